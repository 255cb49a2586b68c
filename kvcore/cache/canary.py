"""A cache that looks after its rows: what steps read is held against what was written, one row in so many.

Three things are compared, each with a note of its own. Sampled rows with their check words, which lie beside the pools
in the same slots and blocks, so that whatever copies or clears those does so with the words. What an index says on the
device with what the host gave it. And what the table of requests says with what it said when the last verb ended: a
place in it is never changed, only replaced.

A step's end is where that is done: rows that the step could see are checked, then those that it wrote get their words.
Rows of a ring that it takes the place of are checked as it is opened. Nothing waits for a device: what a look finds
there is told by the first step after it that finds it known, or by ``cache.faults()``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvcore.check_words import table_hash
from kvcore.counts import as_count
from kvcore.errors import BackendError, FaultError, SpecError
from kvcore.ops import Ops, StepIndex
from kvcore.ops.canary import NUMBERS, SPANS, Asked, Found, watch
from kvcore.plan import CachePlan, Watched
from kvcore.pools import Pools
from kvcore.requests.manager import Manager, Request, RequestState
from kvcore.step import StepNumbers, StepRequest, build_index

SAMPLE = 16
"""One row in so many, unless a cache is created with another number."""

MOST_TURNS = 1 << 30
"""Of looks, before their numbers begin anew."""

MOST_NAMED = 5
"""Faults in one message."""

WHAT = dict(zip(NUMBERS, ("slot", "length", "length", "blocks"), strict=True))
"""What is wrong with a request, by the number of an index that is."""

Array = np.ndarray[Any, Any]
Span = tuple[Array, Array]


Watch = Callable[[Pools, StepIndex, Asked], tuple[Pools, Found] | None]


class Fault(NamedTuple):
    """Something that is not as it was written.

    Attributes:
        request: whose.
        what: ``row``: bytes of a row, or which row lies there; ``slot``, ``length`` or ``blocks``: what says where the
            request's rows lie, in the cache's table or in a step's index.
        layer: of the row, the one that owns the pool; None where it is no row.
        role: of the row; None likewise.
        position: of the row's token, or of an entry's first; None likewise.
    """

    request: Request
    what: str
    layer: int | None = None
    role: str | None = None
    position: int | None = None

    def __str__(self) -> str:
        if self.what != "row":
            return f"{self.what} of request {self.request.id}"
        return f"layer {self.layer}, {self.role}, position {self.position} of request {self.request.id}"


class Record(NamedTuple):
    """What the table said of a request when a verb had ended: the place, what was in it, and the hash of its blocks."""

    place: RequestState
    slot: int
    length: int
    blocks: tuple[int, ...]
    hash: int


class Rows(NamedTuple):
    """Some requests as arrays: slots, starts, lengths, tokens taken over at admission, and hashes of their blocks."""

    slots: Array
    starts: Array
    lengths: Array
    stored: Array
    hashes: Array


def sample_of(canary: object) -> int:
    """``create_cache``'s argument as the plan's number: 0 for none.

    Raises:
        SpecError: neither a boolean nor a number above 0.
    """
    if isinstance(canary, bool):
        return SAMPLE if canary else 0
    count = as_count(canary, 1)
    if count is None:
        raise SpecError(got=canary, where="canary", allowed="True, False, or one row in how many: 1 or more")
    return count


class Canary:
    """The looks at one cache's rows.

    Args:
        plan: with check words.
        ops: verbs of a backend that has ``watch``, or whose pools lie in the host's memory.
        manager: of the requests.
        pools: the cache's.

    Raises:
        BackendError: the pools lie elsewhere.
    """

    def __init__(self, plan: CachePlan, ops: Ops, manager: Manager, pools: Pools) -> None:
        self._plan = plan
        self._ops = ops
        self._manager = manager
        self._watch: Watch = getattr(ops, "watch", None) or partial(watch, plan)
        self._kinds = tuple({watched.kind: watched for watched in plan.watched}.values())
        self._records: dict[Request, Record] = {}
        self._pending: list[tuple[Found, Sequence[Request]]] = []
        self._turn = 0
        # New tokens of a request up to which a step takes the place of no row that it reads.
        self._spared = min(
            (_spared(watched) for watched in self._kinds if watched.component.span is not None), default=None
        )
        nothing = Asked(np.zeros((len(NUMBERS) + len(SPANS) * len(self._kinds), 0), np.int32), 0)
        if self._watch(pools, ops.index(build_index([], max_blocks=plan.max_blocks)), nothing) is None:
            raise BackendError(
                got=f"pools on {ops.device}",
                where="canary",
                allowed="a backend that has watch, or pools in the host's memory that can be written to",
                hint="Leave canary out.",
            )

    def note(self) -> None:
        """Note what the table of requests says, after a verb."""
        before, now = self._records, dict[Request, Record]()
        for request in self._manager.requests:
            place, known = self._manager.place_of(request), before.get(request)
            if known is None or known.place is not place:
                known = Record(place, place.slot, place.length, place.blocks, self._hash_of(request, place.blocks))
            now[request] = known
        self._records = now

    def _hash_of(self, request: Request, blocks: Sequence[int]) -> int:
        """The hash of a request's blocks, which is known of most."""
        known = self._records.get(request)
        return known.hash if known is not None and known.blocks is blocks else table_hash(blocks)

    def check_places(self, requests: Iterable[Any], where: str) -> None:
        """Refuse requests of which the table says something else than it did, without having been exchanged.

        Raises:
            FaultError: naming them.
        """
        self._refuse(self._misplaced(requests), where)

    def _misplaced(self, requests: Iterable[Any]) -> list[Fault]:
        found: list[Fault] = []
        for request in requests:
            known = self._records.get(request)
            if known is not None and self._manager.is_live(request):
                place = self._manager.place_of(request)
                if place is known.place and (place.slot, place.length, place.blocks) != known[1:4]:
                    said = {"slot": place.slot, "length": place.length, "blocks": place.blocks}
                    found += [Fault(request, what) for what, now in said.items() if now != getattr(known, what)]
        return found

    def opened(
        self, pools: Pools, requests: Sequence[Request], numbers: StepNumbers, blocks: Sequence[Sequence[int]],
        index: StepIndex,
    ) -> Pools:  # fmt: skip
        """Check the rows that a step is about to take the place of.

        Raises:
            FaultError: rows that are not as they were written, of this step or, on a device, of one before.
        """
        if self._spared is not None and numbers.most_new > self._spared:
            rows = self._rows(requests, numbers.arrays, blocks)
            asked = self._ask(rows, lambda watched: (_overwritten(watched, rows), None))
            if asked.most:
                pools = self._look(pools, requests, index, asked)
        self._refuse(self._known(), "step")
        return pools

    def ended(
        self, pools: Pools, requests: Sequence[Request], numbers: StepNumbers, blocks: Sequence[Sequence[int]],
        index: StepIndex, kept: StepNumbers,
    ) -> Pools:  # fmt: skip
        """Check what else a step could see, and what told it where that lies; seal what it wrote.

        ``numbers`` are those of the index; of what it wrote, the rows up to the lengths of ``kept`` stay.

        Raises:
            FaultError: as ``opened``. Words of the step's rows are written all the same: ``take_back`` undoes that.
        """
        self.check_places(requests, "commit")
        rows = self._rows(requests, numbers.arrays, blocks)
        if requests:
            ends = kept.arrays[2].astype(np.int64)
            asked = self._ask(rows, lambda watched: (_seen(watched, rows), _written(watched, rows, ends)))
            self._turn = (self._turn + 1) % MOST_TURNS
            pools = self._look(pools, requests, index, asked._replace(turn=self._turn))
        self._refuse(self._known(), "commit")
        return pools

    def take_back(
        self, pools: Pools, requests: Sequence[Request], numbers: StepNumbers, blocks: Sequence[Sequence[int]],
        index: StepIndex,
    ) -> Pools:  # fmt: skip
        """Give the rows that an abort put back their words again, where ``ended`` may have been begun."""
        rows = self._rows(requests, numbers.arrays, blocks)
        asked = self._ask(rows, lambda watched: (None, _replaced(watched, rows)))
        return self._watched(pools, index, asked)[0] if asked.most else pools

    def seal(self, pools: Pools, row: StepRequest, first: int = 0) -> Pools:
        """Give all rows of a request their words, that came from elsewhere; in blocks those of ``first`` and later."""
        index = self._ops.index(build_index([row], max_blocks=self._plan.max_blocks))
        slot, start, length, stored, hash = np.array(
            [[row.slot], [0], [row.length], [first], [table_hash(row.blocks)]], np.int64
        )
        rows = Rows(slot, start, length, stored, hash)
        asked = self._ask(
            rows._replace(starts=rows.lengths), lambda watched: (None, _written(watched, rows, rows.lengths))
        )
        return self._watched(pools, index, asked)[0]

    def faults(self, pools: Pools, rows: Mapping[Request, StepRequest]) -> tuple[Pools, tuple[Fault, ...]]:
        """All that is not as it was written of some requests, and what looks found that nobody was told of yet."""
        found = self._misplaced(rows)
        requests = list(rows)
        if requests:
            index = self._ops.index(build_index(list(rows.values()), max_blocks=self._plan.max_blocks))
            numbers = np.array([(row.slot, row.length, row.length, row.stored) for row in rows.values()], np.int32).T
            now = self._rows(requests, numbers, [row.blocks for row in rows.values()])
            asked = self._ask(now, lambda watched: (_seen(watched, now), None))
            pools = self._look(pools, requests, index, asked)
        return pools, tuple(dict.fromkeys([*found, *self._known(wait=True)]))

    def _rows(self, requests: Sequence[Request], numbers: Array, blocks: Sequence[Sequence[int]]) -> Rows:
        slots, starts, lengths, stored = numbers.astype(np.int64)
        hashes = [self._hash_of(request, held) for request, held in zip(requests, blocks, strict=True)]
        return Rows(slots, starts, lengths, stored, np.array(hashes, np.int64))

    def _ask(self, rows: Rows, spans: Callable[[Watched], tuple[Span | None, Span | None]]) -> Asked:
        """What is to be looked at of each kind of rows: (checked, sealed) spans of their numbers by request."""
        numbers = np.zeros((len(NUMBERS) + len(SPANS) * len(self._kinds), len(rows.slots)), np.int64)
        numbers[: len(NUMBERS)] = rows.slots, rows.starts, rows.lengths, rows.hashes
        for number, watched in enumerate(self._kinds):
            for place, span in enumerate(spans(watched)):
                if span is not None:
                    first = len(NUMBERS) + len(SPANS) * number + 2 * place
                    numbers[first : first + 2] = span
        bounds = -(-numbers[len(NUMBERS) :] // self._plan.canary)
        counts = bounds[1::2] - bounds[0::2]
        most, sealed = (int(some.max(initial=0)) for some in (counts, counts[1::2]))
        return Asked(numbers.astype(np.uint32).view(np.int32), most, seals=sealed > 0)

    def _watched(self, pools: Pools, index: StepIndex, asked: Asked) -> tuple[Pools, Found]:
        found = self._watch(pools, index, asked)
        if found is None:
            raise BackendError(got="other pools", where="canary", allowed="the pools that the cache was created with")
        return found

    def _look(self, pools: Pools, requests: Sequence[Request], index: StepIndex, asked: Asked) -> Pools:
        pools, found = self._watched(pools, index, asked)
        self._pending.append((found, requests))
        return pools

    def _known(self, *, wait: bool = False) -> list[Fault]:
        """What looks found, as far as that is known."""
        told: list[Fault] = []
        while self._pending and (wait or self._pending[0][0].ready()):
            found, requests = self._pending[0]
            told += [self._named(requests[request], number, row) for number, request, row in found.read()]
            del self._pending[0]
        return list(dict.fromkeys(told))

    def _named(self, request: Request, number: int, row: int) -> Fault:
        if number < 0:
            return Fault(request, WHAT[NUMBERS[-1 - number]])
        watched = self._plan.watched[number]
        return Fault(request, "row", watched.layer, watched.role, row * watched.component.tokens_per_row)

    def _refuse(self, faults: list[Fault], where: str) -> None:
        if faults:
            more = f" and {len(faults) - MOST_NAMED} more" * (len(faults) > MOST_NAMED)
            raise FaultError(
                got="; ".join(map(str, faults[:MOST_NAMED])) + more,
                where=where,
                allowed="rows, slots, lengths and blocks as they were written",
                hint="Release the requests that are named, and compute them anew; others are whole as far as was seen.",
                faults=tuple(faults),
            )


def _spared(watched: Watched) -> int:
    """New tokens of a request up to which a step takes the place of no row in a ring that it reads."""
    component = watched.component
    # States are read by whoever writes the next.
    return watched.regions[0].rows - ((component.span if component.recurrent else component.reach) or 0)


def _least(watched: Watched, rows: Rows) -> Array:
    """The first row that is still there at the end of a step: in a ring its newest rows."""
    return rows.lengths - watched.regions[0].rows if watched.component.growth == "slot" else 0 * rows.lengths


def _seen(watched: Watched, rows: Rows) -> Span:
    first, end = watched.component.live_bounds(rows.starts, np.maximum)
    return np.maximum(first, _least(watched, rows)), end


def _overwritten(watched: Watched, rows: Rows) -> Span:
    first, end = watched.component.live_bounds(rows.starts, np.maximum)
    return first, np.minimum(end, _least(watched, rows))


def _written(watched: Watched, rows: Rows, ends: Array) -> Span:
    step = watched.component.tokens_per_row
    if watched.component.growth == "slot":
        return np.maximum(rows.starts, _least(watched, rows)), ends
    return np.maximum(rows.starts, rows.stored) // step, ends // step


def _replaced(watched: Watched, rows: Rows) -> Span:
    """Rows older than a step whose places in a ring its own took."""
    if watched.component.growth != "slot":
        return 0 * rows.starts, 0 * rows.starts
    first = np.maximum(rows.starts - watched.regions[0].rows, 0)
    return first, np.minimum(rows.starts, _least(watched, rows))
