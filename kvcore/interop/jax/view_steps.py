"""One step of a layer view, as one shard computes it: what is stored, what is seen, and in which order.

Rows are read after they are stored, so that XLA writes pools in place: a pool that is read as it was beside one that is
written is two pools. Only a ring that the step's own rows outgrow must be read first; then the write waits for what was
read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from kvcore.backends.jax_pallas.kv import in_order
from kvcore.backends.jax_pallas.layer import Layer
from kvcore.backends.jax_pallas.order import read_first
from kvcore.backends.jax_pallas.rows import Held
from kvcore.interop.jax.view_kinds import Kind, index_of

if TYPE_CHECKING:
    from kvcore.ops import StepIndex

Pools = dict[str, jax.Array]


class State(NamedTuple):
    """A view's arrays: pools, lengths [B], starts [B], and floors [B] where the layer is a ring."""

    pools: Pools
    lengths: jax.Array
    starts: jax.Array
    floors: jax.Array | None


class Seen(NamedTuple):
    """Rows [B, n, ...] of every part in position order, mask [B, S, n], positions [B, n], and the state after it."""

    parts: tuple[jax.Array, ...]
    mask: jax.Array
    positions: jax.Array
    state: State


def append_kv(kind: Kind, state: State, given: tuple[jax.Array, ...], count: jax.Array) -> Seen:
    """Store keys and values [B, S, heads, dim], ``count`` [B] of each sequence; -> all that the queries may see."""
    ops, new, ring = kind.ops, given[0].shape[1], kind.ring_rows
    span = kind.length if kind.layer.kv is None or kind.layer.kv.span is None else kind.layer.kv.span
    index, after = _step(kind, state, new, count)
    rows = [ops.from_batch(index, array) for array in given]
    most = min(kind.length, span + new)
    if ring is None or min(span - 1 + new, kind.length) <= ring:
        pools = ops.append_kv(state.pools, 0, index, *rows)
        keys, values, positions = _in_order(kind, pools, index) or ops.gather_kv(pools, 0, index, columns=most)
    else:
        found, after_reading = read_first(
            lambda pools: ops.gather_kv(pools, 0, index, *rows, columns=most), state.pools, index
        )
        keys, values, positions = found
        pools = ops.append_kv(state.pools, 0, after_reading, *rows)
    mask = ops.to_batch(index, ops.mask(0, index, columns=most), new)
    if state.floors is not None and ring is not None:
        floors = jnp.minimum(state.floors, index.starts)
        held = positions >= floors[:, None]
        positions, mask = jnp.where(held, positions, -1), mask & held[:, None]
        keys, values = (jnp.where(held[:, :, None, None], part, 0) for part in (keys, values))
        after = after._replace(floors=jnp.maximum(floors, index.lengths - ring))
    return Seen((keys, values), mask, positions, after._replace(pools=dict(pools)))


def append_latents(kind: Kind, state: State, given: tuple[jax.Array, ...], count: jax.Array) -> Seen:
    """The same for latent rows [B, S, dim], and index keys where the layer has them."""
    ops, new = kind.ops, given[0].shape[1]
    index, after = _step(kind, state, new, count)
    rows = [ops.from_batch(index, array) for array in given]
    pools = ops.store_entries(state.pools, 0, index, *rows)
    found = [ops.gather_all_entries(pools, 0, index, columns=kind.length, role=role) for role in kind.latent_roles]
    positions = found[0].positions
    query = index.starts[:, None] + jnp.arange(new, dtype=jnp.int32)[None]
    query = jnp.where(query < index.lengths[:, None], query, -1)
    mask = (positions[:, None] >= state.starts[:, None, None]) & (positions[:, None] <= query[:, :, None])
    mask &= positions[:, None] >= 0
    return Seen(tuple(one.values for one in found), mask, positions, after._replace(pools=dict(pools)))


def _step(kind: Kind, state: State, new: int, count: jax.Array) -> tuple[StepIndex, State]:
    """The index of a step, and the state after it but for pools and floors: columns that have no room are counted."""
    start = jnp.minimum(state.lengths, kind.length)
    end = jnp.minimum(state.lengths + count, kind.length)
    return index_of(kind, start, end, state.starts, new), state._replace(lengths=state.lengths + count)


def _in_order(kind: Kind, pools: Pools, index: StepIndex) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    """``gather_kv`` of every column, without a gather: a sequence's units lie one after another. None where that fails.

    What was never written is zeros, as there.
    """
    if kind.ring_rows is not None:
        return None
    layer = Layer(kind.ops.plan, 0, kind.ops.kernels, ("kv",))
    found = in_order(layer, Held(pools, layer.kernels), requests=kind.batch, columns=kind.length)
    if found is None:
        return None
    column = jnp.arange(kind.length, dtype=jnp.int32)[None]
    positions = jnp.where(column < index.lengths[:, None], column, -1)
    keys, values = (jnp.where((positions >= 0)[:, :, None, None], part, 0) for part in found)
    return keys, values, positions
