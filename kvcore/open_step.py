"""One step of a cache, open: from ``cache.step`` until commit or abort."""

# pyright: reportPrivateUsage=false

from collections.abc import Callable
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvcore.content import Own
from kvcore.counts import as_count
from kvcore.errors import ShapeError, StepError
from kvcore.growth import Growth
from kvcore.handle import LayerHandle
from kvcore.manager import Manager, Request
from kvcore.ops import StepIndex
from kvcore.step import Row
from kvcore.undo import Undo

if TYPE_CHECKING:
    from kvcore.cache import Cache


class Step:
    """One step of a cache: new tokens of some requests, through all layers.

    Attributes:
        cache: the cache it belongs to.
    """

    def __init__(
        self,
        cache: "Cache",
        manager: Manager,
        requests: list[Request],
        rows: list[Row],
        ids: list[list[int] | None],
        grown: list[Growth],
        index: StepIndex,
    ) -> None:
        self.cache = cache
        # Each request's part as host integers, and the same on the device, as the handles use it.
        self._rows = rows
        self._device_index = index
        # ``cache.pools`` was assigned during the step, so completeness is the caller's business.
        self._pools_replaced = False
        # What one layer worked out from the rows, for others of equal components: by its name and what it depends on.
        self._kept: dict[Any, Any] = {}
        self._manager = manager
        self._requests = requests
        self._ids = ids
        self._grown = grown
        self._layers: dict[int, LayerHandle] = {}
        self._undo: Undo | None = None
        self._open = True

    @cached_property
    def _most_new(self) -> int:
        """Most new tokens of a request."""
        return max((row.new for row in self._rows), default=0)

    @cached_property
    def _deepest(self) -> list[int]:
        """For each request, the smallest length to which it could be truncated if the step ended without a trace."""
        return [self._manager.deepest_truncation(request) for request in self._requests]

    @property
    def index(self) -> StepIndex:
        """The step's index for functional use: ``pools = cache.ops.append_window(pools, layer, step.index, rows)``.

        Functional verbs write at once, so what they may overwrite is noted here, to be put back if the step fails. A
        padded step belongs to a captured graph and is not slowed by that: after a failure its rows count as written.
        """
        padded = len(self._device_index.positions) > sum(row.new for row in self._rows)
        if self._open and self._undo is None and not padded and any(row.new for row in self._rows):
            self._undo = Undo(self.cache.ops, self.cache.pools, self._device_index)
        return self._device_index

    @property
    def positions(self) -> Any:
        """[T] int32 absolute position of every token, -1 for padding."""
        return self._device_index.positions

    @property
    def request_index(self) -> Any:
        """[T] int32 which of the step's requests every token belongs to, -1 for padding."""
        return self._device_index.request_index

    def from_batch(self, batch: Any) -> Any:
        """Rows [T, ...] for the verbs, of a batch [Q, S, ...] padded on the right: request q's new tokens come first.

        Raises:
            ShapeError: another number of requests, or fewer columns than a request has new tokens.
        """
        self._check_open()
        batch = self.cache.ops.asarray(batch)
        requests, width = len(self._device_index.slots), max((row.new for row in self._rows), default=0)
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
        self._check_open()
        rows = self.cache.ops.asarray(rows)
        tokens, least = len(self._device_index.positions), max((row.new for row in self._rows), default=0)
        if not rows.ndim or rows.shape[0] != tokens:
            raise ShapeError(got=list(rows.shape), where="to_batch", allowed=f"{tokens} rows")
        columns = least if width is None else as_count(width, least)
        if columns is None:
            raise ShapeError(got=width, where="to_batch: width", allowed=f"{least} or more")
        return self.cache.ops.to_batch(self._device_index, rows, columns)

    def layer(self, number: int) -> LayerHandle:
        """The handle of layer ``number``; draft layers follow the main ones."""
        self._check_open()
        count = len(self.cache.spec.all_layers)
        found = as_count(number)
        if found is None or found >= count:
            raise ShapeError(got=number, where="step.layer", allowed=f"0 to {count - 1}")
        if found not in self._layers:
            self._layers[found] = LayerHandle(self, found)
        return self._layers[found]

    def _check_open(self) -> None:
        """Refuse to go on after commit or abort."""
        if not self._open:
            raise StepError(got="a step that has ended", where="step", allowed="verbs between open and commit")

    def commit(self) -> None:
        """Make the step's tokens part of their requests; refused, and rolled back, if a layer did not get them.

        Raises:
            StepError: new tokens reached no window, tail or kv of some layer.
        """
        self._check_open()
        try:
            self._check_complete()
            if not self._pools_replaced:
                for number in range(len(self.cache.spec.all_layers)):
                    # A layer that the step left out stays one that it did not touch.
                    (self._layers.get(number) or LayerHandle(self, number))._blank()
            states = [
                self.cache._boundary_states(
                    request, self._rows[number], self._ids[number], self._own_rows(number), written=self._pools_replaced
                )
                for number, request in enumerate(self._requests)
            ]
            for handle in self._layers.values():
                handle._commit()
        except BaseException:
            self.abort()
            raise
        self._open = False
        try:
            freed = self._manager.settle(self._grown)
            touched = self._touched()
            for number, request in enumerate(self._requests):
                self._manager.commit(request, self._rows[number].new, self._ids[number], touched)
                self.cache._publish(request, states[number])
            self.cache._poison([], freed)
        finally:
            self.cache._end_step()

    def abort(self) -> None:
        """Give everything back: lengths, blocks, and the bytes of every row that can still be read."""
        self._check_open()
        undone = False
        try:
            if self._pools_replaced and self._undo is not None:
                self.cache._replace_pools(self._undo.apply(self.cache.pools))
                undone = self._undo.complete
            for handle in self._layers.values():
                handle._abort()
        finally:
            self._open = False
            self._manager.shrink(self._requests, self._grown)
            if self._pools_replaced and not undone:
                for request, row in zip(self._requests, self._rows, strict=True):
                    self._manager.disturb(request, row.length)
            self.cache._end_step()

    def __enter__(self) -> "Step":
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._open:
            return
        if kind is None:
            self.commit()
        else:
            self.abort()

    def _own_rows(self, number: int) -> Callable[[int], Own]:
        """Length -> one request's rows that still wait, cut at that length."""
        first = sum(row.new for row in self._rows[:number])

        def until(length: int) -> Own:
            last = first + length - self._rows[number].start
            waiting = [(layer, handle._waiting_rows()) for layer, handle in self._layers.items()]
            return {
                (layer, role): tuple(array[first:last] for array in arrays)
                for layer, roles in waiting
                for role, arrays in roles.items()
            }

        return until

    def _touched(self) -> dict[str, bool]:
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
