"""Gather rows by (unit, row), for a block table or a selection, and decode them on the way: DMA, then lanes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import compact, rows_codec
from kvcore.kernels.pallas.lines import column
from kvcore.kernels.pallas.stream import Stream, ahead, scratch
from kvcore.plan import Region
from kvcore.spec.layout import LANES

ROWS_A_STEP = 256
ROWS_AT_ONCE = 32
"""Of formats that are decoded line by line in fp32."""


def gather_rows(region: Region, pools, unit, row, *, global_scale: float = 1.0, dtype=jnp.float32, interpret: Any):
    """Values [n, dim] of rows at (unit, row) [n] int32 of a region's pools; zeros where the unit is -1."""
    count, narrow = len(unit), compact.narrow(region)
    size = ROWS_A_STEP if narrow else ROWS_AT_ONCE
    more = -count % size
    unit, row = jnp.pad(unit, (0, more), constant_values=-1), jnp.pad(row, (0, more))
    lines = rows_codec.line_count(region)
    if not interpret:
        # Without this XLA may carry a small pool into VMEM, whole, on every call.
        pools = [pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in pools]
    shape, total = (-1, 1, size), len(unit)
    if narrow:
        unit, row = compact.out_of_fours(unit), compact.out_of_fours(row)
        given = [compact.begins_of(region, unit, row).reshape(shape)]
        order = compact.order(jnp.any(unit.reshape(shape) >= 0, axis=(1, 2)))
        pools, scalars = [*compact.flat(region, pools[0], unit, row, size)], [*order]
    else:
        given, scalars = [unit.reshape(shape), row.reshape(shape)], [unit, row]
    chunk = pl.BlockSpec((1, 1, size), lambda i, *_: (i, 0, 0))
    values = pl.pallas_call(
        functools.partial(_gather_narrow, region=region, interpret=interpret)
        if narrow
        else functools.partial(_gather, region=region, pools=len(pools), global_scale=global_scale),
        out_shape=jax.ShapeDtypeStruct((total, lines * LANES), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(total // size,),
            in_specs=[*[chunk] * len(given), *[pl.BlockSpec(memory_space=pl.ANY)] * len(pools)],
            out_specs=pl.BlockSpec((size, lines * LANES), lambda i, *_: (i, 0)),
            scratch_shapes=compact.rows_scratch(region, size) if narrow else scratch(region, size),
        ),
        compiler_params=compact.COMPILER if narrow else None,
        cost_estimate=pl.CostEstimate(
            flops=2 * total * lines * LANES * (LANES if narrow else 1),
            bytes_accessed=total * lines * LANES * (1 + jnp.dtype(dtype).itemsize),
            transcendentals=0,
        ),
        interpret=interpret,
    )(*scalars, *given, *pools)
    return values[:count, : region.format.dim]


def _gather(units, rows, unit, row, *refs, region: Region, pools: int, global_scale: float):
    held, values, pools = refs[pools + 1 :], refs[pools], refs[:pools]
    step = pl.program_id(0)
    stream = Stream(region, pools, held, units, rows, ROWS_AT_ONCE)
    ahead(stream, step, pl.num_programs(0))
    words = stream.words(step)
    exists = column(unit[0]) >= 0
    for number, line in enumerate(rows_codec.decode(region, words, column(row[0]), global_scale)):
        kept = jnp.where(jnp.broadcast_to(exists, line.shape), line, 0.0)
        values[:, LANES * number : LANES * (number + 1)] = kept.astype(values.dtype)


def _gather_narrow(numbers, following, begins, pool, places, values, *held, region: Region, interpret: Any):
    step = pl.program_id(0)
    stream = compact.Rows(region, pool, places, (numbers, following), held, interpret)
    pl.when(step == 0)(stream.begin)

    @pl.when(numbers[step] >= 0)
    def _():
        for number, line in enumerate(stream.lines(step, begins[0])):
            values[:, LANES * number : LANES * (number + 1)] = line.astype(values.dtype)

    @pl.when(numbers[step] == -1)
    def _():
        values[...] = jnp.zeros(values.shape, values.dtype)

    pl.when(step == pl.num_programs(0) - 1)(stream.end)
