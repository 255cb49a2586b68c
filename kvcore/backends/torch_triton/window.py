"""The sliding window: encode and store, gather in position order."""

import torch

from kvcore.backends.torch_triton import rows as place
from kvcore.backends.torch_triton.encoding import to_bf16
from kvcore.backends.torch_triton.tail import rms_norm, rotate
from kvcore.ops import WindowRows


def append_window(ops, pools, layer, index, rows):
    """Encode rows [T, d] and store them at slot·C + p mod C; only each ring's last C positions are written."""
    (region,) = ops.plan.region(layer, "window")
    place.append(pools, region, index, ops.encode_rows(region, rows))
    return pools


def append_rotated_window(ops, pools, layer, index, rows, *, rope, norm_weight=None, eps=1e-6):
    """Norm (if a weight is given) and rotate rows [T, d] at their positions, then ``append_window``."""
    (region,) = ops.plan.region(layer, "window")
    rows = rows.to(torch.float32)
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
    first, end = component.live_bounds(index.lengths, place.maximum)
    positions = place.numbers_from(first, end - first, region.rows)
    requests = torch.arange(len(index.slots), device=positions.device)[:, None]
    values = ops.decode_rows(region, place.read(pools, region, index, requests, positions, own))
    return WindowRows(place.blank(values[:, :, 0], positions >= 0), positions.int())
