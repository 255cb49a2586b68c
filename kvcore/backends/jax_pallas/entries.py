"""Compressed entries and index keys in paged blocks: store and gather."""

import jax.numpy as jnp
from jax import Array

from kvcore.backends.jax_pallas import rows as place
from kvcore.backends.jax_pallas.choice import verbs
from kvcore.backends.jax_pallas.layer import Layer
from kvcore.backends.jax_pallas.rows import Held
from kvcore.ops import AllEntries, Closed, SelectedEntries, StepIndex


def store_entries(
    layer: Layer, pools: Held, index: StepIndex, entries: Array | None, index_keys: Array | None = None
) -> Held:
    """Encode and store entries [closed, d] that the caller compressed, request by request; index keys likewise."""
    if entries is not None:
        pools = store_role(layer, pools, index, entries, role="entries")
    if index_keys is not None:
        pools = store_role(layer, pools, index, index_keys, role="index_keys")
    return pools


def store_role(layer: Layer, pools: Held, index: StepIndex, values: Array, *, role: str) -> Held:
    """Store the entries that the step completes in the pool of one role."""
    (region,) = layer.regions[role]
    triton = verbs(pools.kernels)
    if triton and triton.covers(region):
        ratio = layer.component(role).ratio
        return triton.store_entries(pools, region, index, values, ratio, layer.global_scale(role))
    request, entry = closed(layer, index, count=len(values), role=role)
    entry = untaken(index, request, entry, layer.component(role).ratio)
    targets = place.locate(region, index, request, entry)
    return place.store_values(pools, region, *targets, values, layer.global_scale(role))


def closed(layer: Layer, index: StepIndex, *, count: int, role: str = "entries") -> Closed:
    """The first ``count`` entries that the step completes, in storing order; -1 where there are fewer."""
    ratio = layer.component(role).ratio
    before = place.divided(index.starts, ratio)
    new = place.divided(index.lengths, ratio) - before
    ends = jnp.cumsum(new)
    row = jnp.arange(count, dtype=jnp.int32)
    request = jnp.sum(row[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    request = jnp.where(request < len(ends), request, -1)
    entry = place.of(before, request) + row - place.of(ends - new, request)
    return Closed(request, jnp.where(request >= 0, entry, -1))


def gather_entries(layer: Layer, pools: Held, index: StepIndex, indices: Array) -> SelectedEntries:
    """Entries by logical index, indices [T, k]; valid iff 0 <= i < the request's entries at the end of the step."""
    (region,) = layer.regions["entries"]
    triton = verbs(pools.kernels)
    if triton and triton.covers(region):
        return SelectedEntries(*triton.gather_entries(pools, region, index, indices, layer.component("entries").ratio))
    count = place.of(place.divided(index.lengths, layer.component("entries").ratio), index.request_index)
    valid = (indices >= 0) & (indices < count[:, None])
    request = jnp.broadcast_to(index.request_index[:, None], indices.shape)
    values = place.read_values(pools, region, index, request, jnp.where(valid, indices, -1))[:, :, 0]
    return SelectedEntries(jnp.where(valid[:, :, None], values, 0), valid)


def gather_all_entries(
    layer: Layer, pools: Held, index: StepIndex, *, columns: int, role: str = "entries"
) -> AllEntries:
    """Every entry (``role`` entries or index_keys) of every request, as [Q, columns, d]."""
    (region,) = layer.regions[role]
    component = layer.component(role)
    triton = verbs(pools.kernels)
    if triton and triton.covers(region):
        scale = layer.global_scale(role)
        return AllEntries(*triton.gather_all(pools, region, index, component.ratio, columns, scale))
    counts = place.divided(index.lengths, component.ratio)
    entry = place.numbered((jnp.zeros_like(counts), counts), columns)
    values = place.read_all_values(pools, region, index, entry, layer.global_scale(role))[:, :, 0]
    positions = jnp.where(entry >= 0, entry * component.ratio, -1)
    return AllEntries(jnp.where((entry >= 0)[:, :, None], values, 0), counts, positions)


def untaken(index, request, entry, ratio):
    """Entries [n], -1 where the entry was taken over at admission: other requests read it, and it is not written."""
    return jnp.where((entry + 1) * ratio <= place.of(index.stored, request), -1, entry)
