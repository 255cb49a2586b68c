"""The index of padded steps on the device: one copy a step, into buffers that stay where they are.

All arrays of an index lie in one buffer. Padded steps of the same shape use the same buffer, so that a captured graph
replayed after ``put`` sees the new positions, lengths and block tables. An index is good until the next of
its shape.

The block table, by far the largest of them, is on the device already but for the rows that changed since the last step
of the shape; what is sent are those, behind the rest. On the CPU everything is written where it lies.

Steps that are not padded have buffers of their own, if nobody may hold their index longer than they last.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from kvcore.ops import StepIndex
from kvcore.step import (
    TABLE,
    BlockTables,
    HostIndex,
    IndexShape,
    Piece,
    StepNumbers,
    fill_flat,
    lay_out,
    pieces_of,
)

NOTHING_ALIKE = None, None, None, None, None

MOST_SENT = 1 << 16
"""Numbers of block tables that go along with a step's others; more of them go in several copies."""

HALF = 4
"""Host buffers that are filled between two looks at whether earlier copies are done."""

MOST_LENT = 8
"""Shapes of steps that are not padded of which buffers are kept."""


def laid_out(host: StepIndex) -> tuple[tuple[Piece, ...], np.ndarray]:
    """Where the arrays of an index lie in one, and that one: the host's own where it has one."""
    shape = shape_of(host)
    flat = getattr(host, "flat", None)
    if flat is None:
        flat = np.zeros(pieces_of(shape)[1], np.int32)
        for target, array in zip(HostIndex.of(flat, shape).arrays, host.arrays, strict=True):
            target[...] = np.asarray(array, np.int32)
    return pieces_of(shape)[0], flat


def shape_of(host: StepIndex) -> IndexShape:
    """The shapes of an index."""
    requests, blocks = (int(size) for size in host.block_table.shape)
    return IndexShape(len(host.positions), requests, blocks, host.left_padding is not None)


@lru_cache(maxsize=1024)
def sizes_of(shape: IndexShape) -> tuple[list[int], list[int]]:
    """Lengths of what a buffer is split into, gaps included, and which of it each array is, in their order."""
    pieces, whole = pieces_of(shape)
    order = sorted(range(len(pieces)), key=lambda number: (pieces[number].start, pieces[number].end))
    sizes: list[int] = []
    places = [0] * len(pieces)
    for number, after in zip(order, [*(pieces[each].start for each in order[1:]), whole], strict=True):
        start, end, _ = pieces[number]
        places[number] = len(sizes)
        sizes += (end - start, after - end) if after > end else (end - start,)
    return sizes, places


def split(flat: torch.Tensor, shape: IndexShape) -> StepIndex:
    """The index that lies in one tensor, all of it."""
    sizes, places = sizes_of(shape)
    parts = flat.split_with_sizes(sizes)
    arrays: list[Any] = [parts[place] for place in places]
    arrays[TABLE] = arrays[TABLE].view(shape.requests, shape.columns)
    return StepIndex(*arrays)


def on_device(flat: torch.Tensor, pieces: tuple[Piece, ...]) -> StepIndex:
    """The index that lies in one tensor."""
    views: list[Any] = [flat.as_strided(shape, (*shape[1:], 1), start) for start, _, shape in pieces]
    return StepIndex(*views)


class DeviceIndex:
    """Persistent buffers for step indices, one set for every shape.

    Steps of a shape are given the same index; ``written`` is called whenever it says something else.
    """

    def __init__(self, device: str, written: Callable[[], None]) -> None:
        self._device = torch.device(device)
        self._written = written
        self._buffers: dict[IndexShape, _Buffer] = {}
        self._lent: dict[IndexShape, _Buffer] = {}

    def put(self, host: StepIndex) -> StepIndex:
        """Copy an index of NumPy int32 arrays to the device, without waiting for the device."""
        self._written()
        return self._of(self._buffers, shape_of(host)).put(host)

    def send(self, numbers: StepNumbers, shape: IndexShape, tables: BlockTables) -> StepIndex:
        """The same of a step's numbers, and of the rows of block tables that are others than in the step before."""
        self._written()
        return self._of(self._buffers, shape).send(numbers, tables)

    def repeat(self, numbers: StepNumbers, shape: IndexShape, tables: BlockTables) -> StepIndex:
        """The same of a step that is not padded: whoever looks at its index does so before the next one is opened."""
        self._written()
        if shape not in self._lent and len(self._lent) == MOST_LENT:
            del self._lent[next(iter(self._lent))]
        return self._of(self._lent, shape).send(numbers, tables)

    def new(self, numbers: StepNumbers, shape: IndexShape, tables: BlockTables) -> StepIndex:
        """The same in memory of its own."""
        size = pieces_of(shape)[1]
        if self._device.type == "cpu":
            flat = np.empty(size, np.int32)
            lay_out(flat, numbers, shape, tables)
            return split(torch.from_numpy(flat), shape)
        # Memory that torch keeps for this: it is not used again before the copy was made.
        pinned = torch.empty(size, dtype=torch.int32, pin_memory=True)
        lay_out(pinned.numpy(), numbers, shape, tables)
        return split(pinned.to(self._device, non_blocking=True), shape)

    def _of(self, buffers: "dict[IndexShape, _Buffer]", shape: IndexShape) -> "_Buffer":
        found = buffers.get(shape)
        if found is None:
            # Buffers outlive the mode they are first used in; inference tensors could not be written outside it.
            with torch.inference_mode(False):
                found = buffers[shape] = _Buffer(shape, self._device)
        return found


class _Buffer:
    """The arrays of one shape where steps find them, and what they are filled from.

    On a GPU: one buffer for all but the block table, with room behind for rows of it; and pinned host buffers of the
    same in turn, so that filling one never meets the copy of another. One event tells of the copies of half of them.
    """

    def __init__(self, shape: IndexShape, device: torch.device) -> None:
        self._shape = shape
        narrow = shape._replace(columns=0)
        pieces, self._size = pieces_of(narrow)
        requests, columns = shape.requests, shape.columns
        room = max(columns + 2, min(requests * (columns + 2), MOST_SENT)) if requests * columns else 0
        self._cuda = device.type == "cuda"
        self._table = torch.full((requests, columns), -1, dtype=torch.int32, device=device)
        self._device = torch.zeros(self._size + room, dtype=torch.int32, device=device)
        self._host = [self._device]
        if self._cuda:
            from kvcore.backends.torch_triton import run_triton  # Triton comes with torch for CUDA alone

            self._stream_of = run_triton.current_stream
            self._host = [torch.zeros(self._size + room, dtype=torch.int32, pin_memory=True) for _ in range(2 * HALF)]
        self._narrow = narrow
        self._flat = [buffer.numpy()[: self._size] for buffer in self._host]
        # The last step of one token for each of its requests, and what of it those that repeat it write anew.
        self._alike: list[tuple[Any, ...]] = [NOTHING_ALIKE for _ in self._host]
        self._blocks: Any = None
        # What a step whose block tables are there already has copied.
        self._numbers = [(self._device[: self._size], buffer[: self._size]) for buffer in self._host]
        self._count = -1
        self._arrays = [HostIndex.of(buffer.numpy()[: self._size], narrow) for buffer in self._host]
        self._copied = [torch.cuda.Event() for _ in range(2)] if self._cuda else []
        # Where copies go on, by the number that is quick to ask for and as torch has it.
        self._stream: tuple[int, Any] = -1, None
        self._index = on_device(self._device, pieces)._replace(block_table=self._table)
        self._has_table = requests * columns > 0
        self._turn = 0
        # Of every row of the table: which version of which slot's row it is, and how many columns may not be -1.
        self._versions = np.full(requests, -1, np.int64)
        self._filled = np.zeros(requests, np.int64)

    def put(self, host: StepIndex) -> StepIndex:
        """Everything anew, from an index of NumPy arrays."""
        self._versions[:], self._count, self._blocks = -1, -1, None
        self._filled[:] = self._shape.columns
        turn = self._next()
        self._alike[turn] = NOTHING_ALIKE
        for name, array in self._arrays[turn]._asdict().items():
            if array is not None and name != "block_table":
                array[...] = getattr(host, name)
        self._copy(turn, self._size)
        table = torch.from_numpy(np.ascontiguousarray(host.block_table, np.int32))
        self._table.copy_(table.pin_memory() if self._cuda else table, non_blocking=True)
        return self._index

    def send(self, numbers: StepNumbers, tables: BlockTables) -> StepIndex:
        """A step's numbers, and the rows of block tables that are others than in the last step."""
        turn, count = self._next(), len(numbers.slots)
        self._write(turn, numbers)
        size = self._size
        # A list of blocks that comes again is as it was.
        same = numbers.blocks is self._blocks or not self._has_table
        if not same:
            self._blocks = None
            same = count == self._count and (tables.versions[numbers.arrays[0]] == self._versions[:count]).all()
        if not same:
            # Rows of an earlier, longer step are sent as empty ones.
            self._count = -1
            slots, versions = np.full(len(self._table), -1, np.int64), np.zeros(len(self._table), np.int64)
            slots[: len(numbers.slots)] = numbers.arrays[0]
            versions[: len(numbers.slots)] = tables.versions[numbers.arrays[0]]
            changed = np.flatnonzero(versions != self._versions)
            if len(changed):
                filled = np.zeros(len(slots), np.int64)
                filled[: len(numbers.slots)] = list(map(len, numbers.blocks))
                # Whoever is interrupted in here leaves rows that are sent again.
                self._versions[changed] = -1
                width = int(np.maximum(filled, self._filled)[changed].max())
                self._filled[changed] = width
                size = self._send_rows(turn, changed, slots[changed], width, tables)
                self._versions[changed] = versions[changed]
                self._filled[changed] = filled[changed]
            self._count = count
        self._blocks = numbers.blocks
        if size and self._cuda:
            self._copy(self._turn, size)
        return self._index

    def _write(self, turn: int, numbers: StepNumbers) -> None:
        """Put a step's numbers into a host buffer."""
        slots, counts, positions, starts, lengths = self._alike[turn]
        if numbers.slots is slots and numbers.counts is counts:
            _, starts[...], lengths[...], _ = numbers.arrays
            positions[...] = starts
            return
        self._alike[turn] = NOTHING_ALIKE
        fill_flat(self._flat[turn], numbers, self._narrow)
        slots, counts, arrays = numbers.slots, numbers.counts, self._arrays[turn]
        count = len(slots)
        if numbers.tokens == count and numbers.most_new == 1 and not self._shape.padded:
            same = arrays.positions[:count], arrays.starts[:count], arrays.lengths[:count]
            self._alike[turn] = slots, counts, *same

    def _send_rows(self, turn: int, rows: np.ndarray, slots: np.ndarray, width: int, tables: BlockTables) -> int:
        """Write rows of block tables into the table, along with the step's other numbers; what is left to copy then."""
        if not self._cuda:
            self._table.numpy()[rows, :width] = _rows_of(slots, width, tables)
            return self._size
        left, most = self._size, max(1, (len(self._device) - self._size) // (width + 2))
        for first in range(0, len(rows), most):
            some = slice(first, first + most)
            count = len(rows[some])
            turn = turn if left else self._next()
            start, end = self._size + 2 * count, self._size + (2 + width) * count
            flat = self._host[turn].numpy()
            flat[self._size : start].view(np.int64)[:] = rows[some]
            flat[start:end].reshape(count, width)[:] = _rows_of(slots[some], width, tables)
            self._copy(turn, end, 0 if left else self._size)
            left = 0
            places = self._device[self._size : start].view(torch.int64)
            self._table[:, :width].index_copy_(0, places, self._device[start:end].view(count, width))
        return 0

    def _next(self) -> int:
        """The host buffer whose turn it is, which no copy reads any more."""
        self._turn = turn = (self._turn + 1) % len(self._host)
        if self._cuda and turn % HALF == 0:
            half, (_, stream) = turn // HALF, self._stream
            if stream is not None:
                self._copied[1 - half].record(stream)
            # HALF copies ago: done long since, unless the host runs far ahead of the device.
            self._copied[half].synchronize()
        return turn

    def _copy(self, turn: int, end: int, start: int = 0) -> None:
        if self._cuda:
            stream = self._stream_of(self._device.device.index)
            if stream != self._stream[0]:
                self._go_on(stream)
            to, of = self._numbers[turn]
            if start or end != self._size:
                to, of = self._device[start:end], self._host[turn][start:end]
            to.copy_(of, non_blocking=True)

    def _go_on(self, number: int) -> None:
        """Copy on another stream, behind the copies so far: what is recorded there later tells of them, too."""
        if torch.cuda.is_current_stream_capturing():
            return
        stream, (_, before) = torch.cuda.current_stream(self._device.device), self._stream
        if before is not None:
            stream.wait_stream(before)
        self._stream = number, stream


def _rows_of(slots: np.ndarray, width: int, tables: BlockTables) -> np.ndarray:
    """[rows, width] block numbers of some slots, -1 in rows of slot -1."""
    found, columns = np.full((len(slots), width), -1, np.int32), min(width, tables.rows.shape[1])
    some = slots >= 0
    found[some, :columns] = tables.rows[slots[some], :columns]
    return found
