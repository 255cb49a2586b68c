"""What a verb returned, held while the verb is called again on other pools: it is of its own pools, and stays so."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.conformance.case import Bench
from kvcore.conformance.outputs import Output
from kvcore.ops import Ops
from kvcore.pools import Pools

Drive = Callable[[Bench], list[Output]]


def held(drive: Drive, *verbs: str) -> Drive:
    """The same drive, in which ``verbs`` are called on other pools right before and right after each call.

    The index, the arguments and so the shapes are the same each time: a step's work that is kept from other pools, and
    memory that is handed out a second time, show in what the drive looks at.
    """

    def driven(bench: Bench) -> list[Output]:
        return drive(Bench(bench.case, cast("Ops", _Between(bench.ops, verbs))))

    return driven


class _Between:
    """Verbs of a backend, some of which are called three times."""

    def __init__(self, ops: Ops, verbs: tuple[str, ...]) -> None:
        self._ops = ops
        self._verbs = verbs

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._ops, name)
        if name not in self._verbs:
            return verb

        def between(pools: Pools, *given: Any, **options: Any) -> Any:
            others = self._others(pools)
            earlier = verb(others, *given, **options)
            found = verb(pools, *given, **options)
            later = verb(others, *given, **options)
            del earlier, later
            return found

        return between

    def _others(self, pools: Pools) -> Pools:
        """Pools in which every unit holds what its neighbour holds in those."""
        return Pools(
            {name: self._ops.asarray(np.roll(to_numpy(array), 1, axis=0).copy()) for name, array in pools.items()}
        )
