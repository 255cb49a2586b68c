"""Verbs that run as one TPU kernel: where pools are whole tiles and the kernels know every field of the format.

What they don't know (classic heads, int8 and NF4 rows) is moved by ``tiles`` and computed by jax.numpy.
"""

import jax.numpy as jnp

from kvcore.backends.jax_pallas.calls import INTERPRETER, ROWS_A_CALL, TILED, interpreted
from kvcore.backends.jax_pallas.encoding import DTYPES
from kvcore.kernels.pallas import attend_groups as grouped
from kvcore.kernels.pallas import attend_heads as headed
from kvcore.kernels.pallas import attend_kv as classic
from kvcore.kernels.pallas import gather_blocks as whole
from kvcore.kernels.pallas import index_scores as scoring
from kvcore.kernels.pallas import rows_codec, walks
from kvcore.kernels.pallas.attend_rows import Source, attend_rows
from kvcore.kernels.pallas.flush import flush as flush_kernel
from kvcore.kernels.pallas.gather_rows import gather_rows
from kvcore.kernels.pallas.lines import buffers_of
from kvcore.kernels.pallas.store_rows import store_rows
from kvcore.kernels.pallas.top_k import LARGEST, top_k
from kvcore.plan import Region
from kvcore.spec.layout import LANES


def moves(pools, region: Region) -> bool:
    """True where rows of a region are encoded and decoded in the kernel that moves them."""
    return pools.kernels in TILED and rows_codec.supports(region)


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


def loads_blocks(pools, region: Region) -> bool:
    """True where all rows of a block come together, by one copy, rather than one by one."""
    return moves(pools, region) and whole.fits(region)


def load_blocks(pools, region: Region, blocks):
    """Values [..., rows, dim] of all rows of blocks [...]; arbitrary where the block is -1."""
    (pool,) = _of(pools, region)
    flat, dtype, found = blocks.reshape(-1), DTYPES[region.format.value_code], []
    for first in range(0, len(flat), ROWS_A_CALL):
        some = flat[first : first + ROWS_A_CALL]
        found.append(whole.gather_blocks(region, pool, some, dtype=dtype, interpret=interpreted(pools)))
    return jnp.concatenate(found).reshape(*blocks.shape, region.rows, region.format.dim)


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


def scores(pools, region: Region) -> bool:
    """True where index scores are one kernel."""
    return moves(pools, region) and scoring.supports(region)


def index_scores(pools, region: Region, blocks, q, weights, global_scale=1.0):
    """Scores [T, blocks · rows] fp32 of the keys in blocks [T, n] of each token; arbitrary where the block is -1."""
    (pool,) = _of(pools, region)
    step = max(1, ROWS_A_CALL // max(blocks.shape[1], 1))
    found = []
    for first in range(0, len(q), step):
        some = slice(first, first + step)
        given = blocks[some], q[some], weights[some]
        found.append(
            scoring.index_scores(region, pool, *given, global_scale=global_scale, interpret=interpreted(pools))
        )
    return jnp.concatenate(found)


def selects(kernels: str, scores_, k: int) -> bool:
    """True where a top-k is one kernel; longer rows are XLA's to sort."""
    return kernels in TILED and 0 < scores_.shape[1] <= LARGEST and len(scores_) > 0 and k > 0


def select(kernels: str, scores_, k: int):
    """Top k of scores [T, n] -> [T, k] int32."""
    return top_k(scores_, k, interpret=INTERPRETER if kernels == "interpret" else False)


def attends(pools, regions, q, rows: int) -> bool:
    """True where attention over ``rows`` rows a token of these regions is one kernel."""
    fits = q.shape[2] >= LANES and 0 < rows <= ROWS_A_CALL and len(q) > 0
    return fits and all(moves(pools, region) and region.format.dim == q.shape[2] for region in regions)


def attend(pools, q, sources, sink, scale):
    """Out [T, H, d] fp32 and lse [T, H] from q over (region, unit [T, n], row [T, n], global scale) each."""
    step = max(1, ROWS_A_CALL // sum(unit.shape[1] for _, unit, _, _ in sources))
    dim, outs, lses = q.shape[2], [], []
    # Kernels take whole lines: what a row's last one has beyond its channels reads as zeros.
    q = jnp.pad(q, ((0, 0), (0, 0), (0, -dim % LANES)))
    for first in range(0, len(q), step):
        some = slice(first, first + step)
        given = [
            Source(region, _of(pools, region), unit[some], row[some], scale) for region, unit, row, scale in sources
        ]
        out, lse = attend_rows(q[some], given, sink, scale=scale, interpret=interpreted(pools))
        outs.append(out[:, :, :dim])
        lses.append(lse)
    return jnp.concatenate(outs), jnp.concatenate(lses)


def attends_kv(pools, regions, q, columns: int) -> bool:
    """True where classic attention over ``columns`` blocks a token is one kernel, or that to whole groups of tokens."""
    keys, values = regions
    fits = pools.kernels != "portable" and 0 < columns <= ROWS_A_CALL and len(q) > 0
    return fits and (grouped if keys.tokens > 1 else walks).supports(keys, values)


def attend_kv(pools, regions, blocks, first, last, q, scale, sink):
    """Out [T, H, e] and lse [T, H] fp32; see the kernels, of which that of groups knows no sink."""
    keys, values = regions
    step = max(1, ROWS_A_CALL // blocks.shape[1])
    outs, lses = [], []
    for start in range(0, len(q), step):
        some = slice(start, start + step)
        rows = keys, values, _of(pools, keys), _of(pools, values), blocks[some], first[some], last[some], q[some], scale
        if headed.supports(keys, values):
            out, lse = headed.attend_heads(*rows, sink, interpret=interpreted(pools))
        elif keys.tokens > 1:
            out, lse = grouped.attend_groups(*rows, interpret=interpreted(pools))
        else:
            out, lse = classic.attend_kv(*rows, sink, interpret=interpreted(pools))
        outs.append(out)
        lses.append(lse)
    return jnp.concatenate(outs), jnp.concatenate(lses)


def _of(pools, region: Region):
    return [pools[name] for name, _ in region.buffers.values()]


def _exchanged(pools, region: Region, written):
    for (name, _), pool in zip(region.buffers.values(), written, strict=True):
        pools = pools.replace(name, pool)
    return pools
