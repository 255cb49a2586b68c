"""Another name of ``kvcore.ops.Ops``, whose fused verbs have defaults."""

from kvcore.ops import Ops as ComposedVerbs

__all__ = ["ComposedVerbs"]
