"""Rows of a pool streamed into VMEM, a chunk ahead of the arithmetic: one DMA a row and buffer, none for unit -1."""

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas.lines import buffers_of, words_of
from kvcore.plan import Region

HALVES = 2
"""Chunks in VMEM: one that is worked on and one that arrives."""


def scratch(region: Region, *count: int):
    """Scratch of a stream of chunks of ``count`` rows, or (units, tiles of one): all buffers' tiles, and semaphores."""
    tiles = [pltpu.VMEM((HALVES, *count, *buffer.tile), buffer.dtype) for buffer in buffers_of(region)]
    return [*tiles, pltpu.SemaphoreType.DMA((HALVES,))]


class Stream:
    """Chunks of rows of one region, by their addresses in scalar memory.

    Args:
        region: of the rows.
        pools: a reference to each of its pools, in HBM.
        held: the references that ``scratch`` asked for.
        units, rows: where row i of the stream lies, [all] int32 each; rows None: whole units are what is streamed.
        count: rows, or units, of a chunk.
    """

    def __init__(self, region: Region, pools, held, units, rows, count: int) -> None:
        self._buffers = buffers_of(region)
        self._pools, self._tiles, self._arrived = pools, held[:-1], held[-1]
        self._units, self._rows, self._count = units, rows, count

    def start(self, chunk) -> None:
        """Let a chunk come."""
        self._each(chunk, lambda copy: copy.start())

    def words(self, chunk):
        """Wait for a chunk; buffer name -> words [rows, tiles, 128]. Skipped rows are arbitrary."""
        self.wait(chunk)
        half = lax.rem(chunk, HALVES)
        return {
            buffer.name: words_of(tiles[half].reshape(-1, *buffer.tile), buffer)
            for buffer, tiles in zip(self._buffers, self._tiles, strict=True)
        }

    def wait(self, chunk) -> None:
        """Wait for a chunk."""
        self._each(chunk, lambda copy: copy.wait())

    def piece(self, chunk, first, count: int):
        """Words of ``count`` tiles from tile ``first`` on of every unit of a chunk that has arrived, as ``words``."""
        half = lax.rem(chunk, HALVES)
        return {
            buffer.name: words_of(tiles[half, :, pl.ds(first, count)].reshape(-1, *buffer.tile), buffer)
            for buffer, tiles in zip(self._buffers, self._tiles, strict=True)
        }

    def _each(self, chunk, act) -> None:
        half = lax.rem(chunk, HALVES)

        def row(i, _):
            at = chunk * self._count + i
            unit = self._units[at]

            @pl.when(unit >= 0)
            def _():
                for buffer, pool, tiles in zip(self._buffers, self._pools, self._tiles, strict=True):
                    source = pool.at[unit] if self._rows is None else pool.at[unit, buffer.at(self._rows[at])]
                    act(pltpu.make_async_copy(source, tiles.at[half, i], self._arrived.at[half]))

            return _

        lax.fori_loop(0, self._count, row, None)


def ahead(stream: Stream, step, steps) -> None:
    """In step ``step`` of ``steps``: the first chunk starts by itself, every other one a step before it is needed."""

    @pl.when(step == 0)
    def _():
        stream.start(step)

    @pl.when(step + 1 < steps)
    def _():
        stream.start(step + 1)
