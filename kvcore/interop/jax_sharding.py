"""Another name of ``kvcore.interop.jax.sharding``: one cache spread over a mesh."""

from kvcore.interop.jax.sharding import MODES, RULES, Axes, Rules, Sharded

__all__ = ["MODES", "RULES", "Axes", "Rules", "Sharded"]
