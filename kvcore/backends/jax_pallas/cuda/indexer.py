"""The indexer: scores of encoded keys, and the best of them."""

import jax
import jax.numpy as jnp

from kvcore.backends.jax_pallas.cuda.arguments import covers, fields, floats, is_native, launched, record_of
from kvcore.backends.jax_pallas.cuda.call import As
from kvcore.backends.jax_pallas.cuda.choice import chip
from kvcore.kernels.triton.lists import (
    MOST_PICKS,
    OTHERS,
    RANKED,
    enough,
    merges,
    room_for,
    rows_at_once,
    shares_for,
    tile_for,
)
from kvcore.kernels.triton.score_cut import score_cut, score_parts, score_tiles
from kvcore.kernels.triton.scores import rotate_kernel, scores_kernel
from kvcore.kernels.triton.shape import tile
from kvcore.kernels.triton.topk import best_kernel, rank_kernel
from kvcore.plan import Region


def scores(region: Region, index, q, global_scale=1.0) -> bool:
    """True where the kernels cover keys and queries q [T, H, d]."""
    known = covers(region) and score_parts(record_of(region, global_scale)[0]) is not None
    return known and q.size > 0 and len(index.slots) > 0


def index_scores(pools, region: Region, index, q, weights, ratio, columns, global_scale=1.0):
    """Scores [T, columns] fp32, -inf for keys that the token does not see."""
    if not columns:
        return jnp.zeros((len(q), 0), jnp.float32)
    record, names = record_of(region, global_scale)
    tokens, heads = q.shape[:2]
    cut, constants = score_cut(record, heads, is_native())
    tiles = score_tiles(chip().multiprocessors, tokens, columns, cut.keys)
    arguments = {
        "out_ptr": jax.ShapeDtypeStruct((tokens, columns), jnp.float32),
        **_keys(pools, index, names, _rotated(q, record), weights),
        "tokens": tokens,
        "heads": heads,
        "columns": columns,
        **constants,
        "RATIO": ratio,
        "TILES": tiles,
    }
    grid = (tokens * -(-columns // (cut.keys * tiles)),)
    _, (found,) = launched(scores_kernel, grid, arguments, warps=cut.warps, contracted=True)
    return found


def selects(scores_, k) -> bool:
    """True where the best k of scores [T, n] come from the kernels."""
    return scores_.size > 0 and 0 < k <= MOST_PICKS


def select(scores_, k):
    """Top k of scores [T, n] -> [T, k] int32: highest first, ties to the lowest index, -1 where score is -inf."""
    columns = scores_.shape[1]
    cut, room = tile_for(k, columns), room_for(k)
    parts = -(-columns // (cut.hands * cut.deep))
    step = rows_at_once(parts)
    found = []
    for first in range(0, len(scores_), step):
        rows = scores_[first : first + step].astype(jnp.float32)
        pairs, counts = _lists(len(rows), parts, room)
        arguments = {
            "pairs_ptr": pairs,
            "counts_ptr": counts,
            "given_ptr": rows,
            "given_counts_ptr": counts,
            "n": columns,
            "line": columns,
            "k": k,
            "most": enough(k),
            "parts": parts,
            **_tile(cut),
            "ROOM": room,
            "LIST": 0,
        }
        _, (pairs, counts) = launched(best_kernel, (len(rows) * parts,), arguments, warps=cut.warps)
        found.append(_ranked(pairs, counts, len(rows), parts, room, room, k))
    return jnp.concatenate(found)


def _ranked(pairs, counts, rows, parts, room, most, k):
    """The best k of every row's lists [rows, parts, room] -> picks [rows, k]."""
    for one in merges(parts, room, most, k):
        merged, numbers = _lists(rows, one.parts, one.room)
        arguments = {
            "pairs_ptr": merged,
            "counts_ptr": numbers,
            "given_ptr": As(pairs, "int64"),
            "given_counts_ptr": counts,
            "n": one.given,
            "line": one.line,
            "k": k,
            "most": enough(k),
            "parts": one.parts,
            **_tile(one.tile),
            "ROOM": one.room,
            "LIST": one.most,
        }
        _, (pairs, counts) = launched(best_kernel, (rows * one.parts,), arguments, warps=one.tile.warps)
        room, most = one.room, one.room
    shares = shares_for(chip().multiprocessors, rows, most)
    arguments = {
        "picks_ptr": jax.ShapeDtypeStruct((rows, k), jnp.int32),
        "pairs_ptr": As(pairs, "int64"),
        "counts_ptr": counts,
        "line": room,
        "k": k,
        "parts": shares,
        "BLOCK": RANKED,
        "OTHERS": OTHERS,
    }
    _, (found,) = launched(rank_kernel, (rows * shares,), arguments, warps=4)
    return found


def _lists(rows, parts, room):
    """Room for pairs of 64 bits, which JAX has as two of 32, and for the number of pairs of every list."""
    pairs = jax.ShapeDtypeStruct((rows, parts, room, 2), jnp.int32)
    return As(pairs, "int64"), jax.ShapeDtypeStruct((rows, parts), jnp.int32)


def _tile(cut):
    return {"PICKS": cut.picks, "HANDS": cut.hands, "DEEP": cut.deep}


def _keys(pools, index, names, q, weights):
    return {
        "q_ptr": q,
        "weights_ptr": floats(weights),
        **fields(pools, names),
        "positions_ptr": index.positions,
        "request_ptr": index.request_index,
        "table_ptr": index.block_table,
        "table_columns": index.block_table.shape[1],
    }


def _rotated(q, record):
    """Queries as keys of the format are stored: rotated where those are."""
    q = floats(q)
    if not record.hadamard:
        return q
    count = q.size // record.dim
    rows, warps = tile(record, count)
    arguments = {
        "out_ptr": jax.ShapeDtypeStruct(q.shape, jnp.bfloat16),
        "q_ptr": q,
        "count": count,
        "R": record,
        "ROWS": rows,
        "NATIVE": is_native(),
    }
    _, (found,) = launched(rotate_kernel, (-(-count // rows),), arguments, warps=warps)
    return found
