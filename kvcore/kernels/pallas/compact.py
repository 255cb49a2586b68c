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
        apart: as in ``decoded``.
    """

    def __init__(self, region: Region, pool, given, order, held, interpret: Any, *, apart: bool = False) -> None:
        self._region, self._pool, self._given, self._apart = region, pool, given, apart
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
        return decoded(self._region, [coded[some] for some in fours], rest, native=self._native, apart=self._apart)

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


def tile(tiles, number, *, interpret: Any):
    """Words [1, 128] of one of tiles [count, 4, 128]."""
    if interpret:
        return pltpu.bitcast(tiles[number], jnp.int32)
    return tiles.bitcast(jnp.int32).reshape(tiles.shape[0], LANES)[pl.ds(number, 1)]


def put_tile(tiles, number, words, *, interpret: Any) -> None:
    """Exchange what ``tile`` reads."""
    if interpret:
        tiles[number] = pltpu.bitcast(words, jnp.uint8)
    else:
        tiles.bitcast(jnp.int32).reshape(tiles.shape[0], LANES)[pl.ds(number, 1)] = words


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


def decoded(region: Region, fours, rest, *, native: bool, apart: bool = False, kept=None) -> list:
    """Lines [4n, 128] bf16 of narrow rows, 4i to 4i + 3 from the words i of four arrays.

    Args:
        region: of the rows.
        fours: [n, 128] words each, of a row's tile.
        rest: [n, 128] words of which each byte is one of the four rows', of their 16-bit channels.
        native: the chip casts e4m3 itself.
        apart: lines are to be multiplied by ``block_lines.e4m3_factor``; a scale that is no number spoils its row.
        kept: [n, 128] words, 0 in the bytes of rows that are to be zeros; None: none is.
    """
    places = {place.field: place for place in region.unit.places}
    first = next(field for field in region.format.fields if field.is_value)
    factor = jnp.bfloat16(block_lines.e4m3_factor(native))
    bytes_ = transposed(*fours)
    bytes_ = bytes_ if kept is None else [words & kept for words in bytes_]
    line, lane = divmod(places["scales"].base, LANES)
    shape = LANES if kept is None else 1, LANES * len(bytes_)
    channels = lane + jnp.minimum(lax.div(lanes(shape), first.width), first.groups - 1)
    # Where lanes are looked up in, the vector unit does nothing; where rows wait for copies, it has time for products.
    if kept is None:
        scales = _by_products(bytes_[line], lane, first.groups, channels, apart=apart)
    else:
        scales = _among_lanes(bytes_[line], channels)
    found = []
    for words, scale in zip(bytes_, scales, strict=True):
        codes = block_lines.from_e4m3(words, native)
        if not (native or apart):
            # A cast by way of another bias has no -0.
            signs = in_halves(words & np.uint32(0x80808080).view(np.int32)) << 8
            codes = bf16(pltpu.bitcast(codes * factor, jnp.int32) | signs)
        found.append(codes * scale)
    # High bytes lie in the lower lanes, low ones above them.
    pairs = in_halves(rest)
    pairs = pltpu.roll(pairs, LANES // 2, 1) << 8 | pairs
    if apart and not native:
        pairs = pltpu.bitcast(bf16(pairs) * (1 / factor), jnp.int32)
    codes = pltpu.bitcast(found[-1], jnp.int32)
    found[-1] = bf16(jnp.where(lanes(codes.shape) < LANES // 2, codes, pairs))
    return found


def in_halves(words):
    """Words [n, 128] -> [2n, 128] of their bytes, one in either half: as two rows of 16 bits lie."""
    return pltpu.bitcast(pltpu.bitcast(words, jnp.uint8).astype(jnp.uint16), jnp.int32)


def exponents(words):
    """[4n, 128] bf16 powers of two, a row a byte of words [n, 128]; 255 is infinite, and 0 is 0."""
    return bf16(in_halves(words) << 7)


def _among_lanes(words, places) -> list:
    """Scales [4n, 128] bf16 of lines of channels, each looked up in words [n, 128] in the lane ``places`` [1, all]."""
    power = exponents(words)
    power = pltpu.bitcast(jnp.where(power == jnp.bfloat16(jnp.inf), jnp.bfloat16(jnp.nan), power), jnp.int32)
    found = []
    for begin in range(0, places.shape[1], LANES):
        lane = jnp.broadcast_to(places[:, begin : begin + LANES], power.shape)
        found.append(bf16(jnp.take_along_axis(power, lane, axis=1, mode="promise_in_bounds")))
    return found


def _by_products(words, first: int, count: int, places, *, apart: bool) -> list:
    """The same by products with zeros and ones, ``places`` [128, all].

    ``count`` lanes from ``first`` on are scales. ``apart``: one that is no number need not stay in its group.
    """
    lane = lanes((1, LANES))
    power = exponents(words & jnp.where((lane >= first) & (lane < first + count), jnp.int32(-1), 0))
    if not apart:
        # A product with zeros may not spread what is not finite.
        power = jnp.where(power == jnp.bfloat16(jnp.inf), jnp.bfloat16(-1), power)
    ones = jnp.where(lax.broadcasted_iota(jnp.int32, places.shape, 0) == places, 1.0, 0.0).astype(jnp.bfloat16)
    spread = dot(power, ones, contract=0).astype(jnp.bfloat16)
    found = [spread[:, begin : begin + LANES] for begin in range(0, spread.shape[1], LANES)]
    return found if apart else [jnp.where(one < 0, jnp.bfloat16(jnp.nan), one) for one in found]


def transposed(one, two, three, four) -> list:
    """Words of four rows -> of each of their bytes, words that hold it of all four."""
    first, second = _exchanged(one, three, 16), _exchanged(two, four, 16)
    return [word for low, high in zip(first, second, strict=True) for word in _exchanged(low, high, 8)]


def _exchanged(first, second, bits: int) -> tuple:
    """Two words, of which every other piece of so many bits, the upper one of the first, changes places."""
    lower = np.int32(0xFFFF) if bits == 16 else BYTES
    differ = (lax.shift_right_logical(first, bits) ^ second) & lower
    return first ^ differ << bits, second ^ differ
