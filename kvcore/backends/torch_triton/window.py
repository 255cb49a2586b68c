"""The sliding window: encode and store, gather in position order."""

import torch

from kvcore.backends.torch_triton import rows as place
from kvcore.backends.torch_triton.encoding import to_bf16
from kvcore.backends.torch_triton.layer import Layer
from kvcore.backends.torch_triton.tail import rms_norm, rotate
from kvcore.ops import StepIndex, WindowRows
from kvcore.pools import Pools
from kvcore.spec import Rope


def append_window(layer: Layer, pools: Pools, index: StepIndex, rows: torch.Tensor) -> Pools:
    """Encode rows [T, d] and store them at slot·C + p mod C; only each ring's last C positions are written."""
    (region,) = layer.regions["window"]
    return place.append(pools, region, index, place.encode_rows(region, rows))


def rotated_rows(
    layer: Layer,
    index: StepIndex,
    rows: torch.Tensor,
    *,
    rope: Rope | torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Rows [T, d] normed (if a weight is given) and rotated at their positions, as they are stored then."""
    (region,) = layer.regions["window"]
    rows = rows.to(torch.float32)
    if norm_weight is not None:
        rows = rms_norm(rows, norm_weight, eps)
        rows = rows if region.format.is_fp32 else to_bf16(rows)
    rows = rotate(rows, index.positions, rope)
    return rows if region.format.is_fp32 else to_bf16(rows)


def append_rotated_window(
    layer: Layer,
    pools: Pools,
    index: StepIndex,
    rows: torch.Tensor,
    *,
    rope: Rope | torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> Pools:
    """Append the rotated rows of rows [T, d] to the window."""
    rows = rotated_rows(layer, index, rows, rope=rope, norm_weight=norm_weight, eps=eps)
    return append_window(layer, pools, index, rows)


def gather_window(layer: Layer, pools: Pools, index: StepIndex, rows: torch.Tensor | None = None) -> WindowRows:
    """The last min(length, W) positions of every request at the end of the step, ascending from row 0."""
    (region,) = layer.regions["window"]
    component = layer.component("window")
    own = None if rows is None else place.encode_rows(region, rows)
    first, end = component.live_bounds(index.lengths, place.maximum)
    first = first if index.left_padding is None else torch.maximum(first, index.left_padding)
    positions = place.numbers_from(first, end - first, region.rows)
    requests = torch.arange(len(index.slots), device=positions.device)[:, None]
    values = place.decode_rows(region, place.read(pools, region, index, requests, positions, own))
    return WindowRows(place.blank(values[:, :, 0], positions >= 0), positions.int())
