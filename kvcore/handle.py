"""Another name of ``kvcore.cache.handle``: one layer in one step."""

from kvcore.cache.handle import LayerHandle

__all__ = ["LayerHandle"]
