"""Decode attention over rows of several pools, one softmax: the window's and the compressed entries', K = V.

A token's rows come in chunks by DMA, the next chunk of each source under the arithmetic of this one, and are decoded on
lanes; the softmax runs along, so nothing that was gathered is ever written out (DeepSeek-V4 paper section 2.3.3).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import compact, rings, rows_codec, softmax
from kvcore.kernels.pallas.lines import buffers_of, column
from kvcore.kernels.pallas.stream import Stream, scratch
from kvcore.plan import Region
from kvcore.spec.layout import LANES

ROWS_A_STEP = 128
NARROW_ROWS_A_STEP = 256
LATER = 96
"""Of those, whose copies are issued under the products and the softmax rather than under the decoding."""
PARTS_OF_FP32 = 3


class Source(NamedTuple):
    """Rows of one region that every token attends to.

    Attributes:
        region: of the rows.
        pools: its pools.
        unit: [T, n] int32, -1 where there is no row; of a ring, a token's are one slot's, row after row.
        row: [T, n] int32.
        global_scale: of formats that have one.
    """

    region: Region
    pools: Any
    unit: Any
    row: Any
    global_scale: float = 1.0


def attend_rows(q, sources: list[Source], sink=None, *, scale=1.0, interpret: Any):
    """Attend from q [T, H, d] -> out [T, H, d] fp32 and lse [T, H]; lse -inf and out 0 without a row.

    Args:
        q: fp32, or bf16, whose weights are rounded to bf16, too, where all sources are narrow rows.
        sources: whose rows are seen.
        sink: [H], one logit a head in the denominator alone: it counts once, has no value, and is not part of lse.
        scale: of the logits, a number or an fp32 scalar.
        interpret: as in ``pallas_call``.
    """
    tokens, heads, dim = q.shape
    narrow = [compact.narrow(source.region) for source in sources]
    sizes, chunks = [], []
    for source, coded in zip(sources, narrow, strict=True):
        rows = source.unit.shape[1]
        sizes.append(NARROW_ROWS_A_STEP if coded and rows > ROWS_A_STEP else ROWS_A_STEP)
        chunks.append(1 if rings.fits(source.region) else -(-rows // sizes[-1]))
    scalars, inputs, held = [], [], []
    if not all(narrow):
        inputs.append(q.astype(jnp.float32) * scale)
    if any(narrow):
        rounded = all(narrow) and q.dtype == jnp.bfloat16
        inputs.append(q if rounded else compact.exact_parts(q.astype(jnp.float32), PARTS_OF_FP32))
    specs = [pl.BlockSpec((1, *array.shape[1:]), lambda t, *_: (t, 0, 0)) for array in inputs]
    if sink is not None:
        array, spec = softmax.sink_input(sink, heads)
        inputs.append(array)
        specs.append(spec)
    first = 0
    for source, count, size in zip(sources, chunks, sizes, strict=True):
        pools = source.pools
        if not interpret:
            pools = [pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in pools]
        pools, places, given, scratches = _streamed(source, pools, count, size)
        chunk = functools.partial(_chunk, first=first, count=count)
        scalars += places
        inputs += [array.reshape(-1, 1, size) for array in given]
        specs += [pl.BlockSpec((1, 1, size), lambda t, j, *_, chunk=chunk: (chunk(t, j), 0, 0))] * len(given)
        inputs += pools
        specs += [pl.BlockSpec(memory_space=pl.ANY)] * len(pools)
        held += scratches
        first += count
    scalars.append(jnp.asarray(scale, jnp.float32).reshape(1))
    regions = [(source.region, source.global_scale) for source in sources]
    rows = tokens * sum(count * size for count, size in zip(chunks, sizes, strict=True))
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
        compiler_params=compact.COMPILER if all(narrow) else None,
        cost_estimate=pl.CostEstimate(
            flops=4 * rows * heads * dim, bytes_accessed=rows * dim, transcendentals=rows * heads
        ),
        interpret=interpret,
    )(*scalars, *inputs)
    return out, lse[:, :, 0]


def _streamed(source: Source, pools, count: int, size: int):
    """How a source's rows come in ``count`` chunks of ``size`` a token.

    Returns (pools, scalars, what comes with each chunk, scratch).
    """
    region = source.region
    if rings.fits(region):
        unit, first, rows = rings.seen(region, source.unit, source.row)
        places = [*compact.order(unit >= 0), jnp.clip(unit, 0, len(pools[0]) - 1), first, rows]
        return pools, places, [], rings.scratch(region)
    more = ((0, 0), (0, count * size - source.unit.shape[1]))
    unit, row = jnp.pad(source.unit, more, constant_values=-1), jnp.pad(source.row, more)
    numbers = jnp.arange(1, unit.shape[1] + 1, dtype=jnp.int32)[None]
    last = jnp.max(jnp.where(unit >= 0, numbers, 0), axis=1)
    needed = (last + size - 1) // size
    if not compact.narrow(region):
        return pools, [needed, unit.reshape(-1), row.reshape(-1)], [unit, row], scratch(region, size)
    given = [compact.in_fours(unit), compact.begins_of(region, unit, row)]
    live = jnp.arange(count, dtype=jnp.int32)[None] < needed[:, None]
    pools = compact.flat(region, pools[0], unit, row, size)
    return pools, [*compact.order(live.reshape(-1))], given, compact.rows_scratch(region, size)


def _chunk(t, j, first: int, count: int):
    """The chunk of a source that step j of token t works on, or the nearest one of that token."""
    return t * count + jnp.clip(j - first, 0, count - 1)


def _attend(*refs, regions, chunks, sunk: bool, interpret: Any):
    scalars = []
    for region, _ in regions:
        size = 5 if rings.fits(region) else 2 if compact.narrow(region) else 3
        scalars.append(refs[:size])
        refs = refs[size:]
    scale, *refs = refs
    narrow = [compact.narrow(region) for region, _ in regions]
    q, refs = (None, refs) if all(narrow) else (refs[0], refs[1:])
    parts, refs = (refs[0], refs[1:]) if any(narrow) else (None, refs)
    sink, refs = (refs[0], refs[1:]) if sunk else (None, refs)
    given = []
    for region, _ in regions:
        size = len(buffers_of(region)) + (0 if rings.fits(region) else 3 if compact.narrow(region) else 2)
        given.append(refs[:size])
        refs = refs[size:]
    out, lse, largest, total, weighted, *refs = refs
    token, step = pl.program_id(0), pl.program_id(1)
    asked, state = (parts, scale), (largest, total, weighted)

    softmax.begin(step, *state)

    first = 0
    for number, ((region, global_scale), count) in enumerate(zip(regions, chunks, strict=True)):
        size = 4 if compact.narrow(region) and not rings.fits(region) else len(buffers_of(region)) + 1
        held, refs = refs[:size], refs[size:]
        if rings.fits(region):
            numbers, following, units, *seen = scalars[number]
            ring = rings.Ring(region, given[number][0], held, units, interpret)
            order = numbers, following
            pl.when((token == 0) & (step == 0))(lambda ring=ring, order=order: ring.start(0, order))
            pl.when((step == first) & (numbers[token] >= 0))(
                functools.partial(_in_ring, asked, ring, token, order, seen, state)
            )
            first += count
            continue
        unit, row, *pools = given[number]
        if compact.narrow(region):
            order = scalars[number]
            stream = compact.Rows(region, *pools, order, held, interpret)
            pl.when((token == 0) & (step == 0))(stream.begin)
            chunk = token * count + jnp.clip(step - first, 0, count - 1)
            pl.when((step >= first) & (step < first + count) & (order[0][chunk] >= 0))(
                functools.partial(_narrow, asked, stream, chunk, unit, row, state)
            )
            last = (token == pl.num_programs(0) - 1) & (step == pl.num_programs(1) - 1)
            pl.when(last)(stream.end)
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


def _in_ring(asked, ring, token, order, seen, state) -> None:
    """A token's step over its ring."""
    first, count = (array[token] for array in seen)
    lines = ring.lines(token, order, first, count)
    exists = rings.among(ring.region, lax.broadcasted_iota(jnp.int32, (1, len(lines[0])), 1), first, count)
    _weigh(asked, lines, exists, state)


def _narrow(asked, stream, chunk, unit, begins, state) -> None:
    """A step over rows of narrow codes, some of which exist."""
    lines = stream.lines(chunk, begins[0], later=unit.shape[2] * LATER // NARROW_ROWS_A_STEP)
    _weigh(asked, lines, unit[0] >= 0, state)


def _weigh(asked, lines, exists, state) -> None:
    """Take lines [K, 128] bf16 into the softmax where ``exists`` [1, K].

    ``asked``: q as parts, one under the other, and the scale of its logits.
    """
    (q, scale), (largest, total, weighted) = asked, state
    heads, rows = len(weighted), jnp.concatenate(lines, axis=1)
    logits = _summed(compact.dot(q[0], rows), heads) * scale[0]
    kept, weights = softmax.weigh_logits(logits, jnp.broadcast_to(exists, logits.shape), largest, total)
    weights = compact.exact_parts(weights, q.shape[1] // heads)
    weighted[...] = weighted[...] * kept + _summed(compact.dot(weights, rows, contract=0), heads)


def _summed(products, heads: int):
    """Of a left side in parts, the sum over them."""
    return sum(products[first : first + heads] for first in range(0, len(products), heads))
