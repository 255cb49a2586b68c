"""One step of a layer view, as one shard computes it: what is stored, what is seen, and in which order.

Rows are read after they are stored, so that XLA writes pools in place: a pool that is read as it was beside one that is
written is two pools. Only a ring that the step's own rows outgrow must be read first; then the write waits for what was
read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcore.backends.jax_pallas import blocks
from kvcore.backends.jax_pallas import rows as place
from kvcore.backends.jax_pallas.attention import finish, softmax_sum
from kvcore.backends.jax_pallas.kv import attend_in_place, in_order
from kvcore.backends.jax_pallas.order import read_first
from kvcore.backends.jax_pallas.rows import Held
from kvcore.interop.jax.view_kinds import Kind, index_of

if TYPE_CHECKING:
    from kvcore.ops import StepIndex

Pools = dict[str, jax.Array]


class State(NamedTuple):
    """A view's arrays: pools, lengths [B], starts [B], floors [B] of a ring, and the layer's number in a stack."""

    pools: Pools
    lengths: jax.Array
    starts: jax.Array
    floors: jax.Array | None
    number: jax.Array | None = None


class Seen(NamedTuple):
    """Rows [B, n, ...] of every part in position order, mask [B, S, n], positions [B, n], and the state after it."""

    parts: tuple[jax.Array, ...]
    mask: jax.Array
    positions: jax.Array
    state: State


@partial(jax.tree_util.register_dataclass, data_fields=["query", "scale", "sink"], meta_fields=["value_dim"])
@dataclass(frozen=True)
class Asked:
    """Queries [B, S, H, d], their scale, one logit a head [H] or None, and channels of a latent row's value or None."""

    query: jax.Array
    scale: jax.Array
    sink: jax.Array | None
    value_dim: int | None


class Answer(NamedTuple):
    """Outs [B, S, H, e], log-sum-exps [B, S, H], and the state after the step."""

    out: jax.Array
    lse: jax.Array
    state: State


def append_kv(kind: Kind, state: State, given: tuple[jax.Array, ...], count: jax.Array) -> Seen:
    """Store keys and values [B, S, heads, dim], ``count`` [B] of each sequence; -> all that the queries may see."""
    ops, new, ring = kind.ops, given[0].shape[1], kind.ring_rows
    span = kind.length if kind.layer.kv is None or kind.layer.kv.span is None else kind.layer.kv.span
    index, after = step_of(kind, state, new, count)
    rows = [ops.from_batch(index, array) for array in given]
    most = min(kind.length, span - 1 + new)
    if ring is None or most <= ring:
        pools = ops.append_kv(state.pools, 0, index, *rows)
        keys, values, positions = _in_order(kind, pools, index, most) or ops.gather_kv(pools, 0, index, columns=most)
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
    index, after = step_of(kind, state, new, count)
    rows = [ops.from_batch(index, array) for array in given]
    pools = ops.store_entries(state.pools, 0, index, *rows)
    found = [ops.gather_all_entries(pools, 0, index, columns=kind.length, role=role) for role in kind.latent_roles]
    positions = found[0].positions
    query = index.starts[:, None] + jnp.arange(new, dtype=jnp.int32)[None]
    query = jnp.where(query < index.lengths[:, None], query, -1)
    mask = (positions[:, None] >= state.starts[:, None, None]) & (positions[:, None] <= query[:, :, None])
    mask &= positions[:, None] >= 0
    return Seen(tuple(one.values for one in found), mask, positions, after._replace(pools=dict(pools)))


def attend_kv(kind: Kind, state: State, given: tuple[jax.Array, ...], count: jax.Array, asked: Asked) -> Answer:
    """Store keys and values as ``append_kv`` does, and attend to all that the queries may see, where it lies."""
    ops, new, ring = kind.ops, given[0].shape[1], kind.ring_rows
    if ring is not None and ops.kernels != "portable":
        return _attend_to(append_kv(kind, state, given, count), asked)
    span: Any = kind.length if ring is None else kind.layer.kv.span  # type: ignore[union-attr]
    index, after = step_of(kind, state, new, count)
    rows = [ops.from_batch(index, array) for array in given]
    query, most = ops.from_batch(index, asked.query), min(kind.length, span + new)
    floors = None if state.floors is None else jnp.minimum(state.floors, index.starts)

    def attend(pools: Pools, index: StepIndex, *own: jax.Array) -> tuple[jax.Array, jax.Array]:
        if ops.kernels != "portable":
            options = {"sink": asked.sink, "scale": asked.scale}
            out, lse = ops.attend_kv(pools, 0, index, query.astype(jnp.float32), *own, columns=most, **options)
            return out, lse
        k, v = own or (None, None)
        layer = ops.layers[0].only("kv")
        held = {name: pools[layer.names[name]] for name in layer.names}
        return attend_in_place(query, asked.scale, asked.sink, layer, most, (held, index, k, v, floors))

    if ring is None or min(span - 1 + new, kind.length) <= ring:
        pools = ops.append_kv(state.pools, 0, index, *rows)
        out, lse = attend(pools, index)
    else:
        (out, lse), later = read_first(lambda pools: attend(pools, index, *rows), state.pools, index)
        pools = ops.append_kv(state.pools, 0, later, *rows)
    if floors is not None and ring is not None:
        after = after._replace(floors=jnp.maximum(floors, index.lengths - ring))
    return Answer(
        ops.to_batch(index, out, new).astype(asked.query.dtype),
        without_rows(index, ops.to_batch(index, lse, new)),
        after._replace(pools=dict(pools)),
    )


def attend_latents(kind: Kind, state: State, given: tuple[jax.Array, ...], count: jax.Array, asked: Asked) -> Answer:
    """The same for latent rows, which are keys and, as far as ``value_dim``, values."""
    ops, new = kind.ops, given[0].shape[1]
    if ops.kernels != "portable":
        return _attend_to(append_latents(kind, state, given, count), asked)
    index, after = step_of(kind, state, new, count)
    rows = [ops.from_batch(index, array) for array in given]
    pools = ops.store_entries(state.pools, 0, index, *rows)
    layer = ops.layers[0].only("entries")
    held = place.Held({name: pools[layer.names[name]] for name in layer.names}, layer.kernels)
    dim = layer.regions["entries"][0].format.dim
    value_dim = dim if asked.value_dim is None else asked.value_dim
    source = blocks.Source(held, layer.regions["entries"], (layer.global_scale("entries"),), value_dim)

    def seen(position: jax.Array, request: jax.Array) -> tuple[jax.Array, jax.Array]:
        return place.of(state.starts, request), position

    query = ops.from_batch(index, asked.query).astype(jnp.float32) * asked.scale
    out, lse = blocks.attend(source, index, query, seen, stop=index.lengths, sink=asked.sink)
    return Answer(
        ops.to_batch(index, out, new).astype(asked.query.dtype),
        without_rows(index, ops.to_batch(index, lse, new)),
        after._replace(pools=dict(pools)),
    )


def without_rows(index: StepIndex, lse: jax.Array) -> jax.Array:
    """Log-sum-exps [B, S, H], -inf for padding."""
    new = (index.lengths - index.starts)[:, None]
    real = jnp.arange(lse.shape[1], dtype=jnp.int32)[None] < new
    return jnp.where(real[:, :, None], lse, -jnp.inf)


def _attend_to(seen: Seen, asked: Asked) -> Answer:
    """Attention to rows that were brought together."""
    keys, values = (seen.parts[number].astype(jnp.float32) for number in (0, -1))
    if keys.ndim == 3:
        keys = keys[:, :, None]
        values = keys if asked.value_dim is None else keys[..., : asked.value_dim]

    def one(query: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of every sequence's query [B, H, d] of one column."""
        found = softmax_sum(None, query.astype(jnp.float32)[:, None] * asked.scale, keys, values, mask)
        return finish(found, asked.sink, jnp.float32)

    out, lse = jax.lax.map(lambda some: one(*some), (jnp.swapaxes(asked.query, 0, 1), jnp.swapaxes(seen.mask, 0, 1)))
    return Answer(jnp.swapaxes(out, 0, 1).astype(asked.query.dtype), jnp.swapaxes(lse, 0, 1), seen.state)


def step_of(kind: Kind, state: State, new: int, count: jax.Array) -> tuple[StepIndex, State]:
    """The index of a step, and the state after it but for pools and floors: columns that have no room are counted."""
    start = jnp.minimum(state.lengths, kind.length)
    end = jnp.minimum(state.lengths + count, kind.length)
    return index_of(kind, start, end, state.starts, new, state.number), state._replace(lengths=state.lengths + count)


def _in_order(kind: Kind, pools: Pools, index: StepIndex, most: int) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    """``gather_kv`` of ``most`` columns, without a gather; None where that fails.

    What was never written is zeros, as there; of a ring, whatever lies there.
    """
    if kind.layers != 1:
        return None
    layer, ring = kind.ops.layers[0].only("kv"), kind.ring_rows
    found = in_order(layer, Held(pools, layer.kernels), requests=kind.batch, columns=ring or kind.length)
    if found is None:
        return None
    if ring is not None:
        first, end = place.visible(layer.component("kv"), index)
        # On its own: XLA would decode every row anew for whatever order a product reads it in.
        keys, values = lax.optimization_barrier([_turned(part, place.rest(first, ring), most) for part in found])
        return keys, values, place.numbered((first, end), most)
    positions = place.numbered((jnp.zeros_like(index.lengths), index.lengths), most)
    keys, values = (jnp.where((positions >= 0)[:, :, None, None], part, 0) for part in found)
    return keys, values, positions


def _turned(rows: jax.Array, first: jax.Array, most: int) -> jax.Array:
    """Of rings [B, n, ...] the rows from ``first`` [B] on, [B, most, ...]; beyond n anything."""
    twice, columns = jnp.concatenate([rows, rows], axis=1), min(most, rows.shape[1])
    turned = jax.vmap(lambda ring, row: lax.dynamic_slice_in_dim(ring, row, columns))(twice, first)
    return jnp.pad(turned, ((0, 0), (0, most - columns), *((0, 0),) * (rows.ndim - 2)))
