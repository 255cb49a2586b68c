"""What a cache is made of, and the rules that all its verbs keep: one at a time, none inside a step, freed is gone."""

# pyright: reportPrivateUsage=false

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.cache.reuse import PrefixCache
from kvcore.cache.turns import locked, owner
from kvcore.errors import KvcoreError, OutOfBlocks, RequestError, SnapshotError, StepError
from kvcore.ops import Backend, Ops
from kvcore.ops.functional import FunctionalOps
from kvcore.plan import CachePlan
from kvcore.pools import Pools, check_same_tree
from kvcore.portable.rows import Content, Left, write_rows
from kvcore.requests.blocks import BlockStatistics
from kvcore.requests.growth import Growth
from kvcore.requests.manager import Manager, Place, Request, TakenOver
from kvcore.requests.prefix import Policy
from kvcore.step import Row

if TYPE_CHECKING:
    from kvcore.cache.step_state import StepState

R = TypeVar("R")

LOOK_SECONDS = 0.05
"""How often a verb that waits for another thread's step looks whether somebody can still end it."""


MOST_BYTES = 1 << 62
"""Of all pools: what frameworks can count."""


class CacheBase:
    """A plan, its pools, a backend's verbs, and the requests that live in them.

    What begins with an underscore here, on steps and on handles is for the library's own parts, which keep the rules
    that the verbs keep for a user: ``exclusive`` around every change, clean slots, whole requests.
    """

    def __init__(
        self, plan: CachePlan, backend: Backend, ops: Ops, *, prefix: Policy = "off", check: bool = False
    ) -> None:
        self.spec = plan.spec
        self.plan = plan
        self.backend = backend
        self._verbs = ops
        self.ops = cast("Ops", FunctionalOps(ops))
        self._check = check
        self.damaged: tuple[str, ...] = ()
        # Before anything that grows with the plan: whatever is too much for the machine is said at once.
        self._pools = _allocated(ops)
        cast("FunctionalOps", self.ops).expect(self._pools)
        self._manager = Manager(plan)
        self._prefix = PrefixCache(plan.spec, prefix, self._manager)
        # Of backends whose verbs can be traced: (verb, its arrays) -> whether it is.
        self._traced: Callable[[str, tuple[Any, ...]], bool] | None = getattr(ops, "in_trace", None)
        self.turn_timeout: float | None = None
        self._lock = threading.RLock()
        self._turns = threading.Condition(self._lock)
        self._step: StepState | None = None
        # The verb that is under way, or that did not get to its end; and the live, empty request that it fills.
        self._under_way = ""
        self._filling: Request | None = None

    @property
    def pools(self) -> Pools:
        """The pools, ``"L.role.field"`` -> array. Assign what functional ops returned to put it back."""
        return self._pools

    @pools.setter
    def pools(self, pools: Mapping[str, Any]) -> None:
        self._check_outside("cache.pools")
        self._pools = check_same_tree(pools, self._pools)
        if self._step is not None:
            self._step._pools_replaced = True

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused, to ``pickle`` and ``copy``: requests are alive in one cache, and pools belong to a device."""
        raise SnapshotError(
            got=f"pickle or copy of a {type(self).__name__}",
            where="cache",
            allowed="save(path) and kvcore.load(path), or export_request and import_request into a cache of its own",
        )

    def _replace_pools(self, pools: Pools) -> None:
        """Take what a handle's verb returned; nothing is checked."""
        self._pools = pools

    def _to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """The backend's array as NumPy."""
        return to_numpy(array)

    def asarray(self, array: Any) -> Any:
        """A NumPy array (bf16 as ml_dtypes) as the backend's array on its device; inverse of ``kvcore.to_numpy``."""
        return self.ops.asarray(array)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return self._pools.nbytes

    @property
    def free_slots(self) -> int:
        """Requests that can still be admitted."""
        return self._manager.free_slots

    @property
    def free_blocks(self) -> int:
        """Blocks that steps can still take."""
        return self._manager.free_blocks

    @property
    def block_statistics(self) -> BlockStatistics:
        """Blocks taken, dropped and evicted so far, and key look-ups of prefix reuse that hit and missed."""
        return self._manager.blocks.statistics

    @property
    def requests(self) -> tuple[Request, ...]:
        """Live requests in order of admission."""
        return self._manager.requests

    def _row(self, request: Request) -> Row:
        """The request as it is now, as a part of a step without tokens."""
        return self._row_of(self._manager.place(request))

    def _row_of(self, place: Place) -> Row:
        return Row(place.slot, place.length, 0, place.blocks, place.stored)

    def _least_length(self, request: Request) -> int:
        """Smallest length that ``truncate`` accepts for the request."""
        return self._manager.deepest_truncation(self._manager.check(request))

    def _kept_states(self, request: Request) -> list[tuple[int, Content]]:
        """Checkpoints that the request's own tokens lead to, to go with it where it goes."""
        return self._prefix.kept(self._manager.place(request))

    def _check_whole(self, request: Request, where: str) -> None:
        """Refuse a request whose rings are not complete yet; see ``Manager.check_whole``."""
        self._manager.check_whole(request, where)

    def _take_in(
        self,
        left: Left,
        rows: Content | Callable[[Ops, Pools, Row], Pools],
        into: Request | None = None,
        *,
        salt: str | None = None,
        shares: bool | None = None,
        states: Sequence[tuple[int, Content]] = (),
    ) -> Request:
        """A request that holds ``rows``, or what a function writes, as it was when it left another cache.

        Args:
            into: a request without tokens to fill; None admits one.
            salt: under which its prefixes may be found, whatever it says of itself.
            shares: whether they may be found at all; None: if there is a salt.
            states: (length, state) of checkpoints that came with it.

        Raises:
            OutOfSlots, OutOfBlocks: no room. RequestError: ``into`` has another salt. Nothing is changed.
        """
        shares = salt is not None if shares is None else shares
        if into is None:
            request, place = self._fresh(salt)
        else:
            request, place = into, self._manager.place(into).copy()
            if salt not in (None, place.salt):
                raise RequestError(
                    got=f"request {into.id} of salt {place.salt!r}", where="import: into", allowed=f"salt {salt!r}"
                )
            self._filling = into
        taken = TakenOver(left.length, left.floor, left.tokens, salt=place.salt, shares=shares)
        try:
            self._manager.take_over(request, place, taken)
            row = self._row_of(place)
            self._pools = (
                rows(self._verbs, self._pools, row)
                if callable(rows)
                else write_rows(self._verbs, self._pools, row, rows)
            )
            self._prefix.extend(place)
        except BaseException:
            if into is None:
                self._discard(place)
            else:
                self._manager.blocks.drop(place.blocks[::-1])
                self._clean()
            raise
        self._manager.adopt(request, place)
        self._filling = None
        self._prefix.publish(place)
        if shares and self._prefix.on and place.tokens is not None:
            for length, state in states:
                self._prefix.keep(place, length, state)
        return request

    def _fresh(self, salt: str | None = None) -> tuple[Request, Place]:
        """A request with a clean slot that is not live yet: to be adopted, or discarded.

        Raises:
            OutOfSlots: ``max_requests`` requests are live.
        """
        request, place = self._manager.reserve(salt)
        try:
            self._pools = self._verbs.reset_slots(self._pools, self._integers([place.slot]))
        except BaseException:
            self._manager.discard(place)
            raise
        return request, place

    def _discard(self, place: Place) -> None:
        """Take back the slot and blocks of a place that nobody adopted."""
        self._poison([place.slot], self._manager.discard(place))

    def _clean(self) -> None:
        """Make the slot of a request that was being filled, and is still empty, as if never used."""
        if self._filling is not None and not (place := self._manager.place_of(self._filling)).length:
            self._pools = self._verbs.reset_slots(self._pools, self._integers([place.slot]))
        self._filling = None

    def _check_outside(self, verb: str, arrays: tuple[Any, ...] = ()) -> None:
        """Refuse what changes the cache while it is only being traced.

        Raises:
            StepError: inside ``jax.jit``, or an array is mapped over. ShapeError: an array is differentiated.
        """
        if self._traced is not None and self._traced(verb, arrays):
            raise StepError(
                got=f"{verb} inside a function that JAX traces",
                where=verb,
                allowed="verbs of a cache, its steps and its layers outside of jit and other transformations",
                hint="Inside, use the functional verbs of cache.ops, with cache.pools and step.index as arguments, and "
                "assign cache.pools what the function returns.",
            )

    @locked
    def _take_turn(self, verb: str, act: Callable[[], R], *, in_step: bool = False, ends: bool = False) -> R:
        """Do something alone: after whatever was interrupted is finished or undone, and outside other threads' steps.

        Args:
            verb: its name, for messages.
            act: what to do. An error of kvcore's own says that it changed nothing; after any other, and after an
                interruption, the next verb looks what is left to do.
            in_step: whether the thread that has a step open may do it.
            ends: it is the end of the open step.
        """
        self._check_outside(verb)
        if self._under_way:
            self._mend()
        if self._step is not None and not ends:
            self._meet_step(verb, in_step=in_step)
        self._under_way = verb
        try:
            done = act()
        except KvcoreError:
            self._under_way = ""
            raise
        self._under_way = ""
        return done

    def _meet_step(self, verb: str, *, in_step: bool) -> None:
        """Wait for the end of another thread's step, or refuse; end a step that nobody can end any more.

        Raises:
            StepError: the step is this thread's own, or it did not end within ``turn_timeout``.
        """
        end = None if self.turn_timeout is None else time.monotonic() + self.turn_timeout
        while (step := self._step) is not None:
            if step.is_left:
                step.ending = True
                self._mend()
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
            self._turns.wait(min(left, LOOK_SECONDS))
            if self._under_way:
                self._mend()

    def _mend(self) -> None:
        """Finish or undo what a verb left that did not get to its end. May itself be interrupted: it begins anew."""
        step, self._under_way = self._step, self._under_way or "mend"
        # Nobody was given a step whose opening was interrupted.
        if step is not None and (step.ending or self._under_way == "step"):
            step.ending = True
            if not self._manager.is_table(step.table) and not (step.try_undo() or step.try_undo()):
                self._manager.lose(step.requests)
            self._end_step()
        step = self._step
        self._manager.mend(*(((), ()) if step is None else (step.requests, step.grown)))
        self._prefix.mend(map(self._manager.place_of, self._manager.requests))
        self._clean()
        self._under_way = ""

    def _end_step(self) -> None:
        """Let the others go on."""
        self._step = None
        self._turns.notify_all()

    def _poison(self, slots: list[int], blocks: list[int]) -> None:
        """Under ``check=True``, make what was freed unreadable."""
        if self._check and (slots or blocks):
            self._pools = self._verbs.poison(self._pools, self._integers(slots), self._integers(blocks))

    def _rows(self, requests: Sequence[Request], new: Sequence[int]) -> list[Row]:
        """The requests' parts in a step that brings ``new`` tokens, in the blocks that they have."""
        return [self._row(request)._replace(new=count) for request, count in zip(requests, new, strict=True)]

    def _grown_rows(self, requests: Sequence[Request], new: Sequence[int], grown: Sequence[Growth]) -> list[Row]:
        """The same in the blocks that they will have."""
        places = map(self._manager.place_of, requests)
        return [
            Row(place.slot, place.length, count, growth.blocks, place.stored)
            for place, count, growth in zip(places, new, grown, strict=True)
        ]

    def _prepare_blocks(self, grown: Sequence[Growth]) -> None:
        """Copy shared blocks into those that replaced them; under check, poison all others that are new."""
        if not any(growth.added or growth.replaced for growth in grown):
            return
        self._poison([], [block for growth in grown for block in growth.new])
        pairs = [(old, growth.blocks[column]) for growth in grown for column, old in growth.replaced]
        if pairs:
            sources, targets = (self._integers(list(side)) for side in zip(*pairs, strict=True))
            self._pools = self._verbs.copy_blocks(self._pools, sources, targets)

    def _integers(self, values: list[int]) -> Any:
        return self._verbs.asarray(np.array(values, np.int32))


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
