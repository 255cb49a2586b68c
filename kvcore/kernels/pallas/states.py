"""States out of a pool of tiles, and into it, in place: a state a request, and NaN where it has none.

States are megabytes. They go between where the model has them and where they belong through a piece of VMEM: the next
piece is fetched while one is written, and those of tokens that are not kept are never fetched. A row of more than 128
channels is several lines of the pool; a piece is taken apart line by line, which XLA would do with a copy of all.

A pool is of fp32, a channel a lane, or of bytes: bf16 rows, first the high byte of every channel and then the low one,
or codes of a byte with one scale a head, a word in a pool beside it. Four lines of bytes are one of words, so that
every fourth line of channels comes from the same byte of the words.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import arithmetic, codes
from kvcore.kernels.pallas.lines import at_lane, lanes
from kvcore.spec import Field, Format
from kvcore.spec.codes import CODES
from kvcore.spec.layout import LANES

PIECE_BYTES = 1 << 19
"""Of the heads that move together, in fp32, at most: four such pieces lie in VMEM."""

NAN = np.int32(0x7FC00000)
RULES = ("fp32", "quotient")
CODED = {"e4m3": (codes.from_e4m3, codes.to_e4m3), "int8": (codes.from_int8, codes.to_int8)}
"""Codes of a byte: to numbers, and back."""
SMALL = np.int32(np.float32(2.0**-42).view(np.int32))
"""Scales from this on make no product subnormal: every code that is not 0 is 2^-9 or more."""


def supports(format: Format) -> bool:
    """True for heads of plain fp32 or bf16, and of codes of a byte with one fp32 scale."""
    field, *others = format.fields
    if not others:
        return format.is_plain
    coded = field.code in CODED and field.groups == 1 and field.rule in RULES
    return coded and [other.name for other in others] == ["scales"]


def heads_at_once(heads: int, nbytes: int) -> int:
    """How many heads of ``nbytes`` make a piece: a divisor of all of them."""
    return max(
        some for some in range(1, heads + 1) if heads % some == 0 and (some == 1 or some * nbytes <= PIECE_BYTES)
    )


def read_states(format: Format, pools, unit, row, shape: tuple[int, int, int], *, interpret: Any = False):
    """States [n, heads, a, b] of shape (heads, a, b), b a multiple of 128, at (unit, row) [n]; zeros where unit is -1.

    Args:
        format: of a head.
        pools: [units, rows · heads, a · b / 128, 128] fp32; twice as many lines of bytes, of bf16; or as many of codes,
            and the words of their scales [units, tiles, 1, 128].
        unit, row: int32.
        shape: of a state.
        interpret: as in ``pallas_call``.

    Returns:
        fp32, or bf16 where that is what the pool holds.
    """
    heads, tile = shape[0], pools[0].shape[2:]
    some = heads_at_once(heads, 4 * shape[1] * shape[2])
    if not interpret:
        # Without this XLA may carry a small pool into VMEM, whole, on every call.
        pools = [pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in pools]
    return pl.pallas_call(
        functools.partial(_read, format=format, pools=len(pools), heads=heads, some=some, parts=heads // some),
        out_shape=jax.ShapeDtypeStruct(
            (len(unit), *shape), jnp.bfloat16 if format.value_code == "bf16" else jnp.float32
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(len(unit), heads // some),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(pools),
            out_specs=pl.BlockSpec((1, some, *shape[1:]), lambda i, part, *_: (i, part, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((2, some, *tile), pools[0].dtype),
                *[pltpu.VMEM((2, *pool.shape[1:]), pool.dtype) for pool in pools[1:]],
                pltpu.VMEM(_lines(format, some, tile), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        cost_estimate=_cost(len(unit), shape),
        interpret=interpret,
    )(unit, row, *pools)


def _cost(count: int, shape: tuple[int, ...]) -> pl.CostEstimate:
    """Of states that are read and written once, in fp32 at most, and made of codes or into them."""
    values = count * math.prod(shape)
    return pl.CostEstimate(flops=8 * values, bytes_accessed=2 * 4 * values, transcendentals=0)


def _lines(format: Format, some: int, tile) -> tuple[int, int, int]:
    """Shape of ``some`` heads as lines of channels, where they come from bytes; next to nothing where they do not."""
    field = format.fields[0]
    return (1, 8, LANES) if field.code == "fp32" else (some, 8 * tile[0] // field.element.bits, LANES)


def _read(units, places, *refs, format: Format, pools: int, heads: int, some: int, parts: int):
    (*sources, states), (held, *words, joined, arrived) = refs[: pools + 1], refs[pools + 1 :]
    step = pl.program_id(0) * parts + pl.program_id(1)

    def first_of(number):
        return places[lax.div(number, jnp.int32(parts))] * heads + lax.rem(number, jnp.int32(parts)) * some

    def each(number, act):
        unit, slot = units[lax.div(number, jnp.int32(parts))], lax.rem(number, jnp.int32(2))
        found = [sources[0].at[unit, pl.ds(first_of(number), some)], *(pool.at[unit] for pool in sources[1:])]
        for source, target in zip(found, (held, *words), strict=True):
            act(pltpu.make_async_copy(source, target.at[slot], arrived.at[slot]))

    def begin(number):
        exists = units[lax.div(number, jnp.int32(parts))] >= 0
        pl.when(exists)(lambda: each(number, lambda copy: copy.start()))

    pl.when(step == 0)(lambda: begin(step))
    pl.when(step + 1 < pl.num_programs(0) * parts)(lambda: begin(step + 1))
    kept = units[pl.program_id(0)] >= 0

    @pl.when(kept)
    def _found():
        each(step, lambda copy: copy.wait())
        slot = lax.rem(step, jnp.int32(2))
        piece = held.at[slot]
        if words:
            _decode(format.fields[0], piece, words[0].at[slot], first_of(step), joined)
        elif held.dtype == jnp.uint8:
            join(piece[...], joined)
        piece = joined if held.dtype == jnp.uint8 else piece
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


def _decode(field: Field, stored, words, first, lines) -> None:
    """Codes [heads, n, 128], scaled by words ``first`` on of a unit's [tiles, 1, 128], into lines [heads, n, 128]."""
    from_code, _ = CODED[field.code]

    def head(number, _):
        tile, lane = _place(first + number)
        bits = at_lane(lax.bitcast_convert_type(words[tile], jnp.int32), lane)
        scale = codes.of_bits(bits)
        four = pltpu.bitcast(stored[number], jnp.int32)
        small = jnp.max(jnp.where((bits & codes.ABSOLUTE) < SMALL, 1.0, 0.0)).astype(jnp.int32)

        def scaled(product):
            for byte in range(4):
                values = from_code(four >> 8 * byte & 0xFF)
                lines[number, pl.ds(byte, len(four), stride=4), :] = product(
                    values, jnp.broadcast_to(scale, (1, LANES))
                )

        pl.when(small == 0)(lambda: scaled(lambda values, by: values * by))
        pl.when(small == 1)(lambda: scaled(arithmetic.times))
        return _

    lax.fori_loop(0, stored.shape[0], head, None)


def _encode(format: Format, lines, stored, words, first) -> None:
    """Lines [heads, n, 128] as codes [heads, n, 128], and their scales as words ``first`` on of a unit's."""
    field = format.fields[0]
    _, to_code = CODED[field.code]
    largest = np.float32(CODES[field.code].largest)

    def head(number, _):
        magnitude = codes.int_bits(lines[number]) & codes.ABSOLUTE
        faulty = _largest(jnp.where(magnitude >= codes.INFINITY, 1.0, 0.0)) > 0
        amax = _largest(codes.of_bits(jnp.where(magnitude >= codes.INFINITY, 0, magnitude)))
        amax = jnp.maximum(jnp.where(faulty, 0.0, amax), np.float32(format.amax_floor))
        scales, bits = arithmetic.fp32_scale(jnp.minimum(amax, np.float32(field.limit)), field, format)
        _put(words, first + number, jnp.where(faulty, NAN, bits.astype(jnp.int32)))
        kept, count = jnp.where(faulty, np.int32(0), np.int32(0xFF)), lines.shape[1] // 4
        four = jnp.zeros((count, LANES), jnp.int32)
        for byte in range(4):
            values = arithmetic.clamp(lines[number, pl.ds(byte, count, stride=4), :], field.limit)
            ratios = jnp.clip(_over(values, scales, field), -largest, largest)
            four |= (to_code(ratios) & kept) << 8 * byte
        stored[number] = pltpu.bitcast(four, jnp.uint8)
        return _

    lax.fori_loop(0, lines.shape[0], head, None)


def _largest(values):
    """The largest of all [n, 128], [1, 128]."""
    most = jnp.max(jnp.max(values, axis=0, keepdims=True), axis=1, keepdims=True)
    return jnp.broadcast_to(most, (1, LANES))


def _over(values, scales, field: Field):
    """Values over their scales, as the field's rule divides."""
    if field.rule != "quotient":
        return arithmetic.divide(values, scales)
    ratios = values * arithmetic.divide(jnp.ones_like(scales), scales)
    return arithmetic.half_away(ratios) if field.code == "int8" else ratios


def _place(number):
    """(tile, lane) of a word of a unit."""
    return lax.div(number, jnp.int32(LANES)), lax.rem(number, jnp.int32(LANES))


def _put(words, number, bits) -> None:
    """Exchange one word of a unit by bits [1, 128], the same in every lane."""
    tile, lane = _place(number)
    held = lax.bitcast_convert_type(words[tile], jnp.int32)
    words[tile] = lax.bitcast_convert_type(jnp.where(lanes(held.shape) == lane, bits, held), words.dtype)


def write_states(
    format: Format, pools, states, source, unit, row, count, *, rows: int, interpret: Any = False
):  # fmt: skip
    """Pools as of ``read_states`` with ``states[source]`` at (unit, row) [n]; nothing where unit is -1.

    The ``count`` - 1 rows before it, in a ring of ``rows``, become NaN. What is stored has one NaN, as all rows.

    Args:
        format, pools: as of ``read_states``.
        states: [m, heads, a, b], fp32 or bf16; b is a multiple of 128.
        source, unit, row: [n] int32.
        count: [n] int32, 1 or more and no more than ``rows``.
        rows: of the ring.
        interpret: as in ``pallas_call``.
    """
    heads, tile = states.shape[1], pools[0].shape[2:]
    some = heads_at_once(heads, 4 * states.shape[2] * states.shape[3])
    if not interpret:
        # Without this XLA may carry a small pool into VMEM and back, whole, on every call.
        pools = [pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in pools]
    anywhere = [pl.BlockSpec(memory_space=pl.ANY)] * len(pools)
    written = pl.pallas_call(
        functools.partial(_write, format=format, pools=len(pools), heads=heads, some=some, rows=rows),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(len(unit), heads // some),
            in_specs=[
                pl.BlockSpec((1, some, *states.shape[2:]), lambda i, part, source, *_: (source[i], part, 0, 0)),
                *anywhere,
            ],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM((some, *tile), pools[0].dtype),
                pltpu.VMEM((some, *tile), pools[0].dtype),
                *[pltpu.VMEM(pool.shape[1:], pool.dtype) for pool in pools[1:]],
                pltpu.VMEM(_lines(format, some, tile), jnp.float32),
                pltpu.SemaphoreType.DMA((3,)),
            ],
        ),
        cost_estimate=_cost(len(unit), states.shape[1:]),
        input_output_aliases={5 + number: number for number in range(len(pools))},
        interpret=interpret,
    )(jnp.clip(source, 0, len(states) - 1), unit, row, count, states, *pools)
    # A pinned pool that is an output of the program without anything in between is refused by XLA's verifier.
    return written if interpret else [lax.optimization_barrier(pool) for pool in written]


def _write(_, units, places, counts, states, *refs, format: Format, pools: int, heads: int, some: int, rows: int):
    (pool, *beside), (held, none, *words, joined, arrived) = refs[pools : 2 * pools], refs[2 * pools :]
    i, part = pl.program_id(0), pl.program_id(1)
    of_bytes = held.dtype == jnp.uint8

    @pl.when((i == 0) & (part == 0))
    def _first():
        if words:
            none[...] = jnp.zeros(none.shape, none.dtype)
        elif of_bytes:
            joined[...] = jnp.full(joined.shape, jnp.nan, joined.dtype)
            none[...] = split(joined)
        else:
            none[...] = jnp.full(none.shape, jnp.nan, none.dtype)

    def copy(values, row, number):
        at = pool.at[units[i], pl.ds(row * heads + part * some, some)]
        return pltpu.make_async_copy(values, at, arrived.at[number])

    def scales(way):
        """The words of all of a unit's scales, of which some are exchanged: there, and back."""
        source, target = (beside[0].at[units[i]], words[0])[::way]
        return pltpu.make_async_copy(source, target, arrived.at[2])

    def gone(back, carry):
        earlier = lax.rem(places[i] - back + rows, jnp.int32(rows))
        copy(none, earlier, 1).start()
        if words:
            first = earlier * heads + part * some
            lax.fori_loop(0, some, lambda head, _: _put(words[0], first + head, jnp.full((1, LANES), NAN)), None)
        copy(none, earlier, 1).wait()
        return carry

    @pl.when(units[i] >= 0)
    def _kept():
        if words:
            pl.when(part == 0)(lambda: scales(1).start())
        lines, into = states.shape[3] // LANES, joined if of_bytes else held
        for line in range(lines):
            values = states[0, :, :, LANES * line : LANES * (line + 1)].astype(jnp.float32)
            values = jnp.where(values != values, jnp.float32(jnp.nan), values)
            into[:, pl.ds(line, states.shape[2], stride=lines), :] = values
        if words:
            pl.when(part == 0)(lambda: scales(1).wait())
            _encode(format, joined, held, words[0], places[i] * heads + part * some)
        elif of_bytes:
            held[...] = split(joined)
        copy(held, places[i], 0).start()
        lax.fori_loop(1, counts[i], gone, None)
        copy(held, places[i], 0).wait()
        if words:

            @pl.when(part == pl.num_programs(1) - 1)
            def _():
                scales(-1).start()
                scales(-1).wait()
