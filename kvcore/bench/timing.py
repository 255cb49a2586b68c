"""Time on a CUDA device: one call with a cold cache, and one of many calls in a graph."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

FLUSH_BYTES = 256 << 20
"""More than any L2."""


def single(calls: Sequence[Callable[[], object]], repeats: int = 30) -> float:
    """Median µs of one call, the L2 overwritten before each; includes what a launch costs the device."""
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    for call in calls:
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for number, (start, end) in enumerate(events):
        flush.zero_()
        # The device waits, so that the host has queued the call before it can start.
        torch.cuda._sleep(500_000)
        start.record()
        calls[number % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in events)


def graph(calls: Sequence[Callable[[], object]], per_graph: int = 20, repeats: int = 30) -> float:
    """Median µs of one call, of ``per_graph`` captured in one CUDA graph, going round ``calls``."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for number in range(per_graph):
            calls[number % len(calls)]()
    times = []
    for _ in range(3):
        captured.replay()
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        captured.replay()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 / per_graph for start, end in times)


def ceilings(nbytes: int = 1 << 30) -> dict[str, float]:
    """GB/s of a copy (read + write, the best way found), of writing and of reading; TFLOP/s of a bf16 matrix product.

    And µs of an empty kernel.
    """
    source = torch.randint(-(2**31), 2**31 - 1, (nbytes // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    empty: Any = _empty
    ways = (lambda: target.copy_(source), lambda: torch.bitwise_not(source, out=target))
    copy = min(graph([way], per_graph=4, repeats=10) for way in ways)
    write = graph([lambda: target.fill_(7)], per_graph=4, repeats=10)
    read = graph([lambda: torch.amax(source)], per_graph=4, repeats=10)
    factor = torch.randn(8192, 8192, device="cuda").bfloat16()
    product = graph([lambda: factor @ factor], per_graph=4, repeats=10)
    return {
        "copy_gb_s": 2e-3 * nbytes / copy,
        "write_gb_s": 1e-3 * nbytes / write,
        "read_gb_s": 1e-3 * nbytes / read,
        "matmul_tflops": 2e-6 * 8192**3 / product,
        "empty_kernel_us": graph([lambda: empty[(1,)](target)], repeats=100),
    }


def copy_time(nbytes: int, copies: int) -> float:
    """µs of a device's copy that moves ``nbytes`` in all, read and written, in a graph over ``copies`` buffers."""
    size = max(16, nbytes // 2)
    pairs = [torch.empty((2, size), dtype=torch.uint8, device="cuda").random_() for _ in range(copies)]
    return graph([lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs])


@triton.jit
def _empty(pointer):
    """Nothing: what a launch costs."""
    tl.static_assert(pointer.dtype.is_ptr())
