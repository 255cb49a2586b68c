"""Read rows of a pool of tiles by (unit, row), for a block table or a selection: one DMA a row, several in flight.

Rows that are neighbours come together, and a tile that several of them share comes once.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

ROWS_TOGETHER = 8
GROUPS_A_STEP = 8
STEP_BYTES = 1 << 20
"""Of a step, if it has more than one group."""
APART, NEIGHBOURS, SAME = range(3)
"""What the rows of a group are to each other."""


def read_rows(pool, unit, row, *, count: int = 1, interpret: Any = False):
    """Tiles [n, count · s, 128] of pool [units, rows, s, 128] from (unit, row) [n] on; zeros where the unit is -1."""
    rows, tile = len(unit), pool.shape[2:]
    together = ROWS_TOGETHER * count * math.prod(tile) * pool.dtype.itemsize
    groups = max(1, min(GROUPS_A_STEP, -(-rows // ROWS_TOGETHER), STEP_BYTES // together))
    more = -rows % (groups * ROWS_TOGETHER)
    unit, row = jnp.pad(unit, (0, more), constant_values=-1), jnp.pad(row, (0, more))
    if not interpret:
        # Compiled code does not look whether a row exists.
        unit, row = jnp.minimum(unit, pool.shape[0] - 1), jnp.clip(row, 0, pool.shape[1] - count)
        # Without this XLA may carry a small pool into VMEM, whole, on every call.
        pool = pltpu.with_memory_space_constraint(pool, pltpu.HBM)
    size = groups * ROWS_TOGETHER * count
    out = jax.ShapeDtypeStruct((len(unit) * count, *tile), pool.dtype)
    tiles = pl.pallas_call(
        functools.partial(_read, count=count, unroll=not interpret),
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(len(unit) * count // size,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((size, *tile), lambda i, *_: (i, 0, 0)),
            scratch_shapes=[pltpu.SemaphoreType.DMA((groups,))],
        ),
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=2 * out.size * out.dtype.itemsize, transcendentals=0),
        interpret=interpret,
    )(unit, row, _kinds(unit, row, count), pool)
    return tiles[: rows * count].reshape(rows, count * tile[0], tile[1])


def _kinds(unit, row, count: int):
    """What rows of every group are to each other, [n / 8] int32."""
    unit, row = unit.reshape(-1, ROWS_TOGETHER), row.reshape(-1, ROWS_TOGETHER)
    together = jnp.all((unit == unit[:, :1]) & (unit >= 0), axis=1)
    ahead = row - row[:, :1]
    follow = jnp.all(ahead == count * jnp.arange(ROWS_TOGETHER, dtype=row.dtype)[None], axis=1)
    alike = jnp.all(ahead == 0, axis=1)
    return jnp.where(together & follow, NEIGHBOURS, jnp.where(together & alike, SAME, APART)).astype(jnp.int32)


def _read(units, rows, kinds, pool, tiles, arrived, *, count: int, unroll: bool):
    groups = arrived.shape[0]

    def group(number, do):
        """``do`` (start, or wait for, a copy) for what comes of a group, and what that leaves to be filled."""
        place = pl.program_id(0) * groups + number
        first, begin, kind = place * ROWS_TOGETHER, number * (ROWS_TOGETHER * count), kinds[place]

        def copy(row, size: int):
            at = pool.at[units[first + row], pl.ds(rows[first + row], size)]
            return pltpu.make_async_copy(at, tiles.at[pl.ds(begin + row * count, size)], arrived.at[number])

        def each(row, _):
            pl.when(units[first + row] >= 0)(lambda: do(copy(row, count)))
            return _

        pl.when(kind == APART)(lambda: lax.fori_loop(0, ROWS_TOGETHER, each, None, unroll=unroll))
        pl.when((kind > APART) & (kind < SAME))(lambda: do(copy(0, ROWS_TOGETHER * count)))
        pl.when(kind > NEIGHBOURS)(lambda: do(copy(0, count)))
        return first, begin, kind

    def start(number, _):
        group(number, lambda copy: copy.start())
        return _

    def finish(number, _):
        first, begin, kind = group(number, lambda copy: copy.wait())

        @pl.when(kind == APART)
        def _skipped():
            def fill(row, _):
                @pl.when(units[first + row] < 0)
                def _():
                    tiles[pl.ds(begin + row * count, count)] = jnp.zeros((count, *tiles.shape[1:]), tiles.dtype)

                return _

            lax.fori_loop(0, ROWS_TOGETHER, fill, None, unroll=unroll)

        @pl.when(kind > NEIGHBOURS)
        def _again():
            found = tiles[pl.ds(begin, count)]
            for row in range(1, ROWS_TOGETHER):
                tiles[pl.ds(begin + row * count, count)] = found

        return _

    # The interpreter's programs grow with every copy that is written out, and compiling them is most of its time.
    lax.fori_loop(0, groups, start, None, unroll=unroll)
    lax.fori_loop(0, groups, finish, None, unroll=unroll)
