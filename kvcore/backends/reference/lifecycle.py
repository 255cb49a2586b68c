"""Life cycle: reset, copies, raw rows, digests."""

import numpy as np

from kvcore.backends.reference import rows as place
from kvcore.digest import row_lanes
from kvcore.ops import RawRows, StepIndex
from kvcore.plan import LayerPlan
from kvcore.pools import Pools


def reset_slots(pool: np.ndarray, slots: np.ndarray, fresh: bytes | None) -> np.ndarray:
    """One pool with slots [n] as if never used; -1 is ignored. ``fresh`` is one unit's bytes, or None for zeros."""
    pool[slots[slots >= 0]] = 0 if fresh is None else np.frombuffer(fresh, np.uint8)
    return pool


def poison(pool: np.ndarray, units: np.ndarray) -> np.ndarray:
    """One pool with freed slots or blocks [n] filled with 0xFF, so that a stale read is seen."""
    pool[units] = 0xFF
    return pool


def copy_units(pool: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """One pool with whole slots or blocks copied; all sources are read before any target is written."""
    pool[targets] = pool[sources]
    return pool


def gather_rows(
    layer: LayerPlan,
    pools: Pools,
    index: StepIndex,
    rows: tuple[np.ndarray, ...] | None = None,
    *,
    role: str,
    columns: int,
) -> RawRows:
    """The role's live rows in position order as canonical bytes; ``rows`` are the step's own, one per part."""
    component = layer.component(role)
    regions = layer.regions[role]
    requests = len(index.slots)
    out = np.zeros((requests, columns, sum(region.heads * region.format.row for region in regions)), np.uint8)
    positions = np.full((requests, columns), -1, np.int32)
    own = [None] * len(regions)
    if rows is not None:
        own = [place.encode_rows(region, values) for region, values in zip(regions, rows, strict=True)]
    for request in range(requests):
        for column, number in enumerate(component.live(int(index.lengths[request]))[:columns]):
            parts = [
                place.read(pools, region, index, request, number, stored).reshape(-1)
                for region, stored in zip(regions, own, strict=True)
            ]
            out[request, column] = np.concatenate(parts)
            positions[request, column] = number * component.tokens_per_row
    return RawRows(out, positions)


def store_rows(layer: LayerPlan, pools: Pools, index: StepIndex, raw: RawRows, *, role: str) -> Pools:
    """Write canonical rows at their positions: the inverse of ``gather_rows``; position -1 is ignored."""
    step = layer.component(role).tokens_per_row
    for request in range(len(raw.positions)):
        for row, position in zip(raw.rows[request], raw.positions[request], strict=True):
            first = 0
            for region in layer.regions[role]:
                last = first + region.heads * region.format.row
                number = int(position) // step if position >= 0 else -1
                stored = row[first:last].reshape(region.heads, region.format.row)
                place.store(pools, region, *place.locate(region, index, request, number), stored)
                first = last
    return pools


def read_ring(layer: LayerPlan, pools: Pools, index: StepIndex, *, role: str) -> list[list[np.ndarray]]:
    """Raw bytes of the ring rows that the step's tokens will overwrite, for ``restore_ring``."""
    return [
        [place.load(pools, region, *place.locate(region, index, int(q), int(p))) for q, p in _tokens(index)]
        for region in layer.regions[role]
    ]


def restore_ring(
    layer: LayerPlan, pools: Pools, index: StepIndex, saved: list[list[np.ndarray]], *, role: str
) -> Pools:
    """Put back what ``read_ring`` saved."""
    for region, rows in zip(layer.regions[role], saved, strict=True):
        for (request, position), row in zip(_tokens(index), rows, strict=True):
            place.store(pools, region, *place.locate(region, index, int(request), int(position)), row)
    return pools


def digest_rows(raw: RawRows, salt: int) -> np.ndarray:
    """Two 32-bit lanes for every request over its rows and positions -> [Q, 2] int64; see ``kvcore.digest``."""
    return row_lanes(raw.rows, raw.positions, salt)


def _tokens(index: StepIndex):
    """(request, position) of every token, padding included."""
    return zip(index.request_index, index.positions, strict=True)
