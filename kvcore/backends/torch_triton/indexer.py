"""The lightning indexer: scores and top-k (DeepSeek-V4 paper section 2.3.1)."""

import torch

from kvcore.backends.torch_triton import rows as place
from kvcore.backends.torch_triton.encoding import hadamard
from kvcore.backends.torch_triton.layer import Layer
from kvcore.ops import StepIndex
from kvcore.pools import Pools


def index_scores(
    layer: Layer, pools: Pools, index: StepIndex, q: torch.Tensor, weights: torch.Tensor, *, columns: int
) -> torch.Tensor:
    """``sum_h weights[t,h] · relu(q[t,h] · key[s])`` -> [T, columns] fp32; -inf unless s < (t + 1) div m."""
    component = layer.component("index_keys")
    found = layer.ops.gather_all_entries(pools, layer.number, index, columns=columns, role="index_keys")
    keys = found.values.to(torch.float32)
    q = q.to(torch.float32)
    if component.parts[0].format.hadamard:
        q = hadamard(q.reshape(-1, component.dim)).reshape(q.shape)
    scores = torch.full((len(q), columns), -torch.inf, dtype=torch.float32, device=q.device)
    if not len(keys):
        return scores
    visible = torch.where(index.request_index >= 0, (index.positions + 1) // component.ratio, 0)
    column = torch.arange(columns, device=q.device)
    for some in place.portions(len(q), columns * (component.dim + q.shape[1])):
        products = torch.relu(q[some] @ place.of_request(keys, index.request_index[some]).transpose(1, 2))
        found = (weights[some, None].to(torch.float32) @ products)[:, 0]
        scores[some] = torch.where(column < visible[some, None], found, -torch.inf)
    return scores


def select(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Top k of scores [T, n] -> [T, k] int32: highest first, ties to the lowest index, -1 where score is -inf."""
    # NaN is never selected: it compares as no score at all. Adding zero makes -0 and 0 tie on every device.
    scores = torch.where(scores.isnan(), -torch.inf, scores.to(torch.float32)) + 0.0
    best, order = scores.sort(dim=1, descending=True, stable=True)
    indices = torch.full((len(scores), k), -1, dtype=torch.int32, device=scores.device)
    found = min(k, scores.shape[1])
    indices[:, :found] = torch.where(best > -torch.inf, order, -1)[:, :found]
    return indices
