"""The tail of a long prefill: programs for the rows that a request's ring keeps, not for tokens, of which few stay."""

import triton
import triton.language as tl

from kvcore.kernels.triton.border import tokens_before
from kvcore.kernels.triton.codes import load_float
from kvcore.kernels.triton.tail import save_rows, tail_pointers

ROWS = 2
"""Rows of a program: a ring of short windows has few."""


@triton.jit
def append_last_kernel(
    kv_ptr, score_ptr, kv_tail_ptr, score_tail_ptr, slots_ptr, starts_ptr, lengths_ptr, T: tl.constexpr, ROWS:
    tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the last rows of kv and score [tokens, width] of every request, as many as its ring has."""
    programs: tl.constexpr = (T.rows + ROWS - 1) // ROWS
    request = tl.program_id(0) // programs
    start = tl.load(starts_ptr + request)
    length = tl.load(lengths_ptr + request)
    slot = tl.load(slots_ptr + request) + tl.zeros([ROWS], tl.int32)
    back = tl.program_id(0) % programs * ROWS + tl.arange(0, ROWS)
    position = length - 1 - back
    valid = (slot >= 0) & (back < T.rows) & (position >= tl.maximum(start, 0))
    token = tokens_before(request, starts_ptr, lengths_ptr) + position - start
    column = tl.arange(0, COLUMNS)
    source = tl.where(valid, token, 0).to(tl.int64)[:, None] * T.width + column[None, :]
    mask = valid[:, None] & (column < T.width)[None, :]
    position = tl.maximum(position, 0)
    kv_tail, score_tail = tail_pointers(kv_tail_ptr, score_tail_ptr, T)
    save_rows(load_float(kv_ptr + source, mask), column + T.kv, mask, slot, position, kv_tail, T)
    save_rows(load_float(score_ptr + source, mask), column + T.score, mask, slot, position, score_tail, T)
