"""Another name of ``kvcore.sharding``: what lies where when a cache is spread over devices."""

from kvcore.sharding import AXES, Canonical, Exchange, Heads, Layers, Local, Pages, ShardedOps, ShardPlan, assemble_rows

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
