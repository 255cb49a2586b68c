"""One step's index: which token of which request lies where. Built once a step on the host, used by every layer.

Map: ``StepRequest`` and ``build_index`` (from each request's part); ``StepNumbers`` (the same as lists, which is what a
cache opens its steps with), ``IndexShape`` and ``HostIndex`` (how an index lies in memory), ``BlockTables`` (the block
numbers of all requests as arrays, kept from step to step).
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore.counts import as_count
from kvcore.errors import ShapeError
from kvcore.ops import StepIndex

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

NARROWEST = 8
"""Columns of the narrowest block table."""

TABLE = StepIndex._fields.index("block_table")

_COUNT = np.arange(4096, dtype=np.int32)
_ONE_ON = np.array([[0], [1], [1], [0]], np.int32)


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


class IndexShape(NamedTuple):
    """The shapes of an index.

    Attributes:
        tokens: rows of every input.
        requests: rows of what is said by request.
        columns: of the block table.
        padded: whether it has left padding.
    """

    tokens: int
    requests: int
    columns: int
    padded: bool

    @property
    def arrays(self) -> tuple[tuple[int, ...], ...]:
        """Of each array, in the order of ``StepIndex``."""
        tokens, requests, columns, padded = self
        one = (requests,)
        return ((tokens,), (tokens,), one, one, one, (requests, columns), one, *((one,) if padded else ()))


class Piece(NamedTuple):
    """One array of an index within the buffer that holds all of them."""

    start: int
    end: int
    shape: tuple[int, ...]


@lru_cache(maxsize=1024)
def pieces_of(shape: IndexShape) -> tuple[tuple[Piece, ...], int]:
    """Where each array lies in one buffer of int32, and the buffer's length; the block table comes last.

    Every array starts on a 16-byte boundary, so that the compiler may use wide loads.
    """
    shapes = shape.arrays
    sizes = [int(np.prod(one)) for one in shapes]
    # What changes in every step lies together.
    order = sorted(range(len(shapes)), key=lambda number: len(shapes[number]))
    starts = [0] * len(shapes)
    ends = accumulate((-(-sizes[number] // 4) * 4 for number in order), initial=0)
    for number, start in zip(order, ends, strict=False):
        starts[number] = start
    pieces = tuple(Piece(start, start + size, one) for start, size, one in zip(starts, sizes, shapes, strict=True))
    return pieces, sum(-(-size // 4) * 4 for size in sizes)


class HostIndex(StepIndex):
    """An index of NumPy arrays that are pieces of one, in which they lie as ``pieces_of`` says.

    Attributes:
        flat: the one; None of an index that was made from another.
    """

    flat: Int32s | None = None

    @classmethod
    def of(cls, flat: Int32s, shape: IndexShape) -> "HostIndex":
        """The index that lies in a buffer."""
        pieces, _ = pieces_of(shape)
        arrays: list[Any] = [flat[start:end].reshape(dims) for start, end, dims in pieces]
        one = cls(*arrays)
        one.flat = flat
        return one


class StepNumbers:
    """A step as host integers: lists with one number for each request, in mapping order.

    Attributes:
        slots, starts, counts, stored, blocks: what ``StepRequest`` calls ``slot``, ``start``, ``new`` and so on.
        left_padding: likewise; None: the step has none.
        deepest: the smallest lengths to which the requests could be truncated before the step, once somebody asked.
        in_step: whether those of steps that repeat this one are as much greater as the requests are longer.
        shortest: a length that no request was shorter than before the step, once somebody asked; else 0.
        repeats: whether it is such a step, of the one before.
    """

    def __init__(
        self,
        slots: list[int],
        starts: list[int] | None,
        counts: list[int],
        stored: list[int],
        blocks: Sequence[Sequence[int]],
        left_padding: list[int] | None = None,
    ) -> None:
        self.slots = slots
        if starts is not None:
            self.starts = starts
        self.counts = counts
        self.stored = stored
        self.blocks = blocks
        self.left_padding = left_padding
        self.deepest: Int64s | None = None
        self.in_step = False
        self.shortest = 0
        self.repeats = False

    def next(self, blocks: Sequence[Sequence[int]]) -> "StepNumbers":
        """Those of a step that brings the same requests a token each, as this one did."""
        found = StepNumbers(self.slots, None, self.counts, self.stored, blocks)
        found.tokens, found.most_new, found.arrays = self.tokens, 1, self.arrays + _ONE_ON
        found.repeats = True
        if self.longest is not None:
            # Whose requests were all new has none yet.
            found.longest = self.longest
        if blocks is self.blocks:
            found.most_blocks = self.most_blocks
        if self.in_step and self.deepest is not None:
            found.deepest, found.in_step, found.shortest = self.deepest + 1, True, self.shortest
        return found

    @classmethod
    def of(cls, rows: Sequence[StepRequest]) -> "StepNumbers":
        """The same of each request's part; there is left padding if one of them says so."""
        padded = any(row.left_padding is not None for row in rows)
        return cls(
            [row.slot for row in rows],
            [row.start for row in rows],
            [row.new for row in rows],
            [row.stored for row in rows],
            [row.blocks for row in rows],
            [row.left_padding or 0 for row in rows] if padded else None,
        )

    @cached_property
    def starts(self) -> list[int]:
        """Each request's length before the step."""
        return self.arrays[1].tolist()

    @cached_property
    def rows(self) -> list[StepRequest]:
        """Each request's part."""
        padding: Sequence[int | None] = self.left_padding or [None] * len(self.slots)
        columns = self.slots, self.starts, self.counts, self.blocks, self.stored, padding
        return [StepRequest(*row) for row in zip(*columns, strict=True)]

    @cached_property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return sum(self.counts)

    @cached_property
    def most_new(self) -> int:
        """Most new tokens of a request."""
        return max(self.counts, default=0)

    @cached_property
    def most_blocks(self) -> int:
        """Most blocks of a request."""
        return max(map(len, self.blocks), default=0)

    @cached_property
    def longest(self) -> int | None:
        """The request that is the longest after the step, of those that it makes longer and that had tokens before."""
        _, starts, lengths, _ = self.arrays
        grown = np.where((starts > 0) & (lengths > starts), lengths, 0)
        number = int(grown.argmax()) if len(grown) else 0
        return number if len(grown) and grown[number] else None

    @cached_property
    def arrays(self) -> Int32s:
        """[4, requests]: slots, starts, lengths, stored."""
        found = np.array((self.slots, self.starts, self.counts, self.stored), np.int32)
        found[2] += found[1]
        return found

    def closed_count(self, ratio: int) -> int:
        """Entries of ``ratio`` tokens that the step completes, over all requests."""
        _, starts, lengths, _ = self.arrays
        return int((lengths // ratio - starts // ratio).sum())

    def shape(self, columns: int, pad_tokens: int | None = None, pad_requests: int | None = None) -> IndexShape:
        """Shapes of the step's index.

        Raises:
            ShapeError: the padding is smaller than the step.
        """
        tokens, requests = self.tokens, len(self.slots)
        if pad_tokens is not None:
            tokens = _padded("pad_tokens", pad_tokens, tokens)
        if pad_requests is not None:
            requests = _padded("pad_requests", pad_requests, requests)
        return IndexShape(tokens, requests, columns, self.left_padding is not None)

    def fill(self, index: StepIndex) -> None:
        """Write everything but the block table into an index of NumPy arrays."""
        slots, starts, lengths, stored = self.arrays
        requests, tokens = len(self.slots), self.tokens
        if requests < len(index.slots):
            index.slots[requests:] = -1
            for padding in (index.starts, index.lengths, index.stored):
                padding[requests:] = 0
        index.slots[:requests], index.starts[:requests] = slots, starts
        index.lengths[:requests], index.stored[:requests] = lengths, stored
        if index.left_padding is not None:
            index.left_padding[requests:] = 0
            index.left_padding[:requests] = self.left_padding
        positions, request_index = index.positions, index.request_index
        if tokens < len(positions):
            positions[tokens:] = request_index[tokens:] = -1
        if tokens == requests and self.most_new == 1:
            positions[:tokens], request_index[:tokens] = starts, _count(tokens)
        elif tokens:
            counts = lengths - starts
            request = np.repeat(_count(requests), counts)
            request_index[:tokens] = request
            positions[:tokens] = _count(tokens) + (starts - (np.cumsum(counts, dtype=np.int32) - counts))[request]


class BlockTables:
    """The blocks of every slot's request as an array, kept from step to step, so that a step writes what is new.

    It follows from the requests' own lists, and is compared with them whenever it is asked.

    Attributes:
        rows: [slots, columns] block numbers, -1 beyond those of a request.
        versions: [slots] a number of its own for whatever a slot's row was changed to, 1 or more.
    """

    def __init__(self) -> None:
        self.rows = np.full((0, NARROWEST), -1, np.int32)
        self.versions = np.zeros(0, np.int64)
        self._held: list[Sequence[int] | None] = []
        self._filled: list[int] = []
        self._version = 0
        self._newest: Sequence[Sequence[int]] | None = None

    def update(self, slots: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        """Bring the rows of some slots up to date: tuples of block numbers, which do not change.

        Nor does a list of them that is given again, for the same slots.
        """
        if blocks is self._newest:
            return
        self._newest = None
        if slots and (most := max(slots)) >= len(self._held):
            self._lengthen(most + 1)
        held = self._held
        for slot, numbers in zip(slots, blocks, strict=True):
            if held[slot] is not numbers:
                self._write(slot, numbers)
        self._newest = blocks

    def _write(self, slot: int, numbers: Sequence[int]) -> None:
        count, before, filled = len(numbers), self._held[slot] or (), self._filled[slot]
        if count > self.rows.shape[1]:
            wider = np.full((len(self.rows), columns_for(count)), -1, np.int32)
            wider[:, : self.rows.shape[1]] = self.rows
            self.rows = wider
        # Whoever is interrupted in here leaves a row that is written anew.
        self._held[slot] = None
        self._filled[slot] = max(filled, count)
        known = len(before) if before == numbers[: len(before)] else 0
        row = self.rows[slot]
        row[known:count] = numbers[known:]
        if filled > count:
            row[count:filled] = -1
        self._version += 1
        self.versions[slot] = self._version
        self._filled[slot] = count
        self._held[slot] = numbers

    def _lengthen(self, count: int) -> None:
        more = max(count, 2 * len(self._held)) - len(self._held)
        self.rows = np.concatenate([self.rows, np.full((more, self.rows.shape[1]), -1, np.int32)])
        self.versions = np.concatenate([self.versions, np.zeros(more, np.int64)])
        self._filled += [0] * more
        self._held += [None] * more

    def fill(self, table: Int32s, slots: Int32s) -> None:
        """Write the rows of some slots, which are up to date, into a step's table [requests, columns]."""
        requests, columns = len(slots), min(table.shape[1], self.rows.shape[1])
        if not columns:
            return
        table[:requests, :columns] = self.rows[slots, :columns]
        if columns < table.shape[1]:
            table[:requests, columns:] = -1
        if requests < len(table):
            table[requests:] = -1


def columns_for(blocks: int) -> int:
    """Columns of the block table of a step whose longest request has so many blocks: a few widths for all lengths."""
    return max(NARROWEST, 1 << (blocks - 1).bit_length())


def build_index(
    rows: Sequence[StepRequest], *, max_blocks: int, pad_tokens: int | None = None, pad_requests: int | None = None
) -> HostIndex:
    """The index of a step as NumPy int32 arrays.

    Args:
        rows: one for each request, in mapping order.
        max_blocks: columns of the block table.
        pad_tokens: number of token rows to pad to with -1, or None for exactly the step's tokens.
        pad_requests: number of request rows to pad to, or None.

    The index has left padding if the rows have, 0 included: what was compiled for one step fits the next.

    Raises:
        ShapeError: the padding is smaller than the step.
    """
    numbers = StepNumbers.of(rows)
    shape = numbers.shape(max_blocks, pad_tokens, pad_requests)
    index = HostIndex.of(np.empty(pieces_of(shape)[1], np.int32), shape)
    numbers.fill(index)
    index.block_table[:] = -1
    for number, row in enumerate(rows):
        index.block_table[number, : len(row.blocks)] = row.blocks
    return index


def kept_index(numbers: StepNumbers, shape: IndexShape, tables: BlockTables) -> HostIndex:
    """The same with the block table from kept ones, which are up to date."""
    index = HostIndex.of(np.empty(pieces_of(shape)[1], np.int32), shape)
    numbers.fill(index)
    tables.fill(index.block_table, numbers.arrays[0])
    return index


def lay_out(flat: Int32s, numbers: StepNumbers, shape: IndexShape, tables: BlockTables) -> None:
    """Write the same into a buffer, where ``pieces_of`` says."""
    fill_flat(flat, numbers, shape)
    if shape.columns:
        first = pieces_of(shape)[0][TABLE].start
        size = shape.requests * shape.columns
        tables.fill(flat[first : first + size].reshape(shape.requests, shape.columns), numbers.arrays[0])


def fill_flat(flat: Int32s, numbers: StepNumbers, shape: IndexShape) -> None:
    """Write everything but the block table into a buffer; a decode step's without looking at each array."""
    count, size = len(numbers.slots), shape.requests
    if shape.padded or not count or size != shape.tokens or count != numbers.tokens or numbers.most_new != 1:
        pieces, _ = pieces_of(shape)
        arrays: list[Any] = [flat[start:end].reshape(dims) for start, end, dims in pieces]
        numbers.fill(HostIndex(*arrays))
        return
    of_requests, wide = numbers.arrays, -(-size // 4) * 4
    # positions, request_index, slots, starts, lengths, stored
    rows = flat[: 6 * wide].reshape(6, wide)
    rows[0, :count], rows[1, :count], rows[2:, :count] = of_requests[1], _count(count), of_requests
    if count < size:
        rows[:3, count:], rows[3:, count:] = -1, 0


def at_start(index: StepIndex) -> StepIndex:
    """The same requests as they were before the step: no new tokens."""
    return index._replace(positions=index.positions[:0], request_index=index.request_index[:0], lengths=index.starts)


def _count(most: int) -> Int32s:
    """0, 1, 2 and so on, not to be written to."""
    return _COUNT[:most] if most <= len(_COUNT) else np.arange(most, dtype=np.int32)


def _padded(where: str, given: int | None, needed: int) -> int:
    if given is None:
        return needed
    if type(given) is int and given >= needed:
        return given
    count = as_count(given, needed)
    if count is None:
        raise ShapeError(got=given, where=where, allowed=f"{needed} or more, for this step")
    return count
