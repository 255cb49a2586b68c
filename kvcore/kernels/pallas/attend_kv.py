"""Decode attention over paged keys and values, a row a head: whole blocks by DMA, one softmax for all heads.

A block holds every head's rows side by side. All query heads are multiplied with all of them at once, which a matrix
unit does in the time that the block takes to arrive, and what a query head does not share is masked. The next blocks
come under the arithmetic of these; nothing that was gathered is ever written out.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import rows_codec, softmax
from kvcore.kernels.pallas.lines import buffers_of
from kvcore.kernels.pallas.stream import Stream, ahead, scratch
from kvcore.plan import Region
from kvcore.spec.layout import LANES

TILES_AT_ONCE = 256
"""Tiles that are decoded at a time; small blocks come several in a step, large ones are taken in pieces."""
BLOCK_BYTES = 1 << 20
"""Of a block in one pool; two of each pool are held at a time."""


def supports(keys: Region, values: Region) -> bool:
    """True for blocks whose rows of keys and values lie alike, each in one buffer."""
    alike = (keys.heads, keys.rows, keys.growth) == (values.heads, values.rows, "block")
    if not alike or not all(rows_codec.decodes(region) for region in (keys, values)):
        return False
    buffers = [buffers_of(region) for region in (keys, values)]
    if [len(some) for some in buffers] != [1, 1] or buffers[0][0].parts != buffers[1][0].parts:
        return False
    small = all(region.unit.nbytes <= BLOCK_BYTES for region in (keys, values))
    return small and keys.heads * keys.rows % buffers[0][0].parts == 0


def _piece(tiles: int, parts: int, heads: int) -> int:
    """Tiles of a piece of a block: every piece begins with the same head, and pieces are as few as can be."""
    for pieces in range(-(-tiles // TILES_AT_ONCE), tiles + 1):
        if tiles % pieces == 0 and tiles // pieces * parts % heads == 0:
            return tiles // pieces
    return tiles


def attend_kv(keys: Region, values: Region, key_pool, value_pool, blocks, first, last, q, sink=None, *, interpret: Any):
    """Attend from q [T, H, key_dim], scaled -> out [T, H, value_dim] fp32 and lse [T, H]; -inf and 0 without a row.

    Args:
        keys, values: the regions; H is a multiple of their heads.
        key_pool, value_pool: their pools.
        blocks: [T, n] int32 units of each token's rows, in order; -1 is not read.
        first, last: [T] int32 first and last position that each token sees; last -1: none.
        q: fp32.
        sink: [H], one logit a head in the denominator alone, or None.
        interpret: as in ``pallas_call``.
    """
    tokens, heads, dim = q.shape
    parts, tiles = buffers_of(keys)[0].parts, key_pool.shape[1]
    count = max(1, min(blocks.shape[1], TILES_AT_ONCE // tiles))
    piece = _piece(tiles, parts, keys.heads)
    blocks = jnp.pad(blocks, ((0, 0), (0, -blocks.shape[1] % count)), constant_values=-1)
    steps = blocks.shape[1] // count
    key_lines, value_lines = rows_codec.line_count(keys), rows_codec.line_count(values)
    q = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, 0), (0, key_lines * LANES - dim)))
    # Of the rows of one piece, those that are the n-th of their tiles: each one's position, and who shares its head.
    row = jnp.arange(count * piece, dtype=jnp.int32)[None] * parts + jnp.arange(parts, dtype=jnp.int32)[:, None]
    position = (row // keys.heads)[:, None]
    shared = (jnp.arange(heads, dtype=jnp.int32) * keys.heads // heads)[None, :, None]
    mine = (shared == (row % keys.heads)[:, None]).astype(jnp.float32)
    inputs = [q, position, mine]
    specs = [
        pl.BlockSpec((1, heads, key_lines * LANES), lambda t, *_: (t, 0, 0)),
        pl.BlockSpec(position.shape, lambda *_: (0, 0, 0)),
        pl.BlockSpec(mine.shape, lambda *_: (0, 0, 0)),
    ]
    if sink is not None:
        array, spec = softmax.sink_input(sink, heads)
        inputs.append(array)
        specs.append(spec)
    pools = [key_pool, value_pool]
    if not interpret:
        # Without this XLA may carry a small pool into VMEM, whole, on every call.
        pools = [pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in pools]
    out, lse = pl.pallas_call(
        functools.partial(_attend, keys=keys, values=values, count=count, piece=piece, sunk=sink is not None),
        out_shape=[
            jax.ShapeDtypeStruct((tokens, heads, value_lines * LANES), jnp.float32),
            jax.ShapeDtypeStruct((tokens, heads, LANES), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(tokens, steps),
            in_specs=[*specs, *[pl.BlockSpec(memory_space=pl.ANY)] * 2],
            out_specs=[
                pl.BlockSpec((1, heads, value_lines * LANES), lambda t, *_: (t, 0, 0)),
                pl.BlockSpec((1, heads, LANES), lambda t, *_: (t, 0, 0)),
            ],
            scratch_shapes=[
                *softmax.state(heads, value_lines * LANES),
                *scratch(keys, count, tiles),
                *scratch(values, count, tiles),
            ],
        ),
        interpret=interpret,
    )(blocks.reshape(-1), first, last, *inputs, *pools)
    return out[:, :, : values.format.dim], lse[:, :, 0]


def _attend(units, firsts, lasts, q, position, mine, *refs, keys: Region, values: Region, count, piece, sunk: bool):
    sink, refs = (refs[0], refs[1:]) if sunk else (None, refs)
    key_pool, value_pool, out, lse, largest, total, weighted, *held = refs
    token, step = pl.program_id(0), pl.program_id(1)
    number, every = token * pl.num_programs(1) + step, pl.num_programs(0) * pl.num_programs(1)

    softmax.begin(step, largest, total, weighted)

    streams = [
        Stream(region, (pool,), some, units, None, count)
        for region, pool, some in ((keys, key_pool, held[:2]), (values, value_pool, held[2:]))
    ]
    for stream in streams:
        ahead(stream, number, every)
    for stream in streams:
        stream.wait(number)
    parts, tiles = buffers_of(keys)[0].parts, key_pool.shape[1]
    rows = count * piece * parts // keys.heads

    def take(some, _):
        # Positions that the token sees, counted from the piece's first one.
        start = step * (count * keys.rows) + some * rows
        first, last = firsts[token] - start, lasts[token] - start

        @pl.when((last >= 0) & (first < rows))
        def _():
            key_words, value_words = (stream.piece(number, some * piece, piece) for stream in streams)
            for part in range(parts):
                row = jnp.full((count * piece, 1), part, jnp.int32)
                k = rows_codec.decode(keys, key_words, row)
                v = rows_codec.decode(values, value_words, row)
                seen = (position[part] >= first) & (position[part] <= last)
                exists = jnp.broadcast_to(seen, (q.shape[1], count * piece)) & (mine[part] > 0)
                kept, weights = softmax.weigh(q, k, exists, largest, total)
                # Along sublanes the same positions: a row's number by its heads, rounded down.
                held_row = lax.broadcasted_iota(jnp.int32, (count * piece, LANES), 0) * parts + part
                held_at = jnp.floor((held_row.astype(jnp.float32) + 0.5) * (1.0 / keys.heads)).astype(jnp.int32)
                v = [jnp.where((held_at >= first) & (held_at <= last), line, 0.0) for line in v]
                _add(weights, v, held_row - held_at * keys.heads, kept, keys.heads, weighted)

        return _

    lax.fori_loop(0, tiles // piece, take, None)

    softmax.end(step, largest, total, weighted, sink, out, lse)


def _add(weights, v, head, kept, heads: int, weighted) -> None:
    """Add values, lines [n, 128] of rows of ``head`` [n, 128], to the weighted sums.

    A weight is 0 where a query head does not share a row's head, and 0 times a number that is not finite is NaN: where
    there is one, each head's rows are multiplied by themselves.
    """
    finite = [jnp.abs(line) < jnp.inf for line in v]
    faulty = sum(jnp.max(jnp.where(some, 0.0, 1.0)) for some in finite)

    @pl.when(faulty == 0)
    def _():
        softmax.add(weights, v, kept, weighted)

    @pl.when(faulty > 0)
    def _():
        query = lax.broadcasted_iota(jnp.int32, (weights.shape[0], LANES), 0)
        group = weights.shape[0] // heads
        for n, line in enumerate(v):
            some = slice(LANES * n, LANES * (n + 1))
            sums = weighted[:, some] * kept
            for number in range(heads):
                shares = (query >= number * group) & (query < (number + 1) * group)
                added = softmax.product(weights, jnp.where(head == number, line, 0.0), contract=0)
                sums = jnp.where(shares, sums + added, sums)
            weighted[:, some] = sums
