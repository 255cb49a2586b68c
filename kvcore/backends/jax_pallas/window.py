"""The sliding window: encode and store, gather in position order."""

import jax.numpy as jnp
from jax import Array

from kvcore.backends.jax_pallas import rows as place
from kvcore.backends.jax_pallas.choice import fall_back, verbs
from kvcore.backends.jax_pallas.encoding import to_bf16
from kvcore.backends.jax_pallas.layer import Layer
from kvcore.backends.jax_pallas.rows import Held
from kvcore.backends.jax_pallas.tail import rms_norm, rotate
from kvcore.ops import StepIndex, WindowRows


def append_window(layer: Layer, pools: Held, index: StepIndex, rows: Array) -> Held:
    """Encode rows [T, d] and store them at slot·C + p mod C; only each ring's last C positions are written."""
    (region,) = layer.regions["window"]
    triton = verbs(pools.kernels)
    if triton and triton.covers(region):
        return triton.append(pools, region, index, rows)
    return place.append_values(pools, region, index, rows)


def rotated_rows(
    layer: Layer,
    index: StepIndex,
    rows: Array,
    *,
    rope: Array,
    norm_weight: Array | None = None,
    eps: float = 1e-6,
) -> Array:
    """Rows [T, d] normed (if a weight is given) and rotated at their positions, as they are stored then.

    ``rope`` is the fp32 inverse frequencies.
    """
    (region,) = layer.regions["window"]
    rows = rows.astype(jnp.float32)
    if norm_weight is not None:
        rows = rms_norm(rows, norm_weight, eps)
        rows = rows if region.format.is_fp32 else to_bf16(rows)
    rows = rotate(rows, index.positions, rope)
    return rows if region.format.is_fp32 else to_bf16(rows)


def append_rotated_window(
    layer: Layer,
    pools: Held,
    index: StepIndex,
    rows: Array,
    *,
    rope: Array,
    norm_weight: Array | None = None,
    eps: float = 1e-6,
) -> Held:
    """Append the rotated rows of rows [T, d] to the window; ``rope`` is the fp32 inverse frequencies."""
    (region,) = layer.regions["window"]
    triton = verbs(pools.kernels)
    if triton and triton.covers(region):
        return triton.append_rotated(pools, region, index, rows, rope, norm_weight, eps)
    rows = rotated_rows(layer, index, rows, rope=rope, norm_weight=norm_weight, eps=eps)
    return append_window(layer, pools, index, rows)


def gather_window(layer: Layer, pools: Held, index: StepIndex, rows: Array | None = None) -> WindowRows:
    """The last min(length, W) positions of every request at the end of the step, ascending from row 0."""
    (region,) = layer.regions["window"]
    triton = verbs(pools.kernels)
    shorter = index.left_padding is not None
    if triton and triton.covers(region) and not shorter:
        return WindowRows(*triton.gather_window(pools, region, index, layer.component("window").window, rows))
    if rows is not None:
        fall_back(pools.kernels, "gather_window", "rows of the step are given")
    own = None if rows is None else place.encode_rows(region, rows)
    if triton and shorter:
        fall_back(pools.kernels, "gather_window", "a window begins later than it does by itself")
    first, end = layer.component("window").live_bounds(index.lengths, jnp.maximum)
    live = (first if index.left_padding is None else jnp.maximum(first, index.left_padding)), end
    positions = place.numbered(live, region.rows)
    values = place.read_values(pools, region, index, place.requests_like(positions), positions, own)[:, :, 0]
    return WindowRows(jnp.where((positions >= 0)[:, :, None], values, 0), positions)
