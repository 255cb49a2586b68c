"""What functional verbs may overwrite in a step, and how it is put back if the step fails.

Paged rows are only ever written beyond what can be read. Rings are different: a new row takes an old one's place. A
backend that works in place needs the old rows' bytes; one that returns new arrays still has the old ones, unless they
were donated to a compiled function.
"""

from typing import Any

from kvcore.content import owned
from kvcore.ops import Ops, StepIndex
from kvcore.pools import Pools


class Undo:
    """The state of all rings before functional verbs touched them.

    Attributes:
        complete: ``apply`` put everything back.
    """

    def __init__(self, ops: Ops, pools: Pools, index: StepIndex) -> None:
        self.complete = False
        self._ops = ops
        self._index = index
        # The arrays themselves: pools whose arrays were donated hold the new ones.
        self._before = Pools(pools)
        self._saved: dict[tuple[int, str], Any] = {}
        if ops.in_place:
            self._saved = {
                (layer, role): ops.read_ring(pools, layer, role, index)
                for layer, role, component in owned(ops.plan.spec)
                if component.span is not None
            }

    def apply(self, pools: Pools) -> Pools:
        """The pools with the rings as they were; may be called again after an interruption."""
        if not self._ops.in_place:
            self.complete = not any(_is_gone(array) for array in self._before.values())
            return self._before if self.complete else pools
        for (layer, role), saved in self._saved.items():
            pools = self._ops.restore_ring(pools, layer, role, self._index, saved)
        self.complete = True
        return pools


def _is_gone(array: Any) -> bool:
    """True for an array whose memory was donated."""
    is_deleted = getattr(array, "is_deleted", None)
    return is_deleted is not None and is_deleted()
