"""What one layer was given in a step, and which of it the rings hold already.

A step reads old rows from the pools and new rows from itself. A ring row is written at once only while nothing in the
step can still need the row it overwrites, and at commit otherwise; what was overwritten at once is put back if the step
fails. Tails' rows wait for the flush that reads them, so that both are one call of the backend; a reader, the next
layer's append and the commit have them written before. This is the one place that knows these rules. A ``LayerHandle``
appends to its ``RingWrites`` and reads through them; the step drives all of them when it ends.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.cache.outside import store_own
from kvcore.cache.state import CacheState
from kvcore.cache.undo import Undo
from kvcore.errors import StepError
from kvcore.ops import Array, StepIndex
from kvcore.ops.arguments import UNKNOWN, check_finite, check_rows, inputs_of, likes, note_passed
from kvcore.pools import Pools
from kvcore.requests.manager import Opening, Request
from kvcore.spec import DERIVED, KV, ROLES, TAIL_OF, Component
from kvcore.step import StepNumbers, StepRequest, at_start

if TYPE_CHECKING:
    from kvcore.cache.far import Coming, Far

WRITERS = {role: f"append_{role}" for role in ROLES}
"""The verbs that write the library's own roles; others go through ``encode`` and ``store_rows``."""

RING_OF = {role: ring for ring, role in DERIVED.items()}
"""Role -> the ring in which its rows wait, raw, until they are coded together."""

ENTRIES_OF = {tail: role for role, tail in TAIL_OF.items()}
"""Tail -> the role whose flush reads it."""


class Writing(NamedTuple):
    """When a step's rows are stored: at once, unless they wait; an abort may have to put back what was there."""

    waits: bool
    undone: bool


AT_ONCE = Writing(waits=False, undone=False)

ROWS_OF_TOKENS = frozenset({"window", "kv", "state", "conv"})
"""Roles whose rows wait for no flush."""

EXACT = 6
"""Binary digits of a number of entries that matter: up to a thirty-second more are looked at."""

DOOR = "handle"
NONE: Mapping[str, Any] = {}
NO_STREAMS = None, None

LAST_WRITERS = {"state": "write_state"}
"""The verbs that write of every request's new rows the last one alone."""


class StepContext:
    """What the layers of a step share.

    Attributes:
        ops, plan, check: of the cache.
        index: the step's, on the device.
        numbers: the step as host integers.
        tokens: rows of every input, padding included.
        copied: copies of arrays, as the backend makes them.
        traced, passed, known: see ``CacheState``.
        whole: the backend's verb for all of a layer; None: it has none.
        memo: what one layer worked out from the rows, for others of equal components: by its name and what it depends
            on.
        unflushed: the layer whose tails' rows wait for its flush; one at a time.
        far: of every request its entries that are in the host's memory, or None; empty where no request has such.
        coming: what was fetched of them last, by the layer that owns them.
        gone_on: calls that were known to pass, and went straight to their launches.
        writings: when rows are stored, by ``CachePlan.kinds``.
    """

    def __init__(self, cache: CacheState, opening: Opening, numbers: StepNumbers, index: StepIndex) -> None:
        self.ops = cache.ops
        self.plan = cache.plan
        self.check = cache.check
        self.copied = cache.copied
        self.traced = cache.traced
        self.whole = cache.whole
        self.index = index
        self.numbers = numbers
        self.memo: dict[Any, Any] = {}
        self.passed = cache.passed
        self.known = cache.known
        self.tokens: int = index.positions.shape[0]
        self.unflushed: RingWrites | None = None
        self.gone_on = 0
        self.writings: dict[int, Writing] = {}
        self.far: list[Far | None] = [place.far for place in opening.places] if cache.has_far else []
        self.coming: dict[int, Coming] = {}
        self._cache = cache
        self._opening = opening

    @cached_property
    def undo(self) -> Undo:
        """What an abort puts back."""
        opening, manager = self._opening, self._cache.manager
        deepest = partial(manager.deepest_truncations, opening.places, ahead=opening.ahead)
        return Undo(self.ops, self.numbers, self.index, deepest)

    def check_open(self) -> None:
        """Refuse to go on after commit or abort."""
        step = self._cache.step
        if step is None or step.context is not self:
            raise StepError(got="a step that has ended", where="step", allowed="verbs between open and commit")

    def key_of(self, verb: str, layer: int, values: Sequence[Any]) -> tuple[Any, ...] | None:
        """What ``passed`` knows a call of a layer's verb by, None where it cannot."""
        like = likes(values) if self.ops.in_place else None
        return None if like is None else (verb, layer, self.tokens, like)

    def passes(self, key: tuple[Any, ...] | None, values: Sequence[Any], found: Any) -> None:
        """Note that a call's arguments passed its checks, where the values are what was given."""
        if key is not None:
            note_passed(self.passed, key, values, found)

    def check_outside(self, verb: str, arrays: tuple[Any, ...]) -> None:
        """Refuse what changes the cache while it is only being traced; see ``CacheState.check_outside``."""
        if self.traced is not None:
            self._cache.check_outside(verb, arrays)

    def check_values(
        self, array: Array, where: str, component: Component, *, minus_infinity: bool = False, rows: int | None = None
    ) -> None:
        """Under ``check=True``, refuse what is not finite in the first ``rows``, those of tokens unless given."""
        if self.check:
            self.check_outside(where, (array,))
            # Padding comes last, and its rows are ignored.
            given = to_numpy(array)[: self.numbers.tokens if rows is None else rows]
            check_finite(given, where, component, minus_infinity=minus_infinity)

    @property
    def pools(self) -> Pools:
        """The cache's pools, while the step is open; never as constants of a function that is traced."""
        self.check_open()
        return self.held

    @property
    def held(self) -> Pools:
        """The same for a verb that has looked whether the step is open."""
        if self.traced is not None:
            self._cache.check_outside("a layer's rows")
        return self._cache.pools

    @property
    def untraced(self) -> Pools:
        """The same of a backend whose verbs are not traced."""
        return self._cache.pools

    def is_far(self, layer: int) -> bool:
        """Whether entries that a layer owns are in the host's memory, of some request."""
        return any(far is not None and layer in far.rows for far in self.far)

    def settle(self) -> None:
        """Write what waits for a flush, for somebody who looks at the pools."""
        if self.unflushed is not None:
            self.unflushed.settle()

    def replace(self, pools: Pools) -> None:
        """Make what a verb returned the cache's pools; nothing is checked."""
        self._cache.pools = pools

    @property
    def rows(self) -> list[StepRequest]:
        """Each request's part, as host integers."""
        return self.numbers.rows

    @property
    def most_new(self) -> int:
        """Most new tokens of a request."""
        return self.numbers.most_new

    def longest(self, ratio: int) -> int:
        """Most entries of ``ratio`` tokens that a request has at the end of the step."""
        key = "longest", ratio
        if key not in self.memo:
            self.memo[key] = max((row.length for row in self.rows), default=0) // ratio
        return self.memo[key]

    def within(self, ratio: int) -> int:
        """As many or a few more, so that a history that grows asks for another number only now and then.

        No more than its blocks hold.
        """
        key = "within", ratio
        if key not in self.memo:
            most = self.longest(ratio)
            if self.known:
                zeros = max(most.bit_length() - EXACT, 0)
                held = self.index.block_table.shape[1] * (self.plan.block_tokens // ratio)
                most = max(most, min(-(-most >> zeros) << zeros, held))
            self.memo[key] = most
        return self.memo[key]

    def kv_columns(self, kv: KV, *, ended: bool) -> int:
        """Most rows of a layer's keys that the queries of a request see, before the step's append or after it."""
        key = "columns", kv, ended
        if key not in self.memo:
            spans = ((row.start, row.length if ended else row.start, row.left_padding or 0) for row in self.rows)
            self.memo[key] = max((len(kv.visible(*span)) for span in spans), default=0)
        return self.memo[key]

    @cached_property
    def stateless(self) -> list[Request]:
        """Requests of which no recurrent state belongs to the length before the step."""
        return [
            request
            for request, place in zip(self._opening.requests, self._opening.places, strict=True)
            if place.length and place.length not in place.states
        ]

    def closed_count(self, ratio: int) -> int:
        """Entries of ``ratio`` tokens that the step completes, over all requests."""
        key = "closed", ratio
        if key not in self.memo:
            self.memo[key] = self.numbers.closed_count(ratio)
        return self.memo[key]


class RingWrites:
    """One layer's part in one step: what was appended, stored, overwritten, and what still waits for the commit.

    Attributes:
        context: of the step.
        number: of the layer.
        spec: of the layer.
        own: role -> the step's own rows as given, one array a stream; present once they are in the pools, or wait.
        last: roles that were given each request's last row alone.
        waiting: those of them that the rings get at commit.
        ahead: roles of those whose last rows the rings have already, where no request had rows for them to take the
            place of.
        unflushed: those of them that the rings get with the flush.
        stored: paged roles whose closing entries were stored in this step.
    """

    __slots__ = (
        *("_known", "_regions", "_rotation"),
        *("ahead", "context", "last", "number", "own", "spec", "stored", "unflushed", "waiting"),
    )

    def __init__(self, context: StepContext, number: int) -> None:
        self.context = context
        self.number = number
        self.spec = context.plan.spec.all_layers[number]
        self.own: dict[str, tuple[Array, ...]] = {}
        self.waiting: Mapping[str, tuple[Array, ...]] = NONE
        self.ahead: frozenset[str] = frozenset()
        self.unflushed: dict[str, tuple[Array, ...]] = {}
        # How the window's rows are rotated on their way, if they are.
        self._rotation: Mapping[str, Any] = NONE
        self.stored: set[str] = set()
        self.last: frozenset[str] = frozenset()
        self._regions = context.plan.layers[number].regions
        self._known = context.known.get(number, NONE)

    @property
    def where(self) -> str:
        """The layer's name in errors."""
        return f"step.layer({self.number})"

    def component(self, role: str, kind: type = Component) -> Any:
        """The layer's component of that role and kind, or a StepError that lists what the layer has."""
        self.context.check_open()
        component = getattr(self.spec, role) if role in self.spec.roles else None
        if not isinstance(component, kind):
            has = ", ".join(found for found, _ in self.spec.components())
            raise StepError(got=f"role {role!r}", where=self.where, allowed=f"a component of the layer: {has}")
        return component

    def checked(self, role: str, values: Sequence[Any]) -> tuple[Array, ...]:
        """The step's rows of a role that the layer has, checked."""
        context = self.context
        layer = context.plan.layers[self.number]
        found = check_rows(context.ops, layer, role, values, context.tokens)
        if context.check:
            component = layer.component(role)
            for given, array in zip(inputs_of(layer, role), found, strict=True):
                context.check_values(array, given.where, component, minus_infinity=given.minus_infinity)
        return found

    def require(self, role: str, verb: str) -> None:
        """Verbs that see the step's new tokens need them appended first."""
        if self.context.tokens and role not in self.own:
            raise StepError(got=f"{verb} before append_{role}", where=self.where, allowed=f"append_{role}, then {verb}")

    def again(self, verb: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What a verb of the layer gives whose arguments are known to pass; ``UNKNOWN``, with nothing done, else."""
        known, context = self._known.get(verb), self.context
        if known is None:
            return UNKNOWN
        found = known.again(DOOR, context.untraced, context.index, arguments, options)
        if found is not UNKNOWN:
            context.gone_on += 1
        return found

    def note(self, verb: str, arguments: tuple[Any, ...], options: dict[str, Any], checked: Sequence[Any]) -> None:
        """Note that a call passed and ran; ``checked`` is what was found of its arguments and options."""
        known = self._known.get(verb)
        if known is not None:
            known.note(DOOR, self.context.index, arguments, options, checked)

    def append_again(self, role: str, arrays: tuple[Array, ...], rotation: dict[str, Any]) -> bool:
        """``append``, where the rows are stored at once and are known to pass; False, with nothing done, else."""
        unflushed = self.context.unflushed
        if not self._known or role in self.own or (unflushed is not None and unflushed is not self):
            return False
        if role not in ROWS_OF_TOKENS or RING_OF.get(role) in self._regions:
            return False
        if self.writing(role).waits:
            return False
        self.keep_overwritten(role)
        verb = "append_rotated_window" if rotation else WRITERS[role]
        if self.again(verb, arrays, rotation) is UNKNOWN:
            return False
        self._rotation = rotation
        self.own[role] = arrays
        return True

    def flush_again(self, tails: Sequence[str], how: dict[str, Any]) -> bool:
        """``flush``, likewise, of tails whose rows wait for it."""
        waiting = self.unflushed
        if not self._known or len(waiting) != len(tails):
            return False
        for tail in tails:
            if tail not in waiting:
                return False
            self.keep_overwritten(tail)
        streams = [*chain.from_iterable(waiting.get(tail, NO_STREAMS) for tail in TAIL_OF.values())]
        if self.again("append_flush", tuple(streams), self.flush_options(how)) is UNKNOWN:
            return False
        self._all_flushed()
        return True

    def append(self, role: str, arrays: tuple[Array, ...], **rotation: Any) -> None:
        """Take the step's rows of a role, and write them as soon as that is safe; a tail's with the flush."""
        context = self.context
        if context.traced is not None:
            context.check_outside(f"append_{role}", arrays)
        if context.unflushed is not None and context.unflushed is not self:
            context.settle()
        if role in self.own:
            self.check_new(role)
        if role == "window":
            self._rotation = rotation
        if role in RING_OF and RING_OF[role] in self._regions:
            self._append_group_rows(role, RING_OF[role], arrays)
            return
        waits, undone = self.writing(role)
        if waits:
            # Copies: the caller may fill its buffer with the next layer's rows before the step ends.
            self.own[role] = context.copied(arrays)
            self.waiting = {**self.waiting, role: self.own[role]}
            if rotation:
                # The step's own queries read them rotated; they are stored as in a step whose rows do not wait.
                (rows,) = self.waiting[role]
                self.own[role] = (context.ops.rotated_rows(self.number, context.index, rows, **rotation),)
            return
        entries = ENTRIES_OF.get(role)
        flushed = entries is not None and getattr(self.spec, entries) is not None
        if not flushed:
            if undone:
                context.undo.keep(context.pools, self.number, role)
            self._write(role, arrays)
        if role in LAST_WRITERS:
            self.own[role] = arrays
            return
        # A flush reads them again, when the caller may have filled its NumPy buffer anew; backends copy those as they
        # come, all but the one whose own arrays they are.
        self.own[role] = copy.deepcopy(arrays) if isinstance(arrays[0], np.ndarray) else arrays
        if flushed:
            self.unflushed[role] = self.own[role]
            context.unflushed = self

    def decode_again(
        self, rows: dict[str, tuple[Array, ...]], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """What attention gives after all rows of a step's layer were stored, where all of it is known to pass.

        ``UNKNOWN``, with nothing done, else.
        """
        if self.own or "decode" not in self._known:
            return UNKNOWN
        for role in rows:
            if self.writing(role).waits:
                return UNKNOWN
            self.keep_overwritten(role)
        found = self.again("decode", arguments, options)
        if found is not UNKNOWN:
            self.own.update(rows)
        return found

    def learn(self, verb: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Have a call worked out whose parts all passed as they are."""
        known = self._known.get(verb)
        if known is not None:
            known.learn(DOOR, self.context.untraced, self.context.index, arguments, options)

    def flush_options(self, how: dict[str, Any]) -> dict[str, Any]:
        """Options of the verb that flushes and appends; how many entries close decides nothing of what it launches."""
        return {"newest": self.context.most_new, "closed": None, **how}

    def _append_group_rows(self, role: str, ring: str, arrays: tuple[Array, ...]) -> None:
        """Take rows that are coded in groups: what closes is coded at once, the ring is written when that is safe."""
        context, waits = self.context, self.writing(ring).waits
        kept = context.copied(arrays) if waits or isinstance(arrays[0], np.ndarray) else arrays
        if waits:
            # The verb writes both; the step's own queries still read the ring's old rows, which are put back.
            context.undo.keep(context.pools, self.number, ring)
            at = self.number, ring, context.index
            saved = context.ops.read_ring(context.pools, *at)
            self._write(role, arrays)
            context.replace(context.ops.restore_ring(context.pools, *at, saved))
            self.waiting = {**self.waiting, ring: kept}
        else:
            self.keep_overwritten(ring)
            self._write(role, arrays)
        self.stored.add(role)
        self.own[role] = self.own[ring] = kept

    def check_new(self, role: str) -> None:
        """Refuse a second append."""
        if role in self.own:
            raise StepError(got=f"a second append to {role}", where=self.where, allowed="one append a step")

    def settle(self) -> None:
        """Write the tails' rows that wait for a flush, for there may be none, or somebody looks at them before."""
        for role, arrays in self.unflushed.items():
            self.keep_overwritten(role)
            self._write(role, arrays)
        self._all_flushed()

    def flush(self, tails: Sequence[str], streams: Sequence[Array | None], **how: Any) -> bool:
        """Store the entries that close from what these tails and the step hold, and what waits of the step's own rows.

        Returns whether that was one verb.

        Args:
            tails: roles of the tails that are read.
            streams: the step's rows of all tails, None where there is no such tail.
            how: options of ``Ops.flush``.
        """
        context = self.context
        at = context.held, self.number, context.index
        if len(self.unflushed) == len(tails) and all(role in self.unflushed for role in tails):
            for role in tails:
                self.keep_overwritten(role)
            context.replace(context.ops.append_flush(*at, *streams, newest=context.most_new, **how))
            self._all_flushed()
            return True
        self.settle()
        context.replace(context.ops.flush(context.pools, *at[1:], *streams, **how))
        return False

    def _all_flushed(self) -> None:
        self.unflushed.clear()
        if self.context.unflushed is self:
            self.context.unflushed = None

    def append_last(self, role: str, rows: Array) -> None:
        """Take the row of each request's last token, [Q, ...], of a recurrent component, and write it."""
        context = self.context
        context.check_outside(LAST_WRITERS[role], (rows,))
        if context.unflushed is not self:
            context.settle()
        if role in self.own:
            raise StepError(got=f"a second write of {role}", where=self.where, allowed="one write a step")
        self.keep_overwritten(role)
        write = getattr(context.ops, LAST_WRITERS[role])
        newest = min(context.most_new, self._regions[role][0].rows)
        context.replace(write(context.pools, self.number, context.index, rows, newest=newest))
        self.own[role] = (rows,)
        self.last |= {role}

    def keep_overwritten(self, role: str) -> None:
        """Keep what the step's rows take the place of, if an abort must put it back."""
        if self.writing(role).undone:
            self.context.undo.keep(self.context.pools, self.number, role)

    def writing(self, role: str) -> Writing:
        """When the step's rows of a role are written."""
        context = self.context
        kind = context.plan.kinds[self.number, role]
        found = context.writings.get(kind)
        if found is None:
            found = context.writings[kind] = self._new_writing(getattr(self.spec, role), self._regions[role][0].rows)
        return found

    def _new_writing(self, component: Component, rows: int) -> Writing:
        """When rows may go to a pool of ``rows`` a unit."""
        if component.reach is None:
            return AT_ONCE
        rows = 0 if component.span is None else rows
        context, longest = self.context, self.context.plan.longest
        # The step's own queries and entries read ``reach`` older rows; what an aborted step must leave readable beyond
        # that is put back.
        at_once = rows - component.reach
        # States are read before they are written: none is needed after that.
        if (longest is None or rows < longest) and context.most_new > at_once and not component.recurrent:
            return Writing(waits=True, undone=False)
        return Writing(waits=False, undone=context.undo.overwrites(component, rows))

    def _write(self, role: str, arrays: tuple[Array, ...]) -> None:
        context = self.context
        if role == "window" and self._rotation:
            (rows,), rotated = arrays, context.ops.append_rotated_window
            context.replace(rotated(context.held, self.number, context.index, rows, **self._rotation))
            return
        if role in WRITERS:
            append = getattr(context.ops, WRITERS[role])
            context.replace(append(context.held, self.number, context.index, *arrays))
            return
        component: Component = getattr(self.spec, role)
        pools = store_own(
            context.ops, context.pools, self._regions[role], component, context.index, context.rows, arrays
        )
        context.replace(pools)

    def unwritten(self, role: str) -> tuple[Array, ...] | None:
        """The step's own rows where the ring does not hold them yet; None: the pools have everything."""
        if RING_OF.get(role) in self.waiting:
            return self.own[role]
        return self.own[role] if role in self.waiting else None

    def parts(self, role: str) -> tuple[Array, ...]:
        """The step's own rows as ``gather_rows`` takes them: one array for every part of the component."""
        own = self.own[role]
        component: Component = getattr(self.spec, role)
        return own if len(own) == len(component.parts) else (self.context.ops.join(*own),)

    def readable(self, role: str) -> tuple[StepIndex, tuple[Array, ...] | None]:
        """(index, own rows) to read a role with: the start of the step before its append, the end after it."""
        self.context.check_open()
        if role in self.unflushed:
            self.settle()
        index = self.context.index
        return (index, self.unwritten(role)) if role in self.own else (at_start(index), None)

    def awaits_entries(self, role: str) -> bool:
        """Whether entries of a role close in this step and were not stored yet."""
        return role not in self.stored and self.context.closed_count(getattr(self.spec, role).tokens_per_row) > 0

    def missing(self) -> list[str]:
        """Roles that new tokens should have reached but did not: what a commit refuses."""
        own = self.own
        if all(map(own.__contains__, self.spec.written)):
            return []
        stored = "entries" in self.stored
        missing = [role for role in self.spec.written if role not in own and not (stored and role == "tail")]
        return [DERIVED.get(role, role) for role in missing]

    def unstored(self) -> list[str]:
        """Own paged roles with entries that close in this step and were not stored yet."""
        return [role for role in self.spec.compressed if self.awaits_entries(role)]

    def waiting_rows(self) -> dict[str, tuple[Array, ...]]:
        """Rows that the rings do not hold yet, by role, one array a part (a tail's kv and score side by side)."""
        return {role: self.parts(role) for role in self.waiting}

    def store_waiting(self) -> None:
        """Write the ring rows that had to wait, with what they take the place of kept for an abort."""
        undo = self.context.undo
        for role in self.waiting:
            if role in self.ahead:
                continue
            if undo.overwrites(getattr(self.spec, role), self._regions[role][0].rows):
                undo.keep(self.context.pools, self.number, role)
            self._write(role, self.waiting[role])


class StepWrites(dict[int, RingWrites]):
    """What each layer got, of those that the step used: by number. Whatever asks for another's uses it from here on."""

    __slots__ = ("context",)

    def __init__(self, context: StepContext) -> None:
        self.context = context

    def __missing__(self, number: int) -> RingWrites:
        found = self[number] = RingWrites(self.context, number)
        return found
