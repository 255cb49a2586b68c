"""Another name of ``kvcore.interop.jax.views``: caches as pytrees in a model's own state."""

from kvcore.interop.jax.views import Appended, AppendedLatents, CacheViews, LayerView, init_views

__all__ = ["Appended", "AppendedLatents", "CacheViews", "LayerView", "init_views"]
