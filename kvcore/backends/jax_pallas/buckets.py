"""Sizes that eager verbs are compiled for: few, whatever steps bring.

Outside of a trace every new number of tokens or requests would compile each verb anew, for a second or so. So a verb
gets a twin of its step's index that is padded as ``pad_tokens`` and ``pad_requests`` do it, its arrays are padded to
match, and what it gives is cut to what the step has. On a CPU both happen in the host's memory, where nothing is
compiled at all; elsewhere each is one small program. Inside the caller's trace sizes are the caller's own.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvcore.ops import StepIndex
from kvcore.step import IndexShape

SMALL = (1, 64, 512)
"""Sizes up to here, for three programs; from here on they double."""

FEWEST_ROWS = 64
"""Rows of an output that a verb is compiled for at least, outside of the interpreter."""

KEPT = 4
"""Indices whose twins are remembered: a step's, and what an abort or a reader made beside it."""

AXES: dict[str, str | None] = {
    **dict.fromkeys(("sink", "scale", "rope", "norm_weight")),
    "raw": "requests",
    "taken": "requests",
}
"""What the first axis of an argument counts; that of all others is tokens."""


def rounded(count: int) -> int:
    """A size for ``count``: few of them while it grows."""
    return next((size for size in SMALL if count <= size), doubled(count)) if count else 0


def doubled(count: int) -> int:
    """A power of two for ``count``."""
    return 1 << (count - 1).bit_length() if count else 0


def sizes_of(tokens: int, requests: int) -> tuple[int, int]:
    """(tokens, requests) to compile a step for."""
    if not tokens or not requests:
        return tokens, requests
    padded = doubled(requests)
    # Of a decode step every row is a request's work, padding or not.
    return (padded if tokens == requests else max(padded, rounded(tokens))), padded


def is_known(arrays: Any) -> bool:
    """Whether arrays, any pytree, have values here, on one device."""
    leaves = [leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)]
    return not any(isinstance(leaf, Tracer) or len(leaf.sharding.device_set) > 1 for leaf in leaves)


@dataclass(frozen=True)
class Place:
    """Where arrays lie.

    Attributes:
        target: device, or None: the default one.
        here: whether that is the host's memory.
        whole: sizes stay as they are: each row of a kernel that is interpreted costs more than a trace.
    """

    target: Any
    here: bool
    whole: bool

    def lengthen(self, arrays: Any, *sizes: int, value: float = 0) -> Any:
        """Arrays, any pytree, with padding after their first axes."""
        if all(leaf.shape[: len(sizes)] == sizes for leaf in jax.tree.leaves(arrays)):
            return arrays
        if not self.here:
            return _longer(arrays, sizes, value)

        def longer(array: Any) -> Any:
            padded = np.full((*sizes, *array.shape[len(sizes) :]), value, array.dtype)
            padded[tuple(map(slice, array.shape[: len(sizes)]))] = np.asarray(array)
            return jax.device_put(padded, self.target)

        return jax.tree.map(longer, arrays)

    def trimmed(self, arrays: Any, rows: int | tuple[int, ...] | None, columns: int | None = None) -> Any:
        """Arrays [rows, ...], those of more axes [rows, columns, ...], of longer ones; None: all there are.

        ``rows`` may be a number for each array.
        """
        leaves, tree = jax.tree.flatten(arrays)
        each = rows if isinstance(rows, tuple) else (rows,) * len(leaves)
        ends = tuple(
            tuple(
                size if end is None else min(size, end) for size, end in zip(leaf.shape, (most, columns), strict=False)
            )
            for leaf, most in zip(leaves, each, strict=True)
        )
        if all(leaf.shape[: len(end)] == end for leaf, end in zip(leaves, ends, strict=True)):
            return arrays
        if self.here and is_known(leaves):
            pieces = [np.asarray(leaf)[tuple(map(slice, end))] for leaf, end in zip(leaves, ends, strict=True)]
            return jax.tree.unflatten(tree, jax.device_put(pieces, self.target))
        return jax.tree.unflatten(tree, _shorter(leaves, ends))

    def rows(self, count: int) -> int:
        """Rows to compile an output of ``count`` rows for."""
        return count and (max(8, doubled(count)) if self.whole else max(FEWEST_ROWS, rounded(count)))


@partial(jax.jit, static_argnums=(1, 2))
def _longer(arrays: Any, sizes: tuple[int, ...], value: float) -> Any:
    def longer(array: Any) -> Any:
        more = [(0, size - had) for size, had in zip(sizes, array.shape, strict=False)]
        return jnp.pad(array, [*more, *[(0, 0)] * (array.ndim - len(sizes))], constant_values=value)

    return jax.tree.map(longer, arrays)


@partial(jax.jit, static_argnums=1)
def _shorter(leaves: list[Any], ends: tuple[tuple[int, ...], ...]) -> list[Any]:
    return [leaf[tuple(map(slice, end))] for leaf, end in zip(leaves, ends, strict=True)]


@dataclass(frozen=True)
class Fit:
    """How a step's arrays are padded, and what is cut again.

    Attributes:
        index: the step's, padded.
        sizes: "tokens" and "requests" of the padded index.
        given: likewise of the step.
        place: where arrays lie.
    """

    index: StepIndex
    sizes: dict[str, int]
    given: dict[str, int]
    place: Place

    def accepts(self, arrays: Any, axis: str | None) -> bool:
        """Whether arrays, any pytree, are the step's, and known."""
        if not is_known(arrays):
            return False
        return axis is None or all(leaf.shape[0] == self.given[axis] for leaf in jax.tree.leaves(arrays))

    def lengthen(self, arrays: Any, axis: str | None) -> Any:
        """Arrays with padding after their first axis, which counts tokens or requests; None: neither."""
        return arrays if axis is None else self.place.lengthen(arrays, self.sizes[axis])


class Twins:
    """The last indices, and how each is padded."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._known: deque[tuple[StepIndex, Callable[[], StepIndex], list[Fit]]] = deque(maxlen=KEPT)

    def note(self, index: StepIndex, padded: Callable[[IndexShape], StepIndex]) -> StepIndex:
        """The index, of which ``padded`` makes one of a larger shape."""
        given = IndexShape(
            len(index.positions), len(index.slots), index.block_table.shape[1], index.left_padding is not None
        )
        tokens, requests = sizes_of(given.tokens, given.requests)
        if not self._place.whole and (tokens, requests) != given[:2]:
            larger = given._replace(tokens=tokens, requests=requests)
            self._known.appendleft((index, partial(padded, larger), []))
        return index

    def fit(self, index: StepIndex) -> Fit | None:
        """How a step's arrays are padded; None where they are not: its size is one that is compiled, or a trace's."""
        for noted, padded, fits in self._known:
            if all(map(is_, noted[:-1], index[:-1])):
                if not fits or fits[0].index.paging is not index.paging:
                    fits[:] = [self._of(index, padded()._replace(paging=index.paging))]
                return fits[0]
        return None

    def tokens_of(self, count: int) -> int:
        """Rows to compile for ``count`` rows of a step's tokens: as many as its index is padded to, if it is known."""
        for noted, _, _ in self._known:
            if len(noted.positions) == count:
                return sizes_of(count, len(noted.slots))[0]
        return doubled(count) if count < SMALL[1] else rounded(count)

    def _of(self, index: StepIndex, padded: StepIndex) -> Fit:
        sizes, given = ({"tokens": len(one.positions), "requests": len(one.slots)} for one in (padded, index))
        return Fit(padded, sizes, given, self._place)


def padded(host: StepIndex, shape: IndexShape) -> StepIndex:
    """An index of NumPy arrays, padded to a larger shape."""
    arrays: dict[str, Any] = {}
    for name, array in host._replace(paging=None)._asdict().items():
        if array is None:
            continue
        missing = (shape.tokens if name in ("positions", "request_index") else shape.requests) - len(array)
        nothing = 0 if name in ("starts", "lengths", "stored", "left_padding") else -1
        arrays[name] = np.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1)), constant_values=nothing)
    return StepIndex(**arrays)
