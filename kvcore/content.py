"""What one request holds, read out of the pools and put back: the one path of checkpoints, export and snapshots.

The content of a request is its live rows in canonical form, by (layer, role), over every component that the spec lists:
nothing is named here, so nothing can be forgotten.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvcore.ops import Array, Ops, RawRows
from kvcore.pools import Pools
from kvcore.spec import CacheSpec, Component
from kvcore.step import Row, build_index

Content = Mapping[tuple[int, str], RawRows]
"""Live rows of one request by (layer, role): RawRows of shape [1, n, row_bytes] and [1, n]."""

Own = Mapping[tuple[int, str], tuple[Array, ...]]
"""A step's own rows of one request by (layer, role), one array a part."""


def owned(spec: CacheSpec) -> Iterator[tuple[int, str, Component]]:
    """(layer, role, component) of every pool: shared ones are their owner's."""
    return (found for found in spec.components() if found[2].shared_from is None)


def read_rows(ops: Ops, pools: Pools, row: Row) -> dict[tuple[int, str], RawRows]:
    """Everything that one request holds: live rows of every component, [1, n, row_bytes], on the device."""
    index = ops.index(build_index([row], max_blocks=ops.plan.blocks))
    return {
        (layer, role): ops.gather_rows(pools, layer, role, index, columns=len(component.live(row.length)))
        for layer, role, component in owned(ops.plan.spec)
    }


def state_at(ops: Ops, pools: Pools, row: Row, length: int, own: Own) -> dict[tuple[int, str], RawRows]:
    """What full blocks do not hold of a request at ``length``: rings and tails, and paged rows of a partial block.

    Args:
        length: from ``row.start`` on, so it may lie in the middle of a step that is about to commit.
        own: the step's own rows of this request where the rings do not hold them yet.
    """
    spec = ops.plan.spec
    index = ops.index(build_index([row._replace(new=length - row.start)], max_blocks=ops.plan.blocks))
    state: dict[tuple[int, str], RawRows] = {}
    for layer, role, component in owned(spec):
        aligned = length // spec.block_tokens * spec.block_tokens // component.tokens_per_row
        columns = len(component.live(length))
        if component.in_checkpoint or columns > aligned:
            raw = ops.gather_rows(pools, layer, role, index, own.get((layer, role)), columns=columns)
            first = 0 if component.in_checkpoint else aligned
            state[layer, role] = RawRows(raw.rows[:, first:], raw.positions[:, first:])
    return state


def write_rows(ops: Ops, pools: Pools, row: Row, content: Mapping[tuple[int, str], RawRows]) -> Pools:
    """Put rows back at their positions."""
    index = ops.index(build_index([row], max_blocks=ops.plan.blocks))
    for (layer, role), raw in content.items():
        pools = ops.store_rows(pools, layer, role, index, raw)
    return pools


def positions_of(component: Component, length: int) -> Sequence[int]:
    """Positions of a component's live rows at a length, as ``gather_rows`` reports them."""
    return [number * component.tokens_per_row for number in component.live(length)]


def to_raw(ops: Ops, rows: np.ndarray[Any, Any], positions: Sequence[int]) -> RawRows:
    """Host rows [n, row_bytes] of one request as RawRows on the device."""
    return RawRows(ops.asarray(rows[None]), ops.asarray(np.array([positions], np.int32).reshape(1, len(positions))))


def page_digests(ops: Ops, rows: np.ndarray[Any, Any], positions: Sequence[int], page: int, salt: int) -> Array:
    """Digest lanes of every page of ``page`` rows: [pages, 2] int64 on the device; the last page may be short."""
    pages = -(-len(rows) // page)
    padded = np.zeros((pages * page, rows.shape[1]), np.uint8)
    padded[: len(rows)] = rows
    places = np.full(pages * page, -1, np.int32)
    places[: len(rows)] = positions
    raw = RawRows(ops.asarray(padded.reshape(pages, page, rows.shape[1])), ops.asarray(places.reshape(pages, page)))
    return ops.digest_rows(raw, salt)
