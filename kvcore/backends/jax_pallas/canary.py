"""Sampled rows beside their check words where JAX has the pools: compiled once for every kind of rows."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import Array, lax

from kvcore.backends.jax_pallas import programs
from kvcore.backends.jax_pallas import rows as place
from kvcore.backends.jax_pallas.layer import Layer
from kvcore.backends.jax_pallas.lifecycle import mix
from kvcore.backends.jax_pallas.rows import Held
from kvcore.backends.jax_pallas.runs import as_elements
from kvcore.check_words import WORD, keys, places_of
from kvcore.digest import POSITION_FACTOR, region_salt
from kvcore.ops import StepIndex
from kvcore.ops.canary import NUMBERS, SPANS, Asked, pieces_of, sampled
from kvcore.plan import Region, Watched
from kvcore.pools import Pools

FEWEST = 8
"""Rows that a look is compiled for at least."""


class Findings:
    """What looks found, as arrays that may not be computed yet.

    Args:
        index: [4, requests] which of NUMBERS are others.
        rows: (number in ``plan.watched``, requests, rows, which of them are wrong).
        on_host: the arrays are computed where they are read: to wait is to compute.
    """

    def __init__(self, index: Any, rows: list[tuple[int, Any, Any, Any]], *, on_host: bool) -> None:
        self._index, self._rows, self._on_host = index, rows, on_host

    def ready(self) -> bool:
        """Whether all of it is computed."""
        return self._on_host or all(wrong.is_ready() for wrong in (self._index, *(row[-1] for row in self._rows)))

    def read(self) -> Sequence[tuple[int, int, int]]:
        """(number in ``plan.watched``, request, row)."""
        found = [(-1 - int(number), int(request), 0) for number, request in np.argwhere(np.asarray(self._index))]
        for number, requests, rows, wrong in self._rows:
            some = np.flatnonzero(np.asarray(wrong)[: len(rows)])
            found += [(number, int(requests[n]), int(rows[n])) for n in some]
        return found


def watch(self: Any, pools: Pools, index: StepIndex, asked: Asked) -> tuple[Pools, Findings]:
    """Compare sampled rows with their check words, and give new ones theirs; see ``kvcore.ops.canary.watch``."""
    plan, count = self.plan, asked.numbers.shape[1]
    wrong = jnp.zeros((len(NUMBERS), 0), bool)
    if count:
        wrong = _of_index(index, self.asarray(asked.numbers[: len(NUMBERS)]))
    # Where the rows of other requests lie nobody knows.
    known = ~wrong.any(axis=0)
    spans = asked.numbers[len(NUMBERS) :]
    places: dict[tuple[int, int], Any] = {}
    rows: list[tuple[int, Any, Any, Any]] = []
    for number, watched in enumerate(plan.watched):
        for first in (0, 2):
            key = watched.kind, first
            if key not in places:
                row = len(SPANS) * watched.kind + first
                places[key] = _padded(*sampled(spans[row], spans[row + 1], plan.canary), self)
            requests, numbers, at = places[key]
            if not len(numbers):
                continue
            name = watched.words.buffers["word"][0]
            how, given = _given(self, watched), (_salt(watched), index, known, *at)
            layer = how[0]
            held = {local: pools[layer.names[local]] for local in layer.names}
            if first:
                into = programs.written(pools, pools[name], held, given)
                programs.put(into, name, _seal(*how, into[name], held, *given))
                pools = programs.as_given(pools, into)
            else:
                rows.append((number, requests, numbers, _check(*how, pools[name], held, *given)))
    return pools, Findings(wrong, rows, on_host=self.device == "cpu")


def _padded(requests: Any, numbers: Any, ops: Any) -> tuple[Any, Any, Any]:
    """Places as arrays of few lengths beside themselves: behind them request -1."""
    most = max(FEWEST, 1 << max(len(numbers) - 1, 0).bit_length())
    both = np.full((2, most), -1, np.int32)
    both[0, : len(numbers)], both[1, : len(numbers)] = requests, numbers
    return requests, numbers, (ops.asarray(both[0]), ops.asarray(both[1])) if len(numbers) else ()


def _given(ops: Any, watched: Watched) -> tuple[Layer, str, Region, int, int]:
    """What a look is compiled for: the layer's rows, their role, the words, rows from one to the next, and units."""
    memo = ops.layers[watched.layer].memo
    key = "canary", watched.role
    if key not in memo:
        words = msgspec.structs.replace(watched.words, layer=0)
        units = ops.plan.units(watched.words)
        memo[key] = ops.layers[watched.layer].only(watched.role), watched.role, words, watched.stride, units
    return memo[key]


def _salt(watched: Watched) -> Any:
    return np.uint32(region_salt(watched.layer, watched.role))


@jax.jit
def _of_index(index: StepIndex, numbers: Array) -> Array:
    """[4, requests] which of NUMBERS are not as said."""
    count = numbers.shape[1]
    table = index.block_table[:count]
    mixed = mix(table.astype(jnp.uint32) ^ keys(table.shape[1])[None])
    hashes = jnp.where(table >= 0, mixed, 0).sum(axis=1, dtype=jnp.uint32)
    got = *(array[:count] for array in (index.slots, index.starts, index.lengths)), _signed(hashes)
    return jnp.stack(got) != numbers


def _signed(values: Array) -> Array:
    return lax.bitcast_convert_type(values, jnp.int32)


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _check(layer, role, words, stride, units, pool, pools, salt, index, known, request, number):
    """[n] whether rows are not what their words say."""
    held, unit, row, there, asked = _locate(layer, role, units, pools, index, known, request, number)
    stored = pool.reshape(len(pool), words.rows, WORD)[jnp.where(there, unit, 0), number // stride % words.rows]
    stored = lax.bitcast_convert_type(stored, jnp.uint32)
    wrong = asked & ~there
    for copy in range(max(region.copies for region in layer.regions[role])):
        made = _made(held, layer.regions[role], unit, row, copy, number, salt)
        wrong |= there & (stored != made)
    return wrong


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=5)
def _seal(layer, role, words, stride, units, pool, pools, salt, index, known, request, number):
    """The pool of words with those of rows written."""
    held, unit, row, there, _ = _locate(layer, role, units, pools, index, known, request, number)
    made = _made(held, layer.regions[role], unit, row, 0, number, salt)
    bytes_of = lax.bitcast_convert_type(made, jnp.uint8)
    # Beyond the last unit nothing is written.
    at = jnp.where(there, unit, units), number // stride % words.rows
    return pool.reshape(len(pool), words.rows, WORD).at[at].set(bytes_of, mode="drop").reshape(pool.shape)


def _locate(layer, role, units, pools, index, known, request, number):
    """(pools, unit, row in the unit, whether it is there, whether it is asked for) of rows."""
    held = Held({name: as_elements(pool, *layer.elements[name]) for name, pool in pools.items()}, layer.kernels)
    asked = (request >= 0) & known[jnp.clip(request, 0, len(known) - 1)]
    unit, row = place.locate(layer.regions[role][0], index, jnp.where(asked, request, -1), number)
    there = asked & (unit >= 0) & (unit < units)
    return held, jnp.where(there, unit, -1), row, there, asked


def _made(held, regions, unit, row, copy, number, salt):
    """[n] uint32: the check words of rows as they lie there."""
    parts = [
        place.load(held, region, unit, row + copy % region.copies * region.rows).reshape(len(unit), -1)
        for region in regions
    ]
    stored = jnp.concatenate(parts, axis=1)
    places = places_of(pieces_of(regions))
    if places is not None:
        stored = jnp.where(places[None] < 0, np.uint8(0), stored[:, places])
    words = lax.bitcast_convert_type(stored.reshape(len(unit), -1, WORD), jnp.uint32)
    sums = mix(words ^ keys(words.shape[1])[None]).sum(axis=1, dtype=jnp.uint32)
    numbered = number.astype(jnp.uint32) * np.uint32(POSITION_FACTOR) + salt
    return mix(sums ^ mix(numbered))
