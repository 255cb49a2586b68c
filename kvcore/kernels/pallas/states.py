"""States out of a pool of tiles, and into it, in place: a state a request, and NaN where it has none.

States are megabytes. They go between where the model has them and where they belong through a piece of VMEM: the next
piece is fetched while one is written, and those of tokens that are not kept are never fetched. A row of more than 128
channels is several lines of the pool; a piece is taken apart line by line, which XLA would do with a copy of all.

A pool is of fp32, a channel a lane, or of bytes: bf16 rows, first the high byte of every channel and then the low one.
Four lines of bytes are one of words, so that every fourth line of channels comes from the same byte of the words.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import arithmetic, codes
from kvcore.spec.layout import LANES

PIECE_BYTES = 1 << 19
"""Of the heads that move together, in fp32, at most: four such pieces lie in VMEM."""

NAN = np.int32(0x7FC00000)


def heads_at_once(heads: int, nbytes: int) -> int:
    """How many heads of ``nbytes`` make a piece: a divisor of all of them."""
    return max(
        some for some in range(1, heads + 1) if heads % some == 0 and (some == 1 or some * nbytes <= PIECE_BYTES)
    )


def read_states(pool, unit, row, shape: tuple[int, int, int], *, interpret: Any = False):
    """States [n, heads, a, b] of shape (heads, a, b), b a multiple of 128, at (unit, row) [n]; zeros where unit is -1.

    The pool is [units, rows · heads, a · b / 128, 128] fp32, or twice as many lines of bytes; states are fp32, or bf16.
    """
    heads, tile, bytes_only = shape[0], pool.shape[2:], pool.dtype == jnp.uint8
    some = heads_at_once(heads, 4 * shape[1] * shape[2])
    if not interpret:
        # Without this XLA may carry a small pool into VMEM, whole, on every call.
        pool = pltpu.with_memory_space_constraint(pool, pltpu.HBM)
    return pl.pallas_call(
        functools.partial(_read, heads=heads, some=some, parts=heads // some),
        out_shape=jax.ShapeDtypeStruct((len(unit), *shape), jnp.bfloat16 if bytes_only else jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(len(unit), heads // some),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((1, some, *shape[1:]), lambda i, part, *_: (i, part, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((2, some, *tile), pool.dtype),
                pltpu.VMEM(_lines(some, tile, of_bytes=bytes_only), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        interpret=interpret,
    )(unit, row, pool)


def _lines(some: int, tile, *, of_bytes: bool) -> tuple[int, int, int]:
    """Shape of ``some`` heads as lines of channels, where they come from bytes; next to nothing where they do not."""
    return (some, tile[0] // 2, LANES) if of_bytes else (1, 8, LANES)


def _read(units, places, pool, states, held, joined, arrived, *, heads: int, some: int, parts: int):
    step = pl.program_id(0) * parts + pl.program_id(1)

    def fetch(number):
        i = lax.div(number, jnp.int32(parts))
        first = places[i] * heads + lax.rem(number, jnp.int32(parts)) * some
        slot = lax.rem(number, jnp.int32(2))
        return pltpu.make_async_copy(pool.at[units[i], pl.ds(first, some)], held.at[slot], arrived.at[slot])

    def begin(number):
        pl.when(units[lax.div(number, jnp.int32(parts))] >= 0)(lambda: fetch(number).start())

    pl.when(step == 0)(lambda: begin(step))
    pl.when(step + 1 < pl.num_programs(0) * parts)(lambda: begin(step + 1))
    kept = units[pl.program_id(0)] >= 0

    @pl.when(kept)
    def _found():
        fetch(step).wait()
        piece = held.at[lax.rem(step, jnp.int32(2))]
        if held.dtype == jnp.uint8:
            join(piece[...], joined)
            piece = joined
        lines = states.shape[3] // LANES
        for line in range(lines):
            found = piece[:, pl.ds(line, states.shape[2], stride=lines), :]
            states[0, :, :, LANES * line : LANES * (line + 1)] = found.astype(states.dtype)

    @pl.when(jnp.logical_not(kept))
    def _none():
        states[...] = jnp.zeros(states.shape, states.dtype)


def join(stored, lines):
    """Bytes [heads, 2n, 128] of bf16 rows into lines [heads, n, 128] of fp32."""
    words = pltpu.bitcast(stored, jnp.int32)
    count = words.shape[1] // 2
    high, low = words[:, :count], words[:, count:]
    for byte in range(4):
        bits = (high >> 8 * byte & 0xFF) << 24 | (low >> 8 * byte & 0xFF) << 16
        lines[:, pl.ds(byte, count, stride=4), :] = codes.of_bits(bits)


def split(lines):
    """Lines [heads, n, 128] of fp32, n a multiple of 4, as bytes [heads, 2n, 128] of bf16 rows: one NaN for all."""
    count = lines.shape[1] // 4
    high = low = jnp.zeros((lines.shape[0], count, LANES), jnp.int32)
    for byte in range(4):
        values = lines[:, pl.ds(byte, count, stride=4), :]
        bits = codes.int_bits(codes.to_bf16(arithmetic.within(values, "bf16", keep=True)))
        bits = jnp.where((bits & codes.ABSOLUTE) > codes.INFINITY, NAN, bits)
        high |= (bits >> 24 & 0xFF) << 8 * byte
        low |= (bits >> 16 & 0xFF) << 8 * byte
    return pltpu.bitcast(jnp.concatenate([high, low], axis=1), jnp.uint8)


def write_states(pool, states, source, unit, row, count, *, rows: int, interpret: Any = False):
    """Pool as of ``read_states`` with ``states[source]`` at (unit, row) [n]; nothing where unit is -1.

    The ``count`` - 1 rows before it, in a ring of ``rows``, become NaN. What is stored has one NaN, as all rows.

    Args:
        states: [m, heads, a, b], fp32 or bf16; b is a multiple of 128.
        source: [n] int32.
        count: [n] int32, 1 or more and no more than ``rows``.
    """
    heads, tile, bytes_only = states.shape[1], pool.shape[2:], pool.dtype == jnp.uint8
    some = heads_at_once(heads, 4 * states.shape[2] * states.shape[3])
    if not interpret:
        # Without this XLA may carry a small pool into VMEM and back, whole, on every call.
        pool = pltpu.with_memory_space_constraint(pool, pltpu.HBM)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    written = pl.pallas_call(
        functools.partial(_write, heads=heads, some=some, rows=rows),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(len(unit), heads // some),
            in_specs=[
                pl.BlockSpec((1, some, *states.shape[2:]), lambda i, part, source, *_: (source[i], part, 0, 0)),
                anywhere,
            ],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM((some, *tile), pool.dtype),
                pltpu.VMEM((some, *tile), pool.dtype),
                pltpu.VMEM(_lines(some, tile, of_bytes=bytes_only), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={5: 0},
        interpret=interpret,
    )(jnp.clip(source, 0, len(states) - 1), unit, row, count, states, pool)
    # A pinned pool that is an output of the program without anything in between is refused by XLA's verifier.
    return written if interpret else lax.optimization_barrier(written)


def _write(
    _, units, places, counts, states, __, pool, held, none, joined, arrived, *, heads: int, some: int, rows: int
):  # fmt: skip
    i, part = pl.program_id(0), pl.program_id(1)

    @pl.when((i == 0) & (part == 0))
    def _first():
        if held.dtype == jnp.uint8:
            joined[...] = jnp.full(joined.shape, jnp.nan, joined.dtype)
            none[...] = split(joined)
        else:
            none[...] = jnp.full(none.shape, jnp.nan, none.dtype)

    def copy(values, row, number):
        at = pool.at[units[i], pl.ds(row * heads + part * some, some)]
        return pltpu.make_async_copy(values, at, arrived.at[number])

    def gone(back, carry):
        earlier = lax.rem(places[i] - back + rows, jnp.int32(rows))
        copy(none, earlier, 1).start()
        copy(none, earlier, 1).wait()
        return carry

    @pl.when(units[i] >= 0)
    def _kept():
        lines, into = states.shape[3] // LANES, joined if held.dtype == jnp.uint8 else held
        for line in range(lines):
            values = states[0, :, :, LANES * line : LANES * (line + 1)].astype(jnp.float32)
            values = jnp.where(values != values, jnp.float32(jnp.nan), values)
            into[:, pl.ds(line, states.shape[2], stride=lines), :] = values
        if held.dtype == jnp.uint8:
            held[...] = split(joined)
        copy(held, places[i], 0).start()
        lax.fori_loop(1, counts[i], gone, None)
        copy(held, places[i], 0).wait()
