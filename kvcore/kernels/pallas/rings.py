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
    """Scratch of a ``Ring``: tiles, and a semaphore for either half."""
    (buffer,) = buffers_of(region)
    tiles = size(region) * buffer.lines // SUBLANES
    return [
        pltpu.VMEM((compact.HALVES, tiles, SUBLANES, LANES), buffer.dtype),
        pltpu.SemaphoreType.DMA((compact.HALVES,)),
    ]


class Ring:
    """Rings of a region, one a token.

    Args:
        region: of the rows.
        pool: a reference to its pool, in HBM.
        held: the references that ``scratch`` asked for.
        units: [T] int32, of each token, within the pools.
        interpret: as in ``pallas_call``.
    """

    def __init__(self, region: Region, pool, held, units, interpret: Any) -> None:
        self.region, self._pool = region, pool
        self._tiles, self._arrived = held
        self._units, self._interpret, self._native = units, interpret, block_lines.casts_e4m3(interpret)

    def start(self, token, order) -> None:
        """Let the ring come that is next from ``token`` on, if there is one."""
        numbers, following = order
        token = following[token]
        needed = token < numbers.shape[0]
        token = jnp.minimum(token, numbers.shape[0] - 1)
        pl.when(needed)(self._copy(token, numbers[token] & compact.HALVES - 1).start)

    def lines(self, token, order, first, count) -> list:
        """Wait for a token's ring; lines [K, 128] bf16 of its rows in their order, zeros where a row is not seen.

        The next one's copies are issued under this one's arithmetic.
        """
        half = order[0][token] & compact.HALVES - 1
        self._copy(token, half).wait()
        few = size(self.region) // ROWS_OF_FIVE_TILES
        kept = _kept(self.region, few, first, count)
        tiles = [
            compact.every(self._tiles.at[half], number, few, step=ROWS_OF_FIVE_TILES + 1, interpret=self._interpret)
            for number in range(ROWS_OF_FIVE_TILES + 1)
        ]
        self.start(token + 1, order)
        # Row r of four begins with line r of tile r, and its fifth line is line r of the next tile.
        fours = [tiles[0], *(compact.joined(tiles[row], tiles[row + 1], 8 * row) for row in range(1, len(tiles) - 1))]
        mine = [tiles[row + 1] & np.uint32(0xFF << 8 * row).view(np.int32) for row in range(len(fours))]
        rest = sum(mine, jnp.int32(0))
        return compact.decoded(self.region, fours, rest & kept, native=self._native, kept=kept)

    def _copy(self, token, half):
        at = self._tiles.at[half, : self._pool.shape[1]]
        return pltpu.make_async_copy(self._pool.at[self._units[token]], at, self._arrived.at[half])


def among(region: Region, row, first, count):
    """Whether rows are among ``count`` from ``first`` on, around the ring; pads are not."""
    ahead = row - first
    ahead = jnp.where(ahead < 0, ahead + region.rows, ahead)
    return (ahead < count) & (row < region.rows)


def _kept(region: Region, count: int, first, rows):
    """[count, 128] int32: the bytes of words 4r to 4r + 3 whose rows are among ``rows`` from ``first`` on."""
    begin = compact.ROWS_OF_A_WORD * lax.broadcasted_iota(jnp.int32, (count, LANES), 0)

    def from_(row):
        past = row - begin
        return jnp.where(past < compact.ROWS_OF_A_WORD, jnp.int32(-1) << 8 * jnp.maximum(past, 0), 0)

    # What is not seen is a run, too, where what is goes around the ring's end.
    end = first + rows
    around = end > region.rows
    low, high = jnp.where(around, end - region.rows, first), jnp.where(around, first, end)
    run = from_(low) & ~from_(high)
    return jnp.where(around, ~run, run) & ~from_(jnp.int32(region.rows))
