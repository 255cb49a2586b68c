"""Another name of ``kvcore.sharding.jax``: context shards over a mesh."""

from kvcore.sharding.jax import JaxExchange, create_cache

__all__ = ["JaxExchange", "create_cache"]
