"""Where rows lie: from (request, position or entry) to a place in the pools, and canonical rows in and out of it.

An address is a pure function of the slot, the position and the block table, kept as two coordinates, (unit, place in
the unit): one flat offset would outgrow int32. A row that does not exist has unit -1, which lies outside every pool;
reads of it are zeros and writes to it are dropped. JAX by itself would wrap -1 around to the last unit.
"""

import math
from functools import cache

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvcore.backends.jax_pallas import fused, tiles
from kvcore.backends.jax_pallas.calls import TILED
from kvcore.backends.jax_pallas.encoding import decode, encode
from kvcore.backends.jax_pallas.runs import Run, from_bytes, join_bytes, runs, split_bytes, to_bytes
from kvcore.ops import StepIndex
from kvcore.plan import Region

OUTSIDE = lax.GatherScatterMode.FILL_OR_DROP


def locate(region: Region, index: StepIndex, request: Array, number: Array) -> tuple[Array, Array]:
    """(unit, row in the unit) of rows ``number`` of requests, both of one shape; unit -1 where there is none.

    ``number`` is a position, or an entry's number in a paged component of compressed entries.
    """
    exists = (request >= 0) & (number >= 0)
    number = jnp.where(exists, number, 0)
    if region.growth == "slot":
        unit = of(index.slots, request)
    else:
        column = divided(number, region.rows)
        exists &= column < index.block_table.shape[1]
        unit = of(index.block_table, request, jnp.where(exists, column, 0))
    return jnp.where(exists, unit, -1), rest(number, region.rows)


def divided(number: Array, by: int) -> Array:
    """``number // by`` of integers of 0 or more: one operation of XLA, where that is nine, all of them compiled."""
    return number if by == 1 else lax.div(number, jnp.asarray(by, number.dtype))


def rest(number: Array, by: int) -> Array:
    """``number % by`` likewise."""
    return jnp.zeros_like(number) if by == 1 else lax.rem(number, jnp.asarray(by, number.dtype))


class Held(dict):
    """A layer's pools by local name, and how their rows are moved; see ``Layer``."""

    def __init__(self, pools, kernels: str) -> None:
        super().__init__(pools)
        self.kernels = kernels

    def replace(self, name: str, pool) -> "Held":
        """A copy with one pool exchanged."""
        return Held({**self, name: pool}, self.kernels)


def load(pools: Held, region: Region, unit: Array, row: Array) -> Array:
    """Canonical rows [..., heads, row_bytes] of positions or entries; zeros where the unit is -1."""
    if pools.kernels in TILED:
        return tiles.load(pools, region, unit, row)
    pieces = []
    end = 0
    # Told once for all runs: a gather that finds out by itself what lies outside is three more kernels for each.
    count = math.prod(unit.shape)
    exists = jnp.repeat((unit >= 0).reshape(count, 1), region.heads, axis=0)
    unit = jnp.maximum(unit, 0)
    for run in runs(region):
        pool = pools[region.buffers[run.buffer][0]]
        flat, where, width = _places(region, run, pool, unit, row)
        axes = tuple(range(where.shape[-1]))
        numbers = lax.GatherDimensionNumbers(
            offset_dims=(where.ndim - 1,), collapsed_slice_dims=(0,), start_index_map=axes
        )
        stored = lax.gather(flat, where, numbers, (1, width), mode="clip")
        stored = to_bytes(stored)
        # Not -1: where there is no row, the rest of the shape does not say how wide one is.
        width = math.prod(stored.shape[unit.ndim :]) // region.heads
        stored = stored.reshape(count * region.heads, width)[:, : run.nbytes]
        pieces.append(jnp.zeros((len(stored), run.first - end), jnp.uint8))
        pieces.append(jnp.where(exists, join_bytes(stored) if run.split else stored, jnp.uint8(0)))
        end = run.first + run.nbytes
    pieces.append(jnp.zeros((count * region.heads, region.format.row - end), jnp.uint8))
    # Piece by piece: of what is joined last XLA finds the fields again that a decoder takes, and joins nothing.
    found = jnp.concatenate([piece for piece in pieces if piece.shape[-1]], axis=1)
    return found.reshape(*unit.shape, region.heads, region.format.row)


def load_in_order(pools: Held, region: Region, requests: int):
    """Canonical rows [Q, rows, heads, row_bytes] of requests whose units lie one after another, as they lie there.

    Where heads lie apart, [units, heads, rows, row_bytes]. None where a ring lies twice, or kernels move rows.
    """
    if pools.kernels != "portable" or region.copies != 1:
        return None
    by_head = region.steps[1] != 1
    pieces, end = [], 0
    for run in runs(region):
        pool = pools[region.buffers[run.buffer][0]]
        stored = to_bytes(pool).reshape(pool.shape[0], -1)
        stored = stored[:, run.base : run.base + region.rows * region.heads * run.stride]
        shape = (len(stored), region.heads, -1) if by_head else (requests, -1, region.heads)
        stored = stored.reshape(*shape, run.stride)[..., : run.nbytes]
        pieces.append(jnp.zeros((*stored.shape[:3], run.first - end), jnp.uint8))
        pieces.append(join_bytes(stored) if run.split else stored)
        end = run.first + run.nbytes
    pieces.append(jnp.zeros((*pieces[-1].shape[:3], region.format.row - end), jnp.uint8))
    return jnp.concatenate([piece for piece in pieces if piece.shape[-1]], axis=-1)


def store(pools: Held, region: Region, unit: Array, row: Array, rows: Array) -> Held:
    """Pools with canonical rows [..., heads, row_bytes] written, in every copy; nothing where the unit is -1."""
    if pools.kernels in TILED:
        return tiles.store(pools, region, unit, row, rows)
    # Flat, as an encoder joins fields: XLA takes them as they were before.
    flat_rows = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    for run in runs(region):
        name = region.buffers[run.buffer][0]
        pool = flat = pools[name]
        stored = flat_rows[:, run.first : run.first + run.nbytes].reshape(*rows.shape[:-1], run.nbytes)
        stored = split_bytes(stored) if run.split else stored
        stored = jnp.pad(stored, ((0, 0),) * (stored.ndim - 1) + ((0, -run.nbytes % pool.dtype.itemsize),))
        for copy in range(region.copies):
            flat, where, width = _places(region, run, flat.reshape(pool.shape), unit, row + copy * region.rows)
            where, values = _not_alone(where, from_bytes(stored, pool.dtype).reshape(*where.shape[:-1], width))
            axes = tuple(range(where.shape[-1]))
            numbers = lax.ScatterDimensionNumbers(
                update_window_dims=(where.ndim - 1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=axes
            )
            flat = lax.scatter(flat, where, values, numbers, mode=OUTSIDE)
        pools = pools.replace(name, flat.reshape(pool.shape))
    return pools


def first_token(index: StepIndex) -> Array:
    """[Q] row of each request's first new token among the step's tokens: tokens come request by request."""
    new = index.lengths - index.starts
    return jnp.cumsum(new) - new


def _not_alone(where: Array, values: Array) -> tuple[Array, Array]:
    """Of a single piece two, the other one nowhere.

    XLA writes one as a slice of the pool, and where rows are read after it, twice: into copies of it.
    """
    if math.prod(where.shape[:-1]) != 1:
        return where, values
    where, values = where.reshape(1, where.shape[-1]), values.reshape(1, values.shape[-1])
    return jnp.concatenate([where, jnp.full_like(where, -1)]), jnp.concatenate([values, values])


def read(
    pools: Held, region: Region, index: StepIndex, request: Array, number: Array, own: Array | None = None
) -> Array:
    """Canonical rows [..., heads, row_bytes] of positions: from the step's ``own`` rows if new, else stored.

    Args:
        own: canonical rows [T, heads, row_bytes] of the step's tokens, or None to read everything from the pools.
    """
    stored = load(pools, region, *locate(region, index, request, number))
    return stored if own is None else _newest(index, request, number, stored, own)


def _newest(index, request, number, stored, own):
    """Stored rows [..., *row], but the step's own rows [T, *row] where they are new."""
    if not len(own):
        return stored
    token = own_token(index, request, number)
    new = (token >= 0).reshape(token.shape + (1,) * (own.ndim - 1))
    return jnp.where(new, own[jnp.clip(token, 0, len(own) - 1)], stored)


def own_token(index, request, number):
    """Which of the step's tokens the rows ``number`` of requests are; -1 where they were there before it."""
    start = of(index.starts, request)
    return jnp.where((request >= 0) & (number >= start), of(first_token(index), request) + number - start, -1)


def origin(region: Region, index, request, number, own: int):
    """(token, unit, row) of rows, flat: among the step's ``own`` tokens if new, else in the pool, else -1 and -1."""
    unit, row = locate(region, index, request, number)
    token = own_token(index, request, jnp.where(unit >= 0, number, -1)) if own else jnp.full_like(unit, -1)
    return token.reshape(-1), jnp.where(token >= 0, -1, unit).reshape(-1), row.reshape(-1)


def read_fp32(pools, region: Region, index, request, number, own):
    """Rows of a region of fp32 fields as numbers, [..., dim]: ``own`` [T, dim] if new, else stored; zeros if -1."""
    if pools.kernels not in TILED or any(pools[name].dtype != jnp.float32 for name, _ in region.buffers.values()):
        rows = read(pools, region, index, request, number, encode_rows(region, own))[..., 0, :]
        return from_bytes(rows, np.dtype(np.float32))
    stored = tiles.load_fp32(pools, region, *locate(region, index, request, number))
    return _newest(index, request, number, stored, own)


def append(pools: Held, region: Region, index: StepIndex, rows: Array) -> Held:
    """Pools with canonical rows [T, heads, row_bytes] of the step's tokens stored at their positions.

    More tokens than a ring holds: rows that a later token of the same step overwrites are left out, so each byte has
    one writer. Padding tokens write nowhere.
    """
    return store(pools, region, *_new_places(region, index), rows)


def append_values(pools, region: Region, index, values, global_scale=1.0):
    """The same for values [T, dim] of a region of one head, encoded on the way."""
    return store_values(pools, region, *_new_places(region, index), values, global_scale)


def only_if(now, index: StepIndex) -> StepIndex:
    """An index to write rings with, by which nothing is written unless ``now``."""
    return index._replace(slots=jnp.where(now, index.slots, -1))


def _new_places(region: Region, index):
    """(unit, row) [T] of the step's tokens; unit -1 where nothing of a token is written."""
    unit, row = locate(region, index, index.request_index, index.positions)
    if region.growth == "slot":
        first = of(index.lengths, index.request_index) - region.rows
    else:
        # Rows that were taken over at admission are not written again: other requests read them.
        first = of(index.stored, index.request_index)
    return jnp.where(index.positions >= first, unit, -1), row


def store_values(pools, region: Region, unit, row, values, global_scale=1.0):
    """Pools with values [n, dim] encoded and written at (unit, row) [n]; nothing happens where the unit is -1."""
    if fused.moves(pools, region):
        return fused.store(pools, region, unit, row, values, global_scale)
    return store(pools, region, unit, row, encode_rows(region, values, global_scale))


def read_values(pools, region: Region, index, request, number, own=None, global_scale=1.0):
    """Values [..., heads, dim] of positions or entries, as ``read`` finds their rows; zeros where there is none."""
    if own is None and fused.moves(pools, region):
        return fused.load(pools, region, *locate(region, index, request, number), global_scale)[..., None, :]
    return decode_rows(region, read(pools, region, index, request, number, own), global_scale)


def read_all_values(pools, region: Region, index, number, global_scale=1.0):
    """``read_values`` of all requests' rows from the first one on, ``number`` [Q, columns], as ``numbered``."""
    if not (fused.loads_blocks(pools, region) and number.size):
        return read_values(pools, region, index, requests_like(number), number, global_scale=global_scale)
    firsts = number[:, :: region.rows]
    block, _ = locate(region, index, requests_like(firsts), firsts)
    values = fused.load_blocks(pools, region, block)
    values = jnp.where((block >= 0)[:, :, None, None], values, 0).reshape(len(number), -1, 1, values.shape[-1])
    return jnp.where((number >= 0)[:, :, None, None], values[:, : number.shape[1]], 0)


def encode_rows(region: Region, values: Array, global_scale: float = 1.0) -> Array:
    """Values [n, d] or [n, heads, d] -> canonical rows [n, heads, row_bytes] of a region."""
    flat = values.reshape(len(values) * region.heads, region.format.dim)
    return encode(region.format, flat, global_scale).reshape(len(values), region.heads, region.format.row)


def decode_rows(region: Region, rows: Array, global_scale: float = 1.0) -> Array:
    """Canonical rows [..., row_bytes] of a region -> values [..., dim]."""
    flat = rows.reshape(math.prod(rows.shape[:-1]), region.format.row)
    return decode(region.format, flat, global_scale=global_scale).reshape(*rows.shape[:-1], region.format.dim)


def of(array, request, *further):
    """``array[request]`` of a [Q, ...] array, -1 where the request is -1; also where there are no requests at all."""
    if not array.size:
        return jnp.full_like(request, -1)
    found = array.at[(jnp.clip(request, 0, len(array) - 1), *further)].get(mode="promise_in_bounds")
    return jnp.where(request >= 0, found, -1)


def visible(component, index):
    """(first, end) arrays [Q] of what the step's queries may see."""
    left = 0 if index.left_padding is None else index.left_padding
    return component.visible_bounds(index.starts, index.lengths, left, jnp.maximum)


def numbered(bounds, columns):
    """Row numbers first, first + 1 ... before end of (first, end) [Q]: [Q, columns] int32, -1 beyond the end."""
    first, end = bounds
    numbers = first[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]
    return jnp.where(numbers < end[:, None], numbers, -1)


def requests_like(numbers):
    """[Q, columns] request numbers beside ``numbers``."""
    return jnp.broadcast_to(jnp.arange(len(numbers), dtype=jnp.int32)[:, None], numbers.shape)


def _places(region: Region, run: Run, pool: Array, unit, row):
    """(the pool as pieces, where those of a run are, elements of a piece); a unit of -1 is before all pieces.

    The pool is [pieces, elements] where each lies at a multiple of its size, with indices [..., 1]; else
    [units, elements] with indices [..., 2] of (unit, first element). Heads that lie side by side are one piece, others
    one each: [..., heads, 2]. A piece is whole elements, the last one with what pads a row there.
    """
    size, units = pool.dtype.itemsize, pool.shape[0]
    pieces = _pieces(region, run, pool.size // units * size) if units else None
    if pieces is not None and units * pieces[0] < 2**31:
        per_unit, first, width = pieces
        # One number a piece needs no array of pairs, which XLA would compile and fill by itself.
        where = (unit * per_unit + first + row)[..., None]
        return pool.reshape(units * per_unit, width // size), where, width // size
    row_step, head_step = region.steps
    row = row * row_step
    width = run.nbytes
    if run.stride == run.nbytes and not run.split and head_step == 1:
        width *= region.heads
    else:
        heads = head_step * jnp.arange(region.heads, dtype=jnp.int32)
        row = row[..., None] + heads.reshape((1,) * row.ndim + (-1,))
        unit = jnp.broadcast_to(unit[..., None], row.shape)
    where = jnp.stack([unit, divided(run.base + row * run.stride, size)], axis=-1)
    return pool.reshape(units, -1), where, -(-width // size)


@cache
def _pieces(region: Region, run: Run, nbytes: int) -> tuple[int, int, int] | None:
    """(pieces of a unit of ``nbytes``, the first row's number, a piece's bytes) of a run of like pieces, or None."""
    row_step, head_step = region.steps
    width = run.nbytes * region.heads
    together = run.stride == run.nbytes and not run.split and head_step == 1 and row_step == region.heads
    if not together or run.base % width or nbytes % width:
        return None
    return nbytes // width, run.base // width, width
