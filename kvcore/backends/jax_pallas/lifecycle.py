"""Life cycle: reset, copies, raw rows, digests."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvcore import digest
from kvcore.backends.jax_pallas import rows as place
from kvcore.backends.jax_pallas.layer import Layer
from kvcore.backends.jax_pallas.rows import Held
from kvcore.ops import RawRows, StepIndex


def reset_slots(pool: Array, slots: Array, fresh: Array | None) -> Array:
    """One pool with slots [n] as if never used; -1 is ignored. ``fresh`` is one unit's elements, or None for zeros."""
    if fresh is None:
        fresh = jnp.zeros(pool.shape[1:], pool.dtype)
    fresh = jnp.broadcast_to(fresh[None], (len(slots), *pool.shape[1:]))
    return pool.at[_outside(slots, pool)].set(fresh, mode="drop")


def poison(pool: Array, units: Array) -> Array:
    """One pool with freed slots or blocks [n] filled with 0xFF, so that a stale read is seen."""
    ones = np.frombuffer(b"\xff" * pool.dtype.itemsize, np.uint8 if pool.dtype.itemsize == 1 else np.uint32)[0]
    filled = lax.bitcast_convert_type(jnp.full((len(units), *pool.shape[1:]), ones), pool.dtype)
    return pool.at[_outside(units, pool)].set(filled, mode="drop")


def copy_units(pool: Array, sources: Array, targets: Array) -> Array:
    """One pool with whole slots or blocks copied; all sources are read before any target is written."""
    return pool.at[_outside(targets, pool)].set(pool.at[sources].get(mode="clip"), mode="drop")


def gather_rows(
    layer: Layer,
    pools: Held,
    index: StepIndex,
    rows: tuple[Array, ...] | None = None,
    *,
    role: str,
    columns: int,
) -> RawRows:
    """The role's live rows in position order as canonical bytes; ``rows`` are the step's own, one per part."""
    component = layer.component(role)
    regions = layer.regions[role]
    numbers = place.numbered(component.live_bounds(index.lengths, jnp.maximum), columns)
    own = [None] * len(regions)
    if rows is not None:
        own = [place.encode_rows(region, values) for region, values in zip(regions, rows, strict=True)]
    parts = [
        place.read(pools, region, index, place.requests_like(numbers), numbers, stored).reshape(
            *numbers.shape, region.heads * region.format.row
        )
        for region, stored in zip(regions, own, strict=True)
    ]
    found = jnp.where((numbers >= 0)[:, :, None], jnp.concatenate(parts, axis=2), 0)
    return RawRows(found, jnp.where(numbers >= 0, numbers * component.tokens_per_row, -1))


def store_rows(layer: Layer, pools: Held, index: StepIndex, raw: RawRows, *, role: str) -> Held:
    """Write canonical rows at their positions: the inverse of ``gather_rows``; position -1 is ignored."""
    step = layer.component(role).tokens_per_row
    numbers = jnp.where(raw.positions >= 0, raw.positions // step, -1)
    requests = place.requests_like(numbers)
    first = 0
    for region in layer.regions[role]:
        last = first + region.heads * region.format.row
        rows = raw.rows[:, :, first:last].reshape(*numbers.shape, region.heads, region.format.row)
        pools = place.store(pools, region, *place.locate(region, index, requests, numbers), rows)
        first = last
    return pools


def read_ring(layer: Layer, pools: Held, index: StepIndex, *, role: str) -> tuple[Array, ...]:
    """Raw bytes of the ring rows that the step's tokens will overwrite, for ``restore_ring``."""
    return tuple(
        place.load(pools, region, *place.locate(region, index, index.request_index, index.positions))
        for region in layer.regions[role]
    )


def restore_ring(layer: Layer, pools: Held, index: StepIndex, saved: tuple[Array, ...], *, role: str) -> Held:
    """Put back what ``read_ring`` saved."""
    for region, rows in zip(layer.regions[role], saved, strict=True):
        pools = place.store(pools, region, *place.locate(region, index, index.request_index, index.positions), rows)
    return pools


def digest_rows(raw: RawRows, salt: Array) -> Array:
    """Two 32-bit lanes for every request over its rows and positions -> [Q, 2] uint32; see ``kvcore.digest``.

    Every operation of the digest is taken modulo 2^32, which is what uint32 does.
    """
    requests, columns, size = raw.rows.shape
    padded = jnp.pad(raw.rows, ((0, 0), (0, 0), (0, -size % 4)))
    words = lax.bitcast_convert_type(padded.reshape(requests, columns, -(-size // 4), 4), jnp.uint32)
    place_of = jnp.arange(words.shape[2], dtype=jnp.uint32) * np.uint32(digest.WORD_FACTOR)
    row_of = raw.positions.astype(jnp.uint32) * np.uint32(digest.POSITION_FACTOR)
    valid = (raw.positions >= 0)[:, :, None]
    lanes = []
    for seed in digest.LANE_SEEDS:
        key = mix(row_of[:, :, None] + place_of[None, None] + (salt + np.uint32(seed)))
        mixed = jnp.where(valid, mix(words ^ key), np.uint32(0))
        lanes.append(jnp.sum(mixed, axis=(1, 2), dtype=jnp.uint32))
    return jnp.stack(lanes, axis=1)


def mix(value: Array) -> Array:
    """murmur3's 32-bit finaliser."""
    for shift, factor in zip(digest.MIX_SHIFTS, (*digest.MIX_FACTORS, 1), strict=True):
        value = (value ^ (value >> shift)) * np.uint32(factor)
    return value


def _outside(units, pool):
    """Units with -1 moved beyond the pool's end, where writes are dropped; JAX would count it from the end."""
    return jnp.where(units >= 0, units, pool.shape[0])
