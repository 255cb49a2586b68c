"""Two GPUs: context-parallel decode of DeepSeek-V4-Flash layers against one GPU, and a request moved between them.

    python benchmarks/two_gpus.py --out records/two_gpus.json          # NCCL, two GPUs, under four minutes
    python benchmarks/two_gpus.py --tiny                               # gloo, the CPU, seconds: that it runs

Decode: a CSA layer (indexer scores, selection, attention) and an HCA layer, one new token for each of a few requests,
eager, as the median wall time of the readers; on one GPU, then with history spread over both. Digests and attention
are compared. Move: one request of all 43 layers, exported on one GPU, pulled and verified on the other, beside plain
sends between the same two processes. Parts are printed as they are done; a part that fails is recorded as its error.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import kvcore
from kvcore.handoff import Desk, decode_handle, encode_handle
from kvcore.handoff.pull import commit, receive
from kvcore.interop import torch_distributed
from kvcore.interop.torch_distributed import PeerCarrier, serve
from kvcore.parity import environment
from kvcore.plan import plan_cache
from kvcore.spec import CacheSpec, presets
from kvcore.spec.presets import V4_FORMATS, v4_layer

FULL = {"lengths": (262_144, 1_048_576), "requests": 4, "chunk": 16_384, "move": 1_048_576, "repeats": 15}
TINY = {"lengths": (2048,), "requests": 2, "chunk": 512, "move": 1024, "repeats": 2}
LINK_BYTES = 1 << 30
BUDGET = 60 << 30


class Rank:
    """One of the two processes."""

    def __init__(self, rank: int, tiny: bool) -> None:
        self.rank = rank
        self.tiny = tiny
        self.sizes: dict[str, Any] = TINY if tiny else FULL
        self.device = "cpu" if tiny else f"cuda:{rank}"

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.tiny:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], *, together: bool = True) -> float:
        """Wall time of a call, the device's work included; begun by both processes at once."""
        self.synchronize()
        if together:
            dist.barrier()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start

    def random(self, seed: int, *shape: int) -> torch.Tensor:
        """Normal values, the same in both processes."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device)


def two_layers() -> CacheSpec:
    """A CSA layer and an HCA layer of V4-Flash."""
    layers = [v4_layer(4, overlap=True, formats=V4_FORMATS), v4_layer(128, overlap=False, formats=V4_FORMATS)]
    return CacheSpec(layers=layers, block_tokens=256, name="V4-Flash, CSA and HCA")


def fill(me: Rank, cache: kvcore.Cache, requests: list[kvcore.Request], length: int) -> None:
    """Bring requests to ``length`` tokens with random rows; entries are stored as a prefill that compresses would."""
    chunk, number = me.sizes["chunk"], 0
    for start in range(0, length, chunk):
        new = min(chunk, length - start)
        with cache.step(dict.fromkeys(requests, new)) as step:
            for layer, spec in enumerate(cache.spec.layers):
                number += 1
                handle = step.layer(layer)
                handle.append_window(me.random(number, new * len(requests), 512))
                if spec.entries is not None:
                    closed = new // spec.entries.ratio * len(requests)
                    keys = me.random(number + 10**6, closed, 128) if spec.index_keys else None
                    handle.store_entries(me.random(number + 2 * 10**6, closed, 512), keys)


def decode(me: Rank, cache: kvcore.Cache, requests: list[kvcore.Request], *, together: bool) -> dict[str, Any]:
    """Median µs of the readers of one decode step, and what they answered."""
    count = len(requests)
    q, iq = me.random(1, count, 64, 512).bfloat16(), me.random(2, count, 64, 128).bfloat16()
    weights, sink = me.random(3, count, 64), me.random(4, 64)
    times: dict[str, list[float]] = {"scores and selection": [], "CSA attention": [], "HCA attention": []}
    answers: list[torch.Tensor] = []
    with cache.step(dict.fromkeys(requests, 1)) as step:
        for layer, spec in enumerate(cache.spec.layers):
            handle = step.layer(layer)
            handle.append_window(me.random(10 + layer, count, 512))
            handle.append_tail(*(me.random(20 + layer + part, count, spec.tail.width) for part in (0, 50)))
            if spec.index_tail is not None:
                handle.append_index_tail(*(me.random(30 + part, count, spec.index_tail.width) for part in (0, 50)))
            handle.flush()
        csa, hca = step.layer(0), step.layer(1)
        found: dict[str, Any] = {}
        calls: dict[str, Callable[[], Any]] = {
            "scores and selection": lambda: selection(cache, step, iq, weights),
            "CSA attention": lambda: csa.attend(q, found["scores and selection"], sink=sink),
            "HCA attention": lambda: hca.attend(q, sink=sink),
        }
        for repeat in range(me.sizes["repeats"] + 3):
            for name, call in calls.items():

                def run(name: str = name, call: Callable[[], Any] = call) -> None:
                    found[name] = call()

                seconds = me.seconds(run, together=together)
                if repeat >= 3:
                    times[name].append(seconds * 1e6)
        answers = [found["CSA attention"].out.cpu(), found["HCA attention"].out.cpu()]
        picks = found["scores and selection"].cpu()
        step.abort()
    median = {name: round(statistics.median(values), 1) for name, values in times.items()}
    return {"us": {**median, "both layers": round(sum(median.values()), 1)}, "answers": answers, "picks": picks}


def selection(cache: kvcore.Cache, step: Any, q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Top 512 of the CSA layer, as one verb."""
    columns = max(row.length for row in step.rows) // 4
    return cache.ops.index_select(cache.pools, 0, step.device_index, q, weights, 512, columns=columns)


def compare_decode(me: Rank, mesh: Any, length: int) -> dict[str, Any]:
    """One context length: one GPU, then both."""
    spec, count = two_layers(), me.sizes["requests"]
    sizes = {"max_requests": count, "max_tokens": count * (length + 512), "device": me.device}
    record: dict[str, Any] = {"tokens": length, "requests": count}
    one = None
    if me.rank == 0:
        cache = kvcore.create_cache(spec, backend="torch_triton", **sizes)
        requests = [cache.admit() for _ in range(count)]
        fill(me, cache, requests, length)
        one = decode(me, cache, requests, together=False)
        record["one GPU"] = {**one["us"], "pool_bytes": cache.nbytes}
        record["digest"] = f"{cache.digest(requests[:1]):016x}"
        del cache, requests
        print(json.dumps(record), flush=True)
    dist.barrier()
    cache = torch_distributed.create_cache(spec, mesh=mesh, **sizes)
    requests = [cache.admit() for _ in range(count)]
    fill(me, cache, requests, length)
    both = decode(me, cache, requests, together=True)
    digest = f"{cache.digest(requests[:1]):016x}"
    record["two GPUs"] = {**both["us"], "pool_bytes": cache.nbytes}
    if one is not None:
        same = (one["picks"] == both["picks"]).all(dim=1)
        record["digests_equal"] = digest == record["digest"]
        record["selections_equal"] = f"{int(same.sum())} of {len(same)}"
        pairs = zip(one["answers"], both["answers"], strict=True)
        differences = [float((a.float() - b.float())[same].abs().max()) if bool(same.any()) else None for a, b in pairs]
        record["largest_difference"] = dict(zip(("CSA", "HCA"), differences, strict=True))
        record["speed_up"] = {name: round(record["one GPU"][name] / us, 2) for name, us in both["us"].items()}
    return record


def capacity() -> dict[str, Any]:
    """Tokens of full V4-Flash within 60 GiB a GPU: figures of the plan."""
    spec = presets.deepseek_v4_flash()
    plans = [plan_cache(spec, max_requests=8, budget_bytes=BUDGET, context=context) for context in (1, 2)]
    tokens = [plan.max_tokens for plan in plans]
    return {"budget_bytes_a_gpu": BUDGET, "tokens": tokens, "ratio": round(tokens[1] / tokens[0], 3)}


def link(me: Rank, nbytes: int) -> float:
    """GB/s of plain sends from rank 0 to rank 1, the median of five."""
    data = torch.zeros(nbytes, dtype=torch.uint8, device=me.device)
    move = (lambda: dist.send(data, 1)) if me.rank == 0 else (lambda: dist.recv(data, 0))
    times = [me.seconds(move) for _ in range(7)]
    return nbytes / statistics.median(times[2:]) / 1e9


class Timed(PeerCarrier):
    """Knows how long pages were on the way."""

    def __init__(self, me: Rank) -> None:
        super().__init__(0, device=me.device)
        self._me = me
        self.on_the_way = 0.0

    def fetch(self, handle: Any, first: int, into: Any, *, timeout: float) -> None:
        """As it is, with a clock beside it."""
        self._me.synchronize()
        start = time.perf_counter()
        super().fetch(handle, first, into, timeout=timeout)
        self._me.synchronize()
        self.on_the_way += time.perf_counter() - start


def move(me: Rank) -> dict[str, Any]:
    """A whole request from rank 0 to rank 1, verified; a second time, so that nothing is first."""
    spec, length = presets.deepseek_v4_flash(draft=False), me.sizes["move"]
    spec = presets.deepseek_v4_flash_tiny(draft=False) if me.tiny else spec
    sizes = {"max_requests": 2, "max_tokens": 2 * length, "device": me.device}
    cache = kvcore.create_cache(spec, backend="torch_triton", **sizes)
    record: dict[str, Any] = {"tokens": length, "link_gb_s": round(link(me, 1 << 20 if me.tiny else LINK_BYTES), 2)}
    desk, digest = None, 0
    if me.rank == 0:
        request = cache.admit()
        fill(me, cache, [request], length)
        desk, digest = Desk(cache, places=1, on_device=not me.tiny), cache.digest([request])
    for _ in range(2):
        box: list[Any] = [None, None]
        if desk is not None:
            start = time.perf_counter()
            handle = desk.export(request, lease_seconds=120)
            me.synchronize()
            record["stage_seconds"] = round(time.perf_counter() - start, 4)
            box = [encode_handle(handle), digest]
        dist.broadcast_object_list(box, 0, device=None if me.tiny else torch.device(me.device))
        if desk is not None:
            serve(desk, 1, device=me.device, idle_seconds=60)
            continue
        handle, carrier = decode_handle(box[0]), Timed(me)
        start = time.perf_counter()
        received = receive(cache, handle, carrier, timeout=100, chunk_pages=512, on_device=not me.tiny)
        me.synchronize()
        here = time.perf_counter()
        moved = commit(cache, received)
        me.synchronize()
        end = time.perf_counter()
        carrier.finish(handle, timeout=10)
        carrier.goodbye()
        nbytes = handle.pages * handle.page_bytes
        record |= {
            "bytes": nbytes,
            "pages": handle.pages,
            "wire_gb_s": round(nbytes / carrier.on_the_way / 1e9, 2),
            "share_of_link": round(nbytes / carrier.on_the_way / 1e9 / record["link_gb_s"], 3),
            "seconds": {
                "on the way": round(carrier.on_the_way, 4),
                "verify": round(here - start - carrier.on_the_way, 4),
                "commit": round(end - here, 4),
                "whole": round(end - start, 4),
            },
            "digests_equal": cache.digest([moved]) == box[1],
        }
        cache.release(moved)
        del received
    return record


def work(rank: int, tiny: bool, store: str, pipe: Any) -> None:
    """All parts, in one of the two processes; answers go to the parent as they come."""
    me = Rank(rank, tiny)
    if not tiny:
        torch.cuda.set_device(rank)
    limit = timedelta(seconds=120)
    dist.init_process_group(
        "gloo" if tiny else "nccl", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit
    )
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu" if tiny else "cuda", (2,), mesh_dim_names=("context",))
    parts: dict[str, Callable[[], dict[str, Any]]] = {"capacity": capacity, "move": lambda: move(me)}
    for length in me.sizes["lengths"]:
        parts[f"decode at {length}"] = lambda length=length: compare_decode(me, mesh, length)
    for name, part in parts.items():
        try:
            pipe.send((name, part()))
        except Exception as error:  # noqa: BLE001 - recorded; the other process would wait, so this ends here
            pipe.send((name, {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}))
            return
        if not tiny:
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the two processes, print and write what they answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="gloo on the CPU, small sizes")
    parser.add_argument("--out", type=Path, help="write the record there, as JSON")
    parser.add_argument("--seconds", type=float, default=240, help="stop after this long")
    options = parser.parse_args()
    start, record = (
        time.monotonic(),
        {
            "devices": ["cpu"] * 2 if options.tiny else [torch.cuda.get_device_name(n) for n in range(2)],
            "command": "python benchmarks/two_gpus.py",
            **environment.describe(),
        },
    )
    context = multiprocessing.get_context("spawn")
    store = str(Path(tempfile.gettempdir()) / f"kvcore-two-gpus-{os.getpid()}")
    pipes, processes = [], []
    for rank in range(2):
        here, there = context.Pipe(duplex=False)
        processes.append(context.Process(target=work, args=(rank, options.tiny, store, there), daemon=True))
        processes[-1].start()
        there.close()
        pipes.append(here)
    failed = False
    open_pipes = dict(enumerate(pipes))
    while open_pipes and time.monotonic() - start < options.seconds and not failed:
        for rank, pipe in list(open_pipes.items()):
            try:
                if pipe.poll(0.2):
                    name, found = pipe.recv()
                    failed = failed or "error" in found
                    record[name] = record.get(name, {}) | found
                    print(f"rank {rank}: {name}: {json.dumps(found)}", flush=True)
                    if options.out:
                        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            except EOFError:
                del open_pipes[rank]
    record["seconds"] = round(time.monotonic() - start, 1)
    record["complete"] = not open_pipes and not failed
    text = json.dumps(record, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    for process in processes:
        process.kill()
        process.join()
    Path(store).unlink(missing_ok=True)
    raise SystemExit(0 if record["complete"] else 1)


if __name__ == "__main__":
    main()
