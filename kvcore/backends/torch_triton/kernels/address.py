"""From (request, position) or (request, entry) to a unit and a row in it, on the device."""

import triton
import triton.language as tl


@triton.jit
def locate(request, number, slots_ptr, table_ptr, table_columns, R: tl.constexpr):
    """Unit [n] (-1 where there is none) and row [n] of row ``number`` of a request; -1 in either gives unit -1."""
    known = (request >= 0) & (number >= 0)
    number = tl.where(known, number, 0)
    row = number % R.rows
    if R.paged:
        column = number // R.rows
        known = known & (column < table_columns)
        unit = tl.load(table_ptr + request.to(tl.int64) * table_columns + column, mask=known, other=-1)
    else:
        unit = tl.load(slots_ptr + request, mask=known, other=-1)
    return unit, row


@triton.jit
def closing(number, starts_ptr, lengths_ptr, requests, RATIO: tl.constexpr, REQUESTS: tl.constexpr):
    """(request [n], entry [n]) of the step's closing entries ``number`` [n], request by request; -1 beyond the last."""
    q = tl.arange(0, REQUESTS)
    start = tl.load(starts_ptr + q, mask=q < requests, other=0) // RATIO
    count = tl.load(lengths_ptr + q, mask=q < requests, other=0) // RATIO - start
    end = tl.cumsum(count, axis=0)
    before = end[None, :] <= number[:, None]
    request = tl.sum(before.to(tl.int32), axis=1)
    mine = q[None, :] == request[:, None]
    entry = number + tl.sum(tl.where(mine, (start - (end - count))[None, :], 0), axis=1)
    found = request < requests
    return tl.where(found, request, -1), tl.where(found, entry, -1)
