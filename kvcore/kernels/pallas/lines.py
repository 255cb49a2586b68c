"""Bytes of rows in tiles as 32-bit lanes: what a kernel sees of a row after a DMA, and what it must hand to one.

A tile of bytes is [4, 128], and a 32-bit word of the vector unit holds the four bytes of one lane: tiles read as words
[K, tiles, 128] need no shuffle, and byte line b of a row (its bytes 128·b to 128·b + 127) is a shift and a mask.
Bytes are held as int32 here; arithmetic on narrower integers is emulated or missing on most chips.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.plan import Region
from kvcore.spec.layout import LANES, LINES_ACROSS, TILE_BYTES

SUBLANES = TILE_BYTES // LANES
"""Byte lines of a tile."""


class Buffer(NamedTuple):
    """One buffer of a region's rows.

    Attributes:
        name: in the region's layout.
        lines: 128-byte lines of a row, pads included.
        parts: rows that share a tile; 1 where a row is one tile or more, whole ones or not.
        fp32: the pool holds fp32 elements, so that a word is a channel.
    """

    name: str
    lines: int
    parts: int
    fp32: bool

    @property
    def across(self) -> bool:
        """Rows begin anywhere in a tile, and end in the next."""
        return not self.fp32 and self.lines in LINES_ACROSS

    @property
    def tiles(self) -> int:
        """Tiles that move with one row."""
        return max(1, -(-self.lines // SUBLANES))

    @property
    def tile(self) -> tuple[int, ...]:
        """What moves with one row: the last two axes of the pool, and some of the one before where rows are across."""
        if self.across:
            return self.tiles, SUBLANES, LANES
        return (self.tiles, LANES) if self.fp32 else (self.tiles * SUBLANES, LANES)

    def first(self, row):
        """Where in its unit of the pool a row begins, or the tile that it shares."""
        return row * self.lines >> 2 if self.across else row >> self.parts.bit_length() - 1

    def line(self, row):
        """The line of the tile at ``first`` with which a row begins."""
        return row * self.lines & 3 if self.across else (row & self.parts - 1) * (SUBLANES // self.parts)

    def at(self, row) -> Any:
        """Index of what moves with a row in its unit of the pool."""
        return pl.ds(self.first(row), self.tiles) if self.across else self.first(row)

    def rows(self, tiles: int) -> int:
        """Rows that lie in so many items of the pool's second axis."""
        return tiles * SUBLANES // self.lines if self.across else tiles * self.parts

    @property
    def dtype(self) -> Any:
        """Of the pool."""
        return jnp.float32 if self.fp32 else jnp.uint8


def buffers_of(region: Region) -> tuple[Buffer, ...]:
    """The buffers of a region in ``tpu_tile`` layout, in the order of its pools."""
    found = []
    for name, _ in region.unit.buffers:
        places = [place for place in region.unit.places if place.buffer == name]
        stride = places[0].stride
        fp32 = stride % TILE_BYTES == 0 and all(region.format.field(place.field).code == "fp32" for place in places)
        found.append(Buffer(name, stride // LANES, max(1, TILE_BYTES // stride), fp32))
    return tuple(found)


def words_of(tiles, buffer: Buffer):
    """Tiles [K, *tile] of a buffer -> words [K, tiles, 128] int32."""
    if buffer.fp32:
        return lax.bitcast_convert_type(tiles, jnp.int32)
    return pltpu.bitcast(tiles, jnp.int32).reshape(-1, buffer.tiles, LANES)


def tiles_of(words, buffer: Buffer):
    """Words [K, tiles, 128] int32 -> tiles [K, *tile] as they are stored."""
    if buffer.fp32:
        return lax.bitcast_convert_type(words, jnp.float32)
    return pltpu.bitcast(words[:, :, None] if buffer.across else words, jnp.uint8)


def byte_line(words, buffer: Buffer, row, number: int):
    """Byte line ``number`` of K rows, [K, 128] int32.

    Args:
        words: [K, tiles, 128].
        buffer: that they come from.
        row: [K, 1] int32, each one's number in its unit: it tells rows that share a tile apart.
        number: of the line.
    """
    if buffer.parts == 1 and not buffer.across:
        return lax.shift_right_logical(words[:, number // SUBLANES, :], jnp.int32(8 * (number % SUBLANES))) & 0xFF
    word = words[:, 0, :]
    line = jnp.broadcast_to(buffer.line(row) + number, word.shape)
    word = jnp.where(line < SUBLANES, word, words[:, 1, :]) if buffer.across else word
    return lax.shift_right_logical(word, 8 * (line & SUBLANES - 1)) & 0xFF


def window(line: Callable[[int], Any], count: int, first: int):
    """[K, 128] elements ``first`` to ``first + 127`` of rows that are ``count`` lines long; arbitrary beyond them."""
    number, shift = divmod(first, LANES)
    here = line(number) if 0 <= number < count else None
    if not shift:
        assert here is not None, "a window of nothing"
        return here
    after = line(number + 1) if 0 <= number + 1 < count else None
    here = None if here is None else pltpu.roll(here, LANES - shift, 1)
    after = None if after is None else pltpu.roll(after, LANES - shift, 1)
    if here is None or after is None:
        return after if here is None else here
    return jnp.where(lanes(here.shape) < LANES - shift, here, after)


def at_lane(line, lane: int):
    """[K, 1] one lane of a line [K, 128]; a sum of zeros and it, since lanes cannot be addressed."""
    return jnp.sum(jnp.where(lanes(line.shape) == lane, line, 0), axis=1, keepdims=True)


def column(numbers):
    """[1, K] int32 along lanes -> [K, 1] along sublanes. In HBM a column would take a whole tile line a row.

    By sums in fp32, since those of integers are two: exact below 2^24, and beyond that the sign is.
    """
    if numbers.shape[1] > LANES:
        pieces = range(0, numbers.shape[1], LANES)
        return jnp.concatenate([column(numbers[:, first : first + LANES]) for first in pieces], axis=0)
    count = numbers.shape[1]
    square = jnp.broadcast_to(numbers.astype(jnp.float32), (count, count))
    diagonal = lanes((count, count)) == lax.broadcasted_iota(jnp.int32, (count, count), 0)
    return jnp.sum(jnp.where(diagonal, square, 0.0), axis=1, keepdims=True).astype(jnp.int32)


def line(numbers):
    """[K, 1] along sublanes -> [1, all] along lanes, and pads to whole lines of them."""
    found = []
    for first in range(0, len(numbers), LANES):
        some = numbers[first : first + LANES]
        square = (len(some), LANES)
        diagonal = lanes(square) == lax.broadcasted_iota(jnp.int32, square, 0)
        found.append(jnp.sum(jnp.where(diagonal, jnp.broadcast_to(some, square), 0), axis=0, keepdims=True))
    return jnp.concatenate(found, axis=1)


def lanes(shape: Sequence[int]):
    """The number of every lane, int32."""
    return lax.broadcasted_iota(jnp.int32, tuple(shape), len(shape) - 1)
