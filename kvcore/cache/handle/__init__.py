"""One layer in one step: the verbs that a model calls.

The handle is the door: it checks every argument, then calls the backend's verbs with the step's index.
"""

from kvcore.cache.handle.inspect import InspectionVerbs
from kvcore.cache.handle.latent import LatentVerbs
from kvcore.cache.handle.reading import ReadingVerbs
from kvcore.cache.handle.rows import RowVerbs


class LayerHandle(LatentVerbs, ReadingVerbs, RowVerbs, InspectionVerbs):
    """One layer's cache during one step, from ``step.layer(i)``; it ends with the step."""


__all__ = ["LayerHandle"]
