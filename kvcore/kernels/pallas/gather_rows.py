"""Gather rows by (unit, row), for a block table or a selection, and decode them on the way: DMA, then lanes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import rows_codec
from kvcore.kernels.pallas.lines import column
from kvcore.kernels.pallas.stream import Stream, ahead, scratch
from kvcore.plan import Region
from kvcore.spec.layout import LANES

ROWS_A_STEP = 32


def gather_rows(region: Region, pools, unit, row, *, global_scale: float = 1.0, dtype=jnp.float32, interpret: Any):
    """Values [n, dim] of rows at (unit, row) [n] int32 of a region's pools; zeros where the unit is -1."""
    count = len(unit)
    more = -count % ROWS_A_STEP
    unit, row = jnp.pad(unit, (0, more), constant_values=-1), jnp.pad(row, (0, more))
    lines = rows_codec.line_count(region)
    if not interpret:
        # Without this XLA may carry a small pool into VMEM, whole, on every call.
        pools = [pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in pools]
    chunk = pl.BlockSpec((1, 1, ROWS_A_STEP), lambda i, *_: (i, 0, 0))
    values = pl.pallas_call(
        functools.partial(_gather, region=region, pools=len(pools), global_scale=global_scale),
        out_shape=jax.ShapeDtypeStruct((len(unit), lines * LANES), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(len(unit) // ROWS_A_STEP,),
            in_specs=[chunk, chunk, *[pl.BlockSpec(memory_space=pl.ANY)] * len(pools)],
            out_specs=pl.BlockSpec((ROWS_A_STEP, lines * LANES), lambda i, *_: (i, 0)),
            scratch_shapes=scratch(region, ROWS_A_STEP),
        ),
        interpret=interpret,
    )(unit, row, unit.reshape(-1, 1, ROWS_A_STEP), row.reshape(-1, 1, ROWS_A_STEP), *pools)
    return values[:count, : region.format.dim]


def _gather(units, rows, unit, row, *refs, region: Region, pools: int, global_scale: float):
    held, values, pools = refs[pools + 1 :], refs[pools], refs[:pools]
    step = pl.program_id(0)
    stream = Stream(region, pools, held, units, rows, ROWS_A_STEP)
    ahead(stream, step, pl.num_programs(0))
    words = stream.words(step)
    exists = column(unit[0]) >= 0
    for number, line in enumerate(rows_codec.decode(region, words, column(row[0]), global_scale)):
        kept = jnp.where(jnp.broadcast_to(exists, line.shape), line, 0.0)
        values[:, LANES * number : LANES * (number + 1)] = kept.astype(values.dtype)
