"""What recurrent layers carry on: rows right before a step's tokens, and the states that it ends at; one launch each.

A slot's ring has few rows, and a row of position p is what is known after token p (a state), or the token's own (an
input of a convolution). Rows of one plain number a channel are cut into pieces of ``flattened`` records, whatever heads
they have: a state is as long as many keys together.
"""

import triton
import triton.language as tl

from kvcore.kernels.triton.address import head_of, locate
from kvcore.kernels.triton.codes import load_float
from kvcore.kernels.triton.record import PLAIN_BYTES, RowRecord, power_of_two
from kvcore.kernels.triton.rows import channels, load_rows, store_dense, store_rows
from kvcore.ops.choices import Declined

PIECE = 1024
"""Channels of a piece at most."""
LEAST_PIECE = 16
"""Shorter ones are not cut: they would be more programs, not fewer channels of one."""
EARLIER = tl.constexpr(128)
"""Requests whose new tokens a program counts at a time, to find its own among all."""
LARGEST = 8192
"""Channels of a row that a program takes whole."""


def flattened(record: RowRecord) -> RowRecord | Declined:
    """The record of the same rows in pieces, where heads of plain rows lie side by side; else as it is."""
    size = PLAIN_BYTES.get(record.plain, 0)
    whole = record.heads * record.dim
    piece = min(whole & -whole, PIECE)
    if not record.quant and record.plain_stride == record.dim * size and piece >= LEAST_PIECE:
        return record._replace(dim=piece, width=piece, tiles=1, heads=whole // piece, plain_stride=piece * size)
    if power_of_two(record.dim) > LARGEST:
        return Declined(f"a head has {record.dim} channels, and kernels take {LARGEST} whole")
    return record


@triton.jit(do_not_specialize=["count"])
def read_before_kernel(
    out_ptr, codes_ptr, scales_ptr, plain_ptr, slots_ptr, starts_ptr, count, BEFORE: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The BEFORE rows right before each request's new tokens: out [requests, BEFORE, heads, dim], zeros before 0."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    cell = row // R.heads
    request = cell // BEFORE
    position = tl.load(starts_ptr + request, mask=inside, other=0) - BEFORE + cell % BEFORE
    unit, place = locate(request, tl.where(inside, position, -1), slots_ptr, slots_ptr, 0, R)
    valid = unit >= 0
    x = load_rows(unit, place * R.heads + head_of(row, R), valid, codes_ptr, scales_ptr, plain_ptr, R, NATIVE)
    store_dense(out_ptr, row.to(tl.int64) * R.dim, x, channels(R), inside, R)


@triton.jit(do_not_specialize=["count", "columns"])
def write_last_kernel(
    values_ptr, codes_ptr, scales_ptr, plain_ptr, slots_ptr, starts_ptr, lengths_ptr, count, columns, R: tl.constexpr,
    ROWS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store values [requests, heads, dim] after each request's last token, and NaN after its others.

    Of each request the last ``columns`` tokens are looked at.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    cell = row // R.heads
    request, back = cell // columns, cell % columns
    position = tl.load(lengths_ptr + request, mask=inside, other=0) - 1 - back
    new = inside & (position >= tl.load(starts_ptr + request, mask=inside, other=0))
    store_state(
        values_ptr, request.to(tl.int64), request, tl.where(new, position, -1), inside & (back == 0), head_of(row, R),
        codes_ptr, scales_ptr, plain_ptr, slots_ptr, R, NATIVE,
    )  # fmt: skip


@triton.jit
def select_state_kernel(
    values_ptr, codes_ptr, scales_ptr, plain_ptr, slots_ptr, starts_ptr, lengths_ptr, taken_ptr, R: tl.constexpr,
    ROWS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Of values [tokens, heads, dim] store that after the last token that is taken, and NaN after those before it.

    A program is a request's, not a token's: tokens that are not taken cost nothing.
    """
    request = tl.program_id(1)
    # Asked for before the others' tokens are counted: what waits for one another is the time of a program.
    start = tl.load(starts_ptr + request)
    new = tl.load(lengths_ptr + request) - start
    taken = tl.minimum(tl.load(taken_ptr + request), new)
    before = 0
    for some in range(0, request, EARLIER):
        q = some + tl.arange(0, EARLIER)
        theirs = tl.load(lengths_ptr + q, mask=q < request, other=0)
        before += tl.sum(theirs - tl.load(starts_ptr + q, mask=q < request, other=0), axis=0)
    head = head_of(tl.program_id(0) * ROWS + tl.arange(0, ROWS), R)
    inside = tl.program_id(0) * ROWS + tl.arange(0, ROWS) < R.heads
    requests = tl.zeros([ROWS], tl.int32) + request
    source = (before + taken - 1).to(tl.int64)
    for back in range(tl.minimum(taken, R.rows)):
        store_state(
            values_ptr, source, requests, tl.where(inside, start + taken - 1 - back, -1), inside & (back == 0), head,
            codes_ptr, scales_ptr, plain_ptr, slots_ptr, R, NATIVE,
        )  # fmt: skip


@triton.jit
def store_state(
    values_ptr, source, request, position, given, head, codes_ptr, scales_ptr, plain_ptr, slots_ptr, R: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Store a head's value where it is ``given``, else NaN; nothing where the position is -1.

    Values come without waiting for where they go.
    """
    unit, place = locate(request, position, slots_ptr, slots_ptr, 0, R)
    valid = unit >= 0
    channel = channels(R)
    at = (source * R.heads + head)[:, None, None] * R.dim + channel
    x = load_float(values_ptr + at, given[:, None, None] & (channel < R.dim))
    x = tl.where(given[:, None, None], x, float("nan"))
    narrow: tl.constexpr = values_ptr.dtype.element_ty != tl.float32
    store_rows(x, unit, place * R.heads + head, valid, codes_ptr, scales_ptr, plain_ptr, R, narrow, NATIVE)
