"""Read rows of a pool of tiles by (unit, row), for a block table or a selection: one DMA a row, several in flight."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

ROWS_IN_FLIGHT = 8


def read_rows(pool, unit, row, *, count: int = 1, interpret: Any = False):
    """Tiles [n, count · s, 128] of pool [units, rows, s, 128] from (unit, row) [n] on; zeros where the unit is -1."""
    rows = len(unit)
    more = -rows % ROWS_IN_FLIGHT
    unit, row = jnp.pad(unit, (0, more), constant_values=-1), jnp.pad(row, (0, more))
    tile = pool.shape[2:]
    if not interpret:
        # Without this XLA may carry a small pool into VMEM, whole, on every call.
        pool = pltpu.with_memory_space_constraint(pool, pltpu.HBM)
    tiles = pl.pallas_call(
        functools.partial(_read, count=count, unroll=not interpret),
        out_shape=jax.ShapeDtypeStruct((len(unit), count, *tile), pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(len(unit) // ROWS_IN_FLIGHT,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((ROWS_IN_FLIGHT, count, *tile), lambda i, *_: (i, 0, 0, 0)),
            scratch_shapes=[pltpu.SemaphoreType.DMA((ROWS_IN_FLIGHT,))],
        ),
        interpret=interpret,
    )(unit, row, pool)
    return tiles[:rows].reshape(rows, count * tile[0], tile[1])


def _read(units, rows, pool, tiles, arrived, *, count: int, unroll: bool):
    first = pl.program_id(0) * ROWS_IN_FLIGHT

    def copy(i):
        at = pool.at[units[first + i], pl.ds(rows[first + i], count)]
        return pltpu.make_async_copy(at, tiles.at[i], arrived.at[i])

    def start(i, _):
        pl.when(units[first + i] >= 0)(lambda: copy(i).start())
        return _

    def finish(i, _):
        pl.when(units[first + i] >= 0)(lambda: copy(i).wait())

        @pl.when(units[first + i] < 0)
        def _skipped():
            tiles[i] = jnp.zeros(tiles.shape[1:], tiles.dtype)

        return _

    # The interpreter's programs grow with every copy that is written out, and compiling them is most of its time.
    lax.fori_loop(0, ROWS_IN_FLIGHT, start, None, unroll=unroll)
    lax.fori_loop(0, ROWS_IN_FLIGHT, finish, None, unroll=unroll)
