"""Another name of ``kvcore.cache.Step``: one step of a cache."""

from kvcore.cache import Step

__all__ = ["Step"]
