"""The sliding window: encode and store, gather in position order."""

import numpy as np

from kvcore.backends.reference import rows as place
from kvcore.backends.reference.encoding import DTYPES, decode, to_bf16
from kvcore.backends.reference.tail import rms_norm, rotate
from kvcore.ops import StepIndex, WindowRows
from kvcore.plan import LayerPlan
from kvcore.pools import Pools
from kvcore.spec import Rope


def append_window(layer: LayerPlan, pools: Pools, index: StepIndex, rows: np.ndarray) -> Pools:
    """Encode rows [T, d] and store them at slot·C + p mod C; only each ring's last C positions are written."""
    (region,) = layer.regions["window"]
    return place.append(pools, region, index, place.encode_rows(region, rows))


def rotated_rows(
    layer: LayerPlan,
    index: StepIndex,
    rows: np.ndarray,
    *,
    rope: Rope | np.ndarray,
    norm_weight: np.ndarray | None = None,
    eps: float = 1e-6,
) -> np.ndarray:
    """Rows [T, d] normed (if a weight is given) and rotated at their positions, as they are stored then."""
    (region,) = layer.regions["window"]
    # Padding may hold anything, and NumPy warns of NaN.
    rows = np.where(index.positions[:, None] < 0, np.float32(0), rows.astype(np.float32))
    if norm_weight is not None:
        rows = rms_norm(rows, norm_weight, eps)
        rows = rows if region.format.is_fp32 else to_bf16(rows)
    rows = rotate(rows, index.positions, rope)
    return rows if region.format.is_fp32 else to_bf16(rows)


def append_rotated_window(
    layer: LayerPlan,
    pools: Pools,
    index: StepIndex,
    rows: np.ndarray,
    *,
    rope: Rope | np.ndarray,
    norm_weight: np.ndarray | None = None,
    eps: float = 1e-6,
) -> Pools:
    """Append the rotated rows of rows [T, d] to the window."""
    rows = rotated_rows(layer, index, rows, rope=rope, norm_weight=norm_weight, eps=eps)
    return append_window(layer, pools, index, rows)


def gather_window(layer: LayerPlan, pools: Pools, index: StepIndex, rows: np.ndarray | None = None) -> WindowRows:
    """The last min(length, W) positions of every request at the end of the step, ascending from row 0."""
    (region,) = layer.regions["window"]
    component = layer.component("window")
    own = None if rows is None else place.encode_rows(region, rows)
    requests = len(index.slots)
    values = np.zeros((requests, region.rows, component.dim), DTYPES[region.format.value_code])
    positions = np.full((requests, region.rows), -1, np.int32)
    for request in range(requests):
        left = 0 if index.left_padding is None else int(index.left_padding[request])
        live = component.live(int(index.lengths[request]))
        for row, position in enumerate(range(max(live.start, left), live.stop)):
            stored = place.read(pools, region, index, request, position, own)
            values[request, row] = decode(region.format, stored)[0]
            positions[request, row] = position
    return WindowRows(values, positions)
