"""Rows as full registers: tiles fetched a chunk ahead, and narrow codes turned into bf16 two rows to a word.

A tile of bytes is 128 words, one sublane of a register, so eight neighbouring tiles in VMEM are one register: nothing
is shuffled to fill it. Where a word's halves belong to two rows, or lines, and hold a code each, they are decoded
together, and the word is then two bf16 numbers, one above the other. All values of e4m3, e2m1 and bf16 are exact in
bf16, and so are their products with powers of two; a matrix unit multiplies those without loss.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import block_lines
from kvcore.kernels.pallas.codes import of_bits
from kvcore.kernels.pallas.lines import SUBLANES, Buffer, buffers_of, column, lanes
from kvcore.plan import Region
from kvcore.spec.layout import LANES, TILE_BYTES

HALVES = 2
"""Chunks in VMEM: one that is worked on and one that arrives."""
ROWS_OF_A_WORD = 4
TILES = 2
"""That a narrow row lies in."""
ROWS_AT_ONCE = 32
"""Narrow rows that are decoded together."""
BYTES = np.int32(0x00FF00FF)
"""The lower byte of both halves of a word."""
BIASED_E4M3 = 120 << 7
"""What makes a code's exponent that of a bf16 number."""
COMPILER = pltpu.CompilerParams(disable_bounds_checks=True)
"""Of kernels whose addresses were clamped before: a check takes as long as starting the copy does."""


def words(tiles, *, interpret: Any):
    """Words [K · tiles, 128] int32 of byte tiles [..., K, 4 · tiles, 128], tile by tile."""
    rows = math.prod(tiles.shape[:-1])
    if interpret:
        # The interpreter knows no views of memory; this shuffles registers, which it has none of.
        return pltpu.bitcast(tiles[...].reshape(rows, LANES), jnp.int32)
    return tiles.bitcast(jnp.int32).reshape(rows // SUBLANES, LANES)[...]


def words_of_chunk(held, half, first, count: int, *, step: int = 1, interpret: Any):
    """Every ``step``-th of a half's words from ``first`` on, [count, 128] int32, or fp32 where those are held.

    Args:
        held: [2, tiles, lines of one, 128], of bytes, or of words of 32 bits.
    """
    fp32 = held.dtype == jnp.float32
    lines = held.shape[1] * held.shape[2] // (4 if held.dtype == jnp.uint8 else 1)
    if not interpret:
        flat = held if fp32 else held.bitcast(jnp.int32)
        return flat.reshape(HALVES, lines, LANES)[half, pl.ds(first, count, stride=step)]
    if step > 1:
        return words_of_chunk(held, half, 0, lines, interpret=interpret)[first::step][:count]
    # The interpreter knows no views: what is asked for is read as it lies.
    tiles = held[half, pl.ds(first * held.shape[1] // lines, count * held.shape[1] // lines)]
    if fp32:
        return tiles.reshape(count, LANES)
    if held.dtype == jnp.uint32:
        return lax.bitcast_convert_type(tiles, jnp.int32).reshape(count, LANES)
    return pltpu.bitcast(tiles, jnp.int32).reshape(count, LANES)


def scratch(buffer: Buffer, *count: int) -> list:
    """Scratch of a stream of chunks: tiles, and a semaphore for either half."""
    return [pltpu.VMEM((HALVES, *count, *buffer.tile), buffer.dtype), pltpu.SemaphoreType.DMA((HALVES,))]


def twice(number: int) -> np.int32:
    """A 16-bit number in both halves of a word."""
    return np.uint32(number << 16 | number).astype(np.int32)


def bf16(pairs):
    """Words [K, 128] of bits of bf16 numbers -> [2K, 128] bf16: the lower half of each word above the upper one."""
    return pltpu.bitcast(pairs, jnp.bfloat16)


def from_e4m3(pairs):
    """Words that hold an e4m3 code in the lower byte of either half -> [2K, 128] bf16."""
    magnitude = pairs & twice(0x7F)
    # Where the exponent is 0, twice the number less 2^-6 is the subnormal; elsewhere that is larger than the number.
    number = bf16((magnitude << 4) + twice(BIASED_E4M3))
    number = jnp.minimum(number * jnp.bfloat16(2) - jnp.bfloat16(2.0**-6), number)
    nan = (magnitude + twice(1)) & twice(0x80)
    special = (pairs & twice(0x80)) << 8 | ((nan << 8) - nan)
    return bf16(pltpu.bitcast(number, jnp.int32) | special)


def from_split(pairs):
    """Words that hold the high byte of a bf16 number in the lower byte of either half, the low one above it."""
    return bf16((pairs & BYTES) << 8 | lax.shift_right_logical(pairs, 8) & BYTES)


def from_bytes(pairs):
    """Words that hold a byte in the lower byte of either half -> [2K, 128] bf16, for products that move it."""
    return bf16(twice(0x4300) | pairs & twice(0x7F) | (pairs & twice(0x80)) << 8)


def bytes_again(spread):
    """Numbers of ``from_bytes``, in fp32 -> the bytes, int32: 128 and the lower seven bits, the highest as the sign."""
    return jnp.where(spread < 0, -spread, spread - 128).astype(jnp.int32)


def shifted(word, bits: int):
    """Words moved so that a byte comes to the lowest."""
    return lax.shift_right_logical(word, bits) if bits else word


def terms(values, count: int) -> list:
    """fp32 numbers as a sum of ``count``, in fp32: all but the last are exact in bf16, of three that one, too."""
    found = []
    for _ in range(count - 1):
        # By bits: a compiler may leave out a rounding that is undone at once.
        top = lax.bitcast_convert_type(lax.bitcast_convert_type(values, jnp.int32) & np.int32(-0x10000), jnp.float32)
        found.append(top)
        values = values - top
    return [*found, values]


def exact_parts(values, count: int):
    """[..., n, d] fp32 -> [..., count · n, d] bf16 whose sum they are: 8 bits of the significand each, 3 are all."""
    return jnp.concatenate([part.astype(jnp.bfloat16) for part in terms(values, count)], axis=-2)


def dot(left, right, *, contract: int = 1):
    """Left [m, k] bf16 times right over axis ``contract`` of right, summed in fp32."""
    return lax.dot_general(left, right, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)


def narrow(region: Region) -> bool:
    """True for rows across tiles: four lines of e4m3 codes and e8m0 scales, and one of 64 channels of 16 bits."""
    buffer, *others = buffers_of(region)
    values = {field.name: field for field in region.format.fields if field.is_value}
    if others or not buffer.across or buffer.lines != SUBLANES + 1 or region.heads > 1:
        return False
    for place in region.unit.places:
        field = values.get(place.field)
        if field is None:
            known = place.field == "scales" and place.base + place.nbytes <= TILE_BYTES
        elif field.code == "e4m3":
            known = place.base == 0 and field.scale == "e8m0" and field.width % 2 == 0
        else:
            known = field.code == "bf16" and place.base == TILE_BYTES
        if not known:
            return False
    # The 16-bit channels are the upper half of the last line of values, where the fifth line has their low bytes.
    return [field.size for field in values.values()] == [TILE_BYTES - LANES // 2, LANES // 2]


class Rows:
    """Chunks of narrow rows, a chunk ahead of the arithmetic: a DMA a row, whether the row exists or not.

    A row of the next chunk takes the place of one that was loaded, so that all places are constants: of what the scalar
    unit does for a copy, addresses that are none are most.

    Args:
        region: of the rows.
        pool: a reference to its pool, in HBM, as ``flat`` makes it.
        given: where the rows of every chunk begin, [chunks, count / 128, 128] int32 in HBM; as ``flat`` makes it.
        order: two references, as ``order`` makes them.
        held: the references that ``rows_scratch`` asked for.
        interpret: as in ``pallas_call``.
    """

    def __init__(self, region: Region, pool, given, order, held, interpret: Any) -> None:
        self._region, self._pool, self._given = region, pool, given
        self._numbers, self._following = order
        self._tiles, self._arrived, self._places, self._told = held
        self._interpret, self._native = interpret, block_lines.casts_e4m3(interpret)

    def begin(self) -> None:
        """Let the first chunk come. Before anything else."""
        self._tell(0)
        self._telling(0).wait()
        chunk = self._following[0]
        self._start(chunk, 0, self._tiles.shape[0])
        self._tell(chunk + 1)

    def end(self) -> None:
        """After everything else, since places were told that nobody asked for."""
        self._telling(0).wait()

    def lines(self, chunk, begins, *, later: int = 0) -> list:
        """Wait for a chunk; its rows' lines [K, 128] bf16, in the order of ``in_fours``, zeros where there is no row.

        Args:
            chunk: that has rows, each after the one before.
            begins: [1, K] int32, the bit of its first tile's words with which each row begins, -1 where there is none.
            later: rows of the next chunk whose copies are issued after the others, under what follows.
        """
        # Ahead of what is waited for: whether there is a next chunk holds up all of its copies.
        following = self._following[chunk + 1]
        pltpu.make_async_copy(self._tiles, self._tiles, self._arrived).wait()
        self._telling(0).wait()
        bits = column(begins)
        found, started, count = [], 0, self._tiles.shape[0]
        for first in range(0, count, ROWS_AT_ONCE):
            some = self._tiles.at[first : first + ROWS_AT_ONCE]
            one, two = (every(some, n, ROWS_AT_ONCE, step=TILES, interpret=self._interpret) for n in range(TILES))
            # Between loads: the compiler leaves a copy's start where it is among them.
            last = (count - later) * (first + ROWS_AT_ONCE) // count
            self._start(following, started, last)
            started = last
            found.append(self._decoded(one, two, bits[first : first + ROWS_AT_ONCE]))
        self._start(following, started, count)
        self._tell(following + 1)
        return [jnp.concatenate(line, axis=0) for line in zip(*found, strict=True)]

    def _decoded(self, first, second, bits):
        """Lines of rows whose two tiles are words of these."""
        bits = jnp.broadcast_to(bits, first.shape)
        coded, rest = joined(first, second, bits), lax.shift_right_logical(second, bits)
        coded, rest = jnp.where(bits >= 0, coded, 0), jnp.where(bits >= 0, rest & 0xFF, 0)
        few = len(first) // ROWS_OF_A_WORD
        fours = [slice(few * number, few * (number + 1)) for number in range(ROWS_OF_A_WORD)]
        rest = sum((rest[some] << 8 * number for number, some in enumerate(fours)), jnp.int32(0))
        return decoded(self._region, [coded[some] for some in fours], rest, native=self._native)

    def _start(self, chunk, first: int, last: int) -> None:
        """Let rows of a chunk come whose places are told, if there is one: a predicate of each copy, no branch."""
        needed = chunk < self._numbers.shape[0]

        def row(i, _):
            at = self._pool.at[pl.ds(self._places[lax.div(i, LANES), lax.rem(i, LANES)], TILES)]
            pl.when(needed)(pltpu.make_async_copy(at, self._tiles.at[i], self._arrived).start)
            return _

        # The interpreter's programs grow with every copy that is written out, and compiling them is most of its time.
        lax.fori_loop(first, last, row, None, unroll=not self._interpret)

    def _tell(self, chunk) -> None:
        """Let the places come of the chunk that is next from ``chunk`` on, or of any."""
        last = self._numbers.shape[0]
        self._telling(jnp.minimum(self._following[jnp.minimum(chunk, last)], last - 1)).start()

    def _telling(self, chunk):
        return pltpu.make_async_copy(self._given.at[chunk], self._places, self._told)


def rows_scratch(region: Region, count: int) -> list:
    """Scratch of ``Rows``: tiles of a chunk, places of the next one's rows, and a semaphore for each."""
    (buffer,) = buffers_of(region)
    return [
        pltpu.VMEM((count, *buffer.tile), buffer.dtype),
        pltpu.SemaphoreType.DMA(()),
        pltpu.SMEM((count // LANES, LANES), jnp.int32),
        pltpu.SemaphoreType.DMA(()),
    ]


def every(tiles, number: int, count: int, *, step: int, interpret: Any):
    """Words [count, 128] of every ``step``-th of tiles [..., 4, 128], from tile ``number`` on."""
    rows = math.prod(tiles.shape[:-1]) // SUBLANES
    if interpret:
        # The interpreter knows no views of memory.
        return pltpu.bitcast(tiles[...].reshape(-1, LANES), jnp.int32)[number::step][:count]
    return tiles.bitcast(jnp.int32).reshape(rows, LANES)[pl.ds(number, count, stride=step)]


def joined(first, second, bits):
    """Words of the four lines that begin ``bits`` / 8 lines after those of ``first``, and go on in ``second``."""
    # In two steps, since 32 bits are no shift.
    return lax.shift_right_logical(first, bits) | second << 8 << 24 - bits


def in_fours(numbers):
    """[..., n] of narrow rows, as lines have them: of rows that are decoded together one of each quarter in turn."""
    quarters = numbers.reshape(*numbers.shape[:-1], -1, ROWS_OF_A_WORD, ROWS_AT_ONCE // ROWS_OF_A_WORD)
    return quarters.swapaxes(-1, -2).reshape(numbers.shape)


def out_of_fours(numbers):
    """What ``in_fours`` undoes."""
    fours = numbers.reshape(*numbers.shape[:-1], -1, ROWS_AT_ONCE // ROWS_OF_A_WORD, ROWS_OF_A_WORD)
    return fours.swapaxes(-1, -2).reshape(numbers.shape)


def order(live):
    """Of chunks [n], which of them have rows: their numbers among those that do, else -1; the next one from each on.

    The second is [n + 1], and n where there is none. So a chunk without a row is neither fetched nor walked.
    """
    count = len(live)
    numbers = jnp.where(live, jnp.cumsum(live.astype(jnp.int32)) - 1, -1)
    places = jnp.where(live, jnp.arange(count, dtype=jnp.int32), count)
    following = lax.cummin(places, reverse=True)
    return numbers, jnp.pad(following, (0, 1), constant_values=count)


def begins_of(region: Region, unit, row):
    """Of rows at (unit, row): the bit of their first tile's words with which they begin, -1 where the unit is."""
    (buffer,) = buffers_of(region)
    return jnp.where(unit >= 0, 8 * buffer.line(row), -1)


def flat(region: Region, pool, unit, row, count: int):
    """(pool [tiles, 4, 128], first tile of each row, [chunks, count / 128, 128] int32); inside it, so nothing looks."""
    (buffer,) = buffers_of(region)
    places = jnp.clip(unit, 0, pool.shape[0] - 1) * pool.shape[1] + buffer.first(jnp.maximum(row, 0))
    return pool.reshape(-1, *pool.shape[2:]), places.reshape(-1, count // LANES, LANES)


def decoded(region: Region, fours, rest, *, native: bool, kept=None) -> list:
    """Lines [4n, 128] bf16 of narrow rows, 4i to 4i + 3 from the words i of four arrays.

    Args:
        region: of the rows.
        fours: [n, 128] words each, of a row's tile.
        rest: [n, 128] words of which each byte is one of the four rows', of their 16-bit channels.
        native: the chip casts e4m3 itself.
        kept: [n, 128] words, 0 in the bytes of rows that are to be zeros; None: none is.
    """
    places = {place.field: place for place in region.unit.places}
    first = next(field for field in region.format.fields if field.is_value)
    bytes_ = transposed(*fours)
    bytes_ = bytes_ if kept is None else [words & kept for words in bytes_]
    scale_line, scale_lane = divmod(places["scales"].base, LANES)
    few = exponents(bytes_[scale_line], scale_lane, first.groups)
    spread = dot(few, _groups(scale_lane, first.width, len(bytes_), first.groups), contract=0).astype(jnp.bfloat16)
    found = []
    for number, words in enumerate(bytes_):
        by = spread[:, LANES * number : LANES * (number + 1)]
        line = block_lines.from_e4m3(words, native) * jnp.bfloat16(block_lines.e4m3_factor(native)) * by
        found.append(jnp.where(by < 0, jnp.bfloat16(jnp.nan), line))
    # High bytes lie in the lower lanes, low ones above them.
    byte = pltpu.bitcast(rest, jnp.uint8).astype(jnp.int32)
    bits = pltpu.bitcast(of_bits(pltpu.roll(byte, LANES // 2, 1) << 24 | byte << 16).astype(jnp.bfloat16), jnp.int32)
    last = pltpu.bitcast(found[-1], jnp.int32)
    found[-1] = bf16(jnp.where(lanes(last.shape) < LANES // 2, last, bits))
    return found


def exponents(words, first: int, count: int):
    """[4n, 128] bf16 of ``count`` lanes of exponents from lane ``first`` on, a row a byte of words [n, 128].

    255 is -1, and other lanes 0: a product with zeros and ones may not spread what is not finite.
    """
    words = in_lanes(words, first, count)
    # A byte's highest bit becomes a sign, too, which is taken away from two numbers at once.
    signed = of_bits(pltpu.bitcast(words, jnp.int8).astype(jnp.int32) << 23).astype(jnp.bfloat16)
    power = bf16(pltpu.bitcast(signed, jnp.int32) & twice(0x7FFF))
    return jnp.where(power == jnp.bfloat16(jnp.inf), jnp.bfloat16(-1), power)


def in_lanes(words, first: int, count: int):
    """Words [n, 128], zeros outside of ``count`` lanes from ``first`` on."""
    lane = lanes((1, LANES))
    return words & jnp.where((lane >= first) & (lane < first + count), jnp.int32(-1), 0)


def transposed(one, two, three, four) -> list:
    """Words of four rows -> of each of their bytes, words that hold it of all four."""
    found = []
    for low in (True, False):
        even, odd = (_halves(some, other, low=low) for some, other in ((one, three), (two, four)))
        found.append(even & BYTES | (odd & BYTES) << 8)
        found.append(lax.shift_right_logical(even, 8) & BYTES | odd & ~BYTES)
    return found


def _halves(first, second, *, low: bool):
    """The lower halves of two words, or their upper ones, as one."""
    if low:
        return first & 0xFFFF | second << 16
    return lax.shift_right_logical(first, 16) | second & np.int32(-0x10000)


def _groups(first: int, width: int, lines: int, groups: int):
    """[128, lines · 128] ones where a channel belongs to the group whose scale lies in a lane from ``first`` on."""
    scale, channel = (lax.broadcasted_iota(jnp.int32, (LANES, LANES * lines), axis) for axis in (0, 1))
    group = jnp.minimum(lax.div(channel, width), groups - 1)
    return jnp.where(scale == first + group, 1.0, 0.0).astype(jnp.bfloat16)
