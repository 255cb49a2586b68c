"""How a token's blocks of keys and values are walked, and which query sees which line: all that a layer decides.

A chunk of blocks arrives together and is multiplied in pieces of lines. Every head's rows lie in a piece, so that a
query is laid out like them, and lines of other heads are far from it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import block_lines, compact
from kvcore.kernels.pallas.block_lines import Lie
from kvcore.plan import Region
from kvcore.spec.layout import LANES

CHUNK_BYTES = 1 << 19
"""Of codes in one pool, that arrive together; two chunks of each pool are held at a time."""
BLOCK_BYTES = 1 << 20
"""Of a block in one pool that is taken at all."""
PIECE_LINES = 4096
"""Lines that are multiplied together, with queries of up to as many heads as follow; fewer where there are more, of
whom each counts as often as rows have scales apart."""
PIECE_HEADS = 64
CAREFUL_LINES = 256
"""The same where rows may be no numbers, which is rare: less code."""
FAR = 1 << 30
"""A position that no token sees."""


class Walk(NamedTuple):
    """Keys and values of a layer, as the kernel reads them.

    Attributes:
        regions: of keys, and of values.
        how: how the rows of each lie.
        count: blocks of a chunk.
        pieces: of a chunk.
        lines: of a piece.
        positions: from a piece to the next.
        native: the chip casts e4m3 itself.
        sublanes: it looks levels up among sublanes, too.
        terms: bf16 numbers that a query, or a weight, is the sum of.
    """

    regions: tuple[Region, Region]
    how: tuple[Lie, Lie]
    count: int
    pieces: int
    lines: int
    positions: int
    native: bool
    sublanes: bool
    terms: int


def declined(keys: Region, values: Region) -> str:
    """Why the kernel does not take a layer's keys and values; "" where it does."""
    if (keys.heads, keys.rows, keys.growth) != (values.heads, values.rows, values.growth):
        return "keys and values have not as many heads"
    mine, theirs = block_lines.lie(keys), block_lines.lie(values)
    if isinstance(mine, str):
        return mine
    if isinstance(theirs, str):
        return theirs
    if (mine.slots, mine.span) != (theirs.slots, theirs.span):
        return "rows of keys and values take not as many lines"
    if not np.array_equal(block_lines.rows_of(keys, mine), block_lines.rows_of(values, theirs)):
        return "rows of keys and values come in another order"
    if any(region.unit.nbytes > BLOCK_BYTES for region in (keys, values)):
        return f"a block is more than {BLOCK_BYTES} bytes"
    return ""


def supports(keys: Region, values: Region) -> bool:
    """True for blocks whose rows of keys and values lie alike."""
    return not declined(keys, values)


def walk(
    keys: Region,
    values: Region,
    blocks: int,
    heads: int,
    *,
    native: bool,
    sublanes: bool,
    terms: int,
    careful: bool = False,
) -> Walk:
    """How a token's ``blocks`` blocks are walked for so many heads of queries."""
    how = _lie(keys), _lie(values)
    rows = block_lines.rows_of(keys, how[0])
    parts = max(PIECE_HEADS, heads * max(one.apart for one in how))
    limit = CAREFUL_LINES if careful else max(LANES, PIECE_LINES * PIECE_HEADS // parts)
    unit, held = rows.shape[1], keys.rows * keys.heads
    most = max(dict(region.unit.buffers)[region.unit.places[0].buffer] for region in (keys, values))
    count = max(1, min(blocks, CHUNK_BYTES // most))
    words = max(one.words for one in how)
    whole = bool((rows >= 0).all()) and held * words % LANES == 0
    for pieces in range(1, count * unit // LANES + 1) if whole else ():
        lines, rest = divmod(count * unit, pieces)
        some = lines * rows.shape[0] // how[0].span
        fits = lines <= limit and lines % LANES == 0 and some % keys.heads == 0 and some * words % LANES == 0
        if not rest and fits:
            return Walk((keys, values), how, count, pieces, lines, some // keys.heads, native, sublanes, terms)
    return Walk((keys, values), how, count, count, unit, keys.rows, native, sublanes, terms)


def _lie(region: Region) -> Lie:
    found = block_lines.lie(region)
    if isinstance(found, str):
        raise TypeError(found)
    return found


def rows_of(by: Walk) -> np.ndarray:
    """[slots, lines] rows of a piece, counted from its first one."""
    keys, _ = by.regions
    unit = block_lines.rows_of(keys, by.how[0])
    units = np.arange(-(-by.lines // unit.shape[1])) * keys.rows * keys.heads
    every = np.where(unit[:, None] >= 0, units[None, :, None] + unit[:, None], -1)
    return every.reshape(len(unit), -1)[:, : by.lines]


def moves_of(by: Walk) -> list[block_lines.Moves | block_lines.Spread]:
    """How the scales of a piece's keys and of its values come to where they scale: once, where that is the same."""

    def one(how: Lie):
        if how.spreads:
            return block_lines.spread_of(how, by.lines)
        row = rows_of(by)[:, None]
        count = how.words or 1
        words = np.where(row >= 0, row * count + np.arange(count)[None, :, None], -1)
        return block_lines.moves_of(words.reshape(-1, by.lines))

    keys, values = by.how
    found = one(keys)
    return [found, found if keys == values else one(values)]


def each_once(moves: list) -> list:
    """Of ``moves_of``, what is the same for keys and values once."""
    return list({id(one): one for one in moves}.values())


def copies_of(by: Walk) -> np.ndarray:
    """[copies, heads of keys] the slots that hold a head's rows: one, or several, each of which is asked by itself."""
    (keys, _), rows = by.regions, rows_of(by)
    head = np.where(rows >= 0, rows % keys.heads, -1)
    slots = [[slot for slot in range(len(rows)) if (head[slot] == number).any()] for number in range(keys.heads)]
    most = max(map(len, slots))
    return np.array([[some[min(copy, len(some) - 1)] for some in slots] for copy in range(most)])


def positions_of(by: Walk, copies, heads: int):
    """[copies · H, lines] int32 positions from a piece's first one, biased by the smallest int32; far where not shared.

    One 128 lines of them where all others are these and so many positions more.
    """
    keys = by.regions[0]
    shared = np.arange(heads) * keys.heads // heads
    row = rows_of(by)[copies[:, shared].reshape(-1)]
    mine = (row >= 0) & (row % keys.heads == np.tile(shared, len(copies))[:, None])
    # Copies that are as many for all heads are one too many for some.
    again = np.array([[copies[copy, head] in copies[:copy, head] for head in shared] for copy in range(len(copies))])
    mine &= ~again.reshape(-1)[:, None]
    position = np.where(mine, row // keys.heads, FAR)
    step = step_of(by)
    if step:
        several = position.reshape(len(position), -1, LANES)
        shift = step * np.arange(several.shape[1])[None, :, None]
        if np.array_equal(np.where(several < FAR, several - shift, FAR), several[:, :1] + np.zeros_like(several)):
            position = position[:, :LANES]
    return jnp.asarray(position + np.iinfo(np.int32).min, jnp.int32)


def step_of(by: Walk) -> int:
    """Positions from 128 lines to the next 128, 0 where those are no whole number."""
    step, rest = divmod(LANES // by.how[0].span * by.how[0].slots, by.regions[0].heads)
    return 0 if rest or by.lines % LANES else step


def called(kernel, table, own, whole, pools, outs, scratch, *, vmem_bytes: int, cost, interpret, name: str):
    """Run a kernel whose programs walk the blocks of one token each: fp32 arrays [T, ...] of what they store.

    Args:
        kernel: takes the table, ``own``, ``whole``, the pools, what it stores, and ``scratch``.
        table: blocks [T, n], first, last and scale, which lie in scalar memory.
        own, whole: arrays of three dimensions of which a program gets its token's, and arrays of which it gets all.
        pools: where blocks are copied from.
        outs: shapes of what is stored of a token.
        scratch: the kernel's own memory.
        vmem_bytes: that the kernel may take.
        cost: of all programs.
        interpret: as in ``pallas_call``.
        name: of the kernel.
    """
    blocks, *scalars = table
    if not interpret:
        # Compiled code does not look whether a block exists.
        blocks = jnp.minimum(blocks, pools[0].shape[0] - 1)
        # Without this XLA may carry a small pool into VMEM, whole, on every call.
        pools = [pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in pools]
    stored = [jax.ShapeDtypeStruct((len(blocks), *shape), jnp.float32) for shape in outs]

    def of_token(array):
        return pl.BlockSpec((1, *array.shape[1:]), lambda t, *_: (t, 0, 0))

    def of_all(array):
        return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)

    return pl.pallas_call(
        kernel,
        out_shape=stored,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(table),
            grid=(len(blocks),),
            in_specs=[*map(of_token, own), *map(of_all, whole), *[pl.BlockSpec(memory_space=pl.ANY)] * len(pools)],
            out_specs=[*map(of_token, stored)],
            scratch_shapes=scratch,
        ),
        # Blocks of the next token come under those of this one.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True, vmem_limit_bytes=vmem_bytes
        ),
        cost_estimate=cost,
        interpret=interpret,
        name=name,
    )(blocks.reshape(-1), *scalars, *own, *whole, *pools)


def over_chunks(firsts, lasts, turn, every: int, rows: int, each, take, prepare=lambda: None):
    """A token's chunks, one after another; the next one, or the next token's first, comes while one is taken.

    Args:
        firsts, lasts: references to positions that each token sees.
        turn: reference to the number of chunks so far.
        every: chunks of a token's table.
        rows: positions of a chunk.
        each: (chunk of all tokens, half, act) -> None: ``act`` on its copies.
        take: (half, first, last) -> None: a chunk that is there, and what is seen of it.
        prepare: called before the first copy of all.

    Returns:
        The first chunk, and the one behind the last.
    """
    token, tokens = pl.program_id(0), pl.num_programs(0)

    def chunks(token):
        begin = jnp.minimum(lax.div(jnp.maximum(firsts[token], 0), jnp.int32(rows)), every - 1)
        return begin, jnp.maximum(lax.div(lasts[token], jnp.int32(rows)) + 1, begin + 1)

    def start(token, chunk, half):
        each(token * every + chunk, half, lambda copy: copy.start())

    begin, end = chunks(token)

    @pl.when(token == 0)
    def _():
        prepare()
        turn[0] = 0
        start(0, begin, 0)

    def walk(chunk, _):
        half = lax.rem(turn[0], compact.HALVES)
        turn[0] += 1
        more = chunk + 1 < end
        after = jnp.minimum(token + 1, tokens - 1)

        @pl.when(more | (token + 1 < tokens))
        def _():
            start(jnp.where(more, token, after), jnp.where(more, chunk + 1, chunks(after)[0]), 1 - half)

        each(token * every + chunk, half, lambda copy: copy.wait())
        take(half, firsts[token] - chunk * rows, lasts[token] - chunk * rows)
        return _

    lax.fori_loop(begin, end, walk, None)
    return begin, end


def copy_blocks(pools, held, arrived, units, count: int, chunk, half, act, *, unroll: bool) -> None:
    """``act`` on the copies of a chunk of ``count`` blocks from ``pools`` to ``held``: of whole blocks, -1 left out."""

    def one(number, _):
        unit = units[chunk * count + number]

        @pl.when(unit >= 0)
        def _():
            for pool, mine in zip(pools, held, strict=True):
                size = mine.shape[1] // count
                target = mine.at[half, pl.ds(number * size, size)]
                act(pltpu.make_async_copy(pool.at[unit], target, arrived.at[half]))

        return _

    lax.fori_loop(0, count, one, None, unroll=unroll)
