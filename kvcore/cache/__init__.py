"""Caches: pools of one plan, the requests that live in them, and the steps that write them."""

from kvcore.cache.cache import Cache, create_cache

__all__ = ["Cache", "create_cache"]
