"""How kernels begin, and from (request, position) or (request, entry) to a unit and a row in it, on the device."""

import triton
import triton.language as tl


@triton.jit
def begin(AHEAD: tl.constexpr):
    """What a kernel that is launched ahead does before all else.

    It lets the next launch come up, which does the same, and waits for what those before it write: programs then start
    while the last ones of the launch before still run, and no array is touched too soon.
    """
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


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
def head_of(row, R: tl.constexpr):
    """Head of rows of tokens × heads that are numbered one after the other.

    Triton 3.6 takes a sum with ``row % heads`` for as even as its first element, and would move 8 bytes at once off
    their alignment. So it is told that nothing is known of a head.
    """
    return tl.multiple_of(row % R.heads, 1)


@triton.jit
def closing(
    first, starts_ptr, lengths_ptr, requests, ROWS: tl.constexpr, RATIO: tl.constexpr, REQUESTS: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    """(request [ROWS], entry [ROWS]) of the step's closing entries from number ``first`` on, request by request.

    -1 beyond the last. What closes is counted, REQUESTS requests at a time. Unless entries are SPREAD, one or so a
    request, a program's rows mostly belong to one: then its number and its first entry do for all of them.
    """
    number = first + tl.arange(0, ROWS)
    if SPREAD:
        request, entry = each_closing(number, starts_ptr, lengths_ptr, requests, RATIO, REQUESTS)
    else:
        owner, shift, last, counted = 0, 0, 0, 0
        for some in range(0, requests, REQUESTS):
            start, begin, end, real = closed_by(some, counted, starts_ptr, lengths_ptr, requests, RATIO, REQUESTS)
            mine = (begin <= first) & (first < end)
            owner += tl.sum((real & (end <= first)).to(tl.int32), axis=0)
            shift += tl.sum(tl.where(mine, start - begin, 0), axis=0)
            last += tl.sum(tl.where(mine, end, 0), axis=0)
            counted = tl.max(end, axis=0)
        request = tl.zeros_like(number) + owner
        entry = number + shift
        if first + ROWS > last:
            # Few programs come here: a small tile keeps their code out of the way of the others.
            request, entry = each_closing(number, starts_ptr, lengths_ptr, requests, RATIO, 8)
    found = request < requests
    return tl.where(found, request, -1), tl.where(found, entry, -1)


@triton.jit
def each_closing(number, starts_ptr, lengths_ptr, requests, RATIO: tl.constexpr, REQUESTS: tl.constexpr):
    """``closing`` for every number [n] by itself; beyond the last the request is ``requests``."""
    request, entry, counted = tl.zeros_like(number), number, 0
    for some in range(0, requests, REQUESTS):
        start, begin, end, real = closed_by(some, counted, starts_ptr, lengths_ptr, requests, RATIO, REQUESTS)
        passed = (end[None, :] <= number[:, None]) & real[None, :]
        request += tl.sum(passed.to(tl.int32), axis=1)
        mine = (begin[None, :] <= number[:, None]) & (number[:, None] < end[None, :])
        entry += tl.sum(tl.where(mine, (start - begin)[None, :], 0), axis=1)
        counted = tl.max(end, axis=0)
    return request, entry


@triton.jit
def closed_by(first, counted, starts_ptr, lengths_ptr, requests, RATIO: tl.constexpr, REQUESTS: tl.constexpr):
    """Of REQUESTS requests from ``first`` on: first entry that closes, numbers of its first and last + 1, existence."""
    q = first + tl.arange(0, REQUESTS)
    real = q < requests
    start = tl.load(starts_ptr + q, mask=real, other=0) // RATIO
    count = tl.load(lengths_ptr + q, mask=real, other=0) // RATIO - start
    end = counted + tl.cumsum(count, axis=0)
    return start, end - count, end, real
