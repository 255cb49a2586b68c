"""Decode attention over rows of several pools, one softmax: the window's and the compressed entries', K = V.

A token's rows come in chunks by DMA, the next chunk of each source under the arithmetic of this one, and are decoded on
lanes; the softmax runs along, so nothing that was gathered is ever written out (DeepSeek-V4 paper section 2.3.3).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import compact, rows_codec, softmax
from kvcore.kernels.pallas.lines import buffers_of, column
from kvcore.kernels.pallas.stream import Stream, scratch
from kvcore.plan import Region
from kvcore.spec.layout import LANES

ROWS_A_STEP = 128


class Source(NamedTuple):
    """Rows of one region that every token attends to.

    Attributes:
        region: of the rows.
        pools: its pools.
        unit: [T, n] int32, -1 where there is no row.
        row: [T, n] int32.
        global_scale: of formats that have one.
    """

    region: Region
    pools: Any
    unit: Any
    row: Any
    global_scale: float = 1.0


def attend_rows(q, sources: list[Source], sink=None, *, interpret: Any):
    """Attend from q [T, H, d], scaled, fp32 -> out [T, H, d] fp32 and lse [T, H]; lse -inf and out 0 without a row.

    The sink [H] is one logit a head in the denominator alone: it counts once, has no value, and is not part of lse.
    """
    tokens, heads, dim = q.shape
    chunks = [-(-source.unit.shape[1] // ROWS_A_STEP) for source in sources]
    scalars, inputs, specs, held = [], [q], [pl.BlockSpec((1, heads, dim), lambda t, *_: (t, 0, 0))], []
    if sink is not None:
        array, spec = softmax.sink_input(sink, heads)
        inputs.append(array)
        specs.append(spec)
    first = 0
    for source, count in zip(sources, chunks, strict=True):
        more = ((0, 0), (0, count * ROWS_A_STEP - source.unit.shape[1]))
        unit, row = jnp.pad(source.unit, more, constant_values=-1), jnp.pad(source.row, more)
        numbers = jnp.arange(1, unit.shape[1] + 1, dtype=jnp.int32)[None]
        last = jnp.max(jnp.where(unit >= 0, numbers, 0), axis=1)
        needed = (last + ROWS_A_STEP - 1) // ROWS_A_STEP
        chunk = functools.partial(_chunk, first=first, count=count)
        pools, given, places = source.pools, [unit, row], [needed, unit.reshape(-1), row.reshape(-1)]
        if not interpret:
            pools = [pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in pools]
        if compact.narrow(source.region):
            given = [compact.in_pairs(unit, ROWS_A_STEP), compact.parts_of(source.region, unit, row)]
            pools, places = compact.flat(source.region, pools, unit, row)
            live = jnp.arange(count, dtype=jnp.int32)[None] < needed[:, None]
            places = [*compact.order(live.reshape(-1)), *places]
        scalars += places
        inputs += [array.reshape(-1, 1, ROWS_A_STEP) for array in given]
        specs += [pl.BlockSpec((1, 1, ROWS_A_STEP), lambda t, j, *_, chunk=chunk: (chunk(t, j), 0, 0))] * 2
        inputs += pools
        specs += [pl.BlockSpec(memory_space=pl.ANY)] * len(pools)
        held += (compact.rows_scratch if compact.narrow(source.region) else scratch)(source.region, ROWS_A_STEP)
        first += count
    regions = [(source.region, source.global_scale) for source in sources]
    narrow = all(compact.narrow(source.region) for source in sources)
    rows = tokens * first * ROWS_A_STEP
    out, lse = pl.pallas_call(
        functools.partial(_attend, regions=regions, chunks=chunks, sunk=sink is not None, interpret=interpret),
        out_shape=[
            jax.ShapeDtypeStruct((tokens, heads, dim), jnp.float32),
            jax.ShapeDtypeStruct((tokens, heads, LANES), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(tokens, first),
            in_specs=specs,
            out_specs=[
                pl.BlockSpec((1, heads, dim), lambda t, *_: (t, 0, 0)),
                pl.BlockSpec((1, heads, LANES), lambda t, *_: (t, 0, 0)),
            ],
            scratch_shapes=[*softmax.state(heads, dim), *held],
        ),
        compiler_params=compact.COMPILER if narrow else None,
        cost_estimate=pl.CostEstimate(
            flops=4 * rows * heads * dim, bytes_accessed=rows * dim, transcendentals=rows * heads
        ),
        interpret=interpret,
    )(*scalars, *inputs)
    return out, lse[:, :, 0]


def _chunk(t, j, first: int, count: int):
    """The chunk of a source that step j of token t works on, or the nearest one of that token."""
    return t * count + jnp.clip(j - first, 0, count - 1)


def _attend(*refs, regions, chunks, sunk: bool, interpret: Any):
    scalars = []
    for region, _ in regions:
        size = 2 + len(buffers_of(region)) if compact.narrow(region) else 3
        scalars.append(refs[:size])
        refs = refs[size:]
    q, refs = refs[0], refs[1:]
    sink, refs = (refs[0], refs[1:]) if sunk else (None, refs)
    given = []
    for region, _ in regions:
        size = 2 + len(buffers_of(region))
        given.append(refs[:size])
        refs = refs[size:]
    out, lse, largest, total, weighted, *refs = refs
    token, step = pl.program_id(0), pl.program_id(1)

    softmax.begin(step, largest, total, weighted)

    first = 0
    for number, ((region, global_scale), count) in enumerate(zip(regions, chunks, strict=True)):
        size = len(buffers_of(region)) + 1
        held, refs = refs[:size], refs[size:]
        unit, row, *pools = given[number]
        if compact.narrow(region):
            numbers, following, *places = scalars[number]
            stream = compact.Rows(region, pools, held, places, ROWS_A_STEP, interpret)
            order = numbers, following
            pl.when((token == 0) & (step == 0))(lambda stream=stream, order=order: stream.start(0, order))
            chunk = token * count + jnp.clip(step - first, 0, count - 1)
            pl.when((step >= first) & (step < first + count) & (numbers[chunk] >= 0))(
                functools.partial(_narrow, q, stream, chunk, order, unit, row, largest, total, weighted)
            )
            first += count
            continue
        needed, *places = scalars[number]
        stream = Stream(region, pools, held, *places, ROWS_A_STEP)
        pl.when((token == 0) & (step == 0))(lambda stream=stream: stream.start(0))

        @pl.when((step >= first) & (step < first + count))
        def _(
            stream=stream,
            first=first,
            count=count,
            needed=needed,
            region=region,
            scale=global_scale,
            unit=unit,
            row=row,
        ):
            chunk = token * count + step - first
            pl.when(chunk + 1 < pl.num_programs(0) * count)(lambda: stream.start(chunk + 1))
            words = stream.words(chunk)

            @pl.when(step - first < needed[token])
            def _():
                exists = column(unit[0]) >= 0
                lines = rows_codec.decode(region, words, column(row[0]), scale)
                lines = [jnp.where(jnp.broadcast_to(exists, line.shape), line, 0.0) for line in lines]
                seen = jnp.broadcast_to(unit[0] >= 0, (q.shape[1], ROWS_A_STEP))
                kept, weights = softmax.weigh(q, lines, seen, largest, total)
                softmax.add(weights, lines, kept, weighted)

        first += count

    softmax.end(step, largest, total, weighted, sink, out, lse)


def _narrow(q, stream, chunk, order, unit, parts, largest, total, weighted) -> None:
    """A step over rows of narrow codes, some of which exist."""
    lines = stream.lines(chunk, order, parts[0])
    exists = jnp.broadcast_to(unit[0] >= 0, (q.shape[1], ROWS_A_STEP))
    slices = [slice(LANES * number, LANES * (number + 1)) for number in range(len(lines))]
    logits = sum(_in_parts(q[0, :, some], line, contract=1) for some, line in zip(slices, lines, strict=True))
    kept, weights = softmax.weigh_logits(logits, exists, largest, total)
    for some, line in zip(slices, lines, strict=True):
        weighted[:, some] = weighted[:, some] * kept + _in_parts(weights, line, contract=0)


def _in_parts(left, right, *, contract: int):
    """Left [m, k] fp32 times right in bf16, without loss: the left one as a sum of three."""
    heads = len(left)
    products = compact.dot(compact.exact_parts(left, 3), right, contract=contract)
    return sum(products[first : first + heads] for first in range(0, 3 * heads, heads))
