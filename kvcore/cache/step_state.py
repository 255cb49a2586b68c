"""What an open step is to its cache and its layers: what it took, what it overwrote, and how it ends.

The cache holds it until it has ended; the user holds a ``Step``, whose end can be seen even if nobody says so.
"""

# pyright: reportPrivateUsage=false

import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvcore.cache.handle import LayerHandle
from kvcore.cache.turns import owner
from kvcore.cache.undo import Undo
from kvcore.errors import StepError
from kvcore.ops import StepIndex
from kvcore.portable.rows import Content, Own, owned
from kvcore.requests.growth import Growth
from kvcore.requests.manager import Place, Request
from kvcore.step import Row, build_index

if TYPE_CHECKING:
    from kvcore.cache import Cache


class StepState:
    """One step of a cache, open until commit or abort.

    Attributes:
        cache: the cache it belongs to.
        requests: those of the step, in mapping order.
        grown: the blocks that each of them gets.
        owner: weak reference to the thread that opened it.
        owner_name: that thread's name.
        user: weak reference to the ``Step`` that stands for it.
        block: weak reference to what the ``with`` block holds of it; None outside of one.
        ending: its end has begun, and is finished or undone by whoever comes next.
        table: the manager's table with the step's tokens in it, once that is all there is left to do.
    """

    def __init__(
        self,
        cache: "Cache",
        requests: list[Request],
        rows: list[Row],
        ids: list[list[int] | None],
        grown: list[Growth],
        index: StepIndex,
    ) -> None:
        self.cache = cache
        self.requests = requests
        self.grown = grown
        here = owner()
        self.owner = weakref.ref(here)
        self.owner_name = here.name
        self.user: weakref.ref[Any] | None = None
        self.block: weakref.ref[Any] | None = None
        self.ending = False
        self.table: dict[Request, Place] | None = None
        # Each request's part as host integers, and the same on the device, as the handles use it.
        self._rows = rows
        self._device_index = index
        # ``cache.pools`` was assigned during the step, so completeness is the caller's business.
        self._pools_replaced = False
        # What one layer worked out from the rows, for others of equal components: by its name and what it depends on.
        self._kept: dict[Any, Any] = {}
        self._manager = cache._manager
        self._ids = ids
        self._layers: dict[int, LayerHandle] = {}
        self._undo: Undo | None = None

    @property
    def is_open(self) -> bool:
        """Until it was committed or rolled back."""
        return self.cache._step is self

    @property
    def is_left(self) -> bool:
        """True once nobody can be expected to end it: its end was interrupted, or whoever had it is gone."""
        # A ``with`` block ends its step even if nobody kept the ``Step``.
        ends = self.user if self.block is None else self.block
        return self.ending or (ends is not None and ends() is None) or self.owner() is None

    @cached_property
    def _most_new(self) -> int:
        """Most new tokens of a request."""
        return max((row.new for row in self._rows), default=0)

    @cached_property
    def _deepest(self) -> list[int]:
        """For each request, the smallest length to which it could be truncated if the step ended without a trace."""
        return [self._manager.deepest_truncation(request) for request in self.requests]

    def functional_index(self) -> StepIndex:
        """The index for functional verbs, with what they may overwrite noted."""
        padded = len(self._device_index.positions) > sum(row.new for row in self._rows)
        if self.is_open and self._undo is None and not padded and any(row.new for row in self._rows):
            self.cache._check_outside("step.index")
            self._undo = Undo(self.cache._verbs, self.cache.pools, self.ring_index)
        return self._device_index

    def ring_index(self, rows: int) -> StepIndex | None:
        """The tokens whose rows take the place of others in rings of ``rows``; None where there is nothing to lose."""
        key = "ring index", rows
        if key not in self._kept:
            starts = [max(row.start, row.length - rows) if row.start else row.length for row in self._rows]
            last = [
                row._replace(start=start, new=row.length - start) for row, start in zip(self._rows, starts, strict=True)
            ]
            host = build_index(last, max_blocks=self._device_index.block_table.shape[1])
            self._kept[key] = self.cache._verbs.index(host) if any(row.new for row in last) else None
        return self._kept[key]

    def layer(self, number: int) -> LayerHandle:
        """The handle of a layer."""
        if number not in self._layers:
            self._layers[number] = LayerHandle(self, number)
        return self._layers[number]

    def _check_open(self) -> None:
        """Refuse to go on after commit or abort."""
        if self.cache._step is not self:
            raise StepError(got="a step that has ended", where="step", allowed="verbs between open and commit")

    def commit(self) -> None:
        """Make the step's tokens part of their requests: all of it, or nothing. In the cache's turn."""
        self._check_open()
        self.ending = True
        cache, manager, prefix = self.cache, self._manager, self.cache._prefix
        try:
            self._check_complete()
            if not self._pools_replaced:
                for number in range(len(cache.spec.all_layers)):
                    # A layer that the step left out stays one that it did not touch.
                    (self._layers.get(number) or LayerHandle(self, number))._blank()
            states = self._states()
            places = self._places()
            for handle in self._layers.values():
                handle._store_waiting()
        except BaseException:
            self.roll_back()
            raise
        done = [len(manager.place_of(request).keys) for request in self.requests] if prefix.on else []
        self.table = manager.with_places(places)
        for place, row, ids in zip(places.values(), self._rows, self._ids, strict=True):
            manager.learn(place, row.new, ids)
        # Until here nothing has happened; from here on all of it has.
        manager.become(self.table)
        cache._end_step()
        freed = manager.settle(self.grown)
        for place, sealed, kept in zip(places.values(), done, states, strict=True) if prefix.on else ():
            prefix.publish(place, sealed)
            for length, state in kept:
                if length <= place.complete:
                    prefix.keep(place, length, state)
        cache._poison([], freed)

    def roll_back(self) -> None:
        """Give everything back: lengths, blocks, and the bytes of every row that can still be read."""
        self.ending = True
        self._put_back()
        self.cache._end_step()
        self._manager.shrink(self.grown)

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
        if self._undo is not None:
            self.cache._replace_pools(self._undo.apply(self.cache.pools))
        for handle in self._layers.values():
            handle._put_back()
        if self._pools_replaced and self._undo is None:
            lengths = (row.length for row in self._rows)
            self._manager.disturb(dict(zip(self.requests, lengths, strict=True)))
            self._manager.lose(
                [request for request, row in zip(self.requests, self._rows, strict=True) if self._harms(row)]
            )

    def _harms(self, row: Row) -> bool:
        """Whether a request's new rows take the place of rows that it still needs without them."""
        rings = ((layer, role, part) for layer, role, part in owned(self.cache.spec) if part.span is not None)
        return row.new > 0 and any(
            row.length - self.cache.plan.region(layer, role)[0].rows > component.live(row.start).start
            for layer, role, component in rings
        )

    def _places(self) -> dict[Request, Place]:
        """The requests' places after the step."""
        touched = self._touched()
        places = {
            request: self._manager.after(request, row.new, ids, growth, touched)
            for request, row, ids, growth in zip(self.requests, self._rows, self._ids, self.grown, strict=True)
        }
        if self.cache._prefix.on:
            for place, ids in zip(places.values(), self._ids, strict=True):
                self.cache._prefix.extend(place, ids or ())
        return places

    def _states(self) -> list[list[tuple[int, Content]]]:
        """For each request, the checkpoints that the policy wants of this step; nothing at all under ``off``."""
        if not self.cache._prefix.on:
            return []
        return [
            self.cache._boundary_states(
                request, self._rows[number], ids, self._own_rows(number), written=self._pools_replaced
            )
            if ids is not None
            else []
            for number, (request, ids) in enumerate(zip(self.requests, self._ids, strict=True))
        ]

    def _own_rows(self, number: int) -> Callable[[int], Own]:
        """Length -> one request's rows that still wait, cut at that length."""

        def until(length: int) -> Own:
            first = sum(row.new for row in self._rows[:number])
            last = first + length - self._rows[number].start
            waiting = [(layer, handle._waiting_rows()) for layer, handle in self._layers.items()]
            return {
                (layer, role): tuple(array[first:last] for array in arrays)
                for layer, roles in waiting
                for role, arrays in roles.items()
            }

        return until

    def _touched(self) -> Mapping[str, bool]:
        """``main`` and ``draft``, where such layers were used -> whether all of them got the step's rows."""
        main = len(self.cache.spec.layers)
        layers = {"main": range(main), "draft": range(main, len(self.cache.spec.all_layers))}
        touched = {"main": True} if self._pools_replaced else {}
        for group, numbers in layers.items():
            if any(number in self._layers for number in numbers):
                touched[group] = self._pools_replaced or all(
                    number in self._layers and not self._layers[number]._missing() for number in numbers
                )
        return touched

    def _check_complete(self) -> None:
        if self._pools_replaced or not any(row.new for row in self._rows):
            return
        main = range(len(self.cache.spec.layers))
        drafts = range(len(main), len(self.cache.spec.all_layers))
        # A draft model may be stepped alone; then the main layers get their tokens in a step of their own.
        if not any(number in self._layers for number in main) and any(number in self._layers for number in drafts):
            return
        for number in main:
            layer = self._layers.get(number) or LayerHandle(self, number)
            missing = layer._missing()
            if missing:
                raise StepError(
                    got=f"no rows for {', '.join(missing)}",
                    where=f"commit: {self.cache.spec.path(number)}",
                    allowed="every window, tail and kv gets the step's tokens",
                    hint="The step was rolled back. Call append_* for this layer before the step ends.",
                )
            unstored = layer._unstored() if self.cache._check else []
            if unstored:
                raise StepError(
                    got=f"{', '.join(unstored)} closed but not stored",
                    where=f"commit: {self.cache.spec.path(number)}",
                    allowed="flush or store_entries before the step ends (check=True)",
                )
