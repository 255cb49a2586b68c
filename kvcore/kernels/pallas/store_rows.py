"""Encode rows and store them in place: lanes, then a DMA a row, or a read-modify-write where rows share a tile."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import compact, rows_codec
from kvcore.kernels.pallas.lines import SUBLANES, Buffer, buffers_of, tiles_of, words_of
from kvcore.plan import Region
from kvcore.spec.layout import LANES

ROWS_A_STEP = 8
OPERATIONS_A_VALUE = 16
"""What encoding takes, about."""


def store_rows(region: Region, pools, unit, row, values, *, global_scale: float = 1.0, interpret: Any):
    """Pools of a region with values [n, dim] fp32 encoded at (unit, row) [n] int32; unit -1 is skipped.

    Rows must be distinct: DMAs in flight together have no order.
    """
    count, dim = values.shape
    more, lines = -count % ROWS_A_STEP, rows_codec.line_count(region)
    unit, row = jnp.pad(unit, (0, more), constant_values=-1), jnp.pad(row, (0, more))
    unit, row = inside(region, pools, unit, row)
    values = jnp.pad(values.astype(jnp.float32), ((0, more), (0, lines * LANES - dim)))
    block = pl.BlockSpec((ROWS_A_STEP, lines * LANES), lambda i, *_: (i, 0))
    kernel = functools.partial(_store, region=region, pools=len(pools), global_scale=global_scale)
    cost = pl.CostEstimate(
        flops=OPERATIONS_A_VALUE * values.size,
        bytes_accessed=values.nbytes + len(unit) * region.format.row,
        transcendentals=0,
    )
    steps = len(unit) // ROWS_A_STEP
    return in_place(kernel, region, pools, (unit, row), (values,), (block,), steps, ROWS_A_STEP, (), cost, interpret)


def inside(region: Region, pools, unit, row):
    """(unit, row) of a region's pools, -1 where a pool has no such unit: nothing in the kernel looks for it."""
    rows = [buffer.rows(pool.shape[1]) for buffer, pool in zip(buffers_of(region), pools, strict=True)]
    exists = (unit < pools[0].shape[0]) & (row >= 0) & (row < min(rows))
    return jnp.where(exists, unit, -1), row


def in_place(kernel, region: Region, pools, scalars, inputs, specs, steps: int, rows: int, more, cost, interpret: Any):
    """Call a kernel ``(*scalars, *inputs, *old pools, *new pools, *scratch of Target, *more)`` that updates pools.

    No address is checked in it: whoever calls has made sure that all are inside.
    """
    if not interpret:
        # Without this XLA may carry a small pool into VMEM and back, whole, on every call.
        pools = [pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in pools]
    anywhere = [pl.BlockSpec(memory_space=pl.ANY)] * len(pools)
    first = len(scalars) + len(inputs)
    written = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(steps,),
            in_specs=[*specs, *anywhere],
            out_specs=anywhere,
            scratch_shapes=[*target_scratch(region, rows), *more],
        ),
        compiler_params=compact.COMPILER,
        cost_estimate=cost,
        input_output_aliases={first + number: number for number in range(len(pools))},
        interpret=interpret,
    )(*scalars, *inputs, *pools)
    # A pinned pool that is an output of the program without anything in between is refused by XLA's verifier.
    return written if interpret else [lax.optimization_barrier(pool) for pool in written]


def target_scratch(region: Region, rows: int):
    """Scratch of ``put``: words and tiles of every buffer, the old tile or tiles of one row, a semaphore."""
    buffers = buffers_of(region)
    words = [pltpu.VMEM((rows, buffer.tiles, LANES), jnp.int32) for buffer in buffers]
    tiles = [pltpu.VMEM((rows, *buffer.tile), buffer.dtype) for buffer in buffers]
    shared = [buffer.tile for buffer in buffers if _shares(buffer)] or [(SUBLANES, LANES)]
    return [*words, *tiles, pltpu.VMEM(shared[0], jnp.uint8), pltpu.SemaphoreType.DMA(())]


def _store(units, rows, values, *refs, region: Region, pools: int, global_scale: float):
    pools, held = refs[pools : 2 * pools], refs[2 * pools :]
    first = pl.program_id(0) * ROWS_A_STEP
    lines = [values[:, LANES * n : LANES * (n + 1)] for n in range(rows_codec.line_count(region))]
    put(region, pools, held, lines, [(units[first + i], rows[first + i]) for i in range(ROWS_A_STEP)], global_scale)


def put(region: Region, pools, held, lines, places, global_scale: float) -> None:
    """Encode lines [K, 128] of K rows and write them to their (unit, row), scalars each."""
    buffers = buffers_of(region)
    words, tiles = held[: len(buffers)], held[len(buffers) : 2 * len(buffers)]
    old, arrived = held[2 * len(buffers) : 2 * len(buffers) + 2]
    encoded = rows_codec.encode(region, lines, global_scale)
    for buffer, pool, word, tile in zip(buffers, pools, words, tiles, strict=True):
        for number, line in enumerate(encoded[buffer.name]):
            word[:, number, :] = line
        if _shares(buffer):
            for i, (unit, row) in enumerate(places):
                _merge(buffer, pool, word[i], old, arrived, unit, row)
            continue
        tile[...] = tiles_of(word[...], buffer)

        def copy(i, unit, row, pool=pool, tile=tile):
            return pltpu.make_async_copy(tile.at[i], pool.at[unit, row], arrived)

        for i, (unit, row) in enumerate(places):
            pl.when(unit >= 0)(lambda i=i, unit=unit, row=row: copy(i, unit, row).start())
        for i, (unit, row) in enumerate(places):
            pl.when(unit >= 0)(lambda i=i, unit=unit, row=row: copy(i, unit, row).wait())


def _shares(buffer: Buffer) -> bool:
    return buffer.parts > 1 or buffer.across


def _merge(buffer: Buffer, pool, word, old, arrived, unit, row) -> None:
    """Exchange one row's bytes in tiles that it shares. One after another: the next row may lie in the same tile."""

    @pl.when(unit >= 0)
    def _():
        at = pool.at[unit, buffer.at(row)]
        fetch = pltpu.make_async_copy(at, old, arrived)
        fetch.start()
        fetch.wait()
        shift = jnp.broadcast_to(8 * buffer.line(row), (1, LANES))
        held = [min(buffer.lines - SUBLANES * tile, SUBLANES) for tile in range(buffer.tiles)]
        mine = [jnp.full((1, LANES), np.uint32((1 << 8 * lines) - 1).view(np.int32)) for lines in held]
        mine, new = (_moved(one, shift) for one in (mine, [word[tile : tile + 1] for tile in range(buffer.tiles)]))
        kept = words_of(old[...][None], buffer)[0] & ~mine
        old[...] = tiles_of((kept | new)[None], buffer)[0]
        back = pltpu.make_async_copy(old, at, arrived)
        back.start()
        back.wait()


def _moved(words, bits):
    """A row's words [1, 128] of each of its tiles, as if it were the first -> [tiles, 128] where it begins."""
    first, *rest = words
    if not rest:
        return first << bits
    # In two steps, since 32 bits are no shift.
    carried = lax.shift_right_logical(lax.shift_right_logical(first, 24 - bits), 8)
    return jnp.concatenate([first << bits, rest[0] << bits | carried], axis=0)
