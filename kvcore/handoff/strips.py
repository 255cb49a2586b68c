"""All rows of a request between the pools and pages on the device at once, where a backend can (``move_strips``)."""

from typing import Any

import numpy as np

from kvcore.content import kept_rows
from kvcore.handoff.layout import PageLayout, Strip
from kvcore.ops import Ops
from kvcore.pools import Pools
from kvcore.spec import CacheSpec, Component
from kvcore.step import Row

Placed = list[tuple[Strip, int, int]]
"""(strip, number of its first row, rows in all)."""


def move_at_once(
    ops: Ops, pools: Pools, row: Row, floor: int, layout: PageLayout, pages: Any, *, store: bool = False
) -> bool:
    """Copy a request's rows into its pages, or with ``store`` back; False, and nothing is done, where that can't be.

    Args:
        pages: [pages, page_bytes]; those on the host go another way.
    """
    # A verb that a backend may have, beside those that all have.
    move: Any = getattr(ops, "move_strips", None)
    if move is None or isinstance(pages, np.ndarray):
        return False
    state = _state(ops, layout, floor, row.length, store=store)
    if state is None:
        return False
    paged = [(strip, 0, len(_component(ops.plan.spec, strip).live(row.length))) for strip in layout.paged]
    blocks = layout.blocks
    history = pages[:blocks], paged, np.array(row.blocks[:blocks], np.int32)
    record = (
        pages[blocks:].reshape(min(1, layout.state_pages), layout.state_pages * layout.page_bytes),
        state,
        np.array([row.slot], np.int32),
    )
    # Both are of one layout of the pools, so the second is never refused after the first.
    return all(move(pools, part, placed, units, store=store) for part, placed, units in (history, record) if len(part))


def _state(ops: Ops, layout: PageLayout, floor: int, length: int, *, store: bool) -> Placed | None:
    """Strips of the record, to be stored without what a ring has no room for; None where rows are not neighbours."""
    placed: Placed = []
    kept: dict[Component, list[int]] = {}
    for strip in layout.state:
        component = _component(ops.plan.spec, strip)
        if component not in kept:
            kept[component] = kept_rows(component, floor, length)
        rows = kept[component]
        if not rows:
            continue
        if rows != list(range(rows[0], rows[0] + len(rows))):
            return None
        room = ops.plan.region(strip.layer, strip.role)[0].rows
        skip = max(0, length - room - rows[0]) if store else 0
        start, count = strip.start + skip * strip.row_bytes, strip.rows - skip
        placed.append((strip._replace(start=start, rows=count), rows[0] + skip, count))
    return placed


def _component(spec: CacheSpec, strip: Strip) -> Component:
    return getattr(spec.all_layers[strip.layer], strip.role)
