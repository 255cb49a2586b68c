"""Another name of ``kvcore.cache.LayerHandle``: one layer in one step."""

from kvcore.cache import LayerHandle

__all__ = ["LayerHandle"]
