"""A request moved from one process with a GPU to another: a part of ``benchmarks/two_gpus.py``."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import kvcore
from benchmarks.two_gpus_decode import Rank, fill
from kvcore.handoff import Exporter, decode_handle, encode_handle
from kvcore.interop.torch_distributed import PeerTransport, serve
from kvcore.portable.digests import LaneDigests
from kvcore.portable.importer import commit, receive
from kvcore.spec import presets

CHUNKS = (1024, 64, 256, *(512, 1024, 2048, 4096) * 3)
"""Pages asked for at a time, one hand-off after the other; the first is not recorded."""


def link(me: Rank) -> dict[str, float]:
    """GB/s of plain sends from rank 0 to rank 1, as the receiver sees them, and of a copy between the devices."""
    nbytes = me.sizes["link"]
    data = torch.zeros(nbytes, dtype=torch.uint8, device=me.wire)
    move = (lambda: dist.send(data, 1)) if me.rank == 0 else (lambda: dist.recv(data, 0))
    times = [me.seconds(move) for _ in range(13)]
    rate = round(nbytes / statistics.median(times[2:]) / 1e9, 2)
    found = {"sender_gb_s" if me.rank == 0 else "link_gb_s": rate}
    if me.form == "full" and me.rank == 0:
        there = torch.empty_like(data, device="cuda:1")

        def copy() -> None:
            there.copy_(data, non_blocking=True)
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)

        times = [me.seconds(copy, together=False) for _ in range(9)]
        found["peer_copy_gb_s"] = round(nbytes / statistics.median(times[2:]) / 1e9, 2)
    dist.barrier()
    return found


class Timed(PeerTransport):
    """Knows how long pages were on the way."""

    def __init__(self, me: Rank) -> None:
        super().__init__(0, device=me.wire)
        self.on_the_way = 0.0

    def begin(self, handle: Any, first: int, into: Any, *, timeout: float) -> Callable[[], None]:
        """As it is, with a clock beside it: it ends when the bytes are there, whatever else the device does."""
        start = time.perf_counter()
        wait = super().begin(handle, first, into, timeout=timeout)

        def timed() -> None:
            wait()
            self.on_the_way += time.perf_counter() - start

        return timed


def move(me: Rank) -> dict[str, Any]:
    """A whole request from rank 0 to rank 1, verified, with pages asked for in chunks of several sizes."""
    length = me.sizes["move"]
    spec = (presets.deepseek_v4_flash_tiny if me.form == "tiny" else presets.deepseek_v4_flash)(draft=False)
    record: dict[str, Any] = {"tokens": length, **link(me)}
    me.say(f"link: {record}")
    cache = kvcore.create_cache(spec, backend="torch_triton", max_requests=2, max_tokens=2 * length, device=me.device)
    desk, digest, stages = None, 0, []
    if me.rank == 0:
        request = cache.admit()
        fill(me, cache, [request], length)
        me.say("the request is filled")
        desk, digest = Exporter(cache, places=1, on_device=me.on_gpu), cache.digest([request])
    rounds = []
    for chunk_pages in CHUNKS:
        box: list[Any] = [None, None, None]
        if desk is not None:
            me.synchronize()
            start = time.perf_counter()
            handle = desk.export(request, lease_seconds=120)
            me.synchronize()
            stages.append(round(time.perf_counter() - start, 5))
            box = [encode_handle(handle), digest, stages[-1]]
        dist.broadcast_object_list(box, 0, device=torch.device(me.wire))
        if desk is not None:
            serve(desk, 1, device=me.wire, idle_seconds=60)
            record["stage_seconds"] = stages
        else:
            pulled = one_pull(me, cache, decode_handle(box[0]), box[1], chunk_pages)
            rounds.append(rated(pulled, box[2], record["link_gb_s"]))
            record["pulls"] = rounds[1:]
            record["median_share_of_link"] = medians(rounds[1:])
            me.say(f"{rounds[-1]}")
    return record


def medians(pulls: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Shares of the link's rate by pages asked for at a time, the median of each."""
    return {
        f"{chunk} pages": {
            name: statistics.median(pull["share_of_link"][name] for pull in pulls if pull["chunk_pages"] == chunk)
            for name in pulls[0]["share_of_link"]
        }
        for chunk in sorted({pull["chunk_pages"] for pull in pulls})
    }


def rated(pull: dict[str, Any], export: float, link: float) -> dict[str, Any]:
    """A hand-off with the exporter's seconds before its own, and the rates of all parts as shares of the link's."""
    seconds = {"export": export, **pull["seconds"]}
    rates = {name: pull["bytes"] / value / 1e9 for name, value in seconds.items()}
    return {
        **pull,
        "seconds": {name: round(value, 5) for name, value in seconds.items()},
        "gb_s": {name: round(rate, 2) for name, rate in rates.items()},
        "share_of_link": {name: round(rate / link, 3) for name, rate in rates.items()},
    }


def one_pull(me: Rank, cache: kvcore.Cache, handle: Any, digest: int, chunk_pages: int) -> dict[str, Any]:
    """One hand-off: bytes, and seconds of its parts; those until something begin with the first question."""
    carrier, nbytes = Timed(me), handle.pages * handle.page_bytes
    me.synchronize()
    start = time.perf_counter()
    received = receive(cache, handle, carrier, timeout=60, chunk_pages=chunk_pages, on_device=me.on_gpu)
    me.synchronize()
    verified, on_the_way = time.perf_counter() - start, carrier.on_the_way
    moved = commit(cache, received)
    me.synchronize()
    whole = time.perf_counter() - start
    layout, pages = received.layout, received.pages
    one_page = torch.empty_like(pages[:1]) if me.on_gpu else pages[:1].copy()
    single = [me.seconds(lambda: carrier.fetch(handle, 0, one_page, timeout=10), together=False) for _ in range(9)]
    verify = [me.seconds(lambda: LaneDigests(cache.ops, layout).result(pages), together=False) for _ in range(3)]
    carrier.finish(handle, timeout=10)
    carrier.goodbye()
    equal = cache.digest([moved]) == digest
    cache.release(moved)
    seconds = {
        "on the way": on_the_way,
        "until verified": verified,
        "commit": whole - verified,
        "until committed": whole,
    }
    return {
        "chunk_pages": chunk_pages,
        "bytes": nbytes,
        "pages": handle.pages,
        "seconds": seconds,
        "one_page_us": round(statistics.median(single) * 1e6, 1),
        "verify_alone_gb_s": round(nbytes / min(verify) / 1e9, 2),
        "digests_equal": equal,
    }
