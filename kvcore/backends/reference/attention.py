"""Attention over the window and the compressed entries, straight from the pools (DeepSeek-V4 paper section 2.3.3)."""

import numpy as np

from kvcore.backends.reference import rows as place
from kvcore.backends.reference.encoding import decode
from kvcore.backends.reference.tail import rotate
from kvcore.ops import Attention, StepIndex
from kvcore.plan import LayerPlan
from kvcore.pools import Pools
from kvcore.spec import Rope


def attend(
    layer: LayerPlan,
    pools: Pools,
    index: StepIndex,
    q: np.ndarray,
    selected: np.ndarray | None = None,
    *,
    rows: np.ndarray | None = None,
    sink: np.ndarray | None = None,
    scale: float | None = None,
    rope: Rope | np.ndarray | None = None,
) -> Attention:
    """Attend from q [T, H, d] to the window and the selected (None: all visible) entries, where K = V."""
    tokens, heads, dim = q.shape
    factor = np.float32(dim**-0.5 if scale is None else scale)
    out = np.zeros((tokens, heads, dim), np.float32)
    lse = np.full((tokens, heads), -np.inf, np.float32)
    window = layer.component("window")
    entries = layer.component("entries")
    own = None
    if window is not None and rows is not None:
        own = place.encode_rows(layer.regions["window"][0], rows)
    for token, (request, position) in enumerate(zip(index.request_index, index.positions, strict=True)):
        if request < 0:
            continue
        keys = [np.zeros((0, dim), np.float32)]
        if window is not None:
            left = 0 if index.left_padding is None else int(index.left_padding[request])
            seen = range(window.first_visible(int(position), left), int(position) + 1)
            keys += [_read(layer, pools, index, request, p, own, role="window") for p in seen]
        if entries is not None:
            visible = (int(position) + 1) // entries.ratio
            seen = range(visible) if selected is None else [i for i in selected[token] if 0 <= i < visible]
            keys += [_read(layer, pools, index, request, i, role="entries") for i in seen]
        keys = np.concatenate(keys)
        out[token], lse[token] = softmax_sum(q[token].astype(np.float32), keys, keys, sink, factor)
        if rope is not None:
            rounded = out[token].astype(q.dtype).astype(np.float32)
            out[token] = rotate(rounded, np.full(heads, -position), rope)
    return Attention(out.astype(q.dtype), lse)


def _read(layer, pools, index, request, number, own=None, *, role):
    """One decoded row, [1, d] fp32."""
    (region,) = layer.regions[role]
    stored = place.read(pools, region, index, int(request), int(number), own)
    return decode(region.format, stored, global_scale=layer.global_scale(role)).astype(np.float32)


def softmax_sum(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, sink: np.ndarray | None, scale: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """One query's attention: q [H, d], keys [n, d], values [n, e] -> out [H, e], lse [H].

    The sink is one logit a head, unscaled, in the denominator only: it has no value and is not part of lse.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        logits = q @ keys.T * scale
        largest = logits.max(axis=1, initial=-np.inf)
        # Without a key, or with none that scores above -inf, the weights are 0 and so is the result.
        largest = np.where(np.isneginf(largest), 0, largest)
        weights = np.exp(logits - largest[:, None])
        total = weights.sum(axis=1)
        lse = largest + np.log(total)
        out = weights @ values / np.where(total == 0, 1, total)[:, None]
        if sink is not None:
            # out · sigmoid(lse - sink), written so that neither exponential overflows.
            out = np.where(total[:, None] == 0, 0, out / (1 + np.exp(np.asarray(sink, np.float32) - lse))[:, None])
    return out.astype(np.float32), lse.astype(np.float32)
