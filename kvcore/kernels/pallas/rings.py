"""Whole rings as they lie: one DMA brings all rows of a slot, a token ahead; which are seen is arithmetic.

A row of its own for each copy would take the scalar unit longer than the memory takes for the ring.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import block_lines, compact
from kvcore.kernels.pallas.lines import SUBLANES, buffers_of
from kvcore.plan import Region
from kvcore.spec.layout import LANES

MOST_ROWS = 2 * LANES
ROWS_OF_FIVE_TILES = 4
MOVED = 4
"""Rows that change places at most so that fewer are decoded."""
SUBLANES_OF_WORDS = 8
STEP = 32
"""Rows of which a register holds one byte each."""


def fits(region: Region) -> bool:
    """True for rings of narrow rows that are short enough to be taken at once."""
    return region.growth == "slot" and region.rows <= MOST_ROWS and compact.narrow(region)


def size(region: Region, most: int) -> int:
    """Rows that are decoded where a token sees ``most`` at most: as many as registers hold of these, or of the ring."""
    few = -(-min(region.rows, most) // STEP) * STEP
    return few if region.rows - few <= MOVED else -(-region.rows // STEP) * STEP


def seen(region: Region, unit, row):
    """(unit, first row, how many) [T] int32 of consecutive rows of one slot each, at (unit, row) [T, n]; unit -1: none.

    Rows that do not exist, of unit -1, come before the others or behind them.
    """
    exists = unit >= 0
    number = jnp.argmax(exists, axis=1)[:, None]
    first = jnp.take_along_axis(row, number, axis=1)[:, 0]
    return jnp.max(unit, axis=1, initial=-1), first, jnp.sum(exists, axis=1, dtype=jnp.int32)


def folded(region: Region, first, count, most: int):
    """A ring with places for the rows that are decoded alone: (first, its rows, first row to move, how many to move).

    Where the ring is longer than that, its last rows, those that are seen, take places before the first row that is:
    nothing is seen of these. So what is seen is a run in the shorter ring, too.
    """
    places = min(size(region, most), region.rows)
    moved = jnp.maximum(first, places)
    more = jnp.maximum(jnp.minimum(first + count, region.rows) - moved, 0)
    return jnp.minimum(first, places) - more, places, moved, more


def scratch(region: Region, tokens: int, most: int) -> list:
    """Scratch of a ``Ring`` of so many tokens a step: tiles, and a semaphore for either half."""
    (buffer,) = buffers_of(region)
    fours = max(size(region, most) // ROWS_OF_FIVE_TILES, -(-region.rows // ROWS_OF_FIVE_TILES))
    return [
        pltpu.VMEM((compact.HALVES, tokens, fours * buffer.lines, SUBLANES, LANES), buffer.dtype),
        pltpu.SemaphoreType.DMA((compact.HALVES,)),
    ]


class Ring:
    """Rings of a region, one a token, of some tokens a step.

    Args:
        region: of the rows.
        pool: a reference to its pool, in HBM.
        held: the references that ``scratch`` asked for.
        units: of all tokens, within the pools.
        most: rows that a token sees.
        interpret: as in ``pallas_call``.
    """

    def __init__(self, region: Region, pool, held, units, most: int, interpret: Any) -> None:
        self._region, self._pool, self._most = region, pool, most
        self._tiles, self._arrived = held
        self._units, self._interpret, self._native = units, interpret, block_lines.casts_e4m3(interpret)

    def start(self, step, order) -> None:
        """Let the rings come that are next from ``step`` on, if there are any."""
        numbers, following = order
        step = following[step]
        needed = step < numbers.shape[0]
        step = jnp.minimum(step, numbers.shape[0] - 1)
        for copy in self._copies(step, numbers[step] & compact.HALVES - 1):
            pl.when(needed)(copy.start)

    def rows(self, step, order, seen, *, live=True) -> list:
        """Wait for a step's rings; of each [K, d] bf16 of its rows, zeros where one is not seen, and which are, [1, K].

        The next ones' copies are issued under these ones' arithmetic.

        Args:
            step: of some tokens.
            order: of the steps whose tokens have rows, some of them.
            seen: of all tokens, the first row and how many, as references.
            live: whether there are such; no row is seen where not.
        """
        half, tokens = order[0][step] & compact.HALVES - 1, self._tiles.shape[1]

        @pl.when(live)
        def _():
            for copy in self._copies(step, half):
                copy.wait()
            self.start(step + 1, order)

        runs = []
        for token in range(tokens):
            first, count = (array[tokens * step + token] for array in seen)
            runs.append(self._fold(half, token, first, jnp.where(live, count, 0)))
        return [self._decoded(self._words(half, token), *run) for token, run in enumerate(runs)]

    def _fold(self, half, token: int, first, count) -> tuple:
        """Let rows of a ring change places; (first row, rows of the ring, how many are seen)."""
        begin, places, moved, more = folded(self._region, first, count, self._most)
        for number in range(self._region.rows - places):
            row, place = jnp.minimum(moved + number, self._region.rows - 1), jnp.clip(begin + number, 0, places - 1)
            mask = jnp.where(number < more, jnp.int32(-1), 0)
            self._move(self._tiles.at[half, token], row, place, mask)
        return begin, places, count

    def _move(self, held, row, place, mask) -> None:
        """A row of a ring to another place where the mask is ones; nothing where it is 0."""
        (one, two), bits = self._tiles_of(held, row)
        four, fifth = compact.joined(one, two, bits), lax.shift_right_logical(two, bits) & 0xFF
        (one, two), bits = self._tiles_of(held, place)
        low, high = (jnp.int32(-1) << bits) & mask, ~(jnp.int32(-0x100) << bits) & mask
        above = fifth << bits | lax.shift_right_logical(lax.shift_right_logical(four, 8), 24 - bits)
        (buffer,) = buffers_of(self._region)
        changed = one & ~low | four << bits & low, two & ~high | above & high
        for number, words in enumerate(changed):
            compact.put_tile(held, buffer.first(place) + number, words, interpret=self._interpret)

    def _tiles_of(self, held, row) -> tuple:
        """Words of the two tiles that a row lies in, and the bit of the first one's with which it begins."""
        (buffer,) = buffers_of(self._region)
        tiles = [buffer.first(row) + number for number in range(compact.TILES)]
        return [compact.tile(held, tile, interpret=self._interpret) for tile in tiles], 8 * buffer.line(row)

    def _words(self, half, token: int) -> list:
        """Words of every fifth tile of a ring, from each of the first five on."""
        tiles, step = self._tiles.at[half, token], ROWS_OF_FIVE_TILES + 1
        few = size(self._region, self._most) // ROWS_OF_FIVE_TILES
        return [compact.every(tiles, number, few, step=step, interpret=self._interpret) for number in range(step)]

    def _decoded(self, tiles, first, places: int, count):
        kept = _kept(len(tiles[0]), places, first, count)
        # Row r of four begins with line r of tile r, and its fifth line is line r of the next tile.
        fours = [
            lax.shift_right_logical(tiles[row], 8 * row) | tiles[row + 1] << 32 - 8 * row if row else tiles[0]
            for row in range(len(tiles) - 1)
        ]
        mine = [tiles[row + 1] & np.uint32(0xFF << 8 * row).view(np.int32) for row in range(len(fours))]
        rest = sum(mine, jnp.int32(0)) & kept
        lines = compact.decoded(self._region, fours, rest, native=self._native, apart=True, kept=kept)
        row = lax.broadcasted_iota(jnp.int32, (1, len(lines[0])), 1)
        return jnp.concatenate(lines, axis=1), _among(places, row, first, count)

    def _copies(self, step, half) -> list:
        found, tokens = [], self._tiles.shape[1]
        for token in range(tokens):
            at = self._tiles.at[half, token, : self._pool.shape[1]]
            unit = self._units[tokens * step + token]
            found.append(pltpu.make_async_copy(self._pool.at[unit], at, self._arrived.at[half]))
        return found


def _among(places: int, row, first, count):
    """Whether rows are among ``count`` from ``first`` on, around a ring; pads are not."""
    ahead = row - first
    ahead = jnp.where(ahead < 0, ahead + places, ahead)
    return (ahead < count) & (row < places)


def _kept(few: int, places: int, first, count):
    """[few, 128] int32: the bytes of words 4r to 4r + 3 whose rows are among ``count`` from ``first`` on."""
    # What is not seen is a run, too, where what is goes around the ring's end.
    end = first + count
    around = jnp.where(end > places, jnp.int32(-1), 0)
    low, high = jnp.where(around < 0, end - places, first), jnp.where(around < 0, first, end)
    word = lax.broadcasted_iota(jnp.int32, (SUBLANES_OF_WORDS, LANES), 0)
    bytes_ = word * _bytes(compact.ROWS_OF_A_WORD) + np.int32(0x03020100)
    found = []
    for begin in range(0, compact.ROWS_OF_A_WORD * few, STEP):

        def past(row, begin=begin):
            """In the highest bit of each byte whether its row is this one or a later one."""
            return bytes_ + (128 - jnp.clip(row - begin, 0, STEP)) * _bytes(1)

        seen = past(low) ^ past(high) ^ around
        seen = (seen if begin + STEP <= places else seen & ~past(jnp.int32(places))) & _bytes(128)
        found.append((seen << 1) - lax.shift_right_logical(seen, 7))
    return jnp.concatenate(found, axis=0)


def _bytes(number: int) -> np.int32:
    """A byte four times in a word."""
    return np.uint32(number * 0x01010101).view(np.int32)
