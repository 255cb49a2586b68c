"""The rows of many rings that a step takes the place of, kept and put back in one launch; see ``cache.undo``."""

from collections.abc import Callable, Iterator
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcore.backends.torch_triton.cuda_units import WORDS
from kvcore.backends.torch_triton.launch import calls
from kvcore.backends.torch_triton.replay import Replayed
from kvcore.kernels.triton.rings import ENTRY
from kvcore.ops import StepIndex
from kvcore.ops.host import lines_of
from kvcore.plan import CachePlan, Region
from kvcore.pools import Pools


class Tables(NamedTuple):
    """What a launch must know of some rings of some pools.

    Attributes:
        addresses: of the pools.
        width: bytes of a word.
        read: (entries, rows of their rings) to read a row with.
        back: the same to put it back, in every copy.
    """

    addresses: tuple[int, ...]
    width: int
    read: tuple[torch.Tensor, torch.Tensor]
    back: tuple[torch.Tensor, torch.Tensor]


class Rings:
    """Rings of one plan on one device, several at a time."""

    def __init__(self, plan: CachePlan, device: str, move: Replayed) -> None:
        self._plan = plan
        self._device = device
        self._move = move
        # One step is open at a time: what it keeps, the next one may write over. A line for each token, in which every
        # ring has its place, as many as were planned; and the same as words, as some rings are moved.
        self._lines: torch.Tensor | None = None
        self._held: dict[tuple[tuple[int, str], ...], torch.Tensor] = {}
        self._tables: dict[tuple[tuple[int, str], ...], Tables] = {}
        self._in_slots: dict[tuple[tuple[int, str], ...], bool] = {}
        self._last: tuple[Any, Any, Any] = None, None, None
        # The arrays that were read with last, and what launches that again: in a loop of captured steps they stay.
        self._again: tuple[tuple[Any, ...], Callable[[], bool] | None] = (), None

    def read(self, pools: Pools, rings: tuple[tuple[int, str], ...], index: StepIndex) -> torch.Tensor | None:
        """The bytes of the rows that the step's tokens take: a line for each token. None where rows lie in blocks."""
        if rings is not self._last[1] and not self._all_in_slots(rings):
            return None
        tables = self._tables_of(pools, rings)
        tokens, held = index.positions.shape[0], self._held.get(rings)
        if tokens > self._plan.undo_tokens:
            # Of a step that is no decode step, like a prompt's: they go with it.
            held = self._new_lines(tokens).view(WORDS[tables.width])
            self._move.of_none(None, *_arrays(held, index, tables.read), False)
            return held
        if held is None or held.shape[0] != tokens or held.dtype != WORDS[tables.width]:
            if self._lines is None:
                self._lines = self._new_lines(self._plan.undo_tokens)
            held = self._held[rings] = self._lines[:tokens].view(WORDS[tables.width])
        arrays = _arrays(held, index, tables.read)
        known, again = self._again
        if again is None or not all(map(is_, arrays, known)) or not again():
            self._move.of_none(None, *arrays, False)
            self._again = arrays, self._move.launcher(*arrays, False)
        return held

    def restore(self, pools: Pools, rings: tuple[tuple[int, str], ...], index: StepIndex, held: torch.Tensor) -> None:
        """Put them back."""
        self._move.of_none(None, *_arrays(held, index, self._tables_of(pools, rings).back), True)

    def _new_lines(self, tokens: int) -> torch.Tensor:
        """Room for what so many tokens take the place of in all rings."""
        with torch.inference_mode(False):
            return torch.empty((tokens, self._plan.ring_line[1]), dtype=torch.uint8, device=self._device)

    def _all_in_slots(self, rings: tuple[tuple[int, str], ...]) -> bool:
        found = self._in_slots.get(rings)
        if found is None:
            regions = (region for layer, role in rings for region in self._plan.region(layer, role))
            found = self._in_slots[rings] = all(region.growth == "slot" for region in regions)
        return found

    def _tables_of(self, pools: Pools, rings: tuple[tuple[int, str], ...]) -> Tables:
        last, of, found = self._last
        if last is pools and (of is rings or of == rings):
            return found
        regions = [region for layer, role in rings for region in self._plan.region(layer, role)]
        addresses = tuple(pools[name].data_ptr() for region in regions for name, _ in region.buffers.values())
        found = self._tables.get(rings)
        if found is None or found.addresses != addresses:
            found = self._tables[rings] = self._new_tables(pools, rings, addresses)
        self._last = pools, rings, found
        return found

    def _new_tables(self, pools: Pools, rings: tuple[tuple[int, str], ...], addresses: tuple[int, ...]) -> Tables:
        entries: list[tuple[int, ...]] = []
        copies: list[tuple[int, int]] = []
        for region, place in self._places_of(rings):
            row_step, head_step = region.steps
            # As the bytes lie there: elements whose bytes lie apart are not put together.
            for run in lines_of(region):
                pool = pools[region.buffers[run.buffer][0]]
                inside = run.base, row_step * run.stride, head_step * run.stride, run.nbytes
                outside = place + run.first, region.format.row, region.heads
                entries.append((pool.data_ptr(), pool.stride(0), *inside, *outside))
                copies.append((region.rows, region.copies))
        table = np.array(entries, np.int64)
        width = int(np.gcd(np.gcd.reduce(table[:, : ENTRY - 1], axis=None), max(WORDS)))
        table[:, 1 : ENTRY - 1] //= width
        rows = np.array([rows for rows, _ in copies], np.int32)
        again = [(n, copy) for n, (_, count) in enumerate(copies) for copy in range(count)]
        back = table[[n for n, _ in again]]
        back[:, 2] += [copy * int(rows[n]) * int(table[n, 3]) for n, copy in again]
        return Tables(
            addresses,
            width,
            (self._put(table), self._put(rows)),
            (self._put(back), self._put(rows[[n for n, _ in again]])),
        )

    def _places_of(self, rings: tuple[tuple[int, str], ...]) -> Iterator[tuple[Region, int]]:
        """The parts of some rings, and where a row of each lies in a token's line."""
        for layer, role in rings:
            place = self._plan.ring_line[0][layer, role]
            for region in self._plan.region(layer, role):
                yield region, place
                place += region.heads * region.format.row

    def _put(self, array: np.ndarray) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _arrays(held: torch.Tensor, index: StepIndex, table: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a launch between the rings and ``held`` is given."""
    return held, index.positions, index.request_index, index.slots, index.lengths, *table


def move(_: Any, *given: Any) -> None:
    """The launch, as a verb of no layer."""
    calls().move_rings(*given)
