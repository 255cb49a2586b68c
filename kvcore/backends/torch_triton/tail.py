"""The tails: raw rows of tokens awaiting compression, and the compression itself."""

from functools import cache
from typing import Any

import torch

from kvcore.backends.torch_triton import rows as place
from kvcore.backends.torch_triton.encoding import to_bf16
from kvcore.ops import bounds
from kvcore.spec import Rope


def append_tail(ops, pools, layer, index, kv, score):
    """Store raw compressor rows kv and score, [T, width] each, fp32, at slot·R + p mod R."""
    return _append(ops, pools, layer, index, kv, score, "tail")


def append_index_tail(ops, pools, layer, index, kv, score):
    """The same for the indexer's compressor."""
    return _append(ops, pools, layer, index, kv, score, "index_tail")


def _append(ops, pools, layer, index, kv, score, role):
    (region,) = ops.plan.region(layer, role)
    place.append(pools, region, index, ops.encode_rows(region, ops.join(kv, score)))
    return pools


def compress(ops, pools, layer, index, kv, score, *, closed=None, role="entries", norm_weight=None, eps=1e-6):
    """Pool, for each of the first ``closed`` entries that the step completes, its window; norm; -> [closed, d].

    DeepSeek-V4 paper sections 2.3.1 (CSA, overlapping) and 2.3.2 (HCA); rounding as in the published inference code.
    """
    component = ops.component(layer, ops.tail_of(role))
    d, m = component.dim, component.ratio
    (region,) = ops.plan.region(layer, ops.tail_of(role))
    own = ops.encode_rows(region, ops.join(kv, score))
    exact = ops.component(layer, role).parts[0].format.is_fp32
    closed = bounds.closed(ops.plan, layer, role, index) if closed is None else closed
    requests, entries = ops.closed(layer, index, closed, role)
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
    ops,
    pools,
    layer,
    index,
    kv,
    score,
    index_kv=None,
    index_score=None,
    *,
    closed=None,
    norm_weight=None,
    eps=1e-6,
    rope=None,
    index_norm_weight=None,
):
    """Compress, rotate at position m·i, encode and store every entry that the step completes; then index keys."""
    streams = [("entries", kv, score, norm_weight), ("index_keys", index_kv, index_score, index_norm_weight)]
    for role, stream_kv, stream_score, weight in streams:
        if stream_kv is None:
            continue
        latents = ops.compress(
            pools, layer, index, stream_kv, stream_score, closed=closed, role=role, norm_weight=weight, eps=eps
        )
        component = ops.component(layer, role)
        if rope is not None:
            _, entries = ops.closed(layer, index, len(latents), role)
            latents = rotate(latents, entries * component.ratio, rope)
            latents = latents if component.parts[0].format.is_fp32 else to_bf16(latents)
        ops.store_role(pools, layer, role, index, latents)
    return pools


def window_of(entry, ratio, *, overlap):
    """Positions [n, rows] that entries [n] are pooled from, -1 where there are none: before the first entry's own."""
    before = ratio if overlap else 0
    positions = entry[:, None].long() * ratio + torch.arange(-before, ratio, device=entry.device)
    return torch.where((entry >= 0)[:, None] & (positions >= 0), positions, -1)


def pool(keys, scores):
    """Softmax-weighted sum over rows, [n, rows, d] each, separately for every channel; no row with weight gives 0."""
    largest = scores.amax(dim=1, keepdim=True)
    largest = torch.where(largest.isneginf(), 0, largest)
    weights = torch.exp(scores - largest)
    total = weights.sum(dim=1)
    products = torch.where(weights == 0, 0, weights * keys).sum(dim=1)
    return products / torch.where(total == 0, 1, total)


def rms_norm(values, weight, eps):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in fp32."""
    mean = (values * values).mean(dim=-1, keepdim=True)
    return values * (mean + eps).sqrt().reciprocal() * weight.to(torch.float32)


def rotate(values, positions, rope):
    """Rotate the last channels of values [n, d] in interleaved pairs; angle = fp32(position) * fp32(frequency)."""
    frequencies = frequencies_of(rope, values.device)
    angles = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = torch.cos(angles), torch.sin(angles)
    head, pairs = values.split([values.shape[1] - 2 * len(frequencies), 2 * len(frequencies)], dim=1)
    even, odd = pairs[:, 0::2], pairs[:, 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=2).reshape(pairs.shape)
    return torch.cat([head, turned], dim=1)


def frequencies_of(rope, device) -> Any:
    """Inverse frequencies as a contiguous fp32 tensor, from a Rope or a tensor; None stays None."""
    if isinstance(rope, Rope):
        return on_device(rope, device)
    return None if rope is None else rope.to(torch.float32).contiguous()


@cache
def on_device(rope: Rope, device):
    """A rope's inverse frequencies, on the device once."""
    return torch.tensor(rope.inverse_frequencies, dtype=torch.float32, device=device)
