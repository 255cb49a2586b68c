"""Parts of an attention over different keys put together, each weighted by its share of the sum of exponentials."""

import triton
import triton.language as tl

from kvcore.kernels.triton.attend import beside_sink
from kvcore.kernels.triton.codes import round_bf16
from kvcore.kernels.triton.turn import turn_back


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, sink_ptr, positions_ptr, frequencies_ptr, heads, splits,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, SINK: tl.constexpr,
    PAIRS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Parts [tokens, splits, heads, DIM] and base-2 sums [tokens, splits, heads] -> one query's out and lse of a head.

    The sink counts once, here, and PAIRS of the last channels are turned back. Parts are taken PARTS at a time in a
    fixed order; those without a key are not read.
    """
    token, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    every = tl.arange(0, SPLITS)
    sums = tl.load(partial_lse_ptr + (token * splits + every) * heads + head, mask=every < splits, other=float("-inf"))
    largest = tl.max(sums, axis=0)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(sums - finite), axis=0)
    channel = tl.arange(0, WIDTH)
    out = tl.zeros([WIDTH], tl.float32)
    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        line = (token * splits + part) * heads + head
        some = tl.load(partial_lse_ptr + line, mask=part < splits, other=float("-inf"))
        weight = tl.exp2(some - finite)
        read = (some != float("-inf"))[:, None] & (channel < DIM)[None, :]
        x = tl.load(partial_ptr + line[:, None] * DIM + channel[None, :], mask=read, other=0.0)
        out += tl.sum(x * weight[:, None], axis=0)
    lse = largest + tl.log2(tl.where(total == 0.0, 1.0, total))
    out = out / tl.where(total == 0.0, 1.0, total)
    if SINK:
        out *= beside_sink(sink_ptr, head, True, lse)
    if out_ptr.dtype.element_ty == tl.bfloat16 and not NATIVE:
        out = round_bf16(out, NATIVE)
    line = token * heads + head
    tl.store(lse_ptr + line, lse * 0.6931471805599453)
    tl.store(out_ptr + line * DIM + channel, out.to(out_ptr.dtype.element_ty), mask=channel < DIM)
    if PAIRS:
        tl.debug_barrier()
        at = out_ptr + line * DIM + tl.zeros([1], tl.int32)
        position = tl.load(positions_ptr + token)
        turn_back(at, tl.full([1], True, tl.int1), position, frequencies_ptr, DIM, PAIRS, NATIVE)
