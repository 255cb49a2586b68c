"""Canonical rows put together from the shares of head shards: what digests and transfer are defined on."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcore.sharding.plan import ShardPlan


def assemble_rows(
    plan: ShardPlan, layer: int, role: str, shares: Sequence[np.ndarray[Any, Any]]
) -> np.ndarray[Any, Any]:
    """Whole rows [..., row_bytes] of a role from every head shard's own, in order of shards.

    Args:
        plan: the shards.
        layer: canonical layer number.
        role: a role of that layer; latent rows are on every shard and the first one's are taken.
        shares: [..., bytes of the shard's heads] uint8, the same rows of each, as ``gather_rows`` gives them.
    """
    parts = getattr(plan.spec.all_layers[layer], role).parts
    pieces: list[np.ndarray[Any, Any]] = []
    starts = [0] * len(shares)
    for part, heads in zip(parts, plan.parts(layer, role), strict=True):
        size = part.format.row
        for head in range(part.heads):
            owner = heads.owner(head)
            first = starts[owner] + heads.local(head) * size
            pieces.append(shares[owner][..., first : first + size])
        starts = [start + heads.per_shard * size for start in starts]
    return np.concatenate(pieces, axis=-1)
