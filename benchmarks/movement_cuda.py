"""How fast a request moves between a GPU and the host's memory, verified and committed, beside plain copies.

DeepSeek-V4-Flash's rows, and V4-Pro's. ``export`` lays a request out in pinned memory, verified by the digest that the
GPU works out as rows leave it; ``pull`` takes it in again, verified where it arrives, and makes a request of it.
``store`` is the host's tier of a block store, whose pages are verified by XXH3 on the host. ``chunks`` are MiB of the
device's buffers, others than the library's among them. Every move is checked: the digest of what arrived is that of
what left.

    python -m benchmarks.movement_cuda --out records/movement_h200.json
"""

import argparse
import cProfile
import io
import pstats
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import kvcore
from benchmarks.written import write
from kvcore import environment
from kvcore import store as stores
from kvcore.backends.torch_triton import cuda_units
from kvcore.handoff import Direct, Exporter, decode_handle, encode_handle, pull
from kvcore.interop.torch_distributed import PeerTransport, serve
from kvcore.portable.record import RequestRecord
from kvcore.spec import CacheSpec, presets
from kvcore.store import BlockStore, HostTier

Act = Callable[[], Any]

BEGAN = time.perf_counter()


def filled(spec: CacheSpec, tokens: int, count: int = 1) -> tuple[Any, list[Any]]:
    """A cache with room for twice as many requests of so many tokens; every byte of its pools is of any value."""
    sizes = {"max_requests": 2 * count, "max_tokens": 2 * count * (tokens + spec.block_tokens)}
    cache = kvcore.create_cache(spec, backend="torch_triton", device="cuda", **sizes)
    for pool in cache.pools.values():
        pool.random_()
    # Rows are bytes here and nothing is computed: whatever lies in the pools is the request's.
    record = RequestRecord(length=tokens, floor=tokens, tokens=None, salt=None, checkpoints=[])

    def fill() -> Any:
        return cache.exclusive("fill", lambda state: state.restore(record, lambda _ops, pools, _row: pools))

    return cache, [fill() for _ in range(count)]


def seconds(act: Act, after: Callable[[Any], Any] = lambda _: None) -> float:
    """Of one run, with all that the device does for it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    found = act()
    torch.cuda.synchronize()
    spent = time.perf_counter() - start
    after(found)
    return spent


def profiled(act: Act, after: Callable[[Any], Any]) -> str:
    """Where the host's time goes."""
    profile, text = cProfile.Profile(), io.StringIO()
    profile.enable()
    found = act()
    torch.cuda.synchronize()
    profile.disable()
    after(found)
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(16)
    return text.getvalue()


class Scene:
    """One request and what it cost to move it."""

    def __init__(self, spec: CacheSpec, tokens: int, repeats: int, profile: bool) -> None:
        self.tokens, self.repeats, self.profile = tokens, repeats, profile
        self.cache, (self.request,) = filled(spec, tokens)
        self.right = self.cache.digest([self.request])
        self.bytes = 0
        self.seconds: dict[str, list[float]] = {}
        self.profiles: dict[str, str] = {}

    def arrived(self, moved: Any) -> None:
        stores.bring(self.cache, moved)
        if self.cache.digest([moved]) != self.right:
            raise SystemExit("what arrived is not what left")
        self.cache.release(moved)

    def time(self, what: str, act: Act, after: Callable[[Any], Any] = lambda _: None, repeats: int = 0) -> None:
        found = [seconds(act, after) for _ in range(repeats or self.repeats)]
        self.seconds[what] = [round(one, 6) for one in found]
        best = min(found)
        print(f"{self.tokens:8} {what:30} {best * 1e3:9.2f} ms {self.bytes / best / 1e9:8.2f} GB/s", end="")
        print(f"   first {found[0] * 1e3:.2f}, median {statistics.median(found) * 1e3:.2f}", end="")
        print(f"   at {time.perf_counter() - BEGAN:.1f} s", flush=True)
        if self.profile:
            self.profiles[what] = profiled(act, after)

    def move(self) -> None:
        """Between the device and pinned memory, and on the device."""
        desk, cache, request = Exporter(self.cache, places=1), self.cache, self.request
        on_device = Exporter(self.cache, places=1, on_device=True)
        handle = desk.export(request)
        self.bytes = handle.pages * handle.page_bytes
        desk.finish(desk.name, handle.number, handle.generation)
        self.plain()
        self.time("digest", lambda: cache.digest([request]))

        def out(one: Exporter = desk) -> Any:
            made = one.export(request)
            return lambda: one.finish(one.name, made.number, made.generation)

        self.time("export", out, lambda done: done())
        handles: list[Any] = []

        def bring() -> Any:
            return pull(cache, handles.pop(), Direct(desk), timeout=600.0)

        def again(moved: Any) -> None:
            self.arrived(moved)
            handles.append(desk.export(request))

        handles.append(desk.export(request))
        self.time("pull, committed", bring, again)
        desk.finish(desk.name, handles[0].number, handles[0].generation)

        def both() -> Any:
            return pull(cache, desk.export(request), Direct(desk), timeout=600.0)

        self.time("export and pull", both, self.arrived)
        self.time("export on the device", lambda: out(on_device), lambda done: done())

        def beside() -> Any:
            return pull(cache, on_device.export(request), Direct(on_device), timeout=600.0, on_device=True)

        self.time("export and pull on the device", beside, self.arrived)

    def plain(self) -> None:
        """Plain copies of as many bytes."""
        here = torch.randint(0, 256, (self.bytes,), dtype=torch.uint8, device="cuda")
        there, other = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=True), torch.empty_like(here)
        self.time("copy to pinned memory", lambda: there.copy_(here, non_blocking=True))
        self.time("copy from pinned memory", lambda: here.copy_(there, non_blocking=True))
        self.time("copy on the device", lambda: other.copy_(here))

    def chunks(self, sizes: list[int]) -> None:
        """Out and in again through buffers of so many MiB."""
        desk = Exporter(self.cache, places=1)
        for size in sizes:
            with patch.object(cuda_units, "CHUNK", size << 20):
                handles: list[Any] = [desk.export(self.request)]

                def bring() -> Any:
                    return pull(self.cache, handles.pop(), Direct(desk), timeout=600.0)  # noqa: B023

                def again(moved: Any) -> None:
                    self.arrived(moved)
                    handles.append(desk.export(self.request))  # noqa: B023

                self.time(f"pull, committed, {size} MiB", bring, again)
                desk.finish(desk.name, handles[0].number, handles[0].generation)

                def out() -> Any:
                    return desk.export(self.request)

                def done(made: Any) -> None:
                    desk.finish(desk.name, made.number, made.generation)

                self.time(f"export, {size} MiB", out, done)

    def keep(self) -> None:
        """In a store, and as a blob."""
        cache, request, ids = self.cache, self.request, range(self.tokens)
        store = BlockStore([HostTier(1 << 34)])
        self.time("store.save", lambda: (store.clear(), stores.save(store, cache, request, ids)), repeats=2)
        self.time("store.load", lambda: stores.load(store, cache, ids), self.arrived)
        self.time("store.load, far", lambda: stores.load(store, cache, ids, far=True), self.arrived)
        blob = cache.export_request(request)
        self.time("export_request", lambda: cache.export_request(request), repeats=2)
        self.time("import_request", lambda: cache.import_request(blob), self.arrived, repeats=2)

    def shares(self) -> dict[str, float]:
        """What moves cost beside plain copies: 1.0 is as fast."""
        best = {what: min(found) for what, found in self.seconds.items()}
        out, back = best["copy to pinned memory"], best["copy from pinned memory"]
        return {
            "export": round(best["export"] / out, 3),
            "pull, committed": round(best["pull, committed"] / back, 3),
            "export and pull": round(best["export and pull"] / (out + back), 3),
        }


LADDER = (2048, 8192, 32768, 65536, 131072)
BATCHES = (1, 2, 4, 8, 16, 32)
BURST_TOKENS = 131072
"""The workload ``kv-dsv4`` of InferenceX's suite of transfers: DeepSeek-V4-Pro, pages of 256 tokens, bursts of requests
of no more tokens than these together. There descriptors go between nodes; here requests go through the host's memory.
"""


def burst(tokens: int, count: int, repeats: int) -> dict[str, Any]:
    """Seconds of a burst of requests out of a cache and into it again, each verified."""
    cache, requests = filled(presets.deepseek_v4_pro(draft=False), tokens, count)
    desk, handles, moved = Exporter(cache, places=count), list[Any](), list[Any]()
    wanted = [cache.digest([request]) for request in requests]

    def out() -> None:
        handles.extend(map(desk.export, requests))

    def back() -> None:
        moved.extend(pull(cache, one, Direct(desk), timeout=600.0) for one in handles)

    def check(_: Any) -> None:
        if [cache.digest([one]) for one in moved] != wanted:
            raise SystemExit("what arrived is not what left")
        for one in moved:
            cache.release(one)

    spent: dict[str, list[float]] = {"export": [], "pull": []}
    for _ in range(repeats + 1):
        handles.clear()
        moved.clear()
        spent["export"].append(seconds(out))
        spent["pull"].append(seconds(back, check))
    first = handles[0]
    row = {"isl": tokens, "batch": count, "descriptors": first.pages, "request_bytes": first.pages * first.page_bytes}
    for what, found in spent.items():
        median = statistics.median(found[1:])
        row |= {
            f"{what}_ms": round(median * 1e3, 3),
            f"{what}_gb_s": round(count * row["request_bytes"] / median / 1e9, 2),
        }
    print(row, flush=True)
    return row


def bursts(repeats: int) -> list[dict[str, Any]]:
    """All of the workload."""
    rows: list[dict[str, Any]] = []
    for tokens in LADDER:
        for count in [batch for batch in BATCHES if batch == 1 or batch * tokens <= BURST_TOKENS]:
            rows.append(burst(tokens, count, repeats))
            torch.cuda.empty_cache()
    return rows


def between(rank: int, tokens: int, repeats: int, port: int, answers: Any) -> None:
    """One of two processes on one GPU: rank 0 sends plain bytes and exports, rank 1 receives and pulls."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=rank)
    cache, (request,) = filled(presets.deepseek_v4_flash(draft=False), tokens)
    desk, found = Exporter(cache, places=1), list[dict[str, Any]]()
    for _ in range(repeats + 1):
        handle = desk.export(request)
        nbytes = handle.pages * handle.page_bytes
        data = torch.zeros(nbytes, dtype=torch.uint8)
        dist.barrier()
        plain = seconds(lambda: dist.send(data, 1) if rank == 0 else dist.recv(data, 0))  # noqa: B023
        box: list[Any] = [encode_handle(handle), cache.digest([request])]
        dist.broadcast_object_list(box, 0)
        if rank == 0:
            serve(desk, 1, idle_seconds=60)
            continue
        desk.finish(desk.name, handle.number, handle.generation)
        carrier, moved = PeerTransport(0), list[Any]()
        spent = seconds(lambda: moved.append(pull(cache, decode_handle(box[0]), carrier, timeout=60)))  # noqa: B023
        carrier.goodbye()
        if cache.digest(moved) != box[1]:
            raise SystemExit("what arrived is not what left")
        cache.release(moved[0])
        found.append({"bytes": nbytes, "send": round(plain, 5), "pull, committed": round(spent, 5)})
    if rank:
        answers.put(found[1:])
    dist.barrier()


def processes(tokens: int, repeats: int) -> list[dict[str, Any]]:
    """A request's way from one process to another beside a plain send, on one GPU, over gloo."""
    spawn = torch.multiprocessing.get_context("spawn")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    answers = spawn.Queue()
    both = [spawn.Process(target=between, args=(rank, tokens, repeats, port, answers)) for rank in range(2)]
    for one in both:
        one.start()
    rows: list[dict[str, Any]] = answers.get(timeout=120)
    for one in both:
        one.join()
    for row in rows:
        row["beside a send"] = round(row["pull, committed"] / row["send"], 3)
        print(row, flush=True)
    return rows


def whole_numbers(text: str) -> list[int]:
    """Of a list with commas."""
    return [int(one) for one in text.split(",") if one]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1048576,131072", help="of V4-Flash's requests")
    parser.add_argument("--pro", default="131072", help="tokens of V4-Pro's")
    parser.add_argument("--chunks", default="", help="MiB of buffers that requests go through once more: 16,32,64")
    parser.add_argument("--stored", type=int, default=99_840, help="tokens of what goes through a store; 0: none")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bursts", type=int, default=3, help="times that each burst is moved; 0: none")
    parser.add_argument("--processes", type=int, default=131072, help="tokens that go between two; 0: none")
    parser.add_argument("--profile", type=int, default=0, help="tokens of the scene of which profiles are written")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    profiles: dict[str, str] = {}

    def keep(what: str, measured: Any) -> None:
        """What is known stays known, if the rest comes to no end."""
        found[what] = measured
        lines = (f"== {name}\n{text}" for name, text in profiles.items())
        about = environment.of_script(torch.cuda.get_device_name())
        write({**about, "measured": found}, args.out, txt="\n".join(lines))

    scenes = [
        (f"{tokens} tokens{name}", spec, tokens)
        for name, spec, wanted in (
            ("", presets.deepseek_v4_flash(draft=False), args.tokens),
            (" of V4-Pro", presets.deepseek_v4_pro(draft=False), args.pro),
        )
        for tokens in whole_numbers(wanted)
    ]
    for name, spec, tokens in scenes:
        scene = Scene(spec, tokens, args.repeats, tokens == args.profile)
        scene.move()
        profiles |= {f"{name}: {what}": text for what, text in scene.profiles.items()}
        shares = scene.shares()
        scene.chunks(whole_numbers(args.chunks))
        keep(name, {"bytes": scene.bytes, "seconds": scene.seconds, "beside copies": shares})
        print(shares, flush=True)
        del scene
        torch.cuda.empty_cache()
    if args.stored:
        scene = Scene(presets.deepseek_v4_flash(draft=False), args.stored, args.repeats, args.stored == args.profile)
        scene.bytes = 0
        scene.keep()
        profiles |= {f"{args.stored} tokens through a store: {what}": text for what, text in scene.profiles.items()}
        keep(f"{args.stored} tokens through a store", {"seconds": scene.seconds})
        del scene
        torch.cuda.empty_cache()
    if args.processes:
        keep("between two processes", processes(args.processes, 3))
    if args.bursts:
        keep("kv-dsv4", bursts(args.bursts))


if __name__ == "__main__":
    main()
