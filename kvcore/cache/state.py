"""What a cache is made of, and the rules that all its verbs keep: one at a time, none inside a step, freed is gone.

``Cache`` is the door: it checks what it is given and acts here, each verb in a turn of its own. Steps, snapshots and
hand-offs work on a ``CacheState`` as well, within a turn, and know nothing of the door.

Map: whose turn it is (``take_turn``, ``mend``); requests that come and go (``admit``, ``free``, ``restore``,
``take_prefix``); their parts in steps (``row``, ``index_of``); blocks and slots of the pools (``poison``).
"""

import copy
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from kvcore import digest
from kvcore.arrays import to_numpy
from kvcore.cache.canary import Canary, Fault
from kvcore.cache.far import Far
from kvcore.cache.reuse import Hit, PrefixCache
from kvcore.errors import KvcoreError, OutOfBlocks, RequestError, SpecError, StepError
from kvcore.ops import Ops, Paging, StepIndex
from kvcore.plan import CachePlan
from kvcore.pools import Pools
from kvcore.portable.digests import request_lanes
from kvcore.portable.record import RequestRecord
from kvcore.portable.rows import Content, owned, write_rows
from kvcore.requests.grants import BlockGrant, Opening
from kvcore.requests.manager import Manager, Request, RequestState, TakenOver
from kvcore.requests.prefix import Policy
from kvcore.requests.table import Now
from kvcore.step import BlockTables, IndexShape, StepNumbers, StepRequest, build_index, columns_for, kept_index
from kvcore.turns import Owner, locked, owner

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

LOOK_SECONDS = 0.05
"""How often a verb that waits for another thread's step looks whether somebody can still end it."""

MOST_BYTES = 1 << 62
"""Of all pools: what frameworks can count."""


class OpenStep(Protocol):
    """What the others must know of the step that is open.

    Attributes:
        requests: those of the step.
        grants: the blocks that they got, of those that got any.
        owner_name: name of the thread that opened it.
        ending: its end has begun, and is finished or undone by whoever comes next.
        table: the manager's table with the step's tokens in it, once that is all there is left to do.
        pools_replaced: ``cache.pools`` was assigned during the step, so completeness is the caller's business.
    """

    requests: list[Request]
    grants: dict[Request, BlockGrant]
    owner_name: str
    ending: bool
    table: Now | None
    pools_replaced: bool

    @property
    def context(self) -> object:
        """What its layers share, and know it by."""
        ...

    @property
    def is_left(self) -> bool:
        """True once nobody can be expected to end it."""
        ...

    def owner(self) -> Owner | None:
        """The thread that opened it, while it runs."""
        ...

    def try_undo(self) -> bool:
        """Put the rows back; False if the device refused."""
        ...


class CacheState:
    """A plan, its pools, a backend's verbs, and the requests that live in them.

    Attributes:
        spec, plan, ops: as of the cache; ``ops`` are the backend's verbs themselves.
        check: whether freed rows are made unreadable.
        pools: ``"L.role.field"`` -> array.
        manager: who holds which slots and blocks.
        prefix: what later prompts can take over.
        tables: the blocks of its requests as arrays, for the indices of steps.
        paging: what indices of its steps say of whose they are.
        traced: of backends whose verbs can be traced: (verb, its arrays) -> whether it is.
        copied: copies of arrays, as the backend makes them.
        whole: the backend's verb for all of a layer; None: it has none.
        turn_timeout: seconds that a verb waits for another thread's step; None: without end.
        step: the step that is open.
        under_way: the verb that is under way, or that did not get to its end.
        filling: the live, empty request that it fills.
        canary: what looks after the rows, of a plan with check words; else None.
        follow: what copies requests' rows to where somebody else finds them, of all of them or of none: called with the
            state, and each request, its new place and its length so far, once the rows are stored, before the requests
            have them; None: nobody.
        has_far: whether a request has or had entries in the host's memory; see ``kvcore.cache.far``.
        passed: calls of layers' verbs whose arguments passed as they are, by all that is checked of them.
        is_asked: whether somebody outside was given the index of the step that was opened last.
        is_lent: whether the next step's index is written in its place.
        known: layer -> verb -> what runs such calls at once, where the backend has that.
    """

    def __init__(self, plan: CachePlan, ops: Ops, *, prefix: Policy, check: bool) -> None:
        self.spec = plan.spec
        self.plan = plan
        self.ops = ops
        self.check = check
        # Before anything that grows with the plan: whatever is too much for the machine is said at once.
        self.pools: Pools = _allocated(ops)
        self.manager = Manager(plan)
        self.prefix = PrefixCache(plan.spec, prefix, self.manager)
        self.tables = BlockTables()
        # The step that was opened last.
        self._numbers: tuple[Opening | None, StepNumbers] = None, StepNumbers([], [], [], [], [])
        self.paging: Paging | None = None
        # What the backend gave last, and the same with a word of whose it is.
        self._index: tuple[StepIndex | None, StepIndex | None] = None, None
        self.is_asked, self.is_lent = False, False
        self.traced: Callable[[str, tuple[Any, ...]], bool] | None = getattr(ops, "in_trace", None)
        self.copied: Callable[[Any], Any] = getattr(ops, "copied", copy.deepcopy)
        self.whole: Callable[..., Any] | None = getattr(ops, "whole_layer", None)
        self.turn_timeout: float | None = None
        self._lock = threading.RLock()
        self._turns = threading.Condition(self._lock)
        self._waiting = 0
        self.step: OpenStep | None = None
        self.under_way = ""
        self.filling: Request | None = None
        self.canary: Canary | None = Canary(plan, ops, self.manager, self.pools) if plan.canary else None
        self.follow: Callable[[CacheState, Sequence[tuple[Request, RequestState, int]]], None] | None = None
        self.has_far = False
        self.passed: set[Any] = set()
        known = {} if check or self.traced is not None else getattr(ops, "known", {})
        self.known: Mapping[int | None, Mapping[str, Any]] = known
        # Of backends that lay an index out themselves.
        self._new_index: Callable[[StepNumbers, IndexShape, BlockTables], StepIndex] | None
        self._new_index = getattr(ops, "new_index", None)
        # Of those, some have a place for one that nobody sees but the step's own handles.
        self._repeated_index: Callable[[StepNumbers, IndexShape, BlockTables], StepIndex] | None
        self._repeated_index = getattr(ops, "repeated_index", None)

    def check_outside(self, verb: str, arrays: tuple[Any, ...] = ()) -> None:
        """Refuse what changes the cache while it is only being traced.

        Raises:
            StepError: inside ``jax.jit``, or an array is mapped over. ShapeError: an array is differentiated.
        """
        if self.traced is not None and self.traced(verb, arrays):
            raise StepError(
                got=f"{verb} inside a function that JAX traces",
                where=verb,
                allowed="verbs of a cache, its steps and its layers outside of jit and other transformations",
                hint="Inside, use the functional verbs of cache.ops, with cache.pools and step.index as arguments, and "
                "assign cache.pools what the function returns.",
            )

    @locked
    def take_turn(self, verb: str, act: Callable[[], R], *, in_step: bool = False, ends: bool = False) -> R:
        """Do something alone: after whatever was interrupted is finished or undone, and outside other threads' steps.

        Args:
            verb: its name, for messages.
            act: what to do. An error of kvcore's own says that it changed nothing; after any other, and after an
                interruption, the next verb looks what is left to do.
            in_step: whether the thread that has a step open may do it.
            ends: it is the end of the open step.
        """
        self.check_outside(verb)
        if self.under_way:
            self.mend()
        if self.step is not None and not ends:
            self._meet_step(verb, in_step=in_step)
        self.under_way = verb
        try:
            done = act()
        except KvcoreError:
            self.under_way = ""
            raise
        if self.canary is not None and self.step is None:
            self.canary.note()
        self.under_way = ""
        return done

    def _meet_step(self, verb: str, *, in_step: bool) -> None:
        """Wait for the end of another thread's step, or refuse; end a step that nobody can end any more.

        Raises:
            StepError: the step is this thread's own, or it did not end within ``turn_timeout``.
        """
        end = None if self.turn_timeout is None else time.monotonic() + self.turn_timeout
        while (step := self.step) is not None:
            if step.is_left:
                step.ending = True
                self.mend()
                continue
            if step.owner() is owner():
                if in_step:
                    return
                raise StepError(
                    got=f"{verb} while a step is open",
                    where="cache",
                    allowed="one step at a time, then others",
                    hint="End the step first: leave its with block, or call its commit() or abort().",
                )
            left = LOOK_SECONDS if end is None else end - time.monotonic()
            if left <= 0:
                raise StepError(
                    got=f"{verb} while a step of thread {step.owner_name!r} is open, for {self.turn_timeout} seconds",
                    where="cache",
                    allowed="verbs once the step has ended",
                    hint="Leave its with block there, or call its commit() or abort() from any thread; "
                    "cache.turn_timeout says how long others wait.",
                )
            self._waiting += 1
            try:
                self._turns.wait(min(left, LOOK_SECONDS))
            finally:
                self._waiting -= 1
            if self.under_way:
                self.mend()

    def mend(self) -> None:
        """Finish or undo what a verb left that did not get to its end. May itself be interrupted: it begins anew."""
        step, self.under_way = self.step, self.under_way or "mend"
        # Nobody was given a step whose opening was interrupted.
        if step is not None and (step.ending or self.under_way == "step"):
            step.ending = True
            if not self.manager.is_table(step.table) and not (step.try_undo() or step.try_undo()):
                self.manager.lose(step.requests)
            self.end_step()
        step = self.step
        self.manager.mend({} if step is None else step.grants)
        self.prefix.mend(map(self.manager.place_of, self.manager.requests))
        self._clean()
        self.under_way = ""

    def end_step(self) -> None:
        """Let the others go on."""
        self.step = None
        if self._waiting:
            self._turns.notify_all()

    @property
    def most_checkpoints(self) -> int:
        """How many are kept at once; 0 where prefixes are not reused."""
        return self.prefix.capacity if self.prefix.on else 0

    def restore(
        self,
        left: RequestRecord,
        rows: Content | Callable[[Ops, Pools, StepRequest], Pools],
        into: Request | None = None,
        *,
        salt: str | None = None,
        shares: bool | None = None,
        states: Sequence[tuple[int, Content]] = (),
        far: Far | None = None,
    ) -> Request:
        """A request that holds ``rows``, or what a function writes, as it was when it left another cache.

        Args:
            into: a request without tokens to fill; None admits one.
            salt: under which its prefixes may be found, whatever it says of itself.
            shares: whether they may be found at all; None: if there is a salt. Rows that were converted never are, nor
                those of an approximate replay where no hit is told to be one.
            states: (length, state) of checkpoints that came with it.
            far: entries that stay in the host's memory, and are not among the rows.

        Raises:
            OutOfSlots, OutOfBlocks: no room. RequestError: ``into`` has another salt. Nothing is changed.
        """
        shares = salt is not None if shares is None else shares
        with ExitStack() as alone:
            # JAX's pools are renewed once for the slot that is cleared and for what comes into it: no program reads
            # them in between.
            alone.enter_context(getattr(self.ops, "alone", nullcontext)())
            if into is None:
                request, place = self.admit(salt)
            else:
                request, place = into, self.manager.place(into).copy()
                if salt not in (None, place.salt):
                    raise RequestError(
                        got=f"request {into.id} of salt {place.salt!r}", where="import: into", allowed=f"salt {salt!r}"
                    )
                self.filling = into
            # Whoever finds rows of an approximate replay is told so under that policy alone.
            told = not left.approximate or self.prefix.policy == "approximate"
            shares = shares and not left.converted and told
            taken = TakenOver(
                left.length,
                left.floor,
                left.tokens,
                salt=place.salt,
                shares=shares,
                converted=left.converted,
                approximate=left.approximate,
            )
            try:
                self.manager.take_over(request, place, taken)
                place.far = far
                self.has_far |= far is not None
                row = self.row_of(place)
                self.pools = (
                    rows(self.ops, self.pools, row) if callable(rows) else write_rows(self.ops, self.pools, row, rows)
                )
                alone.close()
                if self.canary is not None:
                    self.pools = self.canary.seal(self.pools, row)
                self.prefix.extend(place)
                if self.follow is not None:
                    self.follow(self, [(request, place, 0)])
            except BaseException:
                if into is None:
                    self.free(place)
                else:
                    self.manager.blocks.drop(place.blocks[::-1])
                    self._clean()
                raise
        self.manager.adopt(request, place)
        self.filling = None
        self.prefix.publish(place)
        if shares and self.prefix.on and place.tokens is not None:
            for length, state in states:
                self.prefix.keep(place, length, state)
        return request

    def admit(self, salt: str | None = None) -> tuple[Request, RequestState]:
        """A request with a clean slot that is not live yet: to be adopted, or discarded.

        Raises:
            OutOfSlots: ``max_requests`` requests are live.
        """
        request, place = self.manager.reserve(salt)
        try:
            self.pools = self.ops.reset_slots(self.pools, self.integers([place.slot]))
        except BaseException:
            self.manager.discard(place)
            raise
        return request, place

    def free(self, place: RequestState) -> None:
        """Take back the slot and blocks of a place that nobody adopted."""
        self.poison([place.slot], self.manager.discard(place))

    def take_prefix(self, request: Request, place: RequestState, hit: Hit, ids: list[int]) -> None:
        """Fill a fresh place from a prefix hit; without room for its last, partial block it starts from nothing."""
        stored = hit.stored if self.plan.blocks else 0
        floor = self.floor(max(hit.length, hit.stored))
        taken = TakenOver(hit.length, floor, ids[: hit.length], stored, hit.blocks, ids, place.salt)
        try:
            self.manager.take_over(request, place, taken)
        except OutOfBlocks:
            return
        place.cached_tokens = hit.length
        place.exact, place.seen_from = hit.exact, 0 if hit.exact else hit.length
        if hit.state is not None:
            self.pools = write_rows(self.ops, self.pools, self.row_of(place), hit.state)
        if self.canary is not None:
            # Rings that are replayed are sealed as they are, empty.
            taken_over = len(hit.blocks) * self.plan.block_tokens
            self.pools = self.canary.seal(self.pools, self.row_of(place), taken_over)
        self.prefix.extend(place)

    def fits(self, ids: list[int], length: int, salt: str | None) -> bool:
        """Whether a prompt could be admitted now and come to ``length`` tokens."""
        longest = self.plan.longest
        if not self.manager.free_slots or (longest is not None and length > longest):
            return False
        return self.blocks_needed(ids, length, salt) <= self.manager.free_blocks

    def blocks_needed(self, ids: list[int], length: int, salt: str | None) -> int:
        """Blocks that a prompt would take of the free ones, cached ones that it takes over among them."""
        hit = self.prefix.find(ids, limit=len(ids) - 1, salt=salt)
        blocks = hit.blocks if hit.length else ()
        return self.plan.blocks_for(length) - len(blocks) + self.manager.blocks.idle_among(blocks)

    def floor(self, length: int) -> int:
        """Smallest length that a request restored at ``length`` can go back to: 0 if nothing had left its rings."""
        rings = [component for _, _, component in owned(self.spec) if component.in_checkpoint]
        return 0 if all(component.live(length).start == 0 for component in rings) else length

    def _clean(self) -> None:
        """Make the slot of a request that was being filled, and is still empty, as if never used."""
        if self.filling is not None and not (place := self.manager.place_of(self.filling)).length:
            self.pools = self.ops.reset_slots(self.pools, self.integers([place.slot]))
        self.filling = None

    def row(self, request: Request) -> StepRequest:
        """The request as it is now, as a part of a step without tokens; all its rows are there.

        Raises:
            RequestError: some are in the host's memory.
        """
        self.manager.check_near(request)
        return self.row_of(self.manager.place(request))

    def row_of(self, place: RequestState) -> StepRequest:
        return StepRequest(place.slot, place.length, 0, place.blocks, place.stored)

    def least_length(self, request: Request) -> int:
        """Smallest length from which on ``truncate`` accepts every one for the request."""
        return self.manager.least_whole(self.manager.check(request))

    def kept_states(self, request: Request) -> list[tuple[int, Content]]:
        """Checkpoints that the request's own tokens lead to, to go with it where it goes."""
        return self.prefix.kept(self.manager.place(request))

    def check_whole(self, request: Request, where: str) -> None:
        """Refuse a request whose rings are not complete yet; see ``Manager.check_whole``."""
        self.manager.check_whole(request, where)

    def rows(self, requests: Sequence[Request], new: Sequence[int]) -> list[StepRequest]:
        """The requests' parts in a step that brings ``new`` tokens, in the blocks that they have."""
        return [self.row(request)._replace(new=count) for request, count in zip(requests, new, strict=True)]

    def numbers_of(self, opening: Opening, padding: list[int] | None) -> StepNumbers:
        """A step as host integers, of those of the step before where it repeats that."""
        before, last = self._numbers
        if padding is None and before is not None and opening.follows is before and last.left_padding is None:
            found = last.next(opening.blocks)
        else:
            parts = opening.slots, opening.starts, opening.counts, opening.stored, opening.blocks
            found = StepNumbers(*parts, padding)
        self._numbers = opening, found
        return found

    def index_of(self, numbers: StepNumbers, pad_tokens: int | None, pad_requests: int | None) -> StepIndex:
        """The index of a step, with a block table of few widths: what its longest request needs, or any could have.

        What is compiled for a shape is compiled once: steps that are padded, or that JAX traces, have one width.

        Raises:
            ShapeError: the padding is smaller than the step.
        """
        padded, most, tables = pad_tokens is not None or pad_requests is not None, self.plan.max_blocks, self.tables
        if most:
            tables.update(numbers.slots, numbers.blocks)
        columns = most
        if most and not padded and self.ops.in_place:
            columns = min(most, columns_for(numbers.most_blocks))
        shape = numbers.shape(columns, pad_tokens, pad_requests)
        # A backend may keep padded indices in one place, so that a captured graph can be replayed on the next; one
        # whose arrays do not change may keep any.
        asked, self.is_asked = self.is_asked, False
        keep = getattr(self.ops, "kept_index", None) if padded or not self.ops.in_place else None
        # Who did not ask for the index of the step that this one repeats does not ask for this one's, in most loops.
        lend = None if padded or asked or not numbers.repeats else self._repeated_index
        self.is_lent = lend is not None
        if lend is not None:
            found = lend(numbers, shape, tables)
        elif not padded and (keep is None or self.ops.in_place):
            new = self._new_index
            found = self.ops.index(kept_index(numbers, shape, tables)) if new is None else new(numbers, shape, tables)
        elif keep is None:
            found = self.ops.padded_index(kept_index(numbers, shape, tables))
        else:
            found = keep(numbers, shape, tables)
        bare, index = self._index
        if index is None or found is not bare:
            index = StepIndex._make((*found[:-1], self.paging))
            self._index = found, index
        return index

    def own_index(self, numbers: StepNumbers, index: StepIndex) -> StepIndex:
        """The index of a step once more, for somebody who may keep it."""
        # Of the blocks that the step had: its requests may have others by now.
        host = build_index(numbers.rows, max_blocks=index.block_table.shape[1])
        return StepIndex(*self.ops.index(host)[:-1], self.paging)

    def digest_lanes(self, requests: Sequence[Request]) -> list[tuple[int, list[tuple[int, int]]]]:
        """What ``digest`` combines: for each request its length, and the two lanes of every pool in canonical order."""
        chosen = [self.manager.check(request) for request in requests]
        rows = self.rows(chosen, [0] * len(chosen))
        near = [request_lanes(self.ops, self.pools, row) for row in rows]
        lanes: list[list[tuple[int, int]]] = [[] for _ in rows]
        index = None
        for (layer, role, component), *known in zip(owned(self.spec), *near, strict=True):
            pairs = [pair for pair in known if pair is not None]
            if len(pairs) < len(rows):
                index = index or self.ops.index(build_index(rows, max_blocks=self.plan.max_blocks))
                columns = max((len(component.live(row.length)) for row in rows), default=0)
                raw = self.ops.gather_rows(self.pools, layer, role, index, columns=columns)
                found = to_numpy(self.ops.digest_rows(raw, digest.region_salt(layer, role)))
                pairs = [(int(a), int(b)) for a, b in found]
            for request, pair in enumerate(pairs):
                lanes[request].append(pair)
        return [(row.length, lane) for row, lane in zip(rows, lanes, strict=True)]

    def faults(self, requests: Sequence[Request] | None) -> tuple[Fault, ...]:
        """What is not as it was written, of some requests or of all.

        Raises:
            SpecError: nothing is watched. RequestError: stale or foreign.
        """
        if self.canary is None:
            raise SpecError(got="canary=False", where="faults", allowed="a cache that was created with canary=True")
        chosen = [self.manager.check(request, lost=True) for request in self.manager.chosen(requests, "faults")]
        rows = {request: self.row_of(self.manager.place_of(request)) for request in chosen}
        self.pools, found = self.canary.faults(self.pools, rows)
        return found

    def prepare_blocks(self, grants: Mapping[Request, BlockGrant]) -> None:
        """Copy shared blocks into those that replaced them; under check, poison all others that are new."""
        if not grants:
            return
        self.poison([], [block for grant in grants.values() for block in grant.new])
        pairs = [(old, grant.blocks[column]) for grant in grants.values() for column, old in grant.replaced]
        if pairs:
            sources, targets = (self.integers(list(side)) for side in zip(*pairs, strict=True))
            self.pools = self.ops.copy_blocks(self.pools, sources, targets)

    def poison(self, slots: list[int], blocks: list[int]) -> None:
        """Under ``check=True``, make what was freed unreadable."""
        if self.check and (slots or blocks):
            self.pools = self.ops.poison(self.pools, self.integers(slots), self.integers(blocks))

    def integers(self, values: list[int]) -> Any:
        return self.ops.asarray(np.array(values, np.int32))


def _allocated(ops: Ops) -> Pools:
    """Fresh pools.

    Raises:
        OutOfBlocks: the device has no room for them.
    """
    try:
        if ops.plan.nbytes > MOST_BYTES:
            raise MemoryError
        return ops.allocate()
    except KvcoreError:
        raise
    except (MemoryError, RuntimeError, ValueError) as error:
        # NumPy, torch and JAX each have errors of their own for memory, and for sizes that are beyond any.
        raise OutOfBlocks(
            got=f"pools of {ops.plan.nbytes} bytes",
            where="create_cache",
            allowed=f"what {ops.device} has room for",
            hint=(str(error).splitlines() or [""])[0][:200],
        ) from error


def verb(
    name: str, *, in_step: bool = False
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Make a method of a cache a verb: it waits for its turn; see ``CacheState.take_turn``.

    Args:
        name: for messages.
        in_step: whether the thread that has a step open may call it.
    """

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def turn(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            act = functools.partial(method, self, *args, **kwargs)
            return self._state.take_turn(name, act, in_step=in_step)

        return turn

    return decorate
