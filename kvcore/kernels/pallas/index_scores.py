"""Lightning-indexer scores straight from blocks of keys (DeepSeek-V4 paper section 2.3.1): a DMA a block, products.

Codes become bf16, which is exact, and queries are sums of bf16 numbers, so matrix units multiply without loss. A row's
one fp32 scale is above 0 and multiplies its score; scales of groups are gathered along the lanes, those of four rows at
once. Nibbles stay where they are in their bytes: the queries' channels are put in their order instead.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import block_lines, compact, rows_codec
from kvcore.kernels.pallas.lines import SUBLANES, buffers_of, lanes
from kvcore.kernels.pallas.rows_codec import place_of
from kvcore.plan import Region
from kvcore.spec.layout import LANES

TILES_A_STEP = 1024
TILES_AT_ONCE = 128
"""Of a step's, that are decoded and multiplied together."""
SUBLANE_TILE = 8
PARTS_OF_FP32 = 3


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
    order = compact.order(jnp.any(blocks.reshape(tokens * steps, count) >= 0, axis=1))
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
            num_scalar_prefetch=3,
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
    )(jnp.clip(blocks, 0, len(pool) - 1).reshape(-1), *order, q, weights, pool)
    scores = scores.reshape(tokens, columns + more, tiles * buffer.parts)
    return scores[:, :columns, : region.rows].reshape(tokens, columns * region.rows)


def _scores(
    units, numbers, following, q, weights, pool, scores, tiles, arrived, *, region, count, global_scale, interpret
):
    step, steps = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1), numbers.shape[0]

    def start(chunk, blocks):
        """Let some blocks of a chunk come, if there is one: a predicate of each copy, no branch."""
        needed = chunk < steps
        chunk = jnp.minimum(chunk, steps - 1)
        half = numbers[chunk] & compact.HALVES - 1
        for i in blocks:
            at = pool.at[units[chunk * count + i]]
            pl.when(needed)(pltpu.make_async_copy(at, tiles.at[half, i], arrived.at[half]).start)

    pl.when(step == 0)(lambda: start(following[0], range(count)))

    @pl.when(numbers[step] >= 0)
    def _():
        half, after = numbers[step] & compact.HALVES - 1, following[step + 1]
        pltpu.make_async_copy(tiles.at[half], tiles.at[half], arrived.at[half]).wait()
        rows, size = [], max(1, TILES_AT_ONCE // tiles.shape[2])
        for first in range(0, count, size):
            # Between loads: the compiler leaves a copy's start where it is among them.
            last = min(first + size, count)
            keys = _keys(region, tiles.at[half, first:last], interpret)
            start(after, range(first, last))
            rows.append(_scored(q[0], weights[0], *keys))
        row = jnp.concatenate(rows, axis=1)
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


def _keys(region: Region, tiles, interpret):
    """Keys of a chunk: ([n, 128], scales of rows [1, n] or None)."""
    (field,) = [field for field in region.format.fields if field.is_value]
    if field.code == "fp32":
        return tiles[...].reshape(-1, LANES), None
    word = compact.words(tiles, interpret=interpret)
    if field.code == "bf16":
        return compact.from_split(word), None
    scale, native = place_of(region, "scales"), block_lines.casts_e4m3(interpret)
    line, first = divmod(scale.base, LANES)
    if field.code == "e4m3":
        return compact.from_e4m3(word), _row_scales(compact.shifted(word, 8 * line), first)
    lane = lanes(word.shape)
    nibbles = jnp.where(lane < LANES // 2, word, lax.shift_right_logical(pltpu.roll(word, LANES // 2, 1), 4))
    # A word's bytes are those of four rows, each with its own scale of the lane's group.
    channel = 2 * (lane & LANES // 2 - 1) + lane // (LANES // 2)
    scales = jnp.take_along_axis(word, first + channel // field.width, axis=1, mode="promise_in_bounds")
    if field.scale == "e8m0":
        # Shifted two by two: no exponent leaves its half.
        pairs = pltpu.bitcast(pltpu.bitcast(scales, jnp.uint8).astype(jnp.uint16), jnp.int32)
        by = compact.bf16(pairs << 7)
        by = jnp.where(by == jnp.bfloat16(jnp.inf), jnp.bfloat16(jnp.nan), by)
    else:
        by = block_lines.from_e4m3(scales, native) * jnp.bfloat16(block_lines.e4m3_factor(native))
    return block_lines.from_e2m1(nibbles) * jnp.bfloat16(block_lines.E2M1_FACTOR) * by, None


def _row_scales(pairs, first: int):
    """[1, n] fp32 of the rows' four bytes from lane ``first`` on: a product turns lanes into rows, byte by byte."""
    byte, lane = (lax.broadcasted_iota(jnp.int32, (SUBLANE_TILE, LANES), axis) for axis in (0, 1))
    chosen = jnp.where(lane == byte + first, 1.0, 0.0).astype(jnp.bfloat16)
    found = compact.bytes_again(compact.dot(chosen, compact.from_bytes(pairs)))
    bits = sum((found[byte : byte + 1] << 8 * byte for byte in range(1, 4)), found[:1])
    return lax.bitcast_convert_type(bits, jnp.float32)
