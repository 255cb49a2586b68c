"""The sliding window: encode and store, gather in position order."""

import numpy as np

from kvcore.backends.reference import rows as place
from kvcore.backends.reference.encoding import DTYPES, to_bf16
from kvcore.backends.reference.tail import rms_norm, rotate
from kvcore.ops import WindowRows


def append_window(ops, pools, layer, index, rows):
    """Encode rows [T, d] and store them at slot·C + p mod C; only each ring's last C positions are written."""
    (region,) = ops.plan.region(layer, "window")
    place.append(pools, region, index, ops.encode_rows(region, rows))
    return pools


def append_rotated_window(ops, pools, layer, index, rows, *, rope, norm_weight=None, eps=1e-6):
    """Norm (if a weight is given) and rotate rows [T, d] at their positions, then ``append_window``."""
    (region,) = ops.plan.region(layer, "window")
    # Padding may hold anything, and NumPy warns of NaN.
    rows = np.where(index.positions[:, None] < 0, np.float32(0), rows.astype(np.float32))
    if norm_weight is not None:
        rows = rms_norm(rows, norm_weight, eps)
        rows = rows if region.format.is_fp32 else to_bf16(rows)
    rows = rotate(rows, index.positions, rope)
    return ops.append_window(pools, layer, index, rows if region.format.is_fp32 else to_bf16(rows))


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
