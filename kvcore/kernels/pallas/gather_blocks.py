"""Whole blocks of narrow rows by block table, decoded on the way: one copy a block, a chunk ahead of the arithmetic.

A copy for each row, as a selection needs it, would take the scalar unit longer than the memory takes for the rows.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import block_lines, compact, rows_codec
from kvcore.kernels.pallas.compact import ROWS_OF_A_WORD
from kvcore.kernels.pallas.lines import buffers_of
from kvcore.plan import Region
from kvcore.spec.layout import LANES

ROWS_A_STEP = 256
ROWS_AT_ONCE = 32
"""That are decoded together, or twice as many."""
MOST_ROWS = 1024
"""Of a step, where blocks are such that it takes more."""


def fits(region: Region) -> bool:
    """True for blocks of narrow rows that lie alike in each: of two, and of fours."""
    alike = region.rows == 2 or region.rows % ROWS_OF_A_WORD == 0
    few = region.growth == "block" and _blocks(region) * region.rows <= MOST_ROWS
    return few and alike and compact.narrow(region)


def _blocks(region: Region) -> int:
    """Blocks of a step: rows that are decoded together lie in several, or in a part of one."""
    least = ROWS_AT_ONCE // math.gcd(ROWS_AT_ONCE, region.rows)
    return max(1, ROWS_A_STEP // (least * region.rows)) * least


def gather_blocks(region: Region, pool, blocks, *, dtype=jnp.float32, interpret: Any):
    """Values [n · rows, dim] of all rows of blocks [n] int32; arbitrary where the block is -1."""
    (buffer,) = buffers_of(region)
    asked, count = len(blocks) * region.rows, _blocks(region)
    rows, tiles, lines = count * region.rows, count * pool.shape[1], rows_codec.line_count(region)
    blocks = jnp.pad(blocks, (0, -len(blocks) % count), constant_values=-1)
    if not interpret:
        # Without this XLA may carry a small pool into VMEM, whole, on every call.
        pool = pltpu.with_memory_space_constraint(pool, pltpu.HBM)
    order = compact.order(jnp.any(blocks.reshape(-1, count) >= 0, axis=1))
    total = len(blocks) * region.rows
    values = pl.pallas_call(
        functools.partial(_gather, region=region, count=count, interpret=interpret),
        out_shape=jax.ShapeDtypeStruct((total, lines * LANES), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(len(blocks) // count,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((rows, lines * LANES), lambda i, *_: (i, 0)),
            scratch_shapes=[
                pltpu.VMEM((compact.HALVES, tiles, *buffer.tile[1:]), buffer.dtype),
                pltpu.SemaphoreType.DMA((compact.HALVES,)),
            ],
        ),
        compiler_params=compact.COMPILER,
        cost_estimate=pl.CostEstimate(
            flops=2 * total * lines * LANES * LANES,
            bytes_accessed=total * (buffer.lines * LANES + lines * LANES * jnp.dtype(dtype).itemsize),
            transcendentals=0,
        ),
        interpret=interpret,
    )(*order, jnp.clip(blocks, 0, len(pool) - 1), pool)
    return values[:asked, : region.format.dim]


def _gather(numbers, following, blocks, pool, values, held, arrived, *, region: Region, count: int, interpret: Any):
    step, steps = pl.program_id(0), pl.num_programs(0)
    size, native = pool.shape[1], block_lines.casts_e4m3(interpret)

    def start(chunk, half, first: int, last: int, *, unroll: bool) -> None:
        """Let some blocks of a chunk come, if there is one: a predicate of each copy, no branch."""
        needed, begin = chunk < steps, jnp.minimum(chunk, steps - 1) * count

        def one(number, _):
            target = held.at[half, pl.ds(number * size, size)]
            pl.when(needed)(pltpu.make_async_copy(pool.at[blocks[begin + number]], target, arrived.at[half]).start)
            return _

        lax.fori_loop(first, last, one, None, unroll=unroll)

    pl.when(step == 0)(lambda: start(following[0], 0, 0, count, unroll=False))

    @pl.when(numbers[step] >= 0)
    def _():
        half, after = numbers[step] & compact.HALVES - 1, following[step + 1]
        pltpu.make_async_copy(held.at[half], held.at[half], arrived.at[half]).wait()
        started = 0
        for first in range(0, len(values), 2 * ROWS_AT_ONCE):
            # Between loads: the compiler leaves a copy's start where it is among them.
            last = count * min(first + 2 * ROWS_AT_ONCE, len(values)) // len(values)
            start(after, 1 - half, started, last, unroll=not interpret)
            started = last
            few = min(2 * ROWS_AT_ONCE, len(values) - first) // ROWS_OF_A_WORD
            fours, rest = _fours(region, held.at[half], size, first // ROWS_OF_A_WORD, few, interpret)
            for number, line in enumerate(compact.decoded(region, fours, rest, native=native)):
                some = slice(first, first + len(line))
                values[some, LANES * number : LANES * (number + 1)] = line.astype(values.dtype)


def _fours(region: Region, tiles, size: int, begin: int, few: int, interpret: Any):
    """Words of ``few`` times four rows, from the fours ``begin`` on, as ``compact.decoded`` takes them.

    ``size``: tiles of a block.
    """
    (buffer,) = buffers_of(region)
    step = buffer.lines if region.rows >= ROWS_OF_A_WORD else ROWS_OF_A_WORD // region.rows * size

    @functools.cache
    def words(tile: int):
        return compact.every(tiles, begin * step + tile, few, step=step, interpret=interpret)

    fours, rest = [], jnp.int32(0)
    for number in range(ROWS_OF_A_WORD):
        block, row = divmod(number, region.rows)
        tile, line = block * size + buffer.first(row), buffer.line(row)
        fours.append(compact.joined(words(tile), words(tile + 1), 8 * line) if line else words(tile))
        # The fifth line lies in the next tile, and never above its row's place among the four.
        last = words(tile + 1) & np.uint32(0xFF << 8 * line).view(np.int32)
        rest |= last << 8 * (number - line) if number > line else last
    return fours, rest
