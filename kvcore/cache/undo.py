"""What functional verbs may overwrite in a step, and how it is put back if the step fails.

Paged rows are only ever written beyond what can be read. Rings are different: a new row takes an old one's place. Their
old rows are read before: a backend that works in place writes into the same memory, and one that returns new arrays
gives the old ones away where they are donated.
"""

from collections.abc import Callable
from typing import Any

from kvcore.ops import Ops, StepIndex
from kvcore.pools import Pools
from kvcore.portable.rows import owned


class Undo:
    """The state of all rings before functional verbs touched them."""

    def __init__(self, ops: Ops, pools: Pools, ring_index: Callable[[int], StepIndex | None]) -> None:
        """``ring_index``: rows of a ring -> the tokens of the step whose rows take the place of others there."""
        self._ops = ops
        # The arrays themselves: pools whose arrays were donated hold the new ones.
        self._before = Pools(pools)
        self._saved: dict[tuple[int, str], tuple[StepIndex, Any]] = {}
        for layer, role, component in owned(ops.plan.spec):
            index = None if component.span is None else ring_index(ops.plan.region(layer, role)[0].rows)
            if index is not None:
                self._saved[layer, role] = index, ops.read_ring(pools, layer, role, index)

    def apply(self, pools: Pools) -> Pools:
        """The pools with the rings as they were; may be called again after an interruption."""
        if not self._ops.in_place and not any(_is_gone(array) for array in self._before.values()):
            return self._before
        for (layer, role), (index, saved) in self._saved.items():
            pools = self._ops.restore_ring(pools, layer, role, index, saved)
        return pools


def _is_gone(array: Any) -> bool:
    """True for an array whose memory was donated."""
    is_deleted = getattr(array, "is_deleted", None)
    return is_deleted is not None and is_deleted()
