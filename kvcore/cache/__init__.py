"""Caches: pools of one plan, the requests that live in them, and the steps that write them."""

from kvcore.cache.cache import Cache
from kvcore.cache.canary import Fault
from kvcore.cache.create import create_cache
from kvcore.cache.layer import LayerHandle
from kvcore.cache.step import Step

__all__ = ["Cache", "Fault", "LayerHandle", "Step", "create_cache"]
