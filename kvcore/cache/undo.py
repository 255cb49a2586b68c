"""What a step overwrites that an abort must bring back, and how it is put back if the step fails.

Paged rows are only ever written beyond what can be read. Rings are different: a new row takes an old one's place. Most
steps take the place of rows that nobody needs at any length to which their requests can be truncated, and keep nothing.
Others read the old rows before: a backend that works in place writes into the same memory, and one that returns new
arrays gives the old ones away where they are donated. Where a backend can, all layers' rows are read at once.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from math import lcm
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from kvcore.ops import Ops, StepIndex
from kvcore.plan import RingKind
from kvcore.pools import Pools
from kvcore.spec import Component
from kvcore.step import StepNumbers, build_index

MOST_TOGETHER = 8
"""New tokens of a request up to which the rows of all rings are read at once: a decode step's, drafts among them."""

Ring = tuple[int, str]
"""The number of a layer, and a role of it."""


MOST_KINDS = 60
"""Kinds of rings that a number has a bit of each for."""
MOST_PHASES = 1 << 16
"""Lengths of which is kept what steps from there on overwrite."""


class Phases(NamedTuple):
    """Kinds of rings in which a decode step overwrites what must be kept, by how far along its requests are.

    Attributes:
        least: smallest length of a request that they are right for.
        bits: by length before the step, modulo theirs, a bit of every kind.
        wanted: bits of all requests -> of each kind whether it is among them, once they came up.
        kinds: how many there are.
    """

    least: int
    bits: np.ndarray[Any, Any]
    wanted: dict[int, tuple[bool, ...]]
    kinds: int

    def of(self, starts: np.ndarray[Any, Any]) -> tuple[bool, ...]:
        """For each kind whether some request's row is to be kept, by lengths before the step."""
        found = int(np.bitwise_or.reduce(self.bits[starts % len(self.bits)]))
        if found not in self.wanted:
            self.wanted[found] = tuple(bool(found >> kind & 1) for kind in range(self.kinds))
        return self.wanted[found]


def phases_of(kinds: Sequence[RingKind], rollback: int) -> Phases | None:
    """Phases of requests that were longer than any ring, and can all be truncated by ``rollback`` tokens."""
    periods = [kind.component.period for kind in kinds]
    count = lcm(*(period or 1 for period in periods))
    if not all(periods) or count > MOST_PHASES or len(kinds) > MOST_KINDS:
        return None
    least = rollback + max((max(kind.rows, kind.component.span or 0) for kind in kinds), default=0)
    starts = np.arange(count) + -(-least // count) * count
    bits = np.zeros(count, np.int64)
    for number, (component, rows, _) in enumerate(kinds):
        first, _ = component.live_bounds(starts - rollback, np.maximum)
        bits |= (starts + 1 - rows > first).astype(np.int64) << number
    return Phases(least, bits, {}, len(kinds))


class OpsAtOnce(Protocol):
    """Verbs of a backend that reads the rows of many rings in one go."""

    def read_rings(self, pools: Pools, rings: tuple[Ring, ...], index: StepIndex) -> Any:
        """What ``read_ring`` reads of each of the rings; None where it cannot be had in one go."""
        ...

    def restore_rings(self, pools: Pools, rings: tuple[Ring, ...], index: StepIndex, saved: Any) -> Pools:
        """Put back what ``read_rings`` read."""
        ...


class Undo:
    """The ring rows that one step takes the place of, as far as somebody may need them.

    Args:
        ops: the backend's verbs.
        numbers: of the step.
        index: the same on the device.
        deepest: says for some of its requests the smallest length to which each could be truncated if there were no
            such step.

    Attributes:
        whole: whether all that functional verbs may overwrite was kept.
    """

    def __init__(self, ops: Ops, numbers: StepNumbers, index: StepIndex, deepest: Callable[[slice], list[int]]) -> None:
        self.whole = False
        self._ops = ops
        self._at_once = cast("OpsAtOnce", ops) if hasattr(ops, "read_rings") else None
        self._plan = ops.plan
        self._numbers = numbers
        self._index = index
        self._ask_deepest = deepest
        self._decided: dict[tuple[Component, int], bool] = {}
        self._rings: dict[bool, tuple[Ring, ...]] = {}
        self._indices: dict[int, StepIndex | None] = {}
        # Rings whose rows were read one by one, and what was read; those that were read at once, likewise.
        self._alone: dict[Ring, tuple[StepIndex, Any]] = {}
        self._together: list[tuple[tuple[Ring, ...], Any]] = []
        self._kept: set[Ring] = set()
        # The arrays themselves: pools whose arrays were donated hold the new ones.
        self._before: Pools | None = None

    def overwrites(self, component: Component, rows: int) -> bool:
        """Whether the step's rows, in rings of ``rows``, take the place of some that an abort must leave there.

        Those are the rows that are live at some length to which a request can be truncated.
        """
        key = component, rows
        if key not in self._decided:
            self._decided[key] = self._decide(component, rows)
        return self._decided[key]

    def _decide(self, component: Component, rows: int) -> bool:
        numbers = self._numbers
        # The newest token takes the place of position length - 1 - rows; what is live begins no earlier at a greater
        # length. A request without tokens has nothing to lose.
        longest = self._longest
        if longest is None:
            return False
        length, deepest = longest
        if length - rows > component.live_bounds(deepest)[0]:  # which in most steps tells
            return True
        if len(numbers.slots) == 1 or length <= rows:
            return False
        first, _ = component.live_bounds(self._deepest, np.maximum)
        return bool((self._lengths - rows > first).any())

    @cached_property
    def _lengths(self) -> np.ndarray[Any, Any]:
        """Lengths after the step of the requests that it makes longer and that had tokens; 0 of others."""
        _, starts, lengths, _ = self._numbers.arrays
        return np.where((starts > 0) & (lengths > starts), lengths, 0)

    @cached_property
    def _longest(self) -> tuple[int, int] | None:
        """Of the request that is the longest at the end of the step, and is not new: that length, and ``deepest``."""
        number = self._numbers.longest
        if number is None:
            return None
        return int(self._numbers.arrays[2, number]), self._ask_deepest(slice(number, number + 1))[0]

    @cached_property
    def _deepest(self) -> np.ndarray[Any, Any]:
        if self._numbers.deepest is None:
            self._ask_all()
        return cast("np.ndarray[Any, Any]", self._numbers.deepest)

    def _ask_all(self) -> None:
        """Note how far all requests could be truncated, and whether that goes along with their lengths."""
        numbers, plan = self._numbers, self._plan
        numbers.deepest = np.array(self._ask_deepest(slice(None)), np.int64)
        starts = numbers.arrays[1]
        wrapped = plan.unwrapped is not None and (starts > plan.unwrapped).all()
        numbers.in_step = bool(wrapped and (starts - numbers.deepest == plan.rollback_tokens).all())

    def keep(self, pools: Pools, layer: int, role: str) -> None:
        """Keep what the step's rows of a ring take the place of, which is not kept yet."""
        if self._together and not self._kept:
            self._kept.update(chain.from_iterable(rings for rings, _ in self._together))
        if (layer, role) not in self._kept:
            self._read(pools, ((layer, role),), draft=layer >= len(self._plan.spec.layers))

    def keep_all(self, pools: Pools) -> None:
        """Keep all that functional verbs may overwrite; once is enough."""
        if self.whole:
            return
        if not self._kept and not self._ops.in_place:
            self._before = Pools(pools)
        for draft in (False, True):
            needed = self._needed(draft)
            if self._kept or not self._read_at_once(pools, needed):
                self._read(pools, needed, draft=draft)
        self.whole = True

    def _needed(self, draft: bool) -> tuple[Ring, ...]:
        """The rings of main or draft layers in which something is overwritten that must be kept."""
        kinds = self._plan.rings[draft]
        found = self._rings.get(draft) if kinds else ()
        if found is None:
            phases, sets = self._phases(draft), self._plan.ring_sets
            # Not by ``overwrites``: looking a component up takes longer than asking it.
            wanted = (
                tuple([self._decide(component, rows) for component, rows, _ in kinds])
                if phases is None
                else phases.of(self._numbers.arrays[1])
            )
            found = sets.get((draft, wanted))
            if found is None:
                chosen = [kind.rings for kind, is_wanted in zip(kinds, wanted, strict=True) if is_wanted]
                found = sets[draft, wanted] = tuple(chain.from_iterable(chosen))
            self._rings[draft] = found
        return found

    def _phases(self, draft: bool) -> "Phases | None":
        """What tells of a step that repeats others which rings those are; None: each is to be asked."""
        numbers, known = self._numbers, self._plan.ring_phases
        if not numbers.repeats or len(numbers.slots) == 1:  # which is asked as fast
            return None
        if draft not in known:
            known[draft] = phases_of(self._plan.rings[draft], self._plan.rollback_tokens)
        phases = known[draft]
        if phases is None:
            return None
        if numbers.shortest < phases.least:
            numbers.shortest = int(numbers.arrays[1].min())
        if numbers.shortest < phases.least:
            return None
        # Once all are asked, steps that repeat this one know.
        if numbers.deepest is None:
            self._ask_all()
        return phases if numbers.in_step else None

    def _read_at_once(self, pools: Pools, rings: tuple[Ring, ...]) -> bool:
        """Read what the step takes the place of in rings of which nothing is kept yet; False where that cannot be."""
        if self._at_once is None or self._numbers.most_new > MOST_TOGETHER:
            return not rings
        saved = self._at_once.read_rings(pools, rings, self._index) if rings else None
        if saved is not None:
            self._together.append((rings, saved))
        return saved is not None or not rings

    def _read(self, pools: Pools, rings: tuple[Ring, ...], *, draft: bool) -> None:
        """Read what the step takes the place of in some rings, or at once in all that a step of these layers takes."""
        if self._at_once is not None and rings and self._numbers.most_new <= MOST_TOGETHER:
            # Nothing that must be kept is written before it was.
            lacking = self._needed(draft)
            if self._kept or (rings is not lacking and not set(rings) <= set(lacking)):
                lacking = tuple(ring for ring in dict.fromkeys((*rings, *lacking)) if ring not in self._kept)
            saved = self._at_once.read_rings(pools, lacking, self._index)
            if saved is not None:
                self._together.append((lacking, saved))
                self._kept.update(lacking)
                return
        for layer, role in rings:
            if (layer, role) not in self._kept:
                component = self._plan.layers[layer].component(role)
                index = self._index_of(self._plan.region(layer, role)[0].rows, component)
                if index is not None:
                    self._alone[layer, role] = index, self._ops.read_ring(pools, layer, role, index)
                self._kept.add((layer, role))

    def _index_of(self, rows: int, component: Component) -> StepIndex | None:
        """The tokens whose rows take the place of others in rings of ``rows``; None where there is nothing to lose."""
        if self._numbers.most_new <= rows or component.span is None:
            return self._index
        if rows not in self._indices:
            starts = [max(row.start, row.length - rows) if row.start else row.length for row in self._numbers.rows]
            last = [
                row._replace(start=start, new=row.length - start)
                for row, start in zip(self._numbers.rows, starts, strict=True)
            ]
            host = build_index(last, max_blocks=self._index.block_table.shape[1])
            self._indices[rows] = self._ops.index(host) if any(row.new for row in last) else None
        return self._indices[rows]

    def apply(self, pools: Pools) -> Pools:
        """The pools with the rings as they were; may be called again after an interruption."""
        before = self._before
        if before is not None and not any(_is_gone(array) for array in before.values()):
            return before
        if self._at_once is not None:
            for rings, saved in self._together:
                pools = self._at_once.restore_rings(pools, rings, self._index, saved)
        for (layer, role), (index, saved) in self._alone.items():
            pools = self._ops.restore_ring(pools, layer, role, index, saved)
        return pools


def _is_gone(array: Any) -> bool:
    """True for an array whose memory was donated."""
    is_deleted = getattr(array, "is_deleted", None)
    return is_deleted is not None and is_deleted()
