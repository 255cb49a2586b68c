"""Attention over the window and the compressed entries, straight from the pools (DeepSeek-V4 paper section 2.3.3)."""

import numpy as np

from kvcore.backends.reference import rows as place
from kvcore.backends.reference.tail import rotate
from kvcore.ops import Attention


def attend(ops, pools, layer, index, q, selected=None, *, rows=None, sink=None, scale=None, rope=None):
    """Attend from q [T, H, d] to the window and the selected (None: all visible) entries, where K = V."""
    tokens, heads, dim = q.shape
    scale = np.float32(dim**-0.5 if scale is None else scale)
    out = np.zeros((tokens, heads, dim), np.float32)
    lse = np.full((tokens, heads), -np.inf, np.float32)
    window = ops.component(layer, "window")
    entries = ops.component(layer, "entries")
    own = None
    if window is not None and rows is not None:
        own = ops.encode_rows(ops.plan.region(layer, "window")[0], rows)
    for token, (request, position) in enumerate(zip(index.request_index, index.positions, strict=True)):
        if request < 0:
            continue
        keys = [np.zeros((0, dim), np.float32)]
        if window is not None:
            keys += [read(ops, pools, layer, "window", index, request, p, own) for p in window.live(int(position) + 1)]
        if entries is not None:
            visible = (int(position) + 1) // entries.ratio
            picks = range(visible) if selected is None else [i for i in selected[token] if 0 <= i < visible]
            keys += [read(ops, pools, layer, "entries", index, request, i) for i in picks]
        keys = np.concatenate(keys)
        out[token], lse[token] = softmax_sum(q[token].astype(np.float32), keys, keys, sink, scale)
        if rope is not None:
            rounded = out[token].astype(q.dtype).astype(np.float32)
            out[token] = rotate(rounded, np.full(heads, -position), rope)
    return Attention(out.astype(q.dtype), lse)


def read(ops, pools, layer, role, index, request, number, own=None):
    """One decoded row, [1, d] fp32."""
    (region,) = ops.plan.region(layer, role)
    stored = place.read(pools, region, index, int(request), int(number), own)
    return ops.decode(region.format, stored, global_scale=ops.global_scale(layer, role)).astype(np.float32)


def softmax_sum(q, keys, values, sink, scale):
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
