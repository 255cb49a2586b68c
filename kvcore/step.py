"""One step's index: which token of which request lies where. Built once a step on the host, used by every layer."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore.counts import as_count
from kvcore.errors import ShapeError
from kvcore.ops import StepIndex


class StepRequest(NamedTuple):
    """One request's part in a step, as host integers.

    Attributes:
        slot: the request's slot.
        start: its length before the step.
        new: tokens that the step brings, 0 or more.
        blocks: its block numbers after the step's allocation, in order of history.
        stored: tokens whose paged rows were taken over at admission.
        left_padding: positions at the start that are no tokens.
    """

    slot: int
    start: int
    new: int
    blocks: Sequence[int]
    stored: int = 0
    left_padding: int | None = None

    @property
    def length(self) -> int:
        """Length after the step."""
        return self.start + self.new


def build_index(
    rows: Sequence[StepRequest], *, max_blocks: int, pad_tokens: int | None = None, pad_requests: int | None = None
) -> StepIndex:
    """The index of a step as NumPy int32 arrays.

    Args:
        rows: one for each request, in mapping order.
        max_blocks: columns of the block table; the same for every step of a cache, so that compiled code fits all.
        pad_tokens: number of token rows to pad to with -1, or None for exactly the step's tokens.
        pad_requests: number of request rows to pad to, or None.

    The index has left padding if the rows have, 0 included: what was compiled for one step fits the next.

    Raises:
        ShapeError: the padding is smaller than the step.
    """
    counts = [row.new for row in rows]
    tokens = _padded("pad_tokens", pad_tokens, sum(counts))
    requests = _padded("pad_requests", pad_requests, len(rows))
    # An array of one column of all rows at a time: one assignment for each number would take longer than the rest.
    padded = any(row.left_padding is not None for row in rows)
    starts = _column([row.start for row in rows], requests, 0)
    positions = np.full(tokens, -1, np.int32)
    request_index = np.full(tokens, -1, np.int32)
    if counts.count(1) == len(counts):
        positions[: len(rows)], request_index[: len(rows)] = starts[: len(rows)], np.arange(len(rows))
    else:
        first = 0
        for number, row in enumerate(rows):
            positions[first : first + row.new] = np.arange(row.start, row.length)
            request_index[first : first + row.new] = number
            first += row.new
    block_table = np.full((requests, max_blocks), -1, np.int32)
    for number, row in enumerate(rows):
        block_table[number, : len(row.blocks)] = row.blocks
    return StepIndex(
        positions,
        request_index,
        _column([row.slot for row in rows], requests, -1),
        starts,
        _column([row.start + row.new for row in rows], requests, 0),
        block_table,
        _column([row.stored for row in rows], requests, 0),
        _column([row.left_padding or 0 for row in rows], requests, 0) if padded else None,
    )


def at_start(index: StepIndex) -> StepIndex:
    """The same requests as they were before the step: no new tokens."""
    return index._replace(positions=index.positions[:0], request_index=index.request_index[:0], lengths=index.starts)


def closed_count(rows: Sequence[StepRequest], ratio: int) -> int:
    """Entries of ``ratio`` tokens that the step completes, over all requests."""
    return sum(row.length // ratio - row.start // ratio for row in rows)


def _column(values: list[int], rows: int, padding: int) -> NDArray[np.int32]:
    """One number for each request, and for those that pad them."""
    return np.array(values + [padding] * (rows - len(values)), np.int32)


def _padded(where: str, given: int | None, needed: int) -> int:
    if given is None:
        return needed
    count = as_count(given, needed)
    if count is None:
        raise ShapeError(got=given, where=where, allowed=f"{needed} or more, for this step")
    return count
