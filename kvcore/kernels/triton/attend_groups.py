"""Attention to keys and values in formats over tokens: groups are decoded to fp32, the open one's rows are raw.

A program takes the query heads of one token that share a key head and a value head, over some of the groups; the last
one of those that share them takes the open group, too. Exponentials are to the base 2. ``attend_codes`` does the same
from codes as they are.
"""

import triton
import triton.language as tl

from kvcore.kernels.triton.attend_kv import first_seen
from kvcore.kernels.triton.codes import round_bf16
from kvcore.kernels.triton.groups import load_tokens
from kvcore.kernels.triton.rows import element_offsets
from kvcore.kernels.triton.softmax import beside_sink, weigh


@triton.jit
def take(q, k, v, seen, scale, largest, total, out, K: tl.constexpr):
    """Take keys and values [n, dim] into a running softmax of queries [r, dim]: (largest, total, out)."""
    logit = tl.dot(q, tl.trans(k), input_precision=K.precision) * scale
    logit = tl.where(seen[None, :], logit, float("-inf"))
    largest, total, weight, kept = weigh(logit, largest, total)
    return largest, total, tl.dot(weight, v, out * kept[:, None], input_precision=K.precision)


@triton.jit
def tail_at(slot, number, head, tail_ptr, T: tl.constexpr):
    """bf16 pointers [n, dim] of raw rows of positions [n]."""
    row = number % T.rows * T.heads + head
    at = tail_ptr + element_offsets(slot, row, T.plain_unit, T.plain_base, T.plain_stride, 1)
    return at.to(tl.pointer_type(tl.bfloat16))[:, None] + tl.arange(0, T.dim)[None, :]


@triton.jit
def take_tail(
    slot, first, earliest, position, key_head, value_head, key_tail_ptr, tail_ptr, q, scale, largest, total, out,
    K: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr,
):  # fmt: skip
    """Take the raw rows from position ``first`` on into the running softmax: (largest, total, out)."""
    number = first + tl.arange(0, K.tokens)
    seen = (number <= position) & (number >= earliest)
    k = tl.load(tail_at(slot, number, key_head, key_tail_ptr, TK), mask=seen[:, None], other=0.0)
    v = tl.load(tail_at(slot, number, value_head, tail_ptr, TV), mask=seen[:, None], other=0.0)
    return take(q, k.to(tl.float32), v.to(tl.float32), seen, scale, largest, total, out, K)


@triton.jit(do_not_specialize=["heads", "window", "chunk", "sunk", "table_columns", "splits"])
def attend_groups_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, q_ptr, sink_ptr, key_codes_ptr, key_scales_ptr, key_plain_ptr,
    codes_ptr, scales_ptr, plain_ptr, key_tail_ptr, tail_ptr, positions_ptr, request_ptr, slots_ptr, table_ptr,
    left_ptr, heads, window, chunk, sunk, table_columns, splits, scale,
    K: tl.constexpr, V: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr, LEFT: tl.constexpr, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Q [tokens, heads, dim] -> out [tokens, heads, value dim] and lse [tokens, heads], or parts for ``merge_kernel``.

    GROUPS: groups of heads that share a key head and a value head; a program takes HEADS of one. ``window``, ``chunk``,
    ``sunk``, ``scale``, ``splits``: as ``attend_kv_kernel`` has them. The third buffers of keys and of values are their
    offsets'.
    """
    program = tl.program_id(0)
    size = heads // GROUPS
    blocks = tl.cdiv(size, HEADS)
    group = program // blocks % GROUPS
    split = program // (blocks * GROUPS) % splits
    token = program // (blocks * GROUPS * splits)
    of_group = program % blocks * HEADS + tl.arange(0, HEADS)
    inside = of_group < size
    head = group * size + of_group
    key_head = group * K.heads // GROUPS
    value_head = group * V.heads // GROUPS
    request = tl.load(request_ptr + token)
    position = tl.load(positions_ptr + token, mask=request >= 0, other=-1)
    request = tl.maximum(request, 0)
    left = position * 0
    if LEFT:
        left = tl.load(left_ptr + request)
    earliest = first_seen(position, left, window, chunk)
    slot = tl.load(slots_ptr + request)
    ratio: tl.constexpr = K.tokens
    closed = (position + 1) // ratio
    first = tl.minimum(earliest // ratio, closed)
    each = tl.cdiv(closed - first, splits)
    begin = first + split * each
    end = tl.minimum(begin + each, closed)

    channel = tl.arange(0, K.dim)
    line = token.to(tl.int64) * heads + head
    q = tl.load(q_ptr + line[:, None] * K.dim + channel[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    channels: tl.constexpr = V.dim
    out = tl.zeros([HEADS, channels], tl.float32)
    place = tl.arange(0, ratio)
    for number in range(begin, end):
        unit = tl.load(table_ptr + request.to(tl.int64) * table_columns + number // K.rows)
        there = tl.maximum(unit, 0)
        seen = (number * ratio + place >= earliest) & (tl.zeros_like(place) + unit >= 0)
        key_row = number % K.rows * K.heads + key_head
        row = number % V.rows * V.heads + value_head
        k = load_tokens(there, key_row, seen, key_codes_ptr, key_scales_ptr, key_plain_ptr, K)
        v = load_tokens(there, row, seen, codes_ptr, scales_ptr, plain_ptr, V)
        largest, total, out = take(q, k, v, seen, scale, largest, total, out, K)
    if split == splits - 1:
        largest, total, out = take_tail(
            tl.maximum(slot, 0), closed * ratio, earliest, position, key_head, value_head, key_tail_ptr, tail_ptr, q,
            scale, largest, total, out, K, TK, TV,
        )  # fmt: skip

    some = 1.0 / tl.where(total == 0.0, 1.0, total)
    lse = largest + tl.log2(tl.where(total == 0.0, 1.0, total))
    if splits > 1:
        line = (token.to(tl.int64) * splits + split) * heads + head
        tl.store(partial_lse_ptr + line, lse, mask=inside)
        store_rows(partial_ptr, line, out, some, total, inside & (lse != float("-inf")), V, NATIVE)
    else:
        tl.store(lse_ptr + line, lse * 0.6931471805599453, mask=inside)
        if sunk:
            some *= beside_sink(sink_ptr, head, inside, lse)
        store_rows(out_ptr, line, out, some, total, inside, V, NATIVE)


@triton.jit
def store_rows(target_ptr, line, out, some, total, keep, V: tl.constexpr, NATIVE: tl.constexpr):
    """Store rows [r] of ``out``, times ``some`` [r], at lines [r] of the target; zeros where ``total`` is."""
    x = tl.where((total == 0.0)[:, None], 0.0, out * some[:, None])
    if target_ptr.dtype.element_ty == tl.bfloat16 and not NATIVE:
        x = round_bf16(x, NATIVE)
    at = target_ptr + line[:, None] * V.dim + tl.arange(0, V.dim)[None, :]
    tl.store(at, x.to(target_ptr.dtype.element_ty), mask=keep[:, None])
