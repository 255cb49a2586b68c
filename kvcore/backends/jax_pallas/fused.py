"""Verbs that run as one TPU kernel: where pools are whole tiles and the kernels know every field of the format.

What they don't know (classic heads, int8 and NF4 rows) is moved by ``tiles`` and computed by jax.numpy.
"""

import jax.numpy as jnp

from kvcore.backends.jax_pallas.calls import ROWS_A_CALL, interpreted
from kvcore.backends.jax_pallas.encoding import DTYPES
from kvcore.backends.jax_pallas.pallas import rows_codec
from kvcore.backends.jax_pallas.pallas.flush import flush as flush_kernel
from kvcore.backends.jax_pallas.pallas.gather_rows import gather_rows
from kvcore.backends.jax_pallas.pallas.lines import buffers_of
from kvcore.backends.jax_pallas.pallas.store_rows import store_rows
from kvcore.plan import Region
from kvcore.spec.layout import LANES


def moves(pools, region: Region) -> bool:
    """True where rows of a region are encoded and decoded in the kernel that moves them."""
    return pools.kernels != "portable" and rows_codec.supports(region)


def load(pools, region: Region, unit, row, global_scale=1.0):
    """Values [..., dim] of rows at (unit, row) [...]; zeros where the unit is -1."""
    flat_unit, flat_row = unit.reshape(-1), row.reshape(-1)
    dtype = DTYPES[region.format.value_code]
    found = []
    for first in range(0, len(flat_unit), ROWS_A_CALL):
        some = slice(first, first + ROWS_A_CALL)
        places = flat_unit[some], flat_row[some]
        found.append(
            gather_rows(
                region,
                _of(pools, region),
                *places,
                global_scale=global_scale,
                dtype=dtype,
                interpret=interpreted(pools),
            )
        )
    values = jnp.concatenate(found) if found else jnp.zeros((0, region.format.dim), dtype)
    return values.reshape(*unit.shape, values.shape[1])


def store(pools, region: Region, unit, row, values, global_scale=1.0):
    """Pools with values [n, dim] encoded at (unit, row) [n]; unit -1 is skipped."""
    for first in range(0, len(unit), ROWS_A_CALL):
        some = slice(first, first + ROWS_A_CALL)
        given = unit[some], row[some], values[some]
        written = store_rows(
            region, _of(pools, region), *given, global_scale=global_scale, interpret=interpreted(pools)
        )
        pools = _exchanged(pools, region, written)
    return pools


def flushes(layer, pools, role: str, rope) -> bool:
    """True where a flush of the role is one kernel: fp32 rings of whole lines, the rotation within the last of them."""
    (region,), (ring,) = layer.regions[role], layer.regions[layer.tail_of(role)]
    dim = region.format.dim or 0
    rings = [buffer.fp32 for buffer in buffers_of(ring)] if ring.layout == "tpu_tile" else []
    return (
        moves(pools, region) and dim % LANES == 0 and rings == [True, True] and (rope is None or 2 * len(rope) <= LANES)
    )


def flush(
    pools, region: Region, ring: Region, own, sources, targets, skipped, weight, turn, *, eps, overlap, global_scale
):
    """Pools with the entries at ``targets`` [n] pooled from rows at ``sources`` [n · rows]; see the kernel."""
    count = len(skipped)
    rows = len(sources[0]) // max(count, 1)
    step = max(1, ROWS_A_CALL // rows)
    if turn is not None:
        # A lane each: pairs share an angle, and channels before the rotated ones turn by nothing.
        cos, sin = (jnp.repeat(array, 2, axis=1) for array in turn)
        before = ((0, 0), (LANES - cos.shape[1], 0))
        turn = jnp.pad(cos, before, constant_values=1), jnp.pad(sin, before)
    # Tokens of no row at all still need an array that a DMA can be made from.
    own = [jnp.pad(array, ((0, 1 if not len(array) else 0), (0, 0))) for array in own]
    for first in range(0, count, step):
        entries = slice(first, first + step)
        some = slice(first * rows, (first + step) * rows)
        written = flush_kernel(
            region,
            _of(pools, region),
            _of(pools, ring),
            own,
            [array[some] for array in sources],
            [array[entries] for array in targets],
            skipped[entries],
            norm_weight=weight,
            eps=eps,
            turn=None if turn is None else [array[entries] for array in turn],
            overlap=overlap,
            global_scale=global_scale,
            interpret=interpreted(pools),
        )
        pools = _exchanged(pools, region, written)
    return pools


def _of(pools, region: Region):
    return [pools[name] for name, _ in region.buffers.values()]


def _exchanged(pools, region: Region, written):
    for (name, _), pool in zip(region.buffers.values(), written, strict=True):
        pools = pools.replace(name, pool)
    return pools
