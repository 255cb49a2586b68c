"""What one request holds, read out of the pools and put back: the one path of checkpoints, export and snapshots.

The content of a request is its rows in canonical form, by (layer, role), over every component that the spec lists:
nothing is named here, so nothing can be forgotten. Rows on the host are ``HostRows``; on the device, ``RawRows``.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.ops import Array, Ops, RawRows
from kvcore.plan import CachePlan
from kvcore.pools import Pools
from kvcore.spec import CacheSpec, Component
from kvcore.spec.component import Growth
from kvcore.step import StepRequest, build_index

LARGE_PAGE = 4096
"""Rows."""


class HostRows(NamedTuple):
    """Canonical rows of one component of one request: rows [n, row_bytes] uint8, positions [n] ascending."""

    rows: np.ndarray[Any, Any]
    positions: Sequence[int]


Content = Mapping[tuple[int, str], HostRows]
"""Rows of one request by (layer, role)."""

Own = Mapping[tuple[int, str], tuple[Array, ...]]
"""A step's own rows of one request by (layer, role), one array a part."""


@lru_cache(maxsize=64)
def owned(spec: CacheSpec) -> tuple[tuple[int, str, Component], ...]:
    """(layer, role, component) of every pool: shared ones are their owner's."""
    return tuple(found for found in spec.components() if found[2].shared_from is None)


def kept_rows(component: Component, floor: int, length: int) -> range | tuple[int, ...]:
    """Rows that any length from ``floor`` to ``length`` can need: what makes a restored request as good as the first.

    A range where they are neighbours. More than the live rows of ``length`` only in rings, where a rollback brings back
    rows that had left the window.
    """
    if component.span is None or floor == length:
        return component.live(length)
    if component.span == 0:
        return range(0)
    # What lives at ``floor``, and of the later rows those that live when they are the newest: the first live row never
    # goes back.
    older = component.live(floor)
    newest = np.arange(floor, length)
    first, _ = component.live_bounds(newest + 1, np.maximum)
    later = newest[first <= newest].tolist()
    start = older.start if older else later[0] if later else 0
    neighbours = range(start, later[-1] + 1 if later else older.stop if older else 0)
    return neighbours if len(neighbours) == len(older) + len(later) else (*older, *later)


def least_kept(component: Component, floor: int, length: int) -> int:
    """Fewer than ``kept_rows`` are, or as many, without making them: what declares a length must have that many."""
    if component.span is None:
        return len(component.live(length))
    # A tail without overlap keeps all but the rows that close a window, and such windows have two rows or more.
    return len(component.live(floor)) + (length - floor) // 2 if component.span else 0


def kept_positions(component: Component, floor: int, length: int) -> Sequence[int]:
    """Positions of ``kept_rows``."""
    kept, step = kept_rows(component, floor, length), component.tokens_per_row
    if isinstance(kept, range):
        return range(kept.start * step, kept.stop * step, step)
    return [number * step for number in kept]


def read_rows(
    ops: Ops, pools: Pools, row: StepRequest, floor: int, *, growth: Growth | None = None
) -> dict[tuple[int, str], HostRows]:
    """Everything that one request holds and could roll back to, down to ``floor``, on the host.

    ``growth``: only what grows like that.
    """
    content: dict[tuple[int, str], HostRows] = {}
    for layer, role, component in owned(ops.plan.spec):
        if growth not in (None, component.growth):
            continue
        lengths = _covering(component, floor, row.length)
        index = ops.index(
            build_index([row._replace(start=at, new=0) for at in lengths], max_blocks=ops.plan.max_blocks)
        )
        columns = max(len(component.live(at)) for at in lengths)
        raw = ops.gather_rows(pools, layer, role, index, columns=columns)
        rows, positions = to_numpy(raw.rows), to_numpy(raw.positions)
        flat = positions.reshape(-1)
        found, first = np.unique(flat, return_index=True)
        first = first[found >= 0]
        content[layer, role] = HostRows(rows.reshape(len(flat), rows.shape[2])[first], flat[first].tolist())
    return content


def _covering(component: Component, floor: int, length: int) -> list[int]:
    """Few lengths whose live rows together are the kept ones."""
    lengths = [length]
    missing = set(kept_rows(component, floor, length)) - set(component.live(length))
    while missing:
        last = max(missing)
        at = next(at for at in range(max(floor, last + 1), length + 1) if last in component.live(at))
        lengths.append(at)
        missing -= set(component.live(at))
    return lengths


def state_at(ops: Ops, pools: Pools, row: StepRequest, length: int, own: Own) -> dict[tuple[int, str], HostRows]:
    """What full blocks do not hold of a request at ``length``: rings and tails, and paged rows of a partial block.

    Args:
        length: from ``row.start`` on, so it may lie in the middle of a step that is about to commit.
        own: the step's own rows of this request where the rings do not hold them yet.
    """
    spec = ops.plan.spec
    index = ops.index(build_index([row._replace(new=length - row.start)], max_blocks=ops.plan.max_blocks))
    state: dict[tuple[int, str], HostRows] = {}
    for layer, role, component in owned(spec):
        first, columns = _outside_blocks(ops.plan, component, length)
        if first < columns or component.in_checkpoint:
            raw = ops.gather_rows(pools, layer, role, index, own.get((layer, role)), columns=columns)
            state[layer, role] = HostRows(to_numpy(raw.rows)[0, first:], to_numpy(raw.positions)[0, first:].tolist())
    return state


def _outside_blocks(plan: CachePlan, component: Component, length: int) -> tuple[int, int]:
    """(first, end) of the live rows at ``length`` that a checkpoint holds; full blocks hold those before."""
    aligned = length // plan.block_tokens * plan.block_tokens // component.tokens_per_row
    return 0 if component.in_checkpoint else aligned, len(component.live(length))


def rings(spec: CacheSpec) -> Iterator[tuple[int, str, Component]]:
    """What a checkpoint must bring: pools that overwrite. The rest of a past state is part of every later one."""
    return (found for found in owned(spec) if found[2].span is not None)


def state_of(ops: Ops, content: Content, brought: Content, length: int) -> dict[tuple[int, str], HostRows]:
    """The state at ``length`` as ``state_at`` gives it, of a request that came from elsewhere.

    Args:
        content: its rows as it is now, at that length or later.
        brought: rows of the rings at ``length``.
    """
    state = dict(brought)
    for layer, role, component in owned(ops.plan.spec):
        if component.span is None:
            first, columns = _outside_blocks(ops.plan, component, length)
            if first < columns or component.in_checkpoint:
                rows, positions = content[layer, role]
                state[layer, role] = HostRows(rows[first:columns].copy(), list(positions[first:columns]))
    return state


def write_rows(ops: Ops, pools: Pools, row: StepRequest, content: Content) -> Pools:
    """Put rows back at their positions; those that the ring has no room for beside later ones are left out."""
    index = ops.index(build_index([row], max_blocks=ops.plan.max_blocks))
    # Layers may come with one array of positions for all of them, which then goes to the device once.
    places: dict[int, Array] = {}
    for (layer, role), (rows, positions) in content.items():
        region = ops.plan.region(layer, role)[0]
        if region.growth == "slot":
            first = sum(position < row.length - region.rows for position in positions)
            raw = to_raw(ops, rows[first:], positions[first:])
        else:
            if id(positions) not in places:
                places[id(positions)] = _places(ops, positions)
            raw = RawRows(ops.asarray(rows[None]), places[id(positions)])
        pools = ops.store_rows(pools, layer, role, index, raw)
    return pools


def to_raw(ops: Ops, rows: np.ndarray[Any, Any], positions: Sequence[int]) -> RawRows:
    """Host rows [n, row_bytes] of one request as RawRows on the device."""
    return RawRows(ops.asarray(rows[None]), _places(ops, positions))


def _places(ops: Ops, positions: Sequence[int]) -> Array:
    """[1, n] int32 on the device."""
    return ops.asarray(np.array([positions], np.int32).reshape(1, len(positions)))


def page_digests(ops: Ops, rows: Array, positions: Sequence[int], page: int, salt: int) -> Array:
    """Digest lanes of every page of ``page`` rows: [pages, 2] int64 on the device; the last page may be short."""
    return digests_at(ops, rows, page_places(ops, positions, page), salt)


def page_places(ops: Ops, positions: Sequence[int], page: int) -> Array:
    """Positions in pages of ``page`` rows: [pages, page] int32 on the device, -1 after the last.

    A page that is not full has no more places than it needs, if it is large: its size may be somebody's word.
    """
    page = min(page, max(len(positions), LARGE_PAGE))
    places = np.full(-(-len(positions) // page) * page, -1, np.int32)
    places[: len(positions)] = positions
    return ops.asarray(places.reshape(-1, page))


def digests_at(ops: Ops, rows: Array, places: Array, salt: int) -> Array:
    """Digest lanes of the pages that ``page_places`` laid out: [pages, 2] int64 on the device."""
    pages, page = places.shape
    padded = rows if len(rows) == pages * page else _padded(rows, pages * page)
    return ops.digest_rows(RawRows(ops.asarray(padded.reshape(pages, page, rows.shape[1])), places), salt)


def _padded(rows: Array, count: int) -> Array:
    """Rows with zeros after them, as many as ``count``; NumPy, or torch on any device."""
    shape = count, rows.shape[1]
    padded = rows.new_zeros(shape) if hasattr(rows, "new_zeros") else np.zeros(shape, np.uint8)
    padded[: len(rows)] = rows
    return padded
