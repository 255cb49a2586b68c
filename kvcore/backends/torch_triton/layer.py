"""A layer as torch's verbs see it: its part of the plan, and the verbs that it belongs to."""

from functools import cached_property
from typing import Any
from weakref import ref

from kvcore.backends.torch_triton import cpu_coded
from kvcore.ops import Ops
from kvcore.plan import CachePlan, LayerPlan


class Layer(LayerPlan):
    """One layer by role."""

    def __init__(self, plan: CachePlan, number: int, ops: Ops) -> None:
        planned = plan.layers[number]
        super().__init__(number, {role: planned.component(role) for role in planned.regions}, planned.regions)
        # Verbs hold pools and spare memory, which must go when they do: no circle.
        self._ops = ref(ops)

    @cached_property
    def is_decoded_in_c(self) -> bool:
        """Whether C can decode its keys and values on the CPU."""
        return cpu_coded.possible(self.regions["kv"])

    @property
    def ops(self) -> Any:
        """The verbs bound to the plan: kernels where there are any, and what all layers share of a step."""
        return self._ops()
