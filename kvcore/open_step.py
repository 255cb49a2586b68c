"""Another name of ``kvcore.cache.open_step``: one step of a cache."""

from kvcore.cache.open_step import Step

__all__ = ["Step"]
