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

from kvcore.kernels.pallas.lines import Buffer, buffers_of, column, lanes
from kvcore.plan import Region
from kvcore.spec.layout import LANES, TILE_BYTES

HALVES = 2
"""Chunks in VMEM: one that is worked on and one that arrives."""
ROWS_OF_A_WORD = 2
BYTES = np.int32(0x00FF00FF)
"""The lower byte of both halves of a word."""
BIASED_E4M3, BIASED_E2M1 = 120 << 7, 126 << 7
"""What makes a code's exponent that of a bf16 number."""
COMPILER = pltpu.CompilerParams(disable_bounds_checks=True)
"""Of kernels whose addresses were clamped before: a check takes as long as starting the copy does."""


def words(tiles, half, *, interpret: Any):
    """Words [K · tiles, 128] int32 of a chunk of byte tiles [HALVES, ..., K, 4 · tiles, 128], tile by tile."""
    rows = math.prod(tiles.shape[1:-1])
    if interpret:
        # The interpreter knows no views of memory; this shuffles registers, which it has none of.
        return pltpu.bitcast(tiles[half].reshape(rows, LANES), jnp.int32)
    return tiles.at[half].bitcast(jnp.int32).reshape(rows // 4, LANES)[...]


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


def from_e2m1(pairs):
    """Words that hold a nibble in either half -> [2K, 128] bf16."""
    number = bf16(((pairs & twice(7)) << 6) + twice(BIASED_E2M1))
    number = jnp.minimum(number * jnp.bfloat16(2) - jnp.bfloat16(1), number)
    return bf16(pltpu.bitcast(number, jnp.int32) | (pairs & twice(8)) << 12)


def from_split(pairs):
    """Words that hold the high byte of a bf16 number in the lower byte of either half, the low one above it."""
    return bf16((pairs & BYTES) << 8 | lax.shift_right_logical(pairs, 8) & BYTES)


def from_e8m0(pairs):
    """Words that hold an exponent in the lower byte of either half -> [2K, 128] bf16; 255 is infinite, for a NaN."""
    return bf16((pairs & BYTES) << 7)


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
    """True for rows of a tile of e4m3 codes with their e8m0 scales, and 64 channels of 16 bits in a part of a tile."""
    buffers = {buffer.name: buffer for buffer in buffers_of(region)}
    values = {field.name: field for field in region.format.fields if field.is_value}
    for place in region.unit.places:
        buffer, field = buffers[place.buffer], values.get(place.field)
        coded = buffer.parts == 1 and buffer.tiles == 1 and place.base < TILE_BYTES
        if field is None:
            known = place.field == "scales" and coded
        elif field.code == "e4m3":
            known = coded and place.base == 0 and field.scale == "e8m0" and field.width % ROWS_OF_A_WORD == 0
        else:
            known = field.code == "bf16" and buffer.parts == 4 and field.size == LANES // 2 and place.base == 0
        if not known:
            return False
    # The 16-bit channels are the upper half of the last line, where a part of a tile has their low bytes.
    sizes = [field.size for field in values.values()]
    return region.heads == 1 and sizes in ([TILE_BYTES - LANES // 2, LANES // 2], [TILE_BYTES])


class Rows:
    """Chunks of narrow rows, a chunk ahead of the arithmetic: a DMA a row and buffer, whether the row exists or not.

    Args:
        region: of the rows.
        pools: a reference to each of its pools, in HBM, as ``flat`` makes them.
        held: the references that ``rows_scratch`` asked for.
        places: of each pool, where row i of the stream lies, [all] int32; as ``flat`` makes them.
        count: rows of a chunk.
        interpret: as in ``pallas_call``.
    """

    def __init__(self, region: Region, pools, held, places, count: int, interpret: Any) -> None:
        self._region, self._buffers, self._places = region, buffers_of(region), places
        self._pools, self._tiles, self._arrived = pools, held[:-1], held[-1]
        self._count, self._interpret = count, interpret

    def start(self, chunk, order) -> None:
        """Let the chunk come that is next from ``chunk`` on, if there is one: a predicate of each copy, no branch."""
        numbers, following = order
        chunk = following[chunk]
        needed = chunk < numbers.shape[0]
        chunk = jnp.minimum(chunk, numbers.shape[0] - 1)
        half = numbers[chunk] & HALVES - 1

        def row(i, _):
            for places, pool, tiles in zip(self._places, self._pools, self._tiles, strict=True):
                at = pool.at[places[chunk * self._count + i]]
                copy = pltpu.make_async_copy(at, tiles.at[half, i], self._arrived.at[half])
                pl.when(needed)(copy.start)
            return _

        # The interpreter's programs grow with every copy that is written out, and compiling them is most of its time.
        lax.fori_loop(0, self._count, row, None, unroll=not self._interpret)

    def lines(self, chunk, order, parts) -> list:
        """Wait for a chunk; its rows' lines [K, 128] bf16, in the order of ``in_pairs``, zeros where there is no row.

        The next chunk's copies are issued under this one's arithmetic.

        Args:
            chunk: that was started.
            order: two references, as ``order`` makes them.
            parts: [1, K] int32, each row's number within the tile that it shares, -1 where there is none.
        """
        half = order[0][chunk] & HALVES - 1
        for tiles in self._tiles:
            pltpu.make_async_copy(tiles.at[half], tiles.at[half], self._arrived.at[half]).wait()
        part = jnp.broadcast_to(column(parts), (self._count, LANES))
        words_of = {
            buffer.name: jnp.where(part >= 0, words(tiles, half, interpret=self._interpret), 0)
            for buffer, tiles in zip(self._buffers, self._tiles, strict=True)
        }
        self.start(chunk + 1, order)
        places = {place.field: place for place in self._region.unit.places}
        first, *more = [field for field in self._region.format.fields if field.is_value]
        pairs = _pairs(words_of[places[first.name].buffer])
        scale_line, scale_lane = divmod(places["scales"].base, LANES)
        lane = lanes(pairs[0].shape)
        own = (lane >= scale_lane) & (lane < scale_lane + first.groups)
        few = from_exponents(jnp.where(own, pairs[scale_line], 0))
        found = []
        for number, pair in enumerate(pairs):
            spread = dot(few, _groups(scale_lane, first.width, number, first.groups), contract=0).astype(jnp.bfloat16)
            line = from_e4m3(pair) * spread
            line = jnp.where(spread < 0, jnp.bfloat16(jnp.nan), line)
            found.append(line)
        for field in more:
            # One byte of each word is this row's: high bytes in the lower lanes, low ones above them.
            word = words_of[places[field.name].buffer]
            mine = lax.shift_right_logical(word, jnp.maximum(part, 0) * 8) & 0xFF
            few = self._count // ROWS_OF_A_WORD
            both = mine[:few] | mine[few:] << 16
            bits = pltpu.roll(both, LANES // 2, 1) << 8 | both
            last = pltpu.bitcast(found[-1], jnp.int32)
            found[-1] = bf16(jnp.where(lane < LANES // 2, last, bits))
        return found


def rows_scratch(region: Region, count: int) -> list:
    """Scratch of ``Rows``: tiles of every buffer, and a semaphore for either half."""
    tiles = [pltpu.VMEM((HALVES, count, *buffer.tile), buffer.dtype) for buffer in buffers_of(region)]
    return [*tiles, pltpu.SemaphoreType.DMA((HALVES,))]


def in_pairs(numbers, count: int):
    """[..., n] of chunks of ``count`` rows, as their lines have them: of each half of the chunk in turn."""
    halves = numbers.reshape(*numbers.shape[:-1], -1, ROWS_OF_A_WORD, count // ROWS_OF_A_WORD)
    return halves.swapaxes(-1, -2).reshape(numbers.shape)


def out_of_pairs(numbers, count: int):
    """What ``in_pairs`` undoes."""
    pairs = numbers.reshape(*numbers.shape[:-1], -1, count // ROWS_OF_A_WORD, ROWS_OF_A_WORD)
    return pairs.swapaxes(-1, -2).reshape(numbers.shape)


def order(live):
    """Of chunks [n], which of them have rows: their numbers among those that do, else -1; the next one from each on.

    The second is [n + 1], and n where there is none. So a chunk without a row is neither fetched nor walked.
    """
    count = len(live)
    numbers = jnp.where(live, jnp.cumsum(live.astype(jnp.int32)) - 1, -1)
    places = jnp.where(live, jnp.arange(count, dtype=jnp.int32), count)
    following = lax.cummin(places, reverse=True)
    return numbers, jnp.pad(following, (0, 1), constant_values=count)


def parts_of(region: Region, unit, row):
    """Of rows at (unit, row): their number within the tile that they share, -1 where the unit is."""
    parts = max(buffer.parts for buffer in buffers_of(region))
    return jnp.where(unit >= 0, row & (parts - 1), -1)


def flat(region: Region, pools, unit, row):
    """(pools [tiles, 4, 128], of each the tile [n] int32 that has row (unit, row)); inside them, so no check looks."""
    places = []
    for buffer, pool in zip(buffers_of(region), pools, strict=True):
        tile = jnp.maximum(row, 0) >> buffer.parts.bit_length() - 1
        places.append((jnp.clip(unit, 0, pool.shape[0] - 1) * pool.shape[1] + tile).reshape(-1))
    return [pool.reshape(-1, *pool.shape[2:]) for pool in pools], places


def from_exponents(pairs):
    """As ``from_e8m0``, but 255 is -1: a product with zeros and ones may not spread what is not finite."""
    nan = (pairs & BYTES) + twice(1) & twice(0x100)
    return bf16((pairs & BYTES) << 7 ^ (nan << 7 | nan << 6))


def _pairs(word):
    """Words [K, 128] of rows of a tile -> of each line, words [K / 2, 128] of a byte of two rows; see ``in_pairs``."""
    few = word.shape[0] // ROWS_OF_A_WORD
    low = word[:few] & 0xFFFF | word[few:] << 16
    high = lax.shift_right_logical(word[:few], 16) | word[few:] & np.int32(-0x10000)
    return [low, lax.shift_right_logical(low, 8), high, lax.shift_right_logical(high, 8)]


def _groups(first: int, width: int, line: int, groups: int):
    """[128, 128] ones where a lane of a line belongs to the group whose scale lies in a lane from ``first`` on."""
    scale, lane = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    group = jnp.minimum(lax.div(lane + LANES * line, width), groups - 1)
    return jnp.where(scale == first + group, 1.0, 0.0).astype(jnp.bfloat16)
