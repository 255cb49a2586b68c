"""R8: an exporter or an importer is killed at any moment of a pull, over every carrier that is installed.

After each kill the other one is asked: an importer has the whole, verified request, or a typed error and the cache of
before, within ten seconds; an exporter still has its request, and gives the next importer the right bytes.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from typing import Any

from kvcore.errors import KvcoreError
from kvcore.handoff import Direct, Exporter, publish, pull
from tests.reliability import command
from tests.support import stories
from tests.support.ways import join, transport_of

SPEC = stories.STORED
TOKENS = 400
TIMEOUT = 4.0
"""Seconds that a pull may take."""

IMPORTED = ("kvcore.handoff", "kvcore.interop.torch_distributed", "torch.distributed.rendezvous", "nixl._api")
"""By the processes; those that are not installed are left out."""

LONGEST = 10.0
"""Seconds after which a process counts as hanging."""


def carriers() -> list[str]:
    """Those that run here."""
    wanted = {"file": "numpy", "torch.distributed": "torch", "nixl": "nixl"}
    return [name for name, module in wanted.items() if importlib.util.find_spec(module)]


def cache_of(backend: str = "reference") -> Any:
    """A cache with room for the request and another one."""
    return stories.create(SPEC, backend, max_requests=3, max_tokens=1024, check=False)


def exporter(carrier: str, folder: str, pipe: Any) -> None:
    """Export one request and serve it, until told to answer for itself."""
    cache = cache_of()
    request = cache.admit()
    stories.tell(cache, {request: list(range(TOKENS))})
    digest = cache.digest([request])
    desk = Exporter(cache, places=2)
    handle = desk.export(request, readers=2)
    with contextlib.suppress(EOFError), _serving(carrier, folder, desk, handle, pipe) as serve:
        pipe.send((handle, digest))
        pipe.recv()
        with contextlib.suppress(KvcoreError):
            serve()
        # Whatever became of the importer: the request is here, and the next one gets it.
        pipe.recv()
        other = cache_of()
        again = pull(other, desk.export(request), Direct(desk))
        pipe.send(cache.digest([request]) == digest == other.digest([again]))


@contextlib.contextmanager
def _serving(carrier: str, folder: str, desk: Exporter, handle: Any, pipe: Any) -> Any:
    if carrier == "file":
        yield lambda: publish(desk, handle, folder, readers=2)
    elif carrier == "torch.distributed":
        from kvcore.interop.torch_distributed import serve

        join(folder, 0)
        yield lambda: serve(desk, 1, idle_seconds=TIMEOUT)
    else:
        from kvcore.interop import nixl

        server = nixl.NixlServer(desk, nixl.agent(f"exporter {folder}"))
        pipe.send(server.metadata)
        yield lambda: server.serve(TIMEOUT)


def importer(carrier: str, folder: str, pipe: Any) -> None:
    """Pull once and tell: (outcome, right or unchanged, seconds)."""
    cache = cache_of()
    held = cache.admit()
    stories.tell(cache, {held: [5] * 20})
    with contextlib.suppress(EOFError):
        way = transport_of(carrier, folder, pipe.recv())
        pipe.send("ready")
        handle, digest = pipe.recv()
        before = cache.digest(), cache.free_slots, cache.free_blocks
        start, outcome = time.monotonic(), "unknown"
        # A file may not be there yet.
        while outcome == "unknown" and time.monotonic() - start < TIMEOUT:
            try:
                request = pull(cache, handle, way, timeout=TIMEOUT, chunk_pages=1)
                outcome, fine = "committed", cache.digest([request]) == digest
            except KvcoreError as error:
                outcome = getattr(error, "reason", type(error).__name__)
                fine = (cache.digest(), cache.free_slots, cache.free_blocks) == before
            if carrier != "file":
                break
        seconds = time.monotonic() - start
        if carrier == "torch.distributed":
            with contextlib.suppress(KvcoreError):
                way.goodbye()
        pipe.send((outcome, fine, seconds))
        pipe.recv()


def trial(context: Any, carrier: str, kill: str, after: float | None, *, stop: bool = False) -> tuple[str, bool, float]:
    """One pull; ``kill`` is killed ``after`` seconds, or nobody where that is None: (outcome, as promised, seconds)."""
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = {}, {}
        for name, work in (("exporter", exporter), ("importer", importer)):
            ends[name], there = context.Pipe()
            processes[name] = context.Process(target=work, args=(carrier, folder, there), daemon=True)
            processes[name].start()
            there.close()
        try:
            ends["importer"].send(ends["exporter"].recv() if carrier == "nixl" else None)
            handle = ends["exporter"].recv()
            ends["importer"].recv()
            ends["exporter"].send("go")
            ends["importer"].send(handle)
            if after is not None:
                time.sleep(after)
                os.kill(processes[kill].pid, signal.SIGSTOP if stop else signal.SIGKILL)
            asked = "importer" if kill == "exporter" else "exporter"
            began = time.monotonic()
            if asked == "importer" or after is None:
                if not ends["importer"].poll(2 * LONGEST):
                    return "hangs", False, time.monotonic() - began
                outcome, fine, seconds = ends["importer"].recv()
                return outcome, fine and seconds < LONGEST, seconds
            ends["exporter"].send("tell")
            if not ends["exporter"].poll(2 * LONGEST):
                return "hangs", False, time.monotonic() - began
            fine, seconds = ends["exporter"].recv(), time.monotonic() - began
            return "importer killed", fine, seconds
        except (EOFError, ConnectionError):
            return "died", False, 0.0
        finally:
            for process in processes.values():
                process.kill()
                process.join()


def run(*, kills: int, seed: int, which: list[str] | None = None) -> dict[str, Any]:
    """``kills`` of exporters and importers in turn on every carrier, at moments spread over a pull and beyond."""
    choice = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    # What a process imports, it imports once: the kills are of processes that were forked with all of it.
    context.set_forkserver_preload(["tests.reliability", "tests.support.stories", *IMPORTED])
    broken = 0
    outcomes = {carrier: Counter[str]() for carrier in which or carriers()}
    longest, whole = dict.fromkeys(outcomes, 0.0), dict.fromkeys(outcomes, 0.0)
    for carrier, tally in outcomes.items():
        outcome, fine, whole[carrier] = trial(context, carrier, "exporter", None)
        tally[f"nobody killed: {outcome}"] += 1
        broken += not fine or outcome != "committed"
    for number in range(kills):
        for carrier, tally in outcomes.items():
            if command.spent():
                break
            kill = ("exporter", "importer")[number % 2]
            outcome, fine, seconds = trial(context, carrier, kill, choice.uniform(0, 1.2 * whole[carrier]))
            tally[f"{kill} killed: {outcome}" if kill == "exporter" else outcome] += 1
            if not fine:
                print(f"{carrier}, seed {seed}, kill {number}: {outcome} after {seconds:.1f} s")
            broken += not fine
            longest[carrier] = max(longest[carrier], seconds)
    found = {
        carrier: {
            "kills": sum(tally.values()) - 1,
            "outcomes": dict(tally),
            "longest_seconds": round(longest[carrier], 2),
            "whole_pull_seconds": round(whole[carrier], 3),
        }
        for carrier, tally in outcomes.items()
    }
    return {"figure": "R8", "tokens": TOKENS, "carriers": found, "divergences": broken}


if __name__ == "__main__":
    command.main(__doc__, lambda full, seed: run(kills=100 if full else 6, seed=seed))
