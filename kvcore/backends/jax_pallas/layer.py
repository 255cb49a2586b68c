"""What a verb must know of one layer at trace time: components and regions, without the layer's number.

A ``Layer`` is a static argument of every compiled verb. Layers of the same make are equal, so 61 layers share the
traces of the few kinds there are, and so do two caches with the same plan.
"""

from typing import Any

import msgspec

from kvcore.backends.jax_pallas.runs import pool_shape
from kvcore.plan import CachePlan, Region
from kvcore.spec import TAIL_OF, Component


class Layer:
    """One layer's components and regions by role, hashable.

    Attributes:
        regions: role -> the regions of its parts, numbered as layer 0, so that equal layers compare equal.
        names: local name of every pool the layer reads or writes -> its name in the plan's pools.
        elements: local name of every pool -> (shape of a unit, dtype) that the verbs expect.
        kernels: ``portable`` (jax.numpy), ``triton`` (on CUDA), ``tpu`` (Pallas) or ``interpret`` (Pallas,
            interpreted).
    """

    def __init__(self, plan: CachePlan, number: int, kernels: str, roles: tuple[str, ...] | None = None) -> None:
        self.kernels = kernels
        self.regions: dict[str, tuple[Region, ...]] = {}
        self.names: dict[str, str] = {}
        self.elements: dict[str, tuple[tuple[int, ...], Any]] = {}
        self._components: dict[str, Component] = {}
        self._parts: dict[tuple[str, ...], Layer] = {}
        self._origin = plan, number
        for role, component in plan.spec.all_layers[number].components():
            if roles is not None and role not in roles:
                continue
            if component.shared_from is not None:
                component = msgspec.structs.replace(component, share=None)
            self._components[role] = component
            self.regions[role] = tuple(msgspec.structs.replace(region, layer=0) for region in plan.region(number, role))
            for mine, planned in zip(self.regions[role], plan.region(number, role), strict=True):
                for buffer, (name, _) in mine.buffers.items():
                    self.names[name] = planned.buffers[buffer][0]
                    (_, *unit), dtype = pool_shape(mine, buffer, 1)
                    self.elements[name] = tuple(unit), dtype
        self._key = (kernels, tuple(self._components.items()), tuple(self.regions.items()))
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

    def component(self, role: str) -> Component | None:
        """The layer's component of that role, or None."""
        return self._components.get(role)

    def tail_of(self, role: str) -> str:
        """The role whose rows are compressed into ``role``."""
        return TAIL_OF[role]

    def global_scale(self, role: str) -> float:
        """The component's global scale, 1 where it has none."""
        return getattr(self.component(role), "global_scale", 1.0)

    def pools_of(self, *roles: str) -> tuple[str, ...]:
        """Local names of the pools of some roles; roles that the layer lacks have none."""
        return tuple(
            name for role in roles for region in self.regions.get(role, ()) for name, _ in region.buffers.values()
        )
