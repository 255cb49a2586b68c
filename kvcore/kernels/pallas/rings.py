"""Whole rings as they lie: one DMA a buffer brings all rows of a slot, a token ahead; which are seen is arithmetic.

A row of its own for each copy would take the scalar unit longer than the memory takes for the ring.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import block_lines, compact
from kvcore.kernels.pallas.lines import buffers_of
from kvcore.plan import Region
from kvcore.spec.layout import LANES

MOST_ROWS = 2 * LANES
ROWS_OF_A_TILE = 4
STEP = 32
"""Rows of which a register holds one byte each."""


def fits(region: Region) -> bool:
    """True for rings of narrow rows that are short enough to be taken at once."""
    return region.growth == "slot" and region.rows <= MOST_ROWS and compact.narrow(region)


def size(region: Region) -> int:
    """Rows that are decoded: those of the ring, and pads."""
    return -(-region.rows // STEP) * STEP


def seen(region: Region, unit, row):
    """(unit, first row, how many) [T] int32 of consecutive rows of one slot each, at (unit, row) [T, n]; unit -1: none.

    Rows that do not exist, of unit -1, come before the others or behind them.
    """
    exists = unit >= 0
    number = jnp.argmax(exists, axis=1)[:, None]
    first = jnp.take_along_axis(row, number, axis=1)[:, 0]
    return jnp.max(unit, axis=1, initial=-1), first, jnp.sum(exists, axis=1, dtype=jnp.int32)


def scratch(region: Region) -> list:
    """Scratch of a ``Ring``: tiles of every buffer, and a semaphore for either half."""
    rows = size(region)
    tiles = [
        pltpu.VMEM((compact.HALVES, rows // buffer.parts, *buffer.tile), buffer.dtype) for buffer in buffers_of(region)
    ]
    return [*tiles, pltpu.SemaphoreType.DMA((compact.HALVES,))]


class Ring:
    """Rings of a region, one a token.

    Args:
        region: of the rows.
        pools: a reference to each of its pools, in HBM.
        held: the references that ``scratch`` asked for.
        units: [T] int32, of each token, within the pools.
        interpret: as in ``pallas_call``.
    """

    def __init__(self, region: Region, pools, held, units, interpret: Any) -> None:
        self.region, self._pools, self._tiles, self._arrived = region, pools, held[:-1], held[-1]
        self._units, self._interpret, self._native = units, interpret, block_lines.casts_e4m3(interpret)

    def start(self, token, order) -> None:
        """Let the ring come that is next from ``token`` on, if there is one."""
        numbers, following = order
        token = following[token]
        needed = token < numbers.shape[0]
        token = jnp.minimum(token, numbers.shape[0] - 1)
        for copy in self._copies(token, numbers[token] & compact.HALVES - 1):
            pl.when(needed)(copy.start)

    def lines(self, token, order, first, count) -> list:
        """Wait for a token's ring; lines [K, 128] bf16 of its rows in their order, zeros where a row is not seen.

        The next one's copies are issued under this one's arithmetic.
        """
        half = order[0][token] & compact.HALVES - 1
        for copy in self._copies(token, half):
            copy.wait()
        few = size(self.region) // ROWS_OF_A_TILE
        kept = _kept(self.region, few, first, count)
        fours, rest = [], None
        for buffer, tiles in zip(buffers_of(self.region), self._tiles, strict=True):
            if buffer.parts == 1:
                fours = [self._words(tiles, half, few, number) for number in range(ROWS_OF_A_TILE)]
            else:
                rest = self._words(tiles, half, few, None) & kept
        self.start(token + 1, order)
        return compact.decoded(self.region, fours, rest, native=self._native, kept=kept)

    def _words(self, tiles, half, count: int, number: int | None):
        """Words of every fourth tile from ``number`` on, or of all of them."""
        if self._interpret:
            # The interpreter knows no views of memory.
            words = compact.words(tiles, half, interpret=True)
            return words if number is None else words[number::ROWS_OF_A_TILE]
        words = tiles.at[half].bitcast(jnp.int32).reshape(tiles.shape[1], LANES)
        return words[...] if number is None else words[pl.ds(number, count, stride=ROWS_OF_A_TILE)]

    def _copies(self, token, half) -> list:
        return [
            pltpu.make_async_copy(pool.at[self._units[token]], tiles.at[half, : pool.shape[1]], self._arrived.at[half])
            for pool, tiles in zip(self._pools, self._tiles, strict=True)
        ]


def among(region: Region, row, first, count):
    """Whether rows are among ``count`` from ``first`` on, around the ring; pads are not."""
    ahead = row - first
    ahead = jnp.where(ahead < 0, ahead + region.rows, ahead)
    return (ahead < count) & (row < region.rows)


def _kept(region: Region, count: int, first, rows):
    """[count, 128] int32: the bytes of words 4r to 4r + 3 whose rows are among ``rows`` from ``first`` on."""
    begin = ROWS_OF_A_TILE * lax.broadcasted_iota(jnp.int32, (count, LANES), 0)

    def from_(row):
        past = row - begin
        return jnp.where(past < ROWS_OF_A_TILE, jnp.int32(-1) << 8 * jnp.maximum(past, 0), 0)

    # What is not seen is a run, too, where what is goes around the ring's end.
    end = first + rows
    around = end > region.rows
    low, high = jnp.where(around, end - region.rows, first), jnp.where(around, first, end)
    run = from_(low) & ~from_(high)
    return jnp.where(around, ~run, run) & ~from_(jnp.int32(region.rows))
