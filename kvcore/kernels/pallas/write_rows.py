"""Write rows into a pool of tiles, in place: one DMA a row that is a tile, a read-modify-write where rows share one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

ROWS_IN_FLIGHT = 8


def write_rows(pool, unit, row, tiles, *, interpret: Any = False):
    """Pool [units, rows, s, 128] with tiles [n, s, 128] at (unit, row) [n]; rows with unit -1 are skipped.

    Rows must be distinct: DMAs in flight together have no order.
    """
    tiles, unit, row = _padded(tiles, unit, row)
    kernel = functools.partial(_write, unroll=not interpret)
    scratch = [pltpu.SemaphoreType.DMA((ROWS_IN_FLIGHT,))]
    return _call(kernel, pool, unit, row, tiles, ROWS_IN_FLIGHT, scratch, interpret)


def write_parts(pool, unit, part, tiles, *, interpret: Any = False):
    """Pool [units, tiles, 4, 128] uint8 with part ``part`` [n] of a unit replaced; unit -1 is skipped.

    A unit's parts lie one after another, each a whole fraction of a tile: 4 // parts sublanes.

    Args:
        tiles: [n, parts, 4 // parts, 128], every slice along ``parts`` the same row, so that it need not be moved.
    """
    parts = tiles.shape[1]
    scratch = [pltpu.VMEM((4, 128), jnp.uint8), pltpu.SemaphoreType.DMA(())]
    kernel = functools.partial(_merge, parts=parts)
    return _call(kernel, pool, unit, part, tiles.reshape(-1, 4, 128), 1, scratch, interpret)


def _write(units, rows, tiles, _, pool, arrived, *, unroll: bool):
    first = pl.program_id(0) * ROWS_IN_FLIGHT

    def copy(i):
        at = pool.at[units[first + i], rows[first + i]]
        return pltpu.make_async_copy(tiles.at[i], at, arrived.at[i])

    def start(i, _):
        pl.when(units[first + i] >= 0)(lambda: copy(i).start())
        return _

    def finish(i, _):
        pl.when(units[first + i] >= 0)(lambda: copy(i).wait())
        return _

    # The interpreter's programs grow with every copy that is written out, and compiling them is most of its time.
    lax.fori_loop(0, ROWS_IN_FLIGHT, start, None, unroll=unroll)
    lax.fori_loop(0, ROWS_IN_FLIGHT, finish, None, unroll=unroll)


def _merge(units, numbers, tiles, _, pool, old, arrived, *, parts):
    row = pl.program_id(0)

    @pl.when(units[row] >= 0)
    def _():
        at = pool.at[units[row], lax.div(numbers[row], parts)]
        fetch = pltpu.make_async_copy(at, old, arrived)
        fetch.start()
        fetch.wait()
        sublane = lax.broadcasted_iota(jnp.int32, (4, 128), 0)
        mine = lax.div(sublane, 4 // parts) == lax.rem(numbers[row], parts)
        merged = jnp.where(mine, tiles[0].astype(jnp.int32), old[...].astype(jnp.int32))
        old[...] = merged.astype(jnp.uint8)
        put = pltpu.make_async_copy(old, at, arrived)
        put.start()
        put.wait()


def _call(kernel, pool, unit, number, tiles, rows, scratch, interpret):
    if not interpret:
        # Without this XLA may carry a small pool into VMEM and back, whole, on every call.
        pool = pltpu.with_memory_space_constraint(pool, pltpu.HBM)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    written = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(len(tiles) // rows,),
            in_specs=[pl.BlockSpec((rows, *tiles.shape[1:]), lambda i, *_: (i, 0, 0)), anywhere],
            out_specs=anywhere,
            scratch_shapes=scratch,
        ),
        input_output_aliases={3: 0},
        interpret=interpret,
    )(unit, number, tiles, pool)
    # A pinned pool that is an output of the program without anything in between is refused by XLA's verifier.
    return written if interpret else lax.optimization_barrier(written)


def _padded(tiles, unit, row):
    """Whole groups of rows in flight; the rows added are skipped."""
    more = -len(tiles) % ROWS_IN_FLIGHT
    tiles = jnp.pad(tiles, ((0, more), (0, 0), (0, 0)))
    return tiles, jnp.pad(unit, (0, more), constant_values=-1), jnp.pad(row, (0, more))
