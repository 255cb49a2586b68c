"""Lightning-indexer scores straight from blocks of keys (DeepSeek-V4 paper section 2.3.1): a DMA a block, products.

Codes become bf16, which is exact, and queries are sums of bf16 numbers, so matrix units multiply without loss. A row's
one fp32 scale is above 0 and multiplies its score; scales of groups are spread over their lanes by a product of zeros
and ones. Nibbles stay where they are in their bytes: the queries' channels are put in their order instead.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import compact, rows_codec
from kvcore.kernels.pallas.lines import SUBLANES, buffers_of, lanes
from kvcore.kernels.pallas.rows_codec import place_of
from kvcore.plan import Region
from kvcore.spec.layout import LANES

TILES_A_STEP = 1024
SUBLANE_TILE = 8
PARTS_OF_FP32 = 3
ROWS_OF_A_PAIR = 2


def supports(region: Region) -> bool:
    """True for keys of one line in one buffer."""
    return rows_codec.supports(region) and region.format.dim == LANES and len(region.unit.buffers) == 1


def index_scores(region: Region, pool, blocks, q, weights, *, global_scale: float = 1.0, interpret: Any):
    """``sum_h weights[t,h] · relu(q[t,h] · key[s])`` for every key of the blocks of each token -> [T, blocks · rows].

    Args:
        region: of the keys.
        pool: its one pool.
        blocks: [T, n] int32 units of each token's keys, in order; the scores of -1 are arbitrary, and behind a token's
            last block nothing is read.
        q: [T, H, 128], rotated as the keys are; in bf16 one product does, in fp32 it takes three.
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
    steps = blocks.shape[1] // count
    live = jnp.any(blocks.reshape(tokens * steps, count) >= 0, axis=1).astype(jnp.int32)
    (field,) = [field for field in region.format.fields if field.is_value]
    if field.code == "e2m1":
        q = q.reshape(*q.shape[:2], LANES // 2, 2).swapaxes(2, 3).reshape(q.shape)
    heads = ((0, 0), (0, -q.shape[1] % SUBLANE_TILE))
    q, weights = jnp.pad(q, (*heads, (0, 0))), jnp.pad(weights.astype(jnp.float32), heads)[:, :, None]
    if field.code != "fp32":
        q = q if q.dtype == jnp.bfloat16 else compact.exact_parts(q.astype(jnp.float32), PARTS_OF_FP32)
    if not interpret:
        pool = pltpu.with_memory_space_constraint(pool, pltpu.HBM)
    rows = count * tiles * buffer.parts
    read = tokens * steps * count * tiles * SUBLANES * LANES
    scores = pl.pallas_call(
        functools.partial(_scores, region=region, count=count, global_scale=global_scale, interpret=interpret),
        out_shape=jax.ShapeDtypeStruct((tokens, steps, 1, rows), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(tokens, steps),
            in_specs=[
                pl.BlockSpec((1, *q.shape[1:]), lambda t, *_: (t, 0, 0)),
                pl.BlockSpec((1, *weights.shape[1:]), lambda t, *_: (t, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((1, 1, 1, rows), lambda t, j, *_: (t, j, 0, 0)),
            scratch_shapes=compact.scratch(buffer, count, tiles),
        ),
        compiler_params=compact.COMPILER,
        cost_estimate=pl.CostEstimate(
            flops=2 * tokens * steps * rows * q.shape[1] * LANES, bytes_accessed=read, transcendentals=0
        ),
        interpret=interpret,
    )(jnp.clip(blocks, 0, len(pool) - 1).reshape(-1), live, q, weights, pool)
    # Keys of a tile are decoded two by two: [pairs, tiles, 2], where here they are rows of their own.
    pairs = max(1, buffer.parts // ROWS_OF_A_PAIR)
    scores = scores.reshape(tokens, steps, pairs, count * tiles, -1).transpose(0, 1, 3, 4, 2)
    scores = scores.reshape(tokens, columns + more, tiles * buffer.parts)
    return scores[:, :columns, : region.rows].reshape(tokens, columns * region.rows)


def _scores(units, live, q, weights, pool, scores, tiles, arrived, *, region, count, global_scale, interpret):
    step, steps = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1), pl.num_programs(0) * pl.num_programs(1)

    def start(chunk):
        half = lax.rem(chunk, compact.HALVES)
        for i in range(count):
            at = pool.at[units[chunk * count + i]]
            pltpu.make_async_copy(at, tiles.at[half, i], arrived.at[half]).start()

    pl.when((step == 0) & (live[0] > 0))(lambda: start(0))
    following = jnp.minimum(step + 1, steps - 1)
    pl.when((step + 1 < steps) & (live[following] > 0))(lambda: start(following))

    @pl.when(live[step] > 0)
    def _():
        half = lax.rem(step, compact.HALVES)
        pltpu.make_async_copy(tiles.at[half], tiles.at[half], arrived.at[half]).wait()
        found = [_scored(q[0], weights[0], *keys) for keys in _keys(region, tiles, half, interpret)]
        row = found[0] if len(found) == 1 else jnp.concatenate(found, axis=1)
        scores[0, 0] = row if global_scale == 1 else row * np.float32(global_scale)


def _scored(q, weights, keys, scales):
    """Scores [1, n] of keys [n, 128], in bf16 with queries in parts, or all in fp32."""
    if keys.dtype == jnp.float32:
        return _summed(rows_product(q, keys), weights)
    products = compact.dot(q, keys)
    heads = len(weights)
    row = _summed(sum(products[first : first + heads] for first in range(0, len(products), heads)), weights)
    return row if scales is None else row * scales


def rows_product(left, right):
    """[m, k] times [n, k] in fp32."""
    numbers = (((1,), (1,)), ((), ()))
    return lax.dot_general(left, right, numbers, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _summed(products, weights):
    weighted = jnp.maximum(products, 0) * jnp.broadcast_to(weights, products.shape)
    return jnp.sum(weighted, axis=0, keepdims=True)


def _keys(region: Region, tiles, half, interpret):
    """Keys of a chunk, pair after pair of the rows that share a tile: ([n, 128], scales of rows [1, n] or None)."""
    (field,) = [field for field in region.format.fields if field.is_value]
    if field.code == "fp32":
        return [(tiles[half].reshape(-1, LANES), None)]
    word = compact.words(tiles, half, interpret=interpret)
    if field.code == "bf16":
        return [(compact.from_split(word), None)]
    scale = place_of(region, "scales")
    line, first = divmod(scale.base, LANES)
    if field.code == "e4m3":
        return [(compact.from_e4m3(word), _row_scales(compact.shifted(word, 8 * line), first))]
    lane = lanes(word.shape)
    nibbles = jnp.where(lane < LANES // 2, word, lax.shift_right_logical(pltpu.roll(word, LANES // 2, 1), 4))
    scales = jnp.where((lane >= first) & (lane < first + field.groups), word, 0)
    from_scale = compact.from_e8m0 if field.scale == "e8m0" else compact.from_e4m3
    found = []
    for number in range(ROWS_OF_A_PAIR):
        keys = compact.from_e2m1(compact.shifted(nibbles, 8 * number))
        few = from_scale(compact.shifted(scales, 8 * number))
        found.append((keys * compact.dot(few, _groups(first, field.width), contract=0).astype(jnp.bfloat16), None))
    return found


def _row_scales(pairs, first: int):
    """[1, n] fp32 of the rows' four bytes from lane ``first`` on: a product turns lanes into rows, byte by byte."""
    byte, lane = (lax.broadcasted_iota(jnp.int32, (SUBLANE_TILE, LANES), axis) for axis in (0, 1))
    chosen = jnp.where(lane == byte + first, 1.0, 0.0).astype(jnp.bfloat16)
    found = compact.bytes_again(compact.dot(chosen, compact.from_bytes(pairs)))
    bits = sum((found[byte : byte + 1] << 8 * byte for byte in range(1, 4)), found[:1])
    return lax.bitcast_convert_type(bits, jnp.float32)


def _groups(first: int, width: int):
    """[128, 128] ones where a lane of nibbles belongs to the group whose scale lies in a lane from ``first`` on."""
    scale, lane = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    channel = 2 * (lane & LANES // 2 - 1) + lax.div(lane, LANES // 2)
    return jnp.where(scale == first + lax.div(channel, width), 1.0, 0.0).astype(jnp.bfloat16)
