"""The lightning indexer: scores and top-k (DeepSeek-V4 paper section 2.3.1)."""

import numpy as np

from kvcore.backends.reference import entries
from kvcore.backends.reference.encoding import hadamard
from kvcore.ops import StepIndex
from kvcore.plan import LayerPlan
from kvcore.pools import Pools


def index_scores(
    layer: LayerPlan, pools: Pools, index: StepIndex, q: np.ndarray, weights: np.ndarray, *, columns: int
) -> np.ndarray:
    """``sum_h weights[t,h] · relu(q[t,h] · key[s])`` -> [T, columns] fp32; -inf unless s < (t + 1) div m."""
    component = layer.component("index_keys")
    keys = entries.gather_all_entries(layer, pools, index, columns=columns, role="index_keys").values
    keys = keys.astype(np.float32)
    q = q.astype(np.float32)
    if component.parts[0].format.hadamard:
        q = hadamard(q.reshape(-1, component.dim)).reshape(q.shape)
    scores = np.full((len(q), columns), -np.inf, np.float32)
    for token, (request, position) in enumerate(zip(index.request_index, index.positions, strict=True)):
        visible = min((int(position) + 1) // component.ratio, columns) if request >= 0 else 0
        products = np.maximum(q[token] @ keys[request, :visible].T, 0)
        scores[token, :visible] = weights[token].astype(np.float32) @ products
    return scores


def select(scores: np.ndarray, k: int) -> np.ndarray:
    """Top k of scores [T, n] -> [T, k] int32: highest first, ties to the lowest index, -1 where score is -inf."""
    indices = np.full((len(scores), k), -1, np.int32)
    for token, row in enumerate(scores):
        # NaN is never selected: it compares as no score at all.
        row = np.where(np.isnan(row), -np.inf, row)
        order = np.argsort(-row, kind="stable")[:k]
        order = order[row[order] > -np.inf]
        indices[token, : len(order)] = order
    return indices
