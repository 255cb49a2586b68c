"""Two GPUs: context-parallel decode of DeepSeek-V4-Flash layers against one GPU, and a request moved between them.

    python -m benchmarks.two_gpus --out records/two_gpus.json          # NCCL, two GPUs, under five minutes
    python -m benchmarks.two_gpus --form one                           # gloo, both processes on one GPU
    python -m benchmarks.two_gpus --form tiny                          # gloo on the CPU, seconds: that it runs

Decode: a CSA layer (indexer scores, selection, attention) and an HCA layer, one new token for each of a few requests,
as the median wall time of the readers, eager and (NCCL) from a CUDA graph; on one GPU, then with history spread over
both. Digests and attention are compared. Move: one request of all 43 layers, exported on one GPU, pulled and verified
on the other, beside plain sends between the same two processes. Parts are recorded as they are done; a part that fails
or takes too long is recorded as its error, and the others go on in fresh processes.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.two_gpus_decode import FORMS, Rank, capacity, compare_decode
from benchmarks.two_gpus_move import move
from benchmarks.written import write
from kvcore import environment

PART_SECONDS = 100
"""A part that takes longer is ended; the first one of new processes includes their start."""


def parts(form: str) -> dict[str, Callable[[Rank, Any], dict[str, Any]]]:
    """Name -> (rank, mesh) -> piece of the record, in the order in which they are worth most."""
    sizes = FORMS[form]
    found: dict[str, Callable[[Rank, Any], dict[str, Any]]] = {
        "capacity": lambda _me, _mesh: capacity(),
        "move": lambda me, _mesh: move(me),
    }
    for how, graph in (("captured", True), ("eager", False)):
        for count, length in itertools.product(sizes["batches"], sizes["lengths"]):

            def compare(me: Rank, mesh: Any, length: int = length, count: int = count, graph: bool = graph) -> Any:
                return compare_decode(me, mesh, length, count, graph=graph)

            found[f"decode, {how}, {count} requests of {length} tokens"] = compare
    return found


def work(rank: int, form: str, names: list[str], store: str, pipe: Any) -> None:
    """Some parts, in one of the two processes; answers go to the parent as they come."""
    torch.set_num_threads(1)
    me = Rank(rank, form)
    options: dict[str, Any] = {}
    if me.on_gpu:
        torch.cuda.set_device(me.device)
    if form == "full":
        options = {"device_id": torch.device(me.device)}
    dist.init_process_group(
        "nccl" if form == "full" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=2 * PART_SECONDS),
        **options,
    )
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda" if form == "full" else "cpu", (2,), mesh_dim_names=("context",))
    found = parts(form)
    for name in names:
        me.say(name)
        try:
            pipe.send((name, found[name](me, mesh)))
        except Exception as error:  # noqa: BLE001 - recorded; the other process would wait, so both are ended
            told = {"error": f"rank {rank}: {type(error).__name__}: {error}", "trace": traceback.format_exc()[-2500:]}
            pipe.send((name, told))
            return
        if me.on_gpu:
            torch.cuda.empty_cache()
    # Both have told everything; ending the group together can wait for a device, and nobody waits for its end.
    pipe.send((None, {}))


class Pair:
    """The two processes, for some of the parts."""

    def __init__(self, form: str, names: list[str]) -> None:
        # A process that has used CUDA cannot be forked; on the CPU what is imported once serves all.
        context = multiprocessing.get_context("forkserver" if form == "tiny" else "spawn")
        if form == "tiny":
            context.set_forkserver_preload(["benchmarks.two_gpus"])
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(2):
            here, there = context.Pipe(duplex=False)
            arguments = rank, form, names, str(Path(self.folder.name) / "store"), there
            self.processes.append(context.Process(target=work, args=arguments, daemon=True))
            self.processes[-1].start()
            there.close()
            self.pipes.append(here)

    def next(self, end: float) -> tuple[str | None, dict[str, Any]]:
        """One part's answers of both, merged: a name and a piece of the record; an ``error`` in it ends the pair."""
        found: dict[str, Any] = {}
        told: set[int] = set()
        name: str | None = None
        while len(told) < 2:
            ready = wait([pipe for rank, pipe in enumerate(self.pipes) if rank not in told], end - time.monotonic())
            if not ready:
                return name, found | {"error": f"no answer in time of ranks {sorted({0, 1} - told)}"}
            for rank, pipe in enumerate(self.pipes):
                if pipe in ready:
                    try:
                        name, piece = pipe.recv()
                    except EOFError:
                        return name, found | {"error": f"rank {rank} ended, exit code {self.exit_code(rank)}"}
                    found |= piece
                    told.add(rank)
                    if "error" in piece:
                        return name, found
        return name, found

    def exit_code(self, rank: int) -> int | None:
        """Of a process that has ended."""
        self.processes[rank].join(5)
        return self.processes[rank].exitcode

    def close(self) -> None:
        """End both, whatever they do."""
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def run(form: str, names: list[str], seconds: float, record: dict[str, Any], out: Path | None) -> bool:
    """Run parts, in as few pairs of processes as failures allow; False if one of them has no result."""
    start, left = time.monotonic(), list(names)
    while left and time.monotonic() - start < seconds:
        pair = Pair(form, left)
        while left:
            part, began = left.pop(0), time.monotonic()
            name, found = pair.next(min(start + seconds, began + PART_SECONDS))
            assert name in (part, None)
            record[part] = {**found, "part_seconds": round(time.monotonic() - began, 1)}
            print(f"{part}: {json.dumps(record[part])}", flush=True)
            write(record, out)
            if "error" in found:
                break
        pair.close()
    return not left and not any("error" in record[name] for name in names)


def main() -> None:
    """Start the two processes, print and write what they answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--form", choices=list(FORMS), default="full")
    parser.add_argument("--parts", help="some parts only: words that their names contain, with commas between")
    parser.add_argument("--out", type=Path, help="write the record there, as JSON")
    parser.add_argument("--seconds", type=float, default=270, help="stop after this long")
    options = parser.parse_args()
    # Point-to-point and small sums gain nothing from NVLink multicast, and not every host allows it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    gpus = {"full": (0, 1), "one": (0, 0), "tiny": ()}[options.form]
    start, record = (
        time.monotonic(),
        {
            **environment.of_script(" and ".join(torch.cuda.get_device_name(gpu) for gpu in gpus)),
            "form": options.form,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if options.form == "full" else None,
        },
    )
    wanted = (options.parts or "").split(",")
    names = [name for name in parts(options.form) if any(word in name for word in wanted)]
    complete = run(options.form, names, options.seconds, record, options.out)
    record |= {"seconds": round(time.monotonic() - start, 1), "complete": complete}
    write(record, options.out)
    print(json.dumps(record, indent=2))
    raise SystemExit(0 if complete else 1)


if __name__ == "__main__":
    main()
