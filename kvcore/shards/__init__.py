"""What lies where when a cache is spread over devices: integers only, nothing stored, no framework.

The canonical order (request, layer, role, row, head) is that of one device. A ``ShardPlan`` maps it to an owner and a
place there, and back. Digests, snapshots and transfer are defined on the canonical order: shards do not show in them.
"""

from kvcore.shards.assemble import assemble_rows
from kvcore.shards.exchange import Exchange
from kvcore.shards.heads import Heads
from kvcore.shards.layers import Layers
from kvcore.shards.ops import ShardedOps
from kvcore.shards.pages import Pages
from kvcore.shards.plan import AXES, Canonical, Local, ShardPlan

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
