"""The sliding window: encode and store, gather in position order."""

import torch

from kvcore.backends.torch_triton import rows as place
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
    first = place.first_visible(component, index.lengths - 1)
    positions = place.numbers_from(first, index.lengths - first, region.rows)
    requests = torch.arange(len(index.slots), device=positions.device)[:, None]
    values = ops.decode_rows(region, place.read(pools, region, index, requests, positions, own))
    return WindowRows(place.blank(values[:, :, 0], positions >= 0), positions.int())
