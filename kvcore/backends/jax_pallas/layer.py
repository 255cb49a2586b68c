"""What a verb must know of one layer at trace time: components and regions, without the layer's number.

A ``Layer`` is a static argument of every compiled verb. Layers of the same make are equal, so 61 layers share the
traces of the few kinds there are, and so do two caches with the same plan.
"""

from typing import TYPE_CHECKING, Any

import msgspec

from kvcore.backends.jax_pallas.runs import pool_shape
from kvcore.plan import LayerPlan

if TYPE_CHECKING:
    from kvcore.plan import CachePlan, Region
    from kvcore.spec import Component


class Layer(LayerPlan):
    """One layer by role, hashable: without the number that it has in its plan.

    Attributes:
        regions: role -> the regions of its parts, numbered as layer 0, so that equal layers compare equal.
        names: local name of every pool the layer reads or writes -> its name in the plan's pools.
        elements: local name of every pool -> (shape of a unit, dtype) that the verbs expect.
        kernels: ``portable`` (jax.numpy), ``triton`` (on CUDA), ``tpu`` (Pallas) or ``interpret`` (Pallas,
            interpreted).
    """

    def __init__(self, plan: "CachePlan", number: int, kernels: str, roles: tuple[str, ...] | None = None) -> None:
        self.kernels = kernels
        self.names: dict[str, str] = {}
        self.elements: dict[str, tuple[tuple[int, ...], Any]] = {}
        self._parts: dict[tuple[str, ...], Layer] = {}
        self._origin = plan, number
        components: dict[str, Component] = {}
        regions: dict[str, tuple[Region, ...]] = {}
        planned = plan.layers[number]
        for role, component in plan.spec.all_layers[number].components():
            if roles is not None and role not in roles:
                continue
            if component.shared_from is not None:
                component = msgspec.structs.replace(component, share=None)
            components[role] = component
            regions[role] = tuple(msgspec.structs.replace(region, layer=0) for region in planned.regions[role])
            for mine, theirs in zip(regions[role], planned.regions[role], strict=True):
                for buffer, (name, _) in mine.buffers.items():
                    self.names[name] = theirs.buffers[buffer][0]
                    (_, *unit), dtype = pool_shape(mine, buffer, 1)
                    self.elements[name] = tuple(unit), dtype
        super().__init__(0, components, regions)
        self._key = (kernels, tuple(components.items()), tuple(regions.items()))
        self._hash = hash(self._key)

    def only(self, *roles: str) -> "Layer":
        """What a verb that touches these roles must know: layers that agree in them share its trace."""
        if roles not in self._parts:
            self._parts[roles] = Layer(*self._origin, self.kernels, roles)
        return self._parts[roles]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layer) and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash
