"""Attention over the parts that context shards answered, joined by their log-sums: one launch after the exchange."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def shards_kernel(
    out_ptr, lse_ptr, parts_ptr, once_ptr, once_lse_ptr, sink_ptr, rows, heads, SHARDS: tl.constexpr,
    ONCE: tl.constexpr, SINK: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one query: parts [shards, rows, DIM + 1] fp32, the log-sum last; what every shard has counts once."""
    row = tl.program_id(0).to(tl.int64)
    largest = -float("inf")
    for shard in tl.static_range(SHARDS):
        largest = tl.maximum(largest, tl.load(parts_ptr + (shard * rows + row) * (DIM + 1) + DIM))
    if ONCE:
        largest = tl.maximum(largest, tl.load(once_lse_ptr + row))
    # A query without any key: weights exp(-inf - 0) are 0.
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    at = tl.arange(0, BLOCK)
    mask = at < DIM
    total = 0.0
    out = tl.zeros([BLOCK], tl.float32)
    for shard in tl.static_range(SHARDS):
        part = parts_ptr + (shard * rows + row) * (DIM + 1)
        weight = tl.exp(tl.load(part + DIM) - largest)
        out += tl.load(part + at, mask=mask, other=0) * weight
        total += weight
    if ONCE:
        weight = tl.exp(tl.load(once_lse_ptr + row) - largest)
        out += tl.load(once_ptr + row * DIM + at, mask=mask, other=0).to(tl.float32) * weight
        total += weight
    lse = tl.where(total == 0, -float("inf"), largest + tl.log(total))
    scale = tl.where(total == 0, 0.0, 1 / total)
    if SINK:
        # sigmoid(lse - sink), written so that neither exponential overflows.
        sink = tl.load(sink_ptr + row % heads).to(tl.float32)
        scale = tl.where(total == 0, 0.0, scale / (1 + tl.exp(sink - lse)))
    tl.store(out_ptr + row * DIM + at, (out * scale).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + row, lse)
