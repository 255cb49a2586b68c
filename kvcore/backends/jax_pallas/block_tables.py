"""Block tables on the device, kept from step to step: what is sent are the numbers that changed.

A step of the same requests that needs no further block has the very array of the step before. Arrays of JAX do not
change, so that an index stays good for as long as somebody holds it.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from kvcore.ops import StepIndex
from kvcore.step import BlockTables, HostIndex, IndexShape, Int32s, StepNumbers, pieces_of

MOST_SENT = 64
"""Numbers that are sent one by one; of more, and of tables that are not much larger, all are sent."""

SMALLEST = 16 * MOST_SENT
KEPT = 8
"""Shapes of tables that are kept."""


@dataclass
class Sent:
    """A table as the device has it.

    Attributes:
        of: the tables that it is of.
        slots: [Q] of its rows, -1 for padding.
        versions: [Q] of each row, 0 for padding; -1 while a row may be another than the device's.
        host: the same table here.
        device: the table.
    """

    of: BlockTables
    slots: Int32s
    versions: np.ndarray
    host: Int32s
    device: Array


class DeviceTables:
    """The last tables of every shape."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._sent: dict[tuple[int, int], Sent] = {}

    def index(self, numbers: StepNumbers, shape: IndexShape, tables: BlockTables) -> StepIndex:
        """The index of a step whose tables are up to date."""
        narrow = shape._replace(columns=0)
        host = HostIndex.of(np.empty(pieces_of(narrow)[1], np.int32), narrow)
        numbers.fill(host)
        slots = np.array(host.slots)
        arrays = {name: array for name, array in host._asdict().items() if name != "block_table" and array is not None}
        sent = jax.device_put(arrays, self._target)
        return StepIndex(**sent, block_table=self._table(slots, shape, tables))

    def _table(self, slots: Int32s, shape: IndexShape, tables: BlockTables) -> Array:
        size = shape.requests, shape.columns
        versions = np.zeros(len(slots), np.int64)
        if shape.columns:
            versions[slots >= 0] = tables.versions[slots[slots >= 0]]
        last = self._sent.get(size)
        if last is None or last.of is not tables or last.versions.min(initial=0) < 0:
            return self._whole(slots, versions, size, tables)
        changed = np.flatnonzero((slots != last.slots) | (versions != last.versions))
        if not len(changed):
            return last.device
        rows = _rows(slots[changed], size[1], tables)
        line, column = np.nonzero(rows != last.host[changed])
        if len(line) > MOST_SENT or last.host.size < SMALLEST:
            return self._whole(slots, versions, size, tables)
        # A row beyond the last is dropped: as many numbers in every step, so that one program serves all.
        places = np.full((3, MOST_SENT), len(slots), np.int32)
        places[:, : len(line)] = changed[line], column, rows[line, column]
        # Whoever is interrupted in here leaves a table that is sent as a whole.
        last.versions[changed] = -1
        last.host[changed] = rows
        last.device = _changed(last.device, jax.device_put(places, self._target))
        last.slots[changed] = slots[changed]
        last.versions[changed] = versions[changed]
        return last.device

    def _whole(self, slots: Int32s, versions: np.ndarray, size: tuple[int, int], tables: BlockTables) -> Array:
        host = _rows(slots, size[1], tables)
        # JAX may take memory that it is given as its own.
        device = jax.device_put(host.copy(), self._target)
        self._sent.pop(size, None)
        while len(self._sent) >= KEPT:
            self._sent.pop(next(iter(self._sent)))
        self._sent[size] = Sent(tables, slots, versions, host, device)
        return device


@jax.jit
def _changed(table: Array, places: Array) -> Array:
    rows, columns, values = places
    return table.at[rows, columns].set(values, mode="drop")


def _rows(slots: Int32s, columns: int, tables: BlockTables) -> Int32s:
    """[rows, columns] block numbers of some slots, -1 in rows of slot -1."""
    found, some = np.full((len(slots), columns), -1, np.int32), slots >= 0
    width = min(columns, tables.rows.shape[1])
    if width and some.any():
        found[some, :width] = tables.rows[slots[some], :width]
    return found
