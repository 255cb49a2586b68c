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
    """(request [n], entry [n]) of the step's closing entries ``number`` [n], request by request; -1 beyond the last.

    Requests are gone through REQUESTS at a time, counting what closes.
    """
    request = tl.zeros_like(number)
    entry = number
    counted = tl.full([], 0, tl.int32)
    for first in range(0, requests, REQUESTS):
        q = first + tl.arange(0, REQUESTS)
        start = tl.load(starts_ptr + q, mask=q < requests, other=0) // RATIO
        count = tl.load(lengths_ptr + q, mask=q < requests, other=0) // RATIO - start
        end = counted + tl.cumsum(count, axis=0)
        begin = end - count
        passed = (end[None, :] <= number[:, None]) & (q < requests)[None, :]
        request += tl.sum(passed.to(tl.int32), axis=1)
        mine = (begin[None, :] <= number[:, None]) & (number[:, None] < end[None, :])
        entry += tl.sum(tl.where(mine, (start - begin)[None, :], 0), axis=1)
        counted += tl.sum(count, axis=0)
    found = request < requests
    return tl.where(found, request, -1), tl.where(found, entry, -1)
