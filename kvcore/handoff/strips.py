"""All rows of a request between the pools and pages on the device at once, where a backend can (``move_strips``)."""

from bisect import bisect_left
from typing import Any

import numpy as np

from kvcore.handoff.layout import Array, PageLayout, Strip
from kvcore.ops import Ops
from kvcore.pools import Pools
from kvcore.step import Row


def move_at_once(ops: Ops, pools: Pools, row: Row, layout: PageLayout, pages: Array, *, store: bool = False) -> bool:
    """Copy a request's rows into its pages, or with ``store`` back; False, and nothing is done, where that can't be.

    Args:
        pages: [pages, page_bytes]; those on the host go another way.
    """
    # A verb that a backend may have, beside those that all have.
    move: Any = getattr(ops, "move_strips", None)
    if move is None or isinstance(pages, np.ndarray) or not layout.is_even:
        return False
    (history, paged), (record, state) = layout.parts(pages)
    if store:
        state = tuple(
            _with_room(strip, row.length - ops.plan.region(strip.layer, strip.role)[0].rows) for strip in state
        )
    parts = (history, paged, row.blocks[: layout.blocks]), (record, state, [row.slot])
    # Both are of one layout of the pools, so the second is never refused after the first.
    return all(
        move(pools, part, strips, np.array(units, np.int32), store=store) for part, strips, units in parts if len(part)
    )


def _with_room(strip: Strip, first: int) -> Strip:
    """The strip without rows before number ``first``, which a ring has no room for beside later ones."""
    skip = bisect_left(strip.numbers, first)
    start = strip.start + skip * strip.row_bytes
    return strip._replace(start=start, rows=strip.rows - skip, numbers=strip.numbers[skip:])
