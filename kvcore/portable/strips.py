"""All rows of a request between the pools and pages on the device at once, where a backend can (``move_strips``)."""

from bisect import bisect_left

import numpy as np

from kvcore.ops import Ops, Strip
from kvcore.pools import Pools
from kvcore.portable.pages import Array, PageLayout, at_once
from kvcore.step import StepRequest


def move_at_once(
    ops: Ops, pools: Pools, row: StepRequest, layout: PageLayout, pages: Array, *, store: bool = False
) -> bool:
    """Copy a request's rows into its pages, or with ``store`` back; False where some must go component by component.

    Args:
        pages: [pages, page_bytes]; those on the host go another way.
    """
    (history, paged), (record, state) = layout.parts(pages)
    if not at_once(pages, state):
        return False
    if store:
        state = tuple(
            _with_room(strip, row.length - ops.plan.region(strip.layer, strip.role)[0].rows) for strip in state
        )
    parts = (history, paged, row.blocks[: layout.blocks]), (record, state, [row.slot])
    return all(
        ops.move_strips(pools, part, strips, np.array(units, np.int32), store=store)
        for part, strips, units in parts
        if len(part)
    )


def _with_room(strip: Strip, first: int) -> Strip:
    """The strip without rows before number ``first``, which a ring has no room for beside later ones."""
    skip = bisect_left(strip.numbers, first)
    start = strip.start + skip * strip.row_bytes
    return strip._replace(start=start, rows=strip.rows - skip, numbers=strip.numbers[skip:])
