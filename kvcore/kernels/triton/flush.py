"""Flush: every entry that the step completes, pooled, normed, rotated, encoded and stored in one launch.

Programs go over the step's tokens and act on those that close a window, so the grid depends on shapes alone and a graph
that was captured stays right when other tokens close. Entries and index keys share the launch, and so can the write of
the step's own rows to the tail.
"""

import triton
import triton.language as tl

from kvcore.kernels.triton.border import append_part, border
from kvcore.kernels.triton.close import close_window
from kvcore.kernels.triton.tail import tail_pointers

NEVER: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def stream(
    tokens, step, rows, ending, T: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr, ROWS:
    tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, BORDER: tl.constexpr, BORDER_CHUNK: tl.constexpr, TOKENS:
    tl.constexpr, APPEND: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One program of one stream: a request's border, where there are BORDER programs to it, or some tokens' windows.

    ``tokens`` are pointers of their positions and requests, and the numbers of both; the rest is ``close_window``'s.
    """
    positions_ptr, request_ptr, count, requests = tokens
    WHOLE: tl.constexpr = BORDER > 0
    program = tl.program_id(0)
    if WHOLE and program < requests * BORDER:
        border(
            program // BORDER, program % BORDER, rows, step, ending, T, R, NORM, PAIRS, ROWS, BORDER_CHUNK, BORDER,
            APPEND, NATIVE,
        )  # fmt: skip
    else:
        program -= requests * BORDER
        part = program % PARTS
        first = program // PARTS * TOKENS
        if TOKENS == 1:
            position = tl.load(positions_ptr + first)
            request = tl.load(request_ptr + first)
            if APPEND and not WHOLE:
                append_part(first, position, request, part, rows, step[0], T, R, PARTS)
            if (position >= 0) & (request >= 0) & ((position + 1) % T.ratio == 0):
                close_window(
                    first, position, request, part, rows, step, ending, T, R, NORM, PAIRS, ROWS, CHUNK, PARTS, WHOLE,
                    WHOLE, NATIVE,
                )  # fmt: skip
        else:
            token = first + tl.arange(0, TOKENS)
            positions = tl.load(positions_ptr + token, mask=token < count, other=-1)
            closes = (positions >= 0) & ((positions + 1) % T.ratio == 0)
            current = tl.min(tl.where(closes, token, NEVER), axis=0)
            while current < NEVER:
                position = tl.load(positions_ptr + current)
                request = tl.load(request_ptr + current)
                close_window(
                    current, position, request, part, rows, step, ending, T, R, NORM, PAIRS, ROWS, CHUNK, PARTS, True,
                    WHOLE, NATIVE,
                )  # fmt: skip
                current = tl.min(tl.where(closes & (token > current), token, NEVER), axis=0)


@triton.jit(do_not_specialize=["count", "table_columns", "requests", "programs", "eps"])
def flush_kernel(
    kv_ptr, score_ptr, kv_tail_ptr, score_tail_ptr, codes_ptr, scales_ptr, plain_ptr, norm_ptr, index_kv_ptr,
    index_score_ptr, index_kv_tail_ptr, index_score_tail_ptr, index_codes_ptr, index_scales_ptr, index_plain_ptr,
    index_norm_ptr, frequencies_ptr, positions_ptr, request_ptr, slots_ptr, starts_ptr, lengths_ptr, stored_ptr,
    table_ptr, scratch_ptr, arrivals_ptr, count, requests, table_columns, programs, eps, T: tl.constexpr, R:
    tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, BORDER:
    tl.constexpr, BORDER_CHUNK: tl.constexpr, IT: tl.constexpr, IR: tl.constexpr, INDEX_NORM: tl.constexpr, INDEX_ROWS:
    tl.constexpr, INDEX_CHUNK: tl.constexpr, INDEX_BORDER: tl.constexpr, INDEX_BORDER_CHUNK: tl.constexpr, INDEX:
    tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr, APPEND: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Both streams of a layer; with INDEX the grid's second axis is the stream."""
    tokens = positions_ptr, request_ptr, count, requests
    step = slots_ptr, starts_ptr, lengths_ptr, stored_ptr, table_ptr, table_columns
    second = False
    if INDEX:
        second = tl.program_id(1) == 1
    if second:
        if tl.program_id(0) < programs:
            stream(
                tokens,
                step,
                (index_kv_ptr, index_score_ptr, tail_pointers(index_kv_tail_ptr, index_score_tail_ptr, IT)),
                (
                    index_codes_ptr,
                    index_scales_ptr,
                    index_plain_ptr,
                    index_norm_ptr,
                    frequencies_ptr,
                    eps,
                    scratch_ptr,
                    arrivals_ptr,
                ),
                IT,
                IR,
                INDEX_NORM,
                PAIRS,
                INDEX_ROWS,
                INDEX_CHUNK,
                1,
                INDEX_BORDER,
                INDEX_BORDER_CHUNK,
                TOKENS,
                APPEND,
                NATIVE,
            )
    else:
        stream(
            tokens, step, (kv_ptr, score_ptr, tail_pointers(kv_tail_ptr, score_tail_ptr, T)), (codes_ptr, scales_ptr,
            plain_ptr, norm_ptr, frequencies_ptr, eps, scratch_ptr, arrivals_ptr), T, R, NORM, PAIRS, ROWS, CHUNK,
            PARTS, BORDER, BORDER_CHUNK, TOKENS, APPEND, NATIVE,
        )  # fmt: skip
