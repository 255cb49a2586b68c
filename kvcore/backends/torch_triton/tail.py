"""The tails: raw rows of tokens awaiting compression, and the compression itself."""

from functools import cache
from typing import Any

import torch

from kvcore.backends.torch_triton import entries as paged
from kvcore.backends.torch_triton import rows as place
from kvcore.backends.torch_triton.encoding import to_bf16
from kvcore.backends.torch_triton.layer import Layer
from kvcore.ops import StepIndex
from kvcore.ops.records import Compression, Streams
from kvcore.pools import Pools
from kvcore.spec import Rope


def join(kv: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """Kv and score [T, width] side by side: [T, 2·width], the channels of a tail row."""
    return torch.cat([kv, score], dim=1)


def append_tail(
    layer: Layer, pools: Pools, index: StepIndex, kv: torch.Tensor, score: torch.Tensor, *, role: str
) -> Pools:
    """Store raw compressor rows kv and score, [T, width] each, fp32, at slot·R + p mod R."""
    (region,) = layer.regions[role]
    return place.append(pools, region, index, place.encode_rows(region, join(kv, score)))


def compress(
    layer: Layer,
    pools: Pools,
    index: StepIndex,
    kv: torch.Tensor,
    score: torch.Tensor,
    *,
    closed: int,
    role: str = "entries",
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Pool, for each of the first ``closed`` entries that the step completes, its window; norm; -> [closed, d].

    DeepSeek-V4 paper sections 2.3.1 (CSA, overlapping) and 2.3.2 (HCA); rounding as in the published inference code.
    """
    component = layer.component(layer.tail_of(role))
    d, m = component.dim, component.ratio
    (region,) = layer.regions[layer.tail_of(role)]
    own = place.encode_rows(region, join(kv, score))
    exact = layer.component(role).parts[0].format.is_fp32
    requests, entries = paged.closed(layer, index, count=closed, role=role)
    latents = torch.zeros((closed, d), dtype=torch.float32, device=own.device)
    for some in place.portions(closed, (2 * m if component.overlap else m) * 2 * component.width):
        positions = window_of(entries[some], m, overlap=component.overlap)
        raw = place.read(pools, region, index, requests[some, None], positions, own)[:, :, 0].view(torch.float32)
        keys, scores = raw[:, :, : component.width], raw[:, :, component.width :]
        if component.overlap:
            # A token in the window before the entry's own lends its carry half, the first; its own tokens the cur half.
            keys = torch.cat([keys[:, :m, :d], keys[:, m:, d:]], dim=1)
            scores = torch.cat([scores[:, :m, :d], scores[:, m:, d:]], dim=1)
        latents[some] = pool(keys, torch.where((positions >= 0)[:, :, None], scores, -torch.inf))
    place.blank(latents, requests >= 0)
    latents = latents if exact else to_bf16(latents)
    if norm_weight is not None:
        latents = rms_norm(latents, norm_weight, eps)
        latents = latents if exact else to_bf16(latents)
    return latents


def flush(
    layer: Layer, pools: Pools, index: StepIndex, streams: Streams, compression: Compression, *, closed: int
) -> Pools:
    """Compress, rotate at position m·i, encode and store every entry that the step completes; then index keys."""
    for role, kv, score, weight in compression.each(streams):
        latents = compress(
            layer, pools, index, kv, score, closed=closed, role=role, norm_weight=weight, eps=compression.eps
        )
        component = layer.component(role)
        if compression.rope is not None:
            _, entries = paged.closed(layer, index, count=closed, role=role)
            latents = rotate(latents, entries * component.ratio, compression.rope)
            latents = latents if component.parts[0].format.is_fp32 else to_bf16(latents)
        layer.ops.store_role(pools, layer.number, role, index, latents)
    return pools


def window_of(entry: torch.Tensor, ratio: int, *, overlap: bool) -> torch.Tensor:
    """Positions [n, rows] that entries [n] are pooled from, -1 where there are none: before the first entry's own."""
    before = ratio if overlap else 0
    positions = entry[:, None].long() * ratio + torch.arange(-before, ratio, device=entry.device)
    return torch.where((entry >= 0)[:, None] & (positions >= 0), positions, -1)


def pool(keys: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Softmax-weighted sum over rows, [n, rows, d] each, separately for every channel; no row with weight gives 0."""
    largest = scores.amax(dim=1, keepdim=True)
    largest = torch.where(largest.isneginf(), 0, largest)
    weights = torch.exp(scores - largest)
    total = weights.sum(dim=1)
    products = torch.where(weights == 0, 0, weights * keys).sum(dim=1)
    return products / torch.where(total == 0, 1, total)


def rms_norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in fp32."""
    mean = (values * values).mean(dim=-1, keepdim=True)
    return values * (mean + eps).sqrt().reciprocal() * weight.to(torch.float32)


def rotate(values: torch.Tensor, positions: torch.Tensor, rope: Rope | torch.Tensor) -> torch.Tensor:
    """Rotate the last channels of values [n, d] in interleaved pairs; angle = fp32(position) * fp32(frequency)."""
    frequencies = frequencies_of(rope, values.device)
    angles = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = torch.cos(angles), torch.sin(angles)
    head, pairs = values.split([values.shape[1] - 2 * len(frequencies), 2 * len(frequencies)], dim=1)
    even, odd = pairs[:, 0::2], pairs[:, 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=2).reshape(pairs.shape)
    return torch.cat([head, turned], dim=1)


def frequencies_of(rope: Rope | torch.Tensor | None, device: Any) -> Any:
    """Inverse frequencies as a contiguous fp32 tensor, from a Rope or a tensor; None stays None."""
    if isinstance(rope, Rope):
        return on_device(rope, device)
    return None if rope is None else rope.to(torch.float32).contiguous()


@cache
def on_device(rope: Rope, device):
    """A rope's inverse frequencies, on the device once."""
    return torch.tensor(rope.inverse_frequencies, dtype=torch.float32, device=device)
