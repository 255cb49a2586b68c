"""One step of a cache, open: from ``cache.step`` until commit or abort."""

# pyright: reportPrivateUsage=false

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from kvcore.cache.handle import LayerHandle
from kvcore.cache.step_state import StepState
from kvcore.counts import as_count
from kvcore.errors import ShapeError, StepError
from kvcore.ops import StepIndex
from kvcore.ops.arguments import check_constant
from kvcore.step import Row

if TYPE_CHECKING:
    from types import TracebackType

    from kvcore.cache import Cache


class _Leaving:
    """``Step.__exit__``, of which a ``with`` statement keeps hold for as long as it lasts.

    A block that was left without a word, because an interruption came before the first line of its end, is seen by
    that: the cache's next verb rolls the step back.
    """

    def __get__(self, step: "Step | None", kind: type["Step"]) -> Any:
        if step is None:
            return self
        leave = partial(_leave, step._state)
        step._leaving = weakref.ref(leave)
        return leave

    def __call__(self, step: "Step", *error: Any) -> None:
        _leave(step._state, *error)


class Step:
    """One step of a cache: new tokens of some requests, through all layers.

    It ends with ``commit`` or ``abort``, or as a ``with`` block: committed at its end, rolled back by an exception. One
    that is forgotten (dropped, or of a thread that has ended) is rolled back by the cache's next verb.

    Attributes:
        cache: the cache it belongs to.
    """

    def __init__(self, state: StepState) -> None:
        self.cache: Cache = state.cache
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
        self._state._check_open()
        check_constant(batch, "from_batch")
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
        self._state._check_open()
        check_constant(rows, "to_batch")
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
        self._state._check_open()
        count = len(self.cache.spec.all_layers)
        found = as_count(number)
        if found is None or found >= count:
            raise ShapeError(got=number, where="step.layer", allowed=f"0 to {count - 1}")
        return self._state.layer(found)

    def commit(self) -> None:
        """Make the step's tokens part of their requests; refused, and rolled back, if a layer did not get them.

        Raises:
            StepError: new tokens reached no window, tail or kv of some layer, or the step has ended.
        """
        self.cache._take_turn("commit", self._state.commit, ends=True)

    def abort(self) -> None:
        """Give everything back: lengths, blocks, and the bytes of every row that can still be read.

        Raises:
            StepError: the step has ended.
        """
        self.cache._take_turn("abort", partial(_abort, self._state), ends=True)

    def __enter__(self) -> "Step":
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
    def _rows(self) -> list[Row]:
        return self._state._rows

    @property
    def _device_index(self) -> StepIndex:
        return self._state._device_index

    @property
    def _pools_replaced(self) -> bool:
        return self._state._pools_replaced

    @_pools_replaced.setter
    def _pools_replaced(self, replaced: bool) -> None:
        self._state._pools_replaced = replaced


def _entered(step: Step) -> Step:
    step._state._check_open()
    # Whoever enters without a ``with`` statement has nothing that ends with the block.
    step._state.block = step._leaving if step._leaving is not None and step._leaving() is not None else None
    return step


def _abort(state: StepState) -> None:
    state._check_open()
    state.roll_back()


def _leave(state: StepState, kind: type[BaseException] | None, *_: object) -> None:
    """The end of a ``with`` block."""
    end: Callable[[], None] = state.commit if kind is None else state.roll_back
    state.cache._take_turn("commit" if kind is None else "abort", partial(_if_open, state, end), ends=True)


def _if_open(state: StepState, end: Callable[[], None]) -> None:
    """End a step that has not ended."""
    if state.is_open:
        end()
