"""The collectives of context shards, in torch: a byte sum, two gathers, a sum."""

from typing import Any

import torch
import torch.distributed as dist

from kvcore.backends.torch_triton.attention import inverse_rope
from kvcore.backends.torch_triton.tail import frequencies_of
from kvcore.ops import Attention
from kvcore.sharding.pages import Pages

# all_gather_into_tensor is deprecated in torch 2.13, and what follows it is not in 2.11.
GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

LARGEST = 2**31 - 1

TOGETHER = 1 << 23
"""Values up to which outputs are gathered with their log-sums, in one exchange; beyond, they are summed on the way."""


class TorchExchange:
    """``kvcore.sharding.Exchange`` over one process group.

    Attributes:
        shards: ranks of the group.
        shard: this rank within it.
        mine: [shards] int32, 1 at this rank.
    """

    def __init__(self, group: Any, device: str | torch.device = "cpu") -> None:
        self._group = group
        self._take_place(dist.get_world_size(group), dist.get_rank(group), device)

    def _take_place(self, shards: int, shard: int, device: str | torch.device) -> None:
        self.shards, self.shard = shards, shard
        self.mine = (torch.arange(shards, dtype=torch.int32) == shard).int().to(device)

    def where(self, condition, values):
        """The values where the condition holds, zeros elsewhere."""
        return torch.where(condition.reshape(*condition.shape, *[1] * (values.ndim - condition.ndim)), values, 0)

    def from_owner(self, values):
        """Bit for bit the values of the one shard that has them: a sum of bytes, of which one at most is not zero."""
        # Bytes, since gloo knows no fp8 and NCCL no 16-bit integers; and no float sum, which would lose signs of zeros.
        data = values.contiguous().clone()
        if data.numel():
            self._sum(data.view(torch.uint8) if data.ndim else data)
        return data

    def spread(self, scores, rows, columns):
        """Scores of this shard's entries [T, n] -> [T, columns] by canonical entry, -inf elsewhere."""
        wide = scores.new_full((len(scores), columns), -torch.inf)
        local = torch.arange(scores.shape[1], device=scores.device)
        place = Pages(self.shards, rows).canonical(self.shard, local)
        # The first shard may hold more rows than this one; those beyond are none, and lie beyond the columns too.
        kept = max(0, Pages(self.shards, rows).held(self.shard, columns))
        wide[:, place[:kept]] = scores[:, :kept]
        return wide

    def top(self, scores, selected, entries):
        """Merge every shard's best k: highest first, ties to the lowest entry, -1 where there is none."""
        if not selected.numel() or not scores.shape[1]:
            return entries
        best = scores.float().gather(1, selected.clamp(min=0).long()) + 0.0
        best = torch.where(selected >= 0, best, -torch.inf).view(torch.int32)
        # Integers in the order of the scores, above integers in the order of ties: one exchange, one sort.
        order = torch.where(best < 0, best ^ LARGEST, best)
        ties = torch.where(entries >= 0, LARGEST - entries, 0)
        both = self._stack(torch.stack((order, ties))).long()
        keys = (both[:, 0] << 32 | both[:, 1]).transpose(0, 1).flatten(1)
        ties = keys.sort(dim=1, descending=True).values[:, : selected.shape[1]] & LARGEST
        return torch.where(ties > 0, LARGEST - ties, -1).int()

    def merge(self, parts, once, sink, like):
        """Attention over all shards' parts and what every shard holds, counted once; then the sink, once."""
        if not like.numel():
            return Attention(parts.out.to(like.dtype), parts.lse)
        out = parts.out.float()
        if out.numel() * self.shards <= TOGETHER:
            found = self._stack(torch.cat((out, parts.lse[..., None]), dim=-1))
            if found.is_cuda:
                return merged(found, once, sink, like)
            outs, found = found[..., :-1], found[..., -1]
        else:
            outs, found = None, self._stack(parts.lse)
        lse = found.logsumexp(dim=0) if once is None else torch.logaddexp(found.logsumexp(dim=0), once.lse)
        # A query without any key: weights exp(-inf - 0) are 0.
        safe = torch.where(lse.isneginf(), 0, lse)
        if outs is None:
            out = out * torch.exp(parts.lse - safe)[..., None]
            self._sum(out)
        else:
            out = (outs * torch.exp(found - safe)[..., None]).sum(dim=0)
        if once is not None:
            out = out + once.out * torch.exp(once.lse - safe)[..., None]
        if sink is not None:
            # out · sigmoid(lse - sink), written so that neither exponential overflows.
            share = torch.where(lse.isneginf(), 0, 1 / (1 + torch.exp(sink.float() - lse)))
            out = out * share[..., None]
        return Attention(out.to(like.dtype), lse)

    def inverse_rope(self, out, positions, rope):
        """Merged outputs [T, H, d] with their last channels turned back by positions [T]."""
        if not out.is_cuda:
            return inverse_rope(out, positions, rope)
        from kvcore.backends.torch_triton.launch import calls

        calls().inverse_rope_rows(out, positions, frequencies_of(rope, out.device))
        return out

    def widen(self, q):
        """The query in fp32; on a GPU as it is, since bf16 is what the kernels' matrix units take."""
        return q if q.is_cuda else q.float()

    def _sum(self, values):
        """In place, the sum over all shards; with ``_stack`` all that is said between shards."""
        dist.all_reduce(values, group=self._group)

    def _stack(self, values):
        """[shards, ...] in order of shards."""
        found = values.new_empty((self.shards, *values.shape))
        GATHER(found.flatten(0, 1), values.contiguous(), group=self._group)
        return found


def merged(parts, once, sink, like):
    """``TorchExchange.merge`` in one launch, of parts [shards, T, H, dim + 1] with their log-sums as the last value."""
    from kvcore.backends.torch_triton.launch import calls

    out, lse = (None, None) if once is None else (once.out, once.lse)
    return Attention(*calls().join_shards(parts, out, lse, sink, like))
