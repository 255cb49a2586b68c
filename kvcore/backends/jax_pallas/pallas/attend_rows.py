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

from kvcore.backends.jax_pallas.pallas import rows_codec
from kvcore.backends.jax_pallas.pallas.lines import buffers_of, column
from kvcore.backends.jax_pallas.pallas.stream import Stream, scratch
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
        inputs.append(jnp.broadcast_to(sink.astype(jnp.float32)[:, None], (heads, LANES)))
        specs.append(pl.BlockSpec((heads, LANES), lambda *_: (0, 0)))
    first = 0
    for source, count in zip(sources, chunks, strict=True):
        more = ((0, 0), (0, count * ROWS_A_STEP - source.unit.shape[1]))
        unit, row = jnp.pad(source.unit, more, constant_values=-1), jnp.pad(source.row, more)
        numbers = jnp.arange(1, unit.shape[1] + 1, dtype=jnp.int32)[None]
        last = jnp.max(jnp.where(unit >= 0, numbers, 0), axis=1)
        scalars += [unit.reshape(-1), row.reshape(-1), (last + ROWS_A_STEP - 1) // ROWS_A_STEP]
        chunk = functools.partial(_chunk, first=first, count=count)
        inputs += [unit.reshape(-1, 1, ROWS_A_STEP), row.reshape(-1, 1, ROWS_A_STEP)]
        specs += [pl.BlockSpec((1, 1, ROWS_A_STEP), lambda t, j, *_, chunk=chunk: (chunk(t, j), 0, 0))] * 2
        pools = source.pools
        inputs += pools if interpret else [pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in pools]
        specs += [pl.BlockSpec(memory_space=pl.ANY)] * len(pools)
        held += scratch(source.region, ROWS_A_STEP)
        first += count
    state = [pltpu.VMEM((heads, LANES), jnp.float32)] * 2 + [pltpu.VMEM((heads, dim), jnp.float32)]
    regions = [(source.region, source.global_scale) for source in sources]
    out, lse = pl.pallas_call(
        functools.partial(_attend, regions=regions, chunks=chunks, sunk=sink is not None),
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
            scratch_shapes=[*state, *held],
        ),
        interpret=interpret,
    )(*scalars, *inputs)
    return out, lse[:, :, 0]


def _chunk(t, j, first: int, count: int):
    """The chunk of a source that step j of token t works on, or the nearest one of that token."""
    return t * count + jnp.clip(j - first, 0, count - 1)


def _attend(*refs, regions, chunks, sunk: bool):
    scalars, refs = refs[: 3 * len(regions)], refs[3 * len(regions) :]
    q, refs = refs[0], refs[1:]
    sink, refs = (refs[0], refs[1:]) if sunk else (None, refs)
    given = []
    for region, _ in regions:
        size = 2 + len(buffers_of(region))
        given.append(refs[:size])
        refs = refs[size:]
    out, lse, largest, total, weighted, *refs = refs
    token, step = pl.program_id(0), pl.program_id(1)

    @pl.when(step == 0)
    def _():
        largest[...] = jnp.full(largest.shape, -jnp.inf, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        weighted[...] = jnp.zeros(weighted.shape, jnp.float32)

    first = 0
    for number, ((region, global_scale), count) in enumerate(zip(regions, chunks, strict=True)):
        size = len(buffers_of(region)) + 1
        held, refs = refs[:size], refs[size:]
        units, rows, needed = scalars[3 * number : 3 * number + 3]
        unit, row, *pools = given[number]
        stream = Stream(region, pools, held, units, rows, ROWS_A_STEP)
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
                _softmax_sum(q, lines, unit[0] >= 0, largest, total, weighted)

        first += count

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        sums = total[...]
        rest = jnp.where(sums == 0, -jnp.inf, largest[...] + jnp.log(sums))
        lse[0] = rest
        shrink = 1 / jnp.where(sums == 0, 1, sums)
        if sink is not None:
            # sigmoid(lse - sink), written so that neither exponential overflows.
            shrink = jnp.where(sums == 0, 0, shrink / (1 + jnp.exp(sink[...] - rest)))
        for line in range(weighted.shape[1] // LANES):
            some = slice(LANES * line, LANES * (line + 1))
            out[0, :, some] = weighted[:, some] * shrink


def _softmax_sum(q, lines, exists, largest, total, weighted) -> None:
    """Take rows, lines [n, 128] each, into the softmax; its state is the same in every lane."""
    logits = sum(_product(q[0, :, LANES * n : LANES * (n + 1)], line, contract=1) for n, line in enumerate(lines))
    logits = jnp.where(jnp.broadcast_to(exists, logits.shape), logits, -jnp.inf)
    before = largest[:, :1]
    higher = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
    base = jnp.where(higher == -jnp.inf, 0, higher)
    weights = jnp.where(jnp.broadcast_to(exists, logits.shape), jnp.exp(logits - base), 0)
    kept = jnp.exp(before - base)
    largest[...] = jnp.broadcast_to(higher, largest.shape)
    total[...] = total[...] * kept + jnp.sum(weights, axis=1, keepdims=True)
    for n, line in enumerate(lines):
        some = slice(LANES * n, LANES * (n + 1))
        weighted[:, some] = weighted[:, some] * kept + _product(weights, line, contract=0)


def _product(left, right, *, contract: int):
    return lax.dot_general(
        left,
        right,
        (((1,), (contract,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
