"""The sliding window: encode and store, gather in position order."""

import numpy as np

from kvcore.backends.reference import rows as place
from kvcore.backends.reference.encoding import DTYPES
from kvcore.ops import WindowRows


def append_window(ops, pools, layer, index, rows):
    """Encode rows [T, d] and store them at slot·C + p mod C; only each ring's last C positions are written."""
    (region,) = ops.plan.region(layer, "window")
    place.append(pools, region, index, ops.encode_rows(region, rows))
    return pools


def gather_window(ops, pools, layer, index, rows=None):
    """The last min(length, W) positions of every request at the end of the step, ascending from row 0."""
    (region,) = ops.plan.region(layer, "window")
    component = ops.component(layer, "window")
    own = None if rows is None else ops.encode_rows(region, rows)
    requests = len(index.slots)
    values = np.zeros((requests, region.rows, component.dim), DTYPES[region.format.value_code])
    positions = np.full((requests, region.rows), -1, np.int32)
    for request in range(requests):
        for row, position in enumerate(component.live(int(index.lengths[request]))):
            stored = place.read(pools, region, index, request, position, own)
            values[request, row] = ops.decode(region.format, stored)[0]
            positions[request, row] = position
    return WindowRows(values, positions)
