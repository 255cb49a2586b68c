"""One new token a row under any mask, in torch's operations and in the model's order, over rows that were handed out.

What compiled code's operators do where a mask says something else than padding at the left: the graph was made for
other masks, and cannot ask the model's own attention function any more.
"""

from typing import Any

import torch

REASON = "a mask that is not padding at the left alone, seen when compiled code ran: rows were handed out"


def attended_under(
    mask: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sink: Any, scale: float | None
) -> torch.Tensor:
    """Attention of q [B, H, 1, dim] to keys and values [B, heads, n, dim] -> [B, 1, H, value dim].

    Args:
        mask: [B or 1, 1, 1, n] of what is seen, or of summands. Where it shows a row nothing, that gets what torch and
            the models give: zeros of the former, the mean of all n values of the latter.
        sink: [H] logits that take a share of the weights; None: there are none.
        scale: of scores; None: dim ** -0.5.
    """
    batch, heads, _, dim = query.shape
    groups, count, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    rows = query.reshape(batch, groups, heads // groups, dim)
    if sink is None:
        out = torch.nn.functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(batch, 1, heads, value_dim)
    scores = rows @ keys.transpose(2, 3) * (dim**-0.5 if scale is None else scale)
    hidden = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores + mask
    share = sink.to(scores.dtype).view(1, groups, heads // groups, 1).expand(batch, -1, -1, 1)
    weights = torch.cat([scores, share], dim=3).softmax(dim=3)[..., :count]
    return (weights @ values).reshape(batch, 1, heads, value_dim)
