"""The tails: raw rows of tokens awaiting compression, and the compression itself."""

import numpy as np

from kvcore.backends.reference import entries as paged
from kvcore.backends.reference import rows as place
from kvcore.backends.reference.encoding import to_bf16
from kvcore.ops import StepIndex
from kvcore.ops.records import Compression, Streams
from kvcore.plan import LayerPlan
from kvcore.pools import Pools
from kvcore.spec import Rope


def join(kv: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Kv and score [T, width] side by side: [T, 2·width], the channels of a tail row."""
    return np.concatenate([kv, score], axis=1)


def append_tail(
    layer: LayerPlan, pools: Pools, index: StepIndex, kv: np.ndarray, score: np.ndarray, *, role: str
) -> Pools:
    """Store raw compressor rows kv and score, [T, width] each, fp32, at slot·R + p mod R."""
    (region,) = layer.regions[role]
    return place.append(pools, region, index, place.encode_rows(region, join(kv, score)))


def compress(
    layer: LayerPlan,
    pools: Pools,
    index: StepIndex,
    kv: np.ndarray,
    score: np.ndarray,
    *,
    closed: int,
    role: str = "entries",
    norm_weight: np.ndarray | None = None,
    eps: float = 1e-6,
) -> np.ndarray:
    """Pool, for each of the first ``closed`` entries that the step completes, its window; norm; -> [closed, d].

    DeepSeek-V4 paper sections 2.3.1 (CSA, overlapping) and 2.3.2 (HCA); rounding as in the published inference code.
    """
    component = layer.component(layer.tail_of(role))
    d, m = component.dim, component.ratio
    (region,) = layer.regions[layer.tail_of(role)]
    own = place.encode_rows(region, join(kv, score))
    exact = layer.component(role).parts[0].format.is_fp32
    latents = np.zeros((closed, d), np.float32)
    for row, (request, entry) in enumerate(zip(*paged.closed(layer, index, count=closed, role=role), strict=True)):
        if request < 0:
            continue
        keys, scores = [], []
        for position in window_of(entry, m, overlap=component.overlap):
            raw = place.read(pools, region, index, request, position, own)[0].view(np.float32)
            # A token in the window before the entry's own lends its carry half, the first; its own tokens the cur half.
            carry = component.overlap and position < entry * m
            half = slice(0, d) if carry or not component.overlap else slice(d, 2 * d)
            keys.append(raw[: component.width][half])
            scores.append(raw[component.width :][half])
        latents[row] = pool(np.stack(keys), np.stack(scores))
    latents = latents if exact else to_bf16(latents)
    if norm_weight is not None:
        latents = rms_norm(latents, norm_weight, eps)
        latents = latents if exact else to_bf16(latents)
    return latents


def flush(
    layer: LayerPlan, pools: Pools, index: StepIndex, streams: Streams, compression: Compression, *, closed: int
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
        paged.store_role(layer, pools, index, latents, role=role)
    return pools


def window_of(entry: int, ratio: int, *, overlap: bool) -> range:
    """Positions that entry ``entry`` is pooled from; the first entry has no window before its own."""
    first = entry - 1 if overlap and entry > 0 else entry
    return range(int(first) * ratio, (int(entry) + 1) * ratio)


def pool(keys: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Softmax-weighted sum over rows, [rows, d] each, separately for every channel; no row with weight gives 0."""
    largest = scores.max(axis=0)
    largest = np.where(np.isneginf(largest), 0, largest)
    # Scores can lie further apart than fp32 reaches, and a row without weight may hold anything.
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp(scores - largest)
        products = np.where(weights == 0, 0, weights * keys).sum(axis=0)
    total = weights.sum(axis=0)
    return products / np.where(total == 0, 1, total)


def rms_norm(values: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in fp32."""
    mean = np.mean(values * values, axis=-1, keepdims=True, dtype=np.float32)
    return values * (np.float32(1) / np.sqrt(mean + np.float32(eps))) * np.asarray(weight, np.float32)


def rotate(values: np.ndarray, positions: np.ndarray, rope: Rope | np.ndarray) -> np.ndarray:
    """Rotate the last channels of values [n, d] in interleaved pairs; angle = fp32(position) * fp32(frequency)."""
    frequencies = np.asarray(rope.inverse_frequencies if isinstance(rope, Rope) else rope, np.float32)
    angles = positions.astype(np.float32)[:, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    head, pairs = np.split(values, [values.shape[1] - 2 * len(frequencies)], axis=1)
    even, odd = pairs[:, 0::2], pairs[:, 1::2]
    turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=2).reshape(pairs.shape)
    return np.concatenate([head, turned], axis=1)
