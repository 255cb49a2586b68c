"""Write rows into a pool of tiles, in place: a DMA a row of whole tiles, else tiles are fetched and merged."""

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

    Tiles [n, k, s, 128] are k neighbours each, from ``row`` on. Rows must be distinct: DMAs in flight together have no
    order.
    """
    if tiles.ndim == 3:
        tiles = tiles[:, None]
    tiles, unit, row = _padded(tiles, unit, row)
    if not interpret:
        unit = _within(pool, unit, row, pool.shape[1] - tiles.shape[1])
    kernel = functools.partial(_write, count=tiles.shape[1], unroll=not interpret)
    scratch = [pltpu.SemaphoreType.DMA((ROWS_IN_FLIGHT,))]
    return _call(kernel, pool, (unit, row), tiles, scratch, interpret)


def write_parts(pool, unit, part, tiles, *, parts: int, interpret: Any = False):
    """Pool [units, tiles, s, 128] with part ``part`` [n] of a unit replaced; unit -1 is skipped.

    A unit's parts lie one after another, ``parts`` to a tile. Parts of one tile are merged into it together, so that
    a tile is fetched and put once for neighbours.

    Args:
        tiles: [n, s, 128], the same part again and again, so that it need not be moved.
    """
    tiles, unit, part = _padded(tiles, unit, part)
    if not interpret:
        unit = _within(pool, unit, part, pool.shape[1] * parts - 1)
    groups = unit.reshape(-1, ROWS_IN_FLIGHT), (part // parts).reshape(-1, ROWS_IN_FLIGHT)
    same = functools.reduce(jnp.logical_and, (array[:, :, None] == array[:, None] for array in groups))
    # Who fetches and puts the tile of each: the first of the group that lies in it.
    first = jnp.argmax(same, axis=2).astype(jnp.int32).reshape(-1)
    scratch = [pltpu.VMEM((ROWS_IN_FLIGHT, *pool.shape[2:]), pool.dtype), pltpu.SemaphoreType.DMA((ROWS_IN_FLIGHT,))]
    kernel = functools.partial(_merge, parts=parts, unroll=not interpret)
    return _call(kernel, pool, (unit, part, first), tiles, scratch, interpret)


def _write(units, rows, tiles, _, pool, arrived, *, count: int, unroll: bool):
    first = pl.program_id(0) * ROWS_IN_FLIGHT

    def copy(i):
        at = pool.at[units[first + i], pl.ds(rows[first + i], count)]
        return pltpu.make_async_copy(tiles.at[i], at, arrived.at[i])

    _each(lambda i: units[first + i] >= 0, lambda i: copy(i).start(), unroll)
    _each(lambda i: units[first + i] >= 0, lambda i: copy(i).wait(), unroll)


def _merge(units, numbers, firsts, tiles, _, pool, held, arrived, *, parts: int, unroll: bool):
    first = pl.program_id(0) * ROWS_IN_FLIGHT
    size = held.shape[1] * held.shape[2] // parts

    def leads(i):
        return (units[first + i] >= 0) & (firsts[first + i] == i)

    def at(i):
        return pool.at[units[first + i], lax.div(numbers[first + i], jnp.int32(parts))]

    def fetch(i):
        return pltpu.make_async_copy(at(i), held.at[i], arrived.at[i])

    def put(i):
        return pltpu.make_async_copy(held.at[i], at(i), arrived.at[i])

    def merge(i):
        tile = held.at[firsts[first + i]]
        element = lax.broadcasted_iota(jnp.int32, tile.shape, 0) * tile.shape[1]
        element = element + lax.broadcasted_iota(jnp.int32, tile.shape, 1)
        begin = lax.rem(numbers[first + i], jnp.int32(parts)) * size
        mine = (element >= begin) & (element < begin + size)
        # Narrow elements are not selected as they are on every chip.
        wide = jnp.int32 if tile.dtype == jnp.uint8 else tile.dtype
        tile[...] = jnp.where(mine, tiles[i].astype(wide), tile[...].astype(wide)).astype(tile.dtype)

    for when, act in (
        (leads, lambda i: fetch(i).start()),
        (leads, lambda i: fetch(i).wait()),
        (lambda i: units[first + i] >= 0, merge),
        (leads, lambda i: put(i).start()),
        (leads, lambda i: put(i).wait()),
    ):
        _each(when, act, unroll)


def _each(when, act, unroll: bool) -> None:
    """``act`` on every row of a group where ``when``."""

    def one(i, _):
        pl.when(when(i))(lambda: act(i))
        return _

    # The interpreter's programs grow with every copy that is written out, and compiling them is most of its time.
    lax.fori_loop(0, ROWS_IN_FLIGHT, one, None, unroll=unroll)


def _call(kernel, pool, scalars, tiles, scratch, interpret):
    if not interpret:
        # Without this XLA may carry a small pool into VMEM and back, whole, on every call.
        pool = pltpu.with_memory_space_constraint(pool, pltpu.HBM)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    rest = (0,) * (tiles.ndim - 1)
    written = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(len(tiles) // ROWS_IN_FLIGHT,),
            in_specs=[pl.BlockSpec((ROWS_IN_FLIGHT, *tiles.shape[1:]), lambda i, *_: (i, *rest)), anywhere],
            out_specs=anywhere,
            scratch_shapes=scratch,
        ),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=2 * tiles.nbytes, transcendentals=0),
        interpret=interpret,
    )(*scalars, tiles, pool)
    # A pinned pool that is an output of the program without anything in between is refused by XLA's verifier.
    return written if interpret else lax.optimization_barrier(written)


def _within(pool, unit, row, last: int):
    """Units of rows that a pool has, -1 for others: a check of compiled code would take as long as starting a copy."""
    return jnp.where((unit < pool.shape[0]) & (row >= 0) & (row <= last), unit, -1)


def _padded(tiles, unit, row):
    """Whole groups of rows in flight; the rows added are skipped."""
    more = -len(tiles) % ROWS_IN_FLIGHT
    tiles = jnp.pad(tiles, ((0, more), *((0, 0),) * (tiles.ndim - 1)))
    return tiles, jnp.pad(unit, (0, more), constant_values=-1), jnp.pad(row, (0, more))
