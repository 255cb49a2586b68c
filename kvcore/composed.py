"""Another name of ``kvcore.ops.composed``: defaults of the fused verbs."""

from kvcore.ops.composed import ComposedVerbs

__all__ = ["ComposedVerbs"]
