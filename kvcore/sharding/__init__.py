"""What lies where when a cache is spread over devices, in integers; and verbs over shards that tell one another.

The canonical order (request, layer, role, row, head) is that of one device. A ``ShardPlan`` maps it to an owner and a
place there, and back. Digests, snapshots and transfer are defined on the canonical order: shards do not show in them.
``torch`` and ``jax`` are the exchanges of those frameworks; nothing else here knows one.
"""

from kvcore.sharding.assemble import assemble_rows
from kvcore.sharding.exchange import Exchange
from kvcore.sharding.heads import Heads
from kvcore.sharding.layers import Layers
from kvcore.sharding.ops import ShardedOps
from kvcore.sharding.pages import Pages
from kvcore.sharding.plan import AXES, Canonical, Local, ShardPlan

__all__ = [
    "AXES",
    "Canonical",
    "Exchange",
    "Heads",
    "Layers",
    "Local",
    "Pages",
    "ShardPlan",
    "ShardedOps",
    "assemble_rows",
]
