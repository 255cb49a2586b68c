"""One step of a cache: the ``Step`` that its user holds, from ``cache.step`` until commit or abort, and its state.

The cache holds the ``StepState`` until the step has ended: what it took, what it overwrote, and how it ends. The user
holds the ``Step``, whose end can be seen even if nobody says so.

Map: ``Step``, ``_Leaving`` (the end of a ``with`` block), ``StepState`` (``commit``, ``roll_back``).
"""

# pyright: reportPrivateUsage=false

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from kvcore.cache.layer import LayerHandle
from kvcore.cache.ring_writes import RingWrites, StepContext, StepWrites
from kvcore.cache.state import CacheState
from kvcore.cache.unwritten import fill_unwritten
from kvcore.counts import as_count
from kvcore.errors import ShapeError, StepError
from kvcore.ops import Ops, StepIndex
from kvcore.ops.arguments import check_constant
from kvcore.portable.rows import Content, Own, owned, state_at
from kvcore.requests.grants import BlockGrant
from kvcore.requests.manager import Opening, Request, RequestState
from kvcore.requests.tokens import as_mapping
from kvcore.spec import CacheSpec
from kvcore.step import StepNumbers, StepRequest
from kvcore.turns import owner

if TYPE_CHECKING:
    from types import TracebackType

    from kvcore.requests.table import Now


class Opener(Protocol):
    """What a step needs of the cache that it shows: what it holds, and the verbs for functional use."""

    spec: CacheSpec
    ops: Ops


C = TypeVar("C", bound=Opener)


class _Leaving:
    """``Step.__exit__``, of which a ``with`` statement keeps hold for as long as it lasts.

    A block that was left without a word, because an interruption came before the first line of its end, is seen by
    that: the cache's next verb rolls the step back.
    """

    def __get__(self, step: "Step[Any] | None", kind: type["Step[Any]"]) -> Any:
        if step is None:
            return self
        leave = partial(_leave, step._state)
        step._leaving = weakref.ref(leave)
        return leave

    def __call__(self, step: "Step[Any]", *error: Any) -> None:
        _leave(step._state, *error)


class Step(Generic[C]):
    """One step of a cache: new tokens of some requests, through all layers.

    It ends with ``commit`` or ``abort``, or as a ``with`` block: committed at its end, rolled back by an exception. One
    that is forgotten (dropped, or of a thread that has ended) is rolled back by the cache's next verb.

    Attributes:
        cache: the cache it belongs to.

    Example:
        >>> import numpy as np
        >>> import kvcore
        >>> spec = kvcore.spec.presets.classic(layers=1, key_heads=1, key_dim=4)
        >>> cache = kvcore.create_cache(spec, backend="reference", max_requests=8, max_tokens=2048)
        >>> rows = np.ones((3, 1, 4), np.float32)
        >>> request = cache.admit()
        >>> step = cache.step({request: 3})  # or: with cache.step(...) as step
        >>> step.positions.tolist(), step.request_index.tolist()
        ([0, 1, 2], [0, 0, 0])
        >>> step.layer(0).append_kv(rows, rows)
        >>> step.commit()
        >>> request.length
        3
        >>> cache.release(request)
    """

    def __init__(self, cache: C, state: "StepState") -> None:
        self.cache = cache
        self._state = state
        self._leaving: weakref.ref[Any] | None = None
        state.user = weakref.ref(self)

    @property
    def index(self) -> StepIndex:
        """The step's index for functional use: ``pools = cache.ops.append_window(pools, layer, step.index, rows)``.

        Functional verbs write at once, so what they may overwrite is noted here, to be put back if the step fails. A
        padded step belongs to a captured graph and is not slowed by that: after a failure its rows count as written,
        and a request is lost that still needs rows in whose place they belong (``max_draft_tokens`` leaves room).
        """
        return self._state.functional_index()

    @property
    def positions(self) -> Any:
        """[T] int32 absolute position of every token, -1 for padding."""
        return self._state.own_index.positions

    @property
    def request_index(self) -> Any:
        """[T] int32 which of the step's requests every token belongs to, -1 for padding."""
        return self._state.own_index.request_index

    def from_batch(self, batch: Any) -> Any:
        """Rows [T, ...] for the verbs, of a batch [Q, S, ...] padded on the right: request q's new tokens come first.

        Raises:
            ShapeError: another number of requests, or fewer columns than a request has new tokens.

        Example:
            >>> first, second = cache.admit(), cache.admit()
            >>> with cache.step({first: 2, second: 1}) as step:
            ...     batch = np.arange(4.0).reshape(2, 2)  # the last one is padding
            ...     print(step.from_batch(batch).tolist(), step.to_batch(step.from_batch(batch)).tolist())
            ...     step.layer(0).append_kv(rows, rows)
            [0.0, 1.0, 2.0] [[0.0, 1.0], [2.0, 0.0]]
            >>> cache.release(first), cache.release(second)
            (None, None)
        """
        self._state.context.check_open()
        check_constant(batch, "from_batch")
        batch = self.cache.ops.asarray(batch)
        requests, width = len(self._device_index.slots), self._state.context.most_new
        if batch.ndim < 2 or batch.shape[0] != requests or batch.shape[1] < width:
            allowed = f"{requests} requests × {width} columns or more"
            raise ShapeError(got=list(batch.shape), where="from_batch", allowed=allowed)
        return self.cache.ops.from_batch(self._device_index, batch)

    def to_batch(self, rows: Any, width: int | None = None) -> Any:
        """The inverse for what verbs return: rows [T, ...] -> [Q, width, ...], zeros (or False) in the padding.

        Args:
            rows: one for every token of the step.
            width: columns; the most new tokens of a request unless given, and no fewer.

        Raises:
            ShapeError: another number of rows, or a width that has no room for them.
        """
        self._state.context.check_open()
        check_constant(rows, "to_batch")
        rows = self.cache.ops.asarray(rows)
        tokens, least = len(self._device_index.positions), self._state.context.most_new
        if not rows.ndim or rows.shape[0] != tokens:
            raise ShapeError(got=list(rows.shape), where="to_batch", allowed=f"{tokens} rows")
        columns = least if width is None else as_count(width, least)
        if columns is None:
            raise ShapeError(got=width, where="to_batch: width", allowed=f"{least} or more")
        return self.cache.ops.to_batch(self._device_index, rows, columns)

    def layer(self, number: int) -> LayerHandle:
        """The handle of layer ``number``; draft layers follow the main ones."""
        self._state.context.check_open()
        count = len(self.cache.spec.all_layers)
        found = number if type(number) is int and number >= 0 else as_count(number)
        if found is None or found >= count:
            raise ShapeError(got=number, where="step.layer", allowed=f"0 to {count - 1}")
        return self._state.layer(found)

    def commit(self, tokens: Mapping[Request, int] | None = None) -> None:
        """Make the step's tokens part of their requests; refused, and rolled back, if a layer did not get them.

        Args:
            tokens: how many of each request, where outside code put fewer into the pools than the step had reserved
                (a loop on the device that ended sooner): the first ones, of every request of the step. Blocks that
                they do not need are free again. None: all.

        Raises:
            StepError: new tokens reached no window, tail or kv of some layer, or the step has ended; fewer tokens of a
                step whose ``cache.pools`` were not assigned, which stays open.
            ShapeError: numbers that are not 0 to what the step has, or not of its requests; it stays open.
        """
        act = self._state.commit if tokens is None else partial(_commit_some, self._state, tokens)
        self._state.cache.take_turn("commit", act, ends=True)

    def abort(self) -> None:
        """Give everything back: lengths, blocks, and the bytes of every row that can still be read.

        Raises:
            StepError: the step has ended.

        Example:
            >>> request = cache.admit()
            >>> step = cache.step({request: 3})
            >>> step.layer(0).append_kv(rows, rows)
            >>> step.abort()
            >>> request.length, request.blocks
            (0, ())
            >>> cache.release(request)
        """
        self._state.cache.take_turn("abort", partial(_abort, self._state), ends=True)

    def __enter__(self) -> "Step[C]":
        return _entered(self)

    if TYPE_CHECKING:

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
        ) -> None: ...

    else:
        __exit__ = _Leaving()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused, to ``pickle`` and ``copy``: a step is open once, and ends once."""
        raise StepError(
            got="pickle or copy of a step",
            where="step",
            allowed="the step itself, until it ends; then cache.fork(request) copies what it brought",
        )

    @property
    def _device_index(self) -> StepIndex:
        """The index as the handles use it: with nothing noted for functional verbs."""
        return self._state.context.index


def _entered(step: "Step[C]") -> "Step[C]":
    step._state.context.check_open()
    # Whoever enters without a ``with`` statement has nothing that ends with the block.
    step._state.block = step._leaving if step._leaving is not None and step._leaving() is not None else None
    return step


def _commit_some(state: "StepState", tokens: Mapping[Request, int]) -> None:
    state.context.check_open()
    state.commit(state.counts_of(tokens))


def _abort(state: "StepState") -> None:
    state.context.check_open()
    state.roll_back()


def _leave(state: "StepState", kind: type[BaseException] | None, *_: object) -> None:
    """The end of a ``with`` block."""
    end: Callable[[], None] = state.commit if kind is None else state.roll_back
    state.cache.take_turn("commit" if kind is None else "abort", partial(_if_open, state, end), ends=True)


def _if_open(state: "StepState", end: Callable[[], None]) -> None:
    """End a step that has not ended."""
    if state.is_open:
        end()


class StepState:
    """One step of a cache, open until commit or abort.

    Attributes:
        cache: what it belongs to.
        context: what its layers share.
        requests: those of the step, in mapping order.
        grants: the blocks that they get, of those that get any.
        owner: weak reference to the thread that opened it.
        owner_name: that thread's name.
        user: weak reference to the ``Step`` that stands for it.
        block: weak reference to what the ``with`` block holds of it; None outside of one.
        ending: its end has begun, and is finished or undone by whoever comes next.
        sealed: its rows may have check words.
        table: the manager's table with the step's tokens in it, once that is all there is left to do.
        pools_replaced: ``cache.pools`` was assigned during the step, so completeness is the caller's business.
    """

    def __init__(
        self,
        cache: CacheState,
        opening: Opening,
        numbers: StepNumbers,
        index: StepIndex,
    ) -> None:
        self.cache = cache
        self.requests = opening.requests
        self.grants = opening.grants
        here = owner()
        self.owner = weakref.ref(here)
        self.owner_name = here.name
        self.user: weakref.ref[Any] | None = None
        self.block: weakref.ref[Any] | None = None
        self.ending = False
        self.sealed = False
        self.table: Now | None = None
        self.pools_replaced = False
        # All main layers got the step's rows.
        self._is_whole = False
        self.context = StepContext(cache, opening, numbers, index)
        self._opening = opening
        self._numbers = numbers
        # The index that its user may keep, once there is one.
        self._own = None if cache.is_lent else index
        self._layers = StepWrites(self.context)
        self._handles: dict[int, LayerHandle] = {}

    @property
    def is_open(self) -> bool:
        """Until it was committed or rolled back."""
        return self.cache.step is self

    @property
    def is_left(self) -> bool:
        """True once nobody can be expected to end it: its end was interrupted, or whoever had it is gone."""
        # A ``with`` block ends its step even if nobody kept the ``Step``.
        ends = self.user if self.block is None else self.block
        return self.ending or (ends is not None and ends() is None) or self.owner() is None

    def functional_index(self) -> StepIndex:
        """The index for functional verbs, with what they may overwrite noted.

        Raises:
            StepError: entries of a request are in the host's memory; who reads by the index knows nothing of that.
        """
        if any(self.context.far):
            raise StepError(
                got="a request whose entries are in the host's memory",
                where="step.index",
                allowed="requests whose rows are all there, or handles' verbs",
                hint="Bring the rest before the step: kvcore.store.bring(cache, request).",
            )
        self.context.settle()
        padded = self.context.tokens > self._numbers.tokens
        if not padded and self._numbers.tokens and self.is_open and not self.context.undo.whole:
            self.cache.check_outside("step.index")
            self.context.undo.keep_all(self.cache.pools)
        return self.own_index

    @property
    def own_index(self) -> StepIndex:
        """The index for somebody who may keep it, with nothing noted."""
        self.cache.is_asked = True
        if self._own is None:
            self._own = self.cache.own_index(self.context.numbers, self.context.index)
        return self._own

    def layer(self, number: int) -> LayerHandle:
        """The handle of a layer."""
        if number not in self._handles:
            self._handles[number] = LayerHandle(self._layers, number)
        return self._handles[number]

    def counts_of(self, tokens: Mapping[Request, int]) -> list[int]:
        """Fewer tokens of the requests than the step has, checked."""
        if not self.pools_replaced:
            raise StepError(
                got="fewer tokens than the step has",
                where="commit: tokens",
                allowed="of a step whose cache.pools were assigned what functional verbs returned",
                hint="What handles were given is all of the step's: commit it, then cache.truncate(request, length).",
            )
        given = as_mapping(tokens, "commit: tokens")
        if set(given) != set(self.requests):
            got = f"{len(given)} requests"
            raise ShapeError(got=got, where="commit: tokens", allowed=f"the step's {len(self.requests)} requests")
        counts: list[int] = []
        for request, most in zip(self.requests, self._opening.counts, strict=True):
            count = as_count(given[request])
            if count is None or count > most:
                where = f"commit: tokens of request {request.id}"
                raise ShapeError(got=given[request], where=where, allowed=f"0 to {most}")
            counts.append(count)
        return counts

    def _shorten(self, counts: list[int]) -> None:
        """Have the step bring fewer tokens, and its requests keep the blocks that these need."""
        self._opening.shorten(counts)
        old = self._numbers
        self._numbers = StepNumbers(old.slots, old.starts, counts, old.stored, old.blocks, old.left_padding)

    def commit(self, counts: list[int] | None = None) -> None:
        """Make the step's tokens, or the first ``counts`` of them, part of their requests: all of it, or nothing.

        In the cache's turn.
        """
        self.context.check_open()
        self.ending = True
        cache, manager, prefix = self.cache, self.cache.manager, self.cache.prefix
        grants = self.grants
        try:
            if counts is not None:
                self._shorten(counts)
            self._check_complete()
            self.context.settle()
            if not self.pools_replaced:
                for number in range(len(cache.spec.all_layers)):
                    fill_unwritten(self._writes(number))
            states = self._states()
            touched = self._touched()
            # Most decode steps only make their requests a token longer.
            plain = counts is None and cache.follow is None
            table = manager.with_step(self._opening, touched) if plain else None
            places = {} if table is not None else manager.after(self._opening, touched, every=self._every)
            if counts is not None:
                grants = {request: self._needed(grant, places[request]) for request, grant in grants.items()}
            keys = self._new_keys(places) if prefix.on and places else {}
            for writes in self._layers.values():
                if writes.waiting:
                    writes.store_waiting()
            if cache.canary is not None:
                self.sealed = True
                cache.pools = cache.canary.ended(cache.pools, *self._looked_at, self._numbers)
            if cache.follow is not None:
                starts = zip(self._opening.requests, self._opening.starts, strict=True)
                cache.follow(cache, [(one, places[one], start) for one, start in starts if one in places])
        except BaseException:
            self.roll_back()
            raise
        if table is None:
            table = manager.with_places(places)
            manager.learn(places, self._opening, keys)
        self.table = table
        # Until here nothing has happened; from here on all of it has.
        manager.become(self.table)
        cache.end_step()
        freed = manager.release_replaced(grants)
        for request, more in keys.items():
            prefix.publish(places[request], len(places[request].keys) - len(more))
        for request, kept in states.items():
            for length, state in kept:
                if length <= places[request].complete:
                    prefix.keep(places[request], length, state)
        cache.poison([], freed)

    def _needed(self, grant: BlockGrant, place: RequestState) -> BlockGrant:
        """A grant, and its request's place, without the blocks that a shorter step does not need."""
        kept = self.cache.plan.blocks_for(max(place.length, place.stored))
        surplus = tuple(enumerate(grant.blocks))[kept:]
        place.blocks = grant.blocks[:kept]
        return grant._replace(blocks=place.blocks, replaced=(*grant.replaced, *surplus))

    def _writes(self, number: int) -> RingWrites:
        """What a layer got; one that the step left out stays one that it did not touch."""
        return self._layers.get(number) or RingWrites(self.context, number)

    def roll_back(self) -> None:
        """Give everything back: lengths, blocks, and the bytes of every row that can still be read."""
        self.ending = True
        self._put_back()
        self.cache.end_step()
        self.cache.manager.shrink(self.grants)

    def try_undo(self) -> bool:
        """Put the rows back; False if the device refused."""
        try:
            self._put_back()
        except Exception:  # noqa: BLE001 - a backend may fail in any way; twice is enough
            return False
        return True

    def _put_back(self) -> None:
        """Restore what was overwritten; may be called again after it was interrupted."""
        # Functional verbs have written even if nobody assigned what they returned.
        self.cache.pools = self.context.undo.apply(self.cache.pools)
        if self.sealed and self.cache.canary is not None:
            self.cache.pools = self.cache.canary.take_back(self.cache.pools, *self._looked_at)
        if self.pools_replaced and not self.context.undo.whole:
            rows = self._numbers.rows
            lengths = (row.length for row in rows)
            self.cache.manager.mark_written(dict(zip(self.requests, lengths, strict=True)))
            self.cache.manager.lose(
                [request for request, row in zip(self.requests, rows, strict=True) if self._harms(row)]
            )

    @property
    def _looked_at(self) -> tuple[list[Request], StepNumbers, Sequence[Sequence[int]], StepIndex]:
        """What a canary must know of the step, as its index says it: of all tokens that it had reserved."""
        return self.requests, self.context.numbers, self._opening.blocks, self.context.index

    def _harms(self, row: StepRequest) -> bool:
        """Whether a request's new rows take the place of rows that it still needs without them."""
        rings = ((layer, role, part) for layer, role, part in owned(self.cache.spec) if part.span is not None)
        return row.new > 0 and any(
            row.length - self.cache.plan.region(layer, role)[0].rows > component.live(row.start).start
            for layer, role, component in rings
        )

    def _new_keys(self, places: Mapping[Request, RequestState]) -> dict[Request, Sequence[bytes]]:
        """Of requests whose blocks close, the keys of those blocks."""
        found: dict[Request, Sequence[bytes]] = {}
        for (request, place), ids in zip(places.items(), self._opening.ids, strict=True):
            more = self.cache.prefix.keys_after(place, ids or ())
            if more:
                found[request] = more
        return found

    def _states(self) -> dict[Request, list[tuple[int, Content]]]:
        """By request, (length, state) of the checkpoints that the policy wants of this step, where it wants any."""
        cache, opening = self.cache, self._opening
        if not cache.prefix.on:
            return {}
        found: dict[Request, list[tuple[int, Content]]] = {}
        for number, (request, place, ids) in enumerate(zip(opening.requests, opening.places, opening.ids, strict=True)):
            if ids is None or place.tokens is None or not place.shares:
                continue
            start, length = place.length, place.length + opening.counts[number]
            # Beyond the ids that are known no prompt can ask for it; of what outside code put into the pools only the
            # end of the step is known.
            wanted = [
                at
                for at in cache.prefix.boundaries(start, length)
                if at <= start + len(ids) and (not self.pools_replaced or at == length) and self._has_states(length, at)
            ]
            if wanted:
                row, own = self._numbers.rows[number], self._own_rows(number)
                found[request] = [(at, state_at(cache.ops, cache.pools, row, at, own(at))) for at in wanted]
        return found

    def _has_states(self, length: int, at: int) -> bool:
        """Whether recurrent layers, if there are any, have a state of length ``at`` after a step to ``length``."""
        states = self.cache.manager.states
        return not states or at == length or (self._every and at > length - states)

    @property
    def _every(self) -> bool:
        """Whether recurrent layers got the state after every token; outside code stores NaN where they did not."""
        return self.pools_replaced or not any(writes.last for writes in self._layers.values())

    def _own_rows(self, number: int) -> Callable[[int], Own]:
        """Length -> one request's rows that still wait, cut at that length."""

        def until(length: int) -> Own:
            first = sum(self._numbers.counts[:number])
            last = first + length - self._numbers.starts[number]
            waiting = [(layer, writes.waiting_rows()) for layer, writes in self._layers.items()]
            return {
                (layer, role): tuple(array[first:last] for array in arrays)
                for layer, roles in waiting
                for role, arrays in roles.items()
            }

        return until

    def _touched(self) -> Mapping[str, bool]:
        """``main`` and ``draft``, where such layers were used -> whether all of them got the step's rows."""
        used = self._layers
        touched = {"main": True} if self.pools_replaced or self._is_whole else {}
        for group, numbers in self.cache.plan.groups.items() if used else ():
            if group not in touched and any(number in used for number in numbers):
                touched[group] = self.pools_replaced or all(
                    number in used and not used[number].missing() for number in numbers
                )
        return touched

    def _check_complete(self) -> None:
        if self.pools_replaced or not self._numbers.tokens:
            return
        main = range(len(self.cache.spec.layers))
        drafts = range(len(main), len(self.cache.spec.all_layers))
        # A draft model may be stepped alone; then the main layers get their tokens in a step of their own.
        used = self._layers
        if not any(number in used for number in main) and any(number in used for number in drafts):
            return
        for number in main:
            writes = used.get(number) or RingWrites(self.context, number)
            missing = writes.missing()
            if missing:
                raise StepError(
                    got=f"no rows for {', '.join(missing)}",
                    where=f"commit: {self.cache.spec.path(number)}",
                    allowed="every window, tail, kv, state and conv gets the step's tokens",
                    hint="The step was rolled back. Call append_* (or write_state) for this layer before it ends.",
                )
            unstored = writes.unstored() if self.cache.check else []
            if unstored:
                raise StepError(
                    got=f"{', '.join(unstored)} closed but not stored",
                    where=f"commit: {self.cache.spec.path(number)}",
                    allowed="flush or store_entries before the step ends (check=True)",
                )
        keeping = self.cache.plan.groups["main"]
        self._is_whole = len(keeping) > 0 and all(map(used.__contains__, keeping))
