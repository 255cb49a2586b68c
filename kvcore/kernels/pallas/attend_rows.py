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

from kvcore.kernels.pallas import block_lines, compact, rings, rows_codec, softmax
from kvcore.kernels.pallas.lines import buffers_of, column, line
from kvcore.kernels.pallas.stream import Stream, scratch
from kvcore.plan import Region
from kvcore.spec.layout import LANES

ROWS_A_STEP = 128
NARROW_ROWS_A_STEP = 256
LATER = 112
"""Of those, whose copies are issued under the products and the softmax rather than under the decoding."""
PARTS_OF_FP32 = 3
TOKENS_A_STEP = 2
"""Where all rows are narrow: while one token's products are waited for, the others' are worked on."""
RINGS_A_STEP = 4
"""Where each token sees rows of its ring alone."""


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
    alone = len(sources) == 1 and rings.fits(sources[0].region)
    steps = -(-tokens // (RINGS_A_STEP if alone else TOKENS_A_STEP if all(narrow) else 1))
    group = -(-tokens // steps)
    q = _filled(q, group * steps)
    sources = [one._replace(unit=_filled(one.unit, len(q), -1), row=_filled(one.row, len(q))) for one in sources]
    sizes, chunks = [], []
    for source, coded in zip(sources, narrow, strict=True):
        rows = source.unit.shape[1]
        sizes.append(NARROW_ROWS_A_STEP if coded and rows > ROWS_A_STEP else ROWS_A_STEP)
        chunks.append(1 if rings.fits(source.region) else -(-rows // sizes[-1]))
    scalars, inputs, held = [], [], []
    if not all(narrow):
        inputs.append(q.astype(jnp.float32) * (scale * softmax.LOG2E))
    if any(narrow):
        rounded = all(narrow) and q.dtype == jnp.bfloat16
        inputs.append(q if rounded else compact.exact_parts(q.astype(jnp.float32), PARTS_OF_FP32))
    # Of rings alone a step weighs what the one before decoded.
    at = (lambda t, *_: (jnp.maximum(t - 1, 0), 0, 0)) if alone else lambda t, *_: (t, 0, 0)
    specs = [pl.BlockSpec((group, *array.shape[1:]), at) for array in inputs]
    if sink is not None:
        array, spec = softmax.sink_input(sink, heads)
        inputs.append(array)
        specs.append(spec)
    first = 0
    for source, count, size in zip(sources, chunks, sizes, strict=True):
        pools = source.pools
        if not interpret:
            pools = [pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in pools]
        pools, places, given, scratches = _streamed(source, pools, count, size, group)
        chunk = functools.partial(_chunk, first=first, count=count)
        scalars += places
        inputs += [array.reshape(-1, 1, group * size) for array in given]
        specs += [pl.BlockSpec((1, 1, group * size), lambda t, j, *_, chunk=chunk: (chunk(t, j), 0, 0))] * len(given)
        inputs += pools
        specs += [pl.BlockSpec(memory_space=pl.ANY)] * len(pools)
        held += scratches
        first += count
    scalars.append((jnp.asarray(scale, jnp.float32) * softmax.LOG2E).reshape(1))
    state, lse = softmax.state(group * heads, dim), (heads, LANES)
    if alone:
        most = rings.size(sources[0].region, sources[0].unit.shape[1])
        state = [pltpu.VMEM((group, most // 2, dim), jnp.int32), pltpu.VMEM((group, 1, most), jnp.float32)]
        lse = 1, heads + -heads % LANES
    regions = [(source.region, source.global_scale, source.unit.shape[1]) for source in sources]
    rows = len(q) * sum(count * size for count, size in zip(chunks, sizes, strict=True))
    out, lse = pl.pallas_call(
        functools.partial(
            _attend_rings if alone else _attend,
            regions=regions,
            chunks=chunks,
            sunk=sink is not None,
            interpret=interpret,
        ),
        out_shape=[jax.ShapeDtypeStruct((len(q), *shape), jnp.float32) for shape in ((heads, dim), lse)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(steps + alone, first),
            in_specs=specs,
            out_specs=[pl.BlockSpec((group, *shape), at) for shape in ((heads, dim), lse)],
            scratch_shapes=[*state, *held],
        ),
        compiler_params=compact.COMPILER if all(narrow) else None,
        cost_estimate=pl.CostEstimate(
            flops=4 * rows * heads * dim, bytes_accessed=rows * dim, transcendentals=rows * heads
        ),
        interpret=interpret,
    )(*scalars, *inputs)
    return out[:tokens], lse[:tokens, 0, :heads] if alone else lse[:tokens, :, 0]


def _filled(array, tokens: int, value: int = 0):
    """An array of tokens, with more of them that are ``value``."""
    more = ((0, tokens - len(array)), *((0, 0),) * (array.ndim - 1))
    return jnp.pad(array, more, constant_values=value)


def _streamed(source: Source, pools, count: int, size: int, group: int):
    """How a source's rows come in ``count`` chunks of ``size`` a token, of ``group`` tokens each.

    Returns (pools, scalars, what comes with each chunk, scratch).
    """
    region = source.region
    if rings.fits(region):
        unit, first, rows = rings.seen(region, source.unit, source.row)
        live = jnp.any(unit.reshape(-1, group) >= 0, axis=1)
        places = [*compact.order(live), jnp.clip(unit, 0, len(pools[0]) - 1), first, rows]
        return pools, places, [], rings.scratch(region, group, source.unit.shape[1])
    more = ((0, 0), (0, count * size - source.unit.shape[1]))
    unit, row = jnp.pad(source.unit, more, constant_values=-1), jnp.pad(source.row, more)
    if not compact.narrow(region):
        numbers = jnp.arange(1, unit.shape[1] + 1, dtype=jnp.int32)[None]
        last = jnp.max(jnp.where(unit >= 0, numbers, 0), axis=1)
        needed = (last + size - 1) // size
        return pools, [needed, unit.reshape(-1), row.reshape(-1)], [unit, row], scratch(region, size)
    # A chunk has rows of one token after those of the one before.
    shape = -1, group, count, size
    unit, row = (array.reshape(shape).swapaxes(1, 2).reshape(-1, group * size) for array in (unit, row))
    given = [compact.in_fours(unit), compact.begins_of(region, unit, row)]
    live = jnp.any(unit >= 0, axis=1)
    pools = compact.flat(region, pools[0], unit, row, group * size)
    return pools, [*compact.order(live)], given, compact.rows_scratch(region, group * size)


def _chunk(t, j, first: int, count: int):
    """The chunk of a source that step j of tokens t works on, or the nearest one of these tokens."""
    return t * count + jnp.clip(j - first, 0, count - 1)


def _attend_rings(*refs, regions, chunks, sunk: bool, interpret: Any):
    """Where each token sees rows of its ring alone: a step weighs rows that the one before decoded, and decodes some.

    The two wait for nothing of each other: while one waits for products, the vector unit works on the other.
    """
    ((region, _, most),), _ = regions, chunks
    (numbers, following, units, *seen), (scale, q, *refs) = refs[:5], refs[5:]
    sink, refs = (refs[0], refs[1:]) if sunk else (None, refs)
    pool, out, lse, rows, exists, *held = refs
    step, last = pl.program_id(0), pl.num_programs(0) - 1
    ring = rings.Ring(region, pool, held, units, most, interpret)
    order = numbers, following

    @pl.when(step == 0)
    def _():
        ring.start(0, order)
        rows[...] = jnp.zeros(rows.shape, rows.dtype)
        exists[...] = jnp.zeros(exists.shape, exists.dtype)

    live = (step < last) & (numbers[jnp.minimum(step, last - 1)] >= 0)
    found = ring.rows(jnp.minimum(step, last - 1), order, seen, live=live)
    factor = block_lines.e4m3_factor(block_lines.casts_e4m3(interpret))
    _finish((q, scale, factor), rows, exists, sink, out, lse)
    for token, (lines, are) in enumerate(found):
        rows[token] = pltpu.bitcast(lines, jnp.int32)
        exists[token] = jnp.where(are, 1.0, 0.0)


def _finish(asked, rows, exists, sink, out, lse) -> None:
    """Weigh all rows that tokens see, references to words of them and to where they exist, as ``_weigh`` does."""
    (q, _, factor), (tokens, heads, _) = asked, out.shape
    rows = [compact.bf16(rows[token]) for token in range(tokens)]
    logits = _logits(asked, rows, [exists[token] > 0 for token in range(tokens)], heads)
    largest = jnp.max(logits, axis=1, keepdims=True)
    base = jnp.where(largest == -jnp.inf, 0, largest)
    weights = jnp.exp2(logits - base)
    total = jnp.sum(weights, axis=1, keepdims=True)
    rest, shrink = softmax.of_powers(base, total)
    for token, mine in enumerate(rows):
        some = slice(heads * token, heads * (token + 1))
        by = softmax.sunk(shrink[some], total[some], rest[some], None if sink is None else sink[:, :1])
        lse[token] = line(rest[some])
        parts = compact.exact_parts(weights[some], q.shape[1] // heads)
        out[token] = _summed(compact.dot(parts, mine, contract=0), heads) * (by * factor)


def _attend(*refs, regions, chunks, sunk: bool, interpret: Any):
    scalars = []
    for region, *_ in regions:
        size = 5 if rings.fits(region) else 2 if compact.narrow(region) else 3
        scalars.append(refs[:size])
        refs = refs[size:]
    scale, *refs = refs
    narrow = [compact.narrow(region) for region, *_ in regions]
    q, refs = (None, refs) if all(narrow) else (refs[0], refs[1:])
    parts, refs = (refs[0], refs[1:]) if any(narrow) else (None, refs)
    sink, refs = (refs[0], refs[1:]) if sunk else (None, refs)
    given = []
    for region, *_ in regions:
        size = len(buffers_of(region)) + (0 if rings.fits(region) else 3 if compact.narrow(region) else 2)
        given.append(refs[:size])
        refs = refs[size:]
    out, lse, largest, total, weighted, *refs = refs
    token, step = pl.program_id(0), pl.program_id(1)
    factor = block_lines.e4m3_factor(block_lines.casts_e4m3(interpret))
    asked, state = (parts, scale, factor), (largest, total, weighted)

    softmax.begin(step, *state)

    first = 0
    for number, ((region, global_scale, most), count) in enumerate(zip(regions, chunks, strict=True)):
        size = 4 if compact.narrow(region) and not rings.fits(region) else len(buffers_of(region)) + 1
        held, refs = refs[:size], refs[size:]
        if rings.fits(region):
            numbers, following, units, *seen = scalars[number]
            ring = rings.Ring(region, given[number][0], held, units, most, interpret)
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
            stream = compact.Rows(region, *pools, order, held, interpret, apart=True)
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


def _in_ring(asked, ring, step, order, seen, state) -> None:
    """A step over rings, one a token."""
    rows, exists = zip(*ring.rows(step, order, seen), strict=True)
    _weigh(asked, rows, exists, state)


def _narrow(asked, stream, chunk, unit, begins, state) -> None:
    """A step over rows of narrow codes, some of which exist."""
    count, tokens = unit.shape[2], len(asked[0])
    lines = stream.lines(chunk, begins[0], later=count * LATER // NARROW_ROWS_A_STEP)
    rows, exists = jnp.concatenate(lines, axis=1), unit[0] >= 0
    some = [slice(first, first + count // tokens) for first in range(0, count, count // tokens)]
    _weigh(asked, [rows[one] for one in some], [exists[:, one] for one in some], state)


def _weigh(asked, rows, exists, state) -> None:
    """Take rows [K, d] bf16 of each token into the softmax where ``exists`` [1, K].

    ``asked``: q as parts, one under the other; the scale of its logits, in powers of two; the factor of rows.
    """
    (q, _, factor), (largest, total, weighted) = asked, state
    heads = len(weighted) // len(rows)
    kept, weights = softmax.weigh_logits(_logits(asked, rows, exists, heads), None, largest, total, power=jnp.exp2)
    weights = weights * factor
    for token, mine in enumerate(rows):
        some = slice(heads * token, heads * (token + 1))
        parts = compact.exact_parts(weights[some], q.shape[1] // heads)
        weighted[some] = weighted[some] * kept[some] + _summed(compact.dot(parts, mine, contract=0), heads)


def _logits(asked, rows, exists, heads: int):
    """Logits [all heads, K] of tokens' rows, one token's under another's; -inf where there is no row."""
    q, scale, factor = asked
    logits = [_summed(compact.dot(q[token], mine), heads) for token, mine in enumerate(rows)]
    seen = jnp.concatenate([jnp.broadcast_to(one, (heads, one.shape[1])) for one in exists], axis=0)
    return jnp.where(seen, jnp.concatenate(logits, axis=0) * (scale[0] * factor), -jnp.inf)


def _summed(products, heads: int):
    """Of a left side in parts, the sum over them."""
    return sum(products[first : first + heads] for first in range(0, len(products), heads))
