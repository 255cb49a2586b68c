"""Sampled rows beside their check words: what a verb is asked, what it finds, and the verb in the host's memory.

A backend may have ``watch``, of the same parameters but the plan, for pools that lie elsewhere.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvcore.arrays import host_view
from kvcore.check_words import check_words, table_hashes
from kvcore.digest import region_salt
from kvcore.ops.host import Lines, lines_of
from kvcore.ops.results import StepIndex
from kvcore.plan import CachePlan, Region, Watched
from kvcore.pools import Pools

Array = np.ndarray[Any, Any]

NUMBERS = ("slot", "start", "length", "blocks")
"""What is asked of a request beside its rows, in order: these of the index must be as said, ``blocks`` by its hash."""

SPANS = ("check from", "check to", "seal from", "seal to")
"""What is asked of each kind of rows, in order."""


class Asked(NamedTuple):
    """What is to be looked at.

    Attributes:
        numbers: [4 + 4 · kinds, requests] int32: NUMBERS, then for every kind of rows SPANS. Of the rows within the
            first span the sampled ones are compared with their words, then those in the second get theirs.
        most: most sampled rows of a request in one of the spans.
        turn: a number that grows from look to look. A backend may then compare a part of the rows, in turns; of -1 it
            compares all of them.
        seals: whether rows are to get words, which are never put off.
    """

    numbers: Array
    most: int
    turn: int = -1
    seals: bool = True


class Found(Protocol):
    """What a look found, once it is known."""

    def ready(self) -> bool:
        """Whether it is known without waiting for a device."""
        ...

    def read(self) -> Sequence[tuple[int, int, int]]:
        """(number in ``plan.watched``, request of the index, row); -1 - n for number n of NUMBERS."""
        ...


class Known(NamedTuple):
    """What a look on the host found."""

    faults: Sequence[tuple[int, int, int]]

    def ready(self) -> bool:
        """At once."""
        return True

    def read(self) -> Sequence[tuple[int, int, int]]:
        """As it is."""
        return self.faults


def watch(plan: CachePlan, pools: Pools, index: StepIndex, asked: Asked) -> tuple[Pools, Found] | None:
    """Compare sampled rows with their check words, and give new ones theirs; None where pools lie elsewhere.

    Args:
        pools: all in the host's memory, to be written to.
        index: requests as the step's verbs find them; there may be padding behind them.
        asked: of the requests, in order.
    """
    held: dict[str, Array] = {}
    for name, pool in pools.items():
        view = host_view(pool)
        if view is None or not view.flags.writeable:
            return None
        held[name] = view.reshape(len(view), -1).view(np.uint8) if view.size else view
    found = _of_index(index, asked)
    # Where the rows of these lie nobody knows.
    spans = asked.numbers[len(NUMBERS) :].copy()
    spans[:, [request for _, request, _ in found]] = 0
    requests: dict[tuple[int, int], tuple[Array, Array]] = {}
    for number, watched in enumerate(plan.watched):
        for first in (0, 2):
            key = watched.kind, first
            if key not in requests:
                row = len(SPANS) * watched.kind + first
                requests[key] = sampled(spans[row], spans[row + 1], plan.canary)
            request, rows = requests[key]
            if len(rows):
                found += _rows(held, index, watched, number, request, rows, seal=first == 2)
    return pools, Known(found)


def sampled(first: Array, end: Array, sample: int) -> tuple[Array, Array]:
    """(request [n], row [n]) of the sampled rows in spans of every request."""
    least = -(-first // sample)
    counts = np.maximum(-(-end // sample) - least, 0)
    request = np.repeat(np.arange(len(first)), counts)
    within = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
    return request, (least[request] + within) * sample


@cache
def pieces_of(regions: tuple[Region, ...]) -> tuple[tuple[int, int], ...]:
    """(first byte, bytes) of what lies together of a row, all parts side by side, by part, head and place."""
    found: list[tuple[int, int]] = []
    offset = 0
    for region in regions:
        size = region.format.row
        for head in range(region.heads):
            found += [(offset + head * size + line.first, line.nbytes) for line in lines_of(region)]
        offset += region.heads * size
    return tuple(found)


def _of_index(index: StepIndex, asked: Asked) -> list[tuple[int, int, int]]:
    """What of the index is not as said."""
    slots, starts, lengths, table = (
        np.asarray(array)[: asked.numbers.shape[1]]
        for array in (index.slots, index.starts, index.lengths, index.block_table)
    )
    hashes = table_hashes(table)
    return [
        (-1 - number, int(request), 0)
        for number, got in enumerate((slots, starts, lengths, hashes.view(np.int32)))
        for request in np.flatnonzero(got != asked.numbers[number])
    ]


def _rows(
    held: dict[str, Array], index: StepIndex, watched: Watched, number: int, request: Array, rows: Array, *, seal: bool
) -> list[tuple[int, int, int]]:
    """Sampled rows of one role compared with their words, or with ``seal`` their words written."""
    unit, place = _locate(watched.regions[0], index, request, rows)
    words = held[watched.words.buffers["word"][0]].view(np.dtype("<u4"))
    there = (unit >= 0) & (unit < len(words))
    if not there.all():
        if not seal:
            lost = np.flatnonzero(~there)
            some = there.nonzero()[0]
            found = _rows(held, index, watched, number, request[some], rows[some], seal=False) if len(some) else []
            return [*found, *((number, int(request[n]), int(rows[n])) for n in lost)]
        request, rows, unit, place = (array[there] for array in (request, rows, unit, place))
    at = unit, rows // watched.stride % watched.words.rows
    salt = region_salt(watched.layer, watched.role)
    wrong = np.zeros(len(rows), bool)
    for copy in range(1 if seal else max(region.copies for region in watched.regions)):
        stored = _load(held, watched.regions, unit, place, copy)
        made = check_words(stored, rows, salt, pieces_of(watched.regions))
        if seal:
            words[at] = made
        else:
            wrong |= words[at] != made
    return [(number, int(request[n]), int(rows[n])) for n in np.flatnonzero(wrong)]


def _locate(region: Region, index: StepIndex, request: Array, rows: Array) -> tuple[Array, Array]:
    """(unit, row in the unit) of rows; unit -1 where there is none."""
    if region.growth == "slot":
        return np.asarray(index.slots)[request], rows % region.rows
    table, column = np.asarray(index.block_table), rows // region.rows
    known = column < table.shape[1]
    return np.where(known, table[request, np.where(known, column, 0)], -1), rows % region.rows


def _load(held: dict[str, Array], regions: Sequence[Region], unit: Array, place: Array, copy: int) -> Array:
    """Canonical rows [n, bytes], parts side by side, as they lie in one of the copies that there are."""
    sizes = [region.heads * region.format.row for region in regions]
    found, offset = np.zeros((len(unit), sum(sizes)), np.uint8), 0
    for region, size in zip(regions, sizes, strict=True):
        part = found[:, offset : offset + size].reshape(len(unit), region.heads, region.format.row)
        at = place + copy % region.copies * region.rows
        for line in lines_of(region):
            stored = _places(held[region.buffers[line.buffer][0]], region, line)[unit, at]
            stored = stored.view(np.uint8).reshape(len(unit), region.heads, line.nbytes)
            target = part[:, :, line.first : line.first + line.nbytes]
            if line.split:
                half = line.nbytes // 2
                target[:, :, 1::2], target[:, :, 0::2] = stored[:, :, :half], stored[:, :, half:]
            else:
                target[...] = stored
        found[:, offset : offset + size] = part.reshape(len(unit), size)
        offset += size
    return found


def _places(pool: Array, region: Region, line: Lines) -> Array:
    """[units, places, heads] of a run each."""
    row_step, head_step = region.steps
    steps = pool.strides[0], row_step * line.stride, head_step * line.stride
    first = pool[0, line.base : line.base + line.nbytes].view(np.dtype((np.void, line.nbytes)))
    return as_strided(first, (len(pool), region.places, region.heads), steps, writeable=False)
