"""Rows of components that outside code defines: written through the two verbs that every backend has for bytes."""

from collections.abc import Sequence
from functools import reduce

import numpy as np

from kvcore.ops import Array, Ops, RawRows, StepIndex
from kvcore.plan import Region
from kvcore.pools import Pools
from kvcore.spec import Component
from kvcore.step import StepRequest


def store_own(
    ops: Ops,
    pools: Pools,
    regions: Sequence[Region],
    component: Component,
    index: StepIndex,
    rows: Sequence[StepRequest],
    own: Sequence[Array],
) -> Pools:
    """Pools with the step's rows of a component: for every part [T, dim] or [T, heads, dim]; padding writes nowhere.

    For roles without a verb of their own.
    """
    tokens, width = len(index.positions), max((row.new for row in rows), default=0)
    scale: float = getattr(component, "global_scale", 1.0)
    encoded: list[Array] = []
    for region, values in zip(regions, own, strict=True):
        flat = values.reshape(tokens * region.heads, region.format.dim or 0)
        encoded.append(ops.encode(region.format, flat, scale).reshape(tokens, region.heads * region.format.row))
    positions = np.full((len(index.slots), width), -1, np.int32)
    for number, row in enumerate(rows):
        # In a ring, all but what a later token of the step overwrites; in blocks, all but what was taken over.
        first = row.stored if regions[0].growth == "block" else row.length - regions[0].rows
        written = np.arange(row.start, row.length, dtype=np.int32)
        positions[number, : row.new] = np.where(written >= first, written, -1)
    raw = RawRows(ops.to_batch(index, reduce(ops.join, encoded), width), ops.asarray(positions))
    return ops.store_rows(pools, regions[0].layer, regions[0].role, index, raw)
