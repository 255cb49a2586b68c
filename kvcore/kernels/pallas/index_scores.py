"""Lightning-indexer scores straight from blocks of keys (DeepSeek-V4 paper section 2.3.1): a DMA a block, products.

Keys that share a tile are decoded by what they share: one product for the first rows of all tiles, one for the second.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import rows_codec
from kvcore.kernels.pallas.lines import buffers_of
from kvcore.kernels.pallas.stream import Stream, ahead, scratch
from kvcore.plan import Region
from kvcore.spec.layout import LANES

TILES_A_STEP = 128


def supports(region: Region) -> bool:
    """True for keys of one line in one buffer."""
    return rows_codec.supports(region) and region.format.dim == LANES and len(region.unit.buffers) == 1


def index_scores(region: Region, pool, blocks, q, weights, *, global_scale: float = 1.0, interpret: Any):
    """``sum_h weights[t,h] · relu(q[t,h] · key[s])`` for every key of the blocks of each token -> [T, blocks · rows].

    Args:
        region: of the keys.
        pool: its one pool.
        blocks: [T, n] int32 units of each token's keys, in order; -1 is not read, and its scores are arbitrary.
        q: [T, H, 128] fp32, rotated as the keys are.
        weights: [T, H] fp32.
        global_scale: of formats that have one.
        interpret: as in ``pallas_call``.
    """
    (buffer,) = buffers_of(region)
    tokens, columns = blocks.shape
    tiles = pool.shape[1]
    count = max(1, min(columns, TILES_A_STEP // tiles))
    more = -columns % count
    blocks = jnp.pad(blocks, ((0, 0), (0, more)), constant_values=-1)
    steps, heads = blocks.shape[1] // count, q.shape[1]
    if not interpret:
        pool = pltpu.with_memory_space_constraint(pool, pltpu.HBM)
    scores = pl.pallas_call(
        functools.partial(_scores, region=region, count=count, parts=buffer.parts, global_scale=global_scale),
        out_shape=jax.ShapeDtypeStruct((tokens, steps, buffer.parts, count * tiles), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tokens, steps),
            in_specs=[
                pl.BlockSpec((1, heads, LANES), lambda t, *_: (t, 0, 0)),
                pl.BlockSpec((1, heads, 1), lambda t, *_: (t, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((1, 1, buffer.parts, count * tiles), lambda t, j, *_: (t, j, 0, 0)),
            scratch_shapes=scratch(region, count, tiles),
        ),
        interpret=interpret,
    )(blocks.reshape(-1), q.astype(jnp.float32), weights.astype(jnp.float32)[:, :, None], pool)
    # Rows of a tile lie side by side in a block; here they are rows of their own.
    scores = scores.swapaxes(2, 3).reshape(tokens, columns + more, tiles * buffer.parts)
    return scores[:, :columns, : region.rows].reshape(tokens, columns * region.rows)


def _scores(units, q, weights, pool, scores, *held, region, count, parts, global_scale):
    step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
    stream = Stream(region, (pool,), held, units, None, count)
    ahead(stream, step, pl.num_programs(0) * pl.num_programs(1))
    words = stream.words(step)
    (first,) = words.values()
    for part in range(parts):
        row = jnp.full((first.shape[0], 1), part, jnp.int32)
        (keys,) = rows_codec.decode(region, words, row, global_scale)
        products = lax.dot_general(
            q[0],
            keys,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        weighted = jnp.maximum(products, 0) * jnp.broadcast_to(weights[0], products.shape)
        scores[0, 0, part, :] = jnp.sum(weighted, axis=0)
