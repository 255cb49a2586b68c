"""Attention over rows where they lie: piece after piece up to the longest request, decoded as it is read.

A piece is some whole blocks of every request, or as many neighbouring rows of its slot. Nothing of a pool's size is
made on the way, and pieces beyond a length, or before all windows, are not read. A ring is read as it lies: which
position each of its rows has is arithmetic, and the order of rows is nothing that a sum of weights knows of.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvcore.backends.jax_pallas import rows as place
from kvcore.backends.jax_pallas.attention import finish
from kvcore.backends.jax_pallas.encoding import decode
from kvcore.backends.jax_pallas.rows import Held
from kvcore.backends.jax_pallas.runs import join_bytes, runs, to_bytes
from kvcore.ops import Attention, StepIndex
from kvcore.plan import Region

PIECE_ROWS = {"cpu": 256}
"""Rows of a request that are read together: on a CPU as many as its cache holds of a layer, elsewhere a thousand."""

MOST_ROWS = 1024
TILE_TOKENS = 64
"""Tokens of a prompt that are answered together."""

Softmax = tuple[Array, Array, Array]
"""Of R requests: largest logit [R, H, S], sum of weights [R, H, S], weighted sum [R, H, S, e]."""


class Source(NamedTuple):
    """A layer's rows as they lie in pools.

    Attributes:
        pools: the layer's.
        regions: of keys, and of values; one where a row is both.
        scales: their global scales.
        value_dim: channels of a value, from the first on.
    """

    pools: Held
    regions: tuple[Region, ...]
    scales: tuple[float, ...]
    value_dim: int


class Seen(NamedTuple):
    """What queries [R, S] see of their requests: rows ``first`` to ``last`` [R, S], of those below ``stop`` [R]."""

    first: Array
    last: Array
    stop: Array


class Own(NamedTuple):
    """The step's own rows, which no pool has yet: of requests [T] at positions [T], keys and values [T, heads, d]."""

    request: Array
    position: Array
    keys: Array
    values: Array


def attend(
    source: Source,
    index: StepIndex,
    q: Array,
    seen: Callable[[Array, Array], tuple[Array, Array]],
    own: tuple[Array, ...] | None = None,
    *,
    stop: Array,
    sink: Array | None = None,
) -> Attention:
    """Attend from q [T, H, d], scaled and fp32, to rows of every token's request.

    Args:
        source: where the rows lie.
        index: the step's.
        q: queries of its tokens.
        seen: (positions [...], requests [...]) of queries -> first and last row that each sees, last -1 for none.
        own: the step's rows, encoded and decoded, keys and values [T, heads, d], where they are not stored yet.
        stop: [Q] how many rows of each request are stored.
        sink: [H] one logit a head, or None.
    """
    tokens, requests = len(q), len(index.slots)
    given = None if own is None else Own(index.request_index, index.positions, *own)
    if tokens <= requests:
        found = _of_tokens(source, index, q, seen, given, stop)
    else:
        found = _of_tiles(source, index, q, seen, given, stop)
    return finish(found, sink, jnp.float32)


def _of_tokens(source, index, q, seen, own, stop) -> Softmax:
    """Every token for itself: its request's blocks are read for it."""
    request = index.request_index
    safe = jnp.maximum(request, 0)
    first, last = seen(index.positions, request)
    window = Seen(first[:, None], last[:, None], place.of(stop, request))
    state = _no_rows(len(q), q.shape[1], 1, source.value_dim)
    state = _stored(source, index.slots[safe], index.block_table[safe], q[:, :, None], window, state)
    state = jax.tree.map(lambda array: jnp.swapaxes(array, 0, 2), state)
    state = _owned(own, jnp.swapaxes(q, 0, 1)[None], request, index.positions, first, state)
    return jax.tree.map(lambda array: jnp.swapaxes(array[0], 0, 1), state)


def _of_tiles(source, index, q, seen, own, stop) -> Softmax:
    """Some neighbouring tokens at a time; tokens come request by request, so that a tile is of few."""
    tokens, size = len(q), min(TILE_TOKENS, len(q))
    tiles = -(-tokens // size)
    at = jnp.arange(tiles * size, dtype=jnp.int32)
    real = at < tokens
    at = jnp.minimum(at, tokens - 1)
    request = jnp.where(real, index.request_index[at], -1).reshape(tiles, size)
    position = jnp.where(real, index.positions[at], -1).reshape(tiles, size)

    def tile(given: tuple[Array, Array, Array]) -> Softmax:
        request, position, q = given
        query = jnp.swapaxes(q, 0, 1)[None]
        first, last = seen(position, request)

        def of_request(number: Array, state: Softmax) -> Softmax:
            mine = request == number
            window = Seen(first[None], jnp.where(mine, last, -1)[None], lax.dynamic_slice_in_dim(stop, number, 1))
            slots = lax.dynamic_slice_in_dim(index.slots, number, 1)
            table = lax.dynamic_slice_in_dim(index.block_table, number, 1)
            return _stored(source, slots, table, query, window, state)

        state = _no_rows(1, q.shape[1], size, source.value_dim)
        # Padding is no request's.
        least = jnp.min(jnp.where(request >= 0, request, len(index.slots)))
        state = lax.fori_loop(least, jnp.max(request) + 1, of_request, state)
        state = _owned(own, query, request, position, first, state)
        return jax.tree.map(lambda array: jnp.swapaxes(array[0], 0, 1), state)

    found = lax.map(tile, (request, position, q[at].reshape(tiles, size, *q.shape[1:])))
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:])[:tokens], found)


def _stored(source: Source, slots, table, q, seen: Seen, state: Softmax) -> Softmax:
    """A softmax with what pools hold: slots [R] and tables [R, blocks] of the requests of q [R, H, S, d]."""
    region = source.regions[0]
    paged, most = region.growth == "block", PIECE_ROWS.get(jax.default_backend(), MOST_ROWS)
    seen_some = seen.last >= seen.first
    least = jnp.min(jnp.where(seen_some, seen.first, jnp.iinfo(jnp.int32).max), initial=jnp.iinfo(jnp.int32).max)
    most_seen = jnp.max(jnp.where(seen_some, seen.last, -1), initial=-1) + 1
    if paged:
        blocks = max(1, min(table.shape[1], most // region.rows))
        count = blocks * region.rows
        table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % blocks)), constant_values=-1)
        bounds = place.divided(least, count), place.divided(most_seen + count - 1, count)
    else:
        blocks, count = 1, min(region.rows, most)
        bounds = 0, place.divided(jnp.minimum(most_seen, region.rows) + count - 1, count)

    def piece(number: Array, state: Softmax) -> Softmax:
        begin = number * count
        if paged:
            unit, row = lax.dynamic_slice_in_dim(table, number * blocks, blocks, axis=1), jnp.int32(0)
            rows = begin + jnp.arange(count, dtype=jnp.int32)[None]
            rows = jnp.where(jnp.repeat(unit, region.rows, axis=1) >= 0, rows, -1)
        else:
            # The last piece begins sooner where rows do not divide; what was read before is left out.
            unit, row = slots[:, None], jnp.minimum(begin, region.rows - count)
            held = row + jnp.arange(count, dtype=jnp.int32)[None]
            newest = seen.stop[:, None] - 1
            # The newest position of every row; one that would be below 0 was never stored.
            age = place.rest(newest - held + region.rows, region.rows)
            rows = jnp.where((held >= begin) & (slots[:, None] >= 0), newest - age, -1)
        rows = jnp.where(rows < seen.stop[:, None], rows, -1)
        valid = (rows[:, None] >= seen.first[:, :, None]) & (rows[:, None] <= seen.last[:, :, None])
        valid &= rows[:, None] >= 0
        parts = [
            _read(source.pools, one, unit, row, count // blocks, scale)
            for one, scale in zip(source.regions, source.scales, strict=True)
        ]
        return _more(state, q, parts[0], parts[-1][..., : source.value_dim], valid)

    return lax.fori_loop(*bounds, piece, state)


def _read(pools: Held, region: Region, unit: Array, row: Array, count: int, scale: float) -> Array:
    """Values [R, heads, blocks · count, d] fp32 of rows ``row`` on of units [R, blocks]; arbitrary where unit is -1."""
    row_step, head_step = region.steps
    by_head = head_step != 1
    pieces, end, shape = [], 0, (*unit.shape, region.heads if by_head else 1)
    for run in runs(region):
        pool = pools[region.buffers[run.buffer][0]]
        size = pool.dtype.itemsize
        wide = count if by_head else count * region.heads
        heads = head_step * jnp.arange(shape[2], dtype=jnp.int32)
        # Rows are read from one to the next: where the last one's next would lie beyond the unit, from a bit before.
        lead = max(0, run.base + region.places * region.heads * run.stride - dict(region.unit.buffers)[run.buffer])
        first = place.divided(run.base - lead + (row * row_step + heads) * run.stride, size)
        held = jnp.maximum(unit, 0)[:, :, None]
        where = jnp.stack([jnp.broadcast_to(each, shape) for each in (held, first)], axis=-1)
        numbers = lax.GatherDimensionNumbers(offset_dims=(3,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
        stored = lax.gather(
            pool.reshape(pool.shape[0], -1), where, numbers, (1, wide * run.stride // size), mode="clip"
        )
        stored = to_bytes(stored).reshape(*shape, wide, run.stride)[..., lead : lead + run.nbytes]
        # Flat before they are joined: XLA finds the fields again that a decoder takes, and joins nothing.
        stored = stored.reshape(-1, run.nbytes)
        pieces.append(jnp.zeros((len(stored), run.first - end), jnp.uint8))
        pieces.append(join_bytes(stored) if run.split else stored)
        end = run.first + run.nbytes
    pieces.append(jnp.zeros((len(pieces[-1]), region.format.row - end), jnp.uint8))
    canonical = jnp.concatenate([piece for piece in pieces if piece.shape[1]], axis=1)
    flat = decode(region.format, canonical, global_scale=scale)
    requests, blocks = unit.shape
    values = flat.reshape(requests, blocks, *((region.heads, count) if by_head else (count, region.heads)), -1)
    values = values if by_head else jnp.swapaxes(values, 2, 3)
    values = jnp.swapaxes(values, 1, 2).reshape(requests, region.heads, blocks * count, -1)
    return values.astype(jnp.float32)


def _more(state: Softmax, q: Array, keys: Array, values: Array, valid: Array) -> Softmax:
    """More rows for the queries: q [R, H, S, d], keys [R, heads, n, d], values [R, heads, n, e], valid [R, S, n].

    Query heads are grouped over key heads, and over value heads, in order.
    """
    largest, total, out = state
    requests, heads, some, dim = q.shape
    of_keys, of_values = keys.shape[1], values.shape[1]
    grouped = q.reshape(requests, of_keys, heads // of_keys * some, dim)
    logits = jnp.einsum("rkxd,rknd->rkxn", grouped, keys, precision=lax.Precision.HIGHEST)
    logits = jnp.where(valid[:, None], logits.reshape(requests, heads, some, -1), -jnp.inf)
    higher = jnp.maximum(largest, jnp.max(logits, axis=3, initial=-jnp.inf))
    base = jnp.where(jnp.isneginf(higher), 0, higher)
    weights = jnp.where(valid[:, None], jnp.exp(logits - base[..., None]), 0)
    kept = jnp.exp(largest - base)
    shared = weights.reshape(requests, of_values, heads // of_values * some, -1)

    def sums(values: Array) -> Array:
        return jnp.einsum("rvxn,rvne->rvxe", shared, values, precision=lax.Precision.HIGHEST)

    # A row that a query may not see can hold NaN: it is taken out, not weighted with 0.
    clean = jnp.where(jnp.any(valid, axis=1)[:, None, :, None], values, 0)
    if some == 1:
        added = sums(clean)
    else:
        finite = jnp.isfinite(clean)
        added = lax.cond(jnp.all(finite), sums, lambda values: _apart(shared, values, finite), clean)
    return higher, total * kept + jnp.sum(weights, axis=3), out * kept[..., None] + added.reshape(out.shape)


def _apart(weights: Array, values: Array, finite: Array) -> Array:
    """The same sums where some values are no numbers: only a weight above 0 brings one in."""
    sums = partial(jnp.einsum, "rvxn,rvne->rvxe", precision=lax.Precision.HIGHEST)
    found = sums(weights, jnp.where(finite, values, 0))
    # Infinities of one sign stay what they are; what is neither is NaN.
    some = (weights > 0).astype(jnp.float32)
    kinds = jnp.isposinf(values), jnp.isneginf(values), jnp.isnan(values)
    high, low, none = (sums(some, kind.astype(jnp.float32)) > 0 for kind in kinds)
    found = jnp.where(high, jnp.inf, found)
    found = jnp.where(low, -jnp.inf, found)
    return jnp.where(none | (high & low), jnp.nan, found)


def _no_rows(requests: int, heads: int, some: int, dim: int) -> Softmax:
    shape = requests, heads, some
    return jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, dim), jnp.float32)


def _owned(own: Own | None, q: Array, request: Array, position: Array, first: Array, state: Softmax) -> Softmax:
    """A softmax with the step's own rows, for queries [1, H, S, d] of requests [S] at positions [S]."""
    if own is None or not len(own.request):
        return state
    tokens, size = len(own.request), min(len(own.request), MOST_ROWS)
    padded, real = jax.tree.map(
        lambda array: jnp.pad(array, ((0, -tokens % size), *((0, 0),) * (array.ndim - 1))),
        (own, jnp.ones(tokens, jnp.bool_)),
    )

    def piece(number: Array, state: Softmax) -> Softmax:
        rows, exist = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, number * size, size), (padded, real))
        valid = (rows.request[None] == request[:, None]) & (request >= 0)[:, None] & exist[None]
        valid &= (rows.position[None] >= jnp.maximum(first, 0)[:, None]) & (rows.position[None] <= position[:, None])
        keys, values = (jnp.swapaxes(part, 0, 1)[None] for part in (rows.keys, rows.values))
        return _more(state, q, keys, values, valid[None])

    return lax.fori_loop(0, len(padded.request) // size, piece, state)
