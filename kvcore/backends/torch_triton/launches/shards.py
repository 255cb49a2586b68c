"""The launch that joins what context shards answered."""

from torch import Tensor

from kvcore.backends.torch_triton.launches.bound import options, registered
from kvcore.kernels.triton.record import power_of_two
from kvcore.kernels.triton.shards import shards_kernel


def _merged(
    parts: Tensor, once: Tensor | None, once_lse: Tensor | None, sink: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    return like.new_empty((*parts.shape[1:3], parts.shape[3] - 1)), parts.new_empty(parts.shape[1:3])


@registered((), _merged)
def join_shards(
    parts: Tensor, once: Tensor | None, once_lse: Tensor | None, sink: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    """(out [T, H, dim] of the dtype of ``like``, lse [T, H]) from parts [shards, T, H, dim + 1] fp32.

    Args:
        parts: every shard's output, and its log-sum as the last value.
        once: [T, H, dim], what every shard has alike, and
        once_lse: [T, H] fp32 its log-sum; or None.
        sink: [H] or None.
        like: gives the dtype.
    """
    shards, tokens, heads, size = parts.shape
    out, lse = _merged(parts, once, once_lse, sink, like)
    if tokens * heads:
        shards_kernel[(tokens * heads,)](
            out,
            lse,
            parts,
            parts if once is None else once.contiguous(),
            parts if once_lse is None else once_lse.contiguous(),
            parts if sink is None else sink.contiguous(),
            tokens * heads,
            heads,
            shards,
            once is not None,
            sink is not None,
            size - 1,
            power_of_two(size - 1),
            num_warps=4,
            **options(parts.device),
        )
    return out, lse
