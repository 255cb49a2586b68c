"""Recurrent layers: the states that tokens go on from, and a short convolution's last inputs."""

import jax.numpy as jnp
from jax import Array

from kvcore.backends.jax_pallas import rows as place
from kvcore.backends.jax_pallas import tiles
from kvcore.backends.jax_pallas.choice import verbs
from kvcore.backends.jax_pallas.layer import Layer
from kvcore.backends.jax_pallas.rows import Held
from kvcore.ops import StepIndex


def append_state(layer: Layer, pools: Held, index: StepIndex, states: Array) -> Held:
    """Store the state after every token of the step, [T, heads, key_dim, value_dim], as far as the ring has room."""
    (region,) = layer.regions["state"]
    return _append(pools, region, index, states)


def write_state(layer: Layer, pools: Held, index: StepIndex, states: Array, *, newest: int | None = None) -> Held:
    """Store the state after every request's last token, [Q, heads, key_dim, value_dim]; NaN for its other tokens."""
    (region,) = layer.regions["state"]
    columns = min(region.rows, len(index.positions) if newest is None else newest)
    if not columns or not len(states):
        return pools
    triton = _launched(pools, region)
    if triton:
        return triton.write_last(pools, region, index, states, columns)
    if tiles.keeps_states(pools, region):
        requests = jnp.arange(len(states), dtype=jnp.int32)
        last = jnp.where(index.lengths > index.starts, index.lengths - 1, -1)
        count = jnp.clip(index.lengths - index.starts, 1, columns)
        return tiles.store_states(pools, region, states, requests, *place.locate(region, index, requests, last), count)
    rows = place.encode_rows(region, states)[:, None]
    none = place.encode_rows(region, jnp.full_like(states[:1], jnp.nan))[:, None]
    rows = jnp.concatenate([rows, *[jnp.broadcast_to(none, rows.shape)] * (columns - 1)], axis=1)
    positions = index.lengths[:, None] - 1 - jnp.arange(columns, dtype=jnp.int32)[None]
    positions = jnp.where(positions >= index.starts[:, None], positions, -1)
    return place.store(pools, region, *place.locate(region, index, place.requests_like(positions), positions), rows)


def select_state(layer: Layer, pools: Held, index: StepIndex, states: Array, taken: Array) -> Held:
    """Of the states after every token, [T, ...], store that after each request's first ``taken``; NaN before it."""
    (region,) = layer.regions["state"]
    triton = _launched(pools, region)
    if triton:
        return triton.select_state(pools, region, index, states, taken)
    if not len(states):
        return pools
    if tiles.keeps_states(pools, region):
        taken = jnp.minimum(taken.astype(jnp.int32), index.lengths - index.starts)
        last = jnp.where(taken > 0, index.starts + taken - 1, -1)
        where = place.locate(region, index, jnp.arange(len(taken), dtype=jnp.int32), last)
        source = place.first_token(index) + taken - 1
        return tiles.store_states(pools, region, states, source, *where, jnp.clip(taken, 1, region.rows))
    positions = index.positions
    length = place.of(index.starts + taken.astype(jnp.int32), index.request_index)
    rows = place.encode_rows(region, states)
    none = place.encode_rows(region, jnp.full_like(states[:1], jnp.nan))
    rows = jnp.where((positions == length - 1)[:, None, None], rows, none)
    kept = (positions < length) & (positions >= length - region.rows)
    where = place.locate(region, index, index.request_index, jnp.where(kept, positions, -1))
    return place.store(pools, region, *where, rows)


def read_state(layer: Layer, pools: Held, index: StepIndex) -> Array:
    """The states that the step's tokens go on from, [Q, heads, key_dim, value_dim]; zeros where there is no token."""
    (region,) = layer.regions["state"]
    if len(index.slots) and tiles.keeps_states(pools, region):
        requests = jnp.arange(len(index.slots), dtype=jnp.int32)
        where = place.locate(region, index, requests, index.starts - 1)
        return tiles.load_states(pools, region, *where, layer.component("state").shape)
    found = _before(pools, region, index, 1)
    return found.reshape(len(index.slots), *layer.component("state").shape)


def append_conv(layer: Layer, pools: Held, index: StepIndex, rows: Array) -> Held:
    """Store the step's inputs [T, channels]; only each ring's last ones are written."""
    (region,) = layer.regions["conv"]
    return _append(pools, region, index, rows)


def gather_conv(layer: Layer, pools: Held, index: StepIndex) -> Array:
    """The inputs right before the step's, oldest first, [Q, width - 1, channels]; zeros before the first token."""
    (region,) = layer.regions["conv"]
    found = _before(pools, region, index, layer.component("conv").span)
    return found.reshape(*found.shape[:2], layer.component("conv").channels)


def _append(pools, region, index, values):
    """Pools with values of every token of the step."""
    triton = _launched(pools, region)
    if triton:
        return triton.append_states(pools, region, index, values)
    if len(values) and tiles.keeps_states(pools, region):
        tokens = jnp.arange(len(values), dtype=jnp.int32)
        unit, row = place.locate(region, index, index.request_index, index.positions)
        kept = index.positions >= place.of(index.lengths, index.request_index) - region.rows
        return tiles.store_states(pools, region, values, tokens, jnp.where(kept, unit, -1), row, tokens * 0 + 1)
    return place.append(pools, region, index, place.encode_rows(region, values))


def _launched(pools, region):
    """The launches, where those are what runs and cover the region."""
    triton = verbs(pools.kernels)
    return triton if triton and triton.keeps_states(region) else None


def _before(pools, region, index, count):
    """Values [Q, count, heads, dim] of the last positions before the step; zeros for those below 0."""
    triton = _launched(pools, region)
    if triton:
        return triton.read_before(pools, region, index, count)
    positions = index.starts[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None]
    positions = jnp.where(positions >= 0, positions, -1)
    unit, row = place.locate(region, index, place.requests_like(positions), positions)
    values = place.decode_rows(region, place.load(pools, region, unit, row))
    return jnp.where((unit >= 0)[..., None, None], values, 0)
