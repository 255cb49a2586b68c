"""A request's rows from pages in the host's memory into pools that lie there too, without a program for each pool.

JAX's arrays do not change. Pools are given away for others of the same memory, as by any verb that writes, in one
program that computes nothing; what comes of it nobody has seen yet, and rows are put there before anybody does.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from kvcore.arrays import host_view
from kvcore.ops import Strip, host
from kvcore.plan import CachePlan
from kvcore.pools import Pools

renewed = jax.jit(jax.lax.optimization_barrier, donate_argnums=0)
"""The same arrays, as others: XLA has theirs for the results where nobody else holds it, and copies it where somebody
does. It runs behind all that reads them."""


def store_strips(plan: CachePlan, pools: Any, pages: Any, strips: Sequence[Strip], units: Any) -> bool:
    """``Ops.move_strips`` with ``store``; False, and nothing is done, where pools or pages lie elsewhere."""
    names = [
        name
        for strip in strips
        for region in plan.region(strip.layer, strip.role)
        for name, _ in region.buffers.values()
    ]
    views = _opened(pools, names) if isinstance(pages, np.ndarray) else None
    return views is not None and host.move(plan, views, pages, strips, units, store=True)


def reset(pools: Any, slots: Any, fresh: Mapping[str, bytes | None]) -> bool:
    """``Ops.reset_slots``, of pools with what a fresh slot of theirs holds; False as above."""
    at = host_view(slots)
    views = None if at is None else _opened(pools, list(fresh))
    if at is None or views is None:
        return False
    units = at[at >= 0]
    for name, unit in fresh.items():
        views[name][units] = 0 if unit is None else np.frombuffer(unit, np.uint8)
    return True


def _opened(pools: Any, names: Sequence[str]) -> Pools | None:
    """Bytes of a cache's pools [units, bytes], to be written to; None where they lie elsewhere, or are traced."""
    if type(pools) is not Pools:
        return None
    if not names:  # a plan without slots, which needs no program
        return Pools()
    given = {name: pools[name] for name in names}
    if any(isinstance(array, Tracer) for array in given.values()):
        return None
    places = {frozenset(array.devices()) for array in given.values()}
    if any(len(place) > 1 or next(iter(place)).platform != "cpu" for place in places):
        return None
    # In one line, for nothing to come between.
    dict.update(pools, renewed(given))
    # All before them is done, and nobody but the pools has them.
    jax.block_until_ready([pools[name] for name in given])
    return Pools({name: np.asarray(_Memory(pools[name])) for name in given})


class _Memory:
    """Bytes of an array [units, bytes], which it keeps alive."""

    def __init__(self, array: Any) -> None:
        self._array = array
        units, *rest = array.shape
        self.__array_interface__ = {
            "data": (array.unsafe_buffer_pointer(), False),
            "shape": (units, prod(rest) * array.dtype.itemsize if units else 0),
            "typestr": "|u1",
            "version": 3,
        }
