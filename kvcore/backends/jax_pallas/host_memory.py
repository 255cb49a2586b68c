"""A request's rows from pages in the host's memory into pools that lie there too, without a program for each pool.

JAX's arrays do not change. Pools are given away for others of the same memory, as by any verb that writes, in one
program that computes nothing; what comes of it nobody has seen yet, and rows are put there before anybody does.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any
from weakref import ref

import jax
import numpy as np

from kvcore.arrays import host_view
from kvcore.ops import Strip, host
from kvcore.plan import CachePlan
from kvcore.pools import Pools

renewed = jax.jit(jax.lax.optimization_barrier, donate_argnums=0)
"""The same arrays, as others: XLA has theirs for the results where nobody else holds it, and copies it where somebody
does. It runs behind all that reads them."""


class Memory:
    """The bytes of a cache's pools, as arrays of NumPy [units, bytes], where they lie in the host's memory.

    XLA gives an array that it was given away for another the same address, and there are hundreds of pools: a view is
    made once for an address. It holds nothing alive, and is looked at only while the pools of that address do. An array
    whose view is known was waited for then, and asked where it lies: it does not change.
    """

    def __init__(self, kind: type) -> None:
        """``kind``: the class of arrays that are not traced."""
        self._kind = kind
        self._host: set[Any] = set()
        self._known: dict[str, tuple[Any, int, tuple[int, ...], np.ndarray[Any, Any]]] = {}
        self._ours: dict[str, Any] | None = None

    @contextmanager
    def alone(self) -> Generator[None]:
        """Nobody sees pools, or has programs read them, between two writes in it: they are renewed for the first."""
        self._ours = {}
        try:
            yield
        finally:
            self._ours = None

    def read(self, pools: Any) -> Pools | None:
        """Views of pools once all that was to be written there is; None where they lie elsewhere, or are traced."""
        known = self._as_before(pools)
        if known is not None:
            return known
        return self._views(pools) if self._lie_here(pools.values()) else None

    def _as_before(self, pools: Any) -> Pools | None:
        """Views of arrays all of which are known."""
        found: dict[str, np.ndarray[Any, Any]] = {}
        known = self._known
        for name, array in pools.items():
            one = known.get(name)
            if one is None or one[0]() is not array or array.is_deleted():
                return None
            found[name] = one[3]
        return Pools(found)

    def opened(self, pools: Any, names: Sequence[str]) -> Pools | None:
        """Views of a cache's own pools, to be written to; None likewise."""
        if type(pools) is not Pools:
            return None
        if not names:  # a plan without slots, which needs no program
            return Pools()
        given = {name: pools[name] for name in names}
        if not self._lie_here(given.values()):
            return None
        ours = self._ours or {}
        seen = {name: array for name, array in given.items() if ours.get(name) is not array}
        if seen:
            # In one line, for nothing to come between.
            dict.update(pools, renewed(seen))
        # All before them is done, and nobody but the pools has them.
        held = {name: pools[name] for name in names}
        if self._ours is not None:
            self._ours.update(held)
        return self._as_before(held) or self._views(held)

    def _lie_here(self, arrays: Iterable[Any]) -> bool:
        """Whether none is traced, and all lie in the host's memory, on one device."""
        for array in arrays:
            if type(array) is not self._kind:
                return False
            places = array.sharding.device_set
            if places != self._host:
                device, *others = places
                if others or device.platform != "cpu":
                    return False
                self._host = places
        return True

    def _views(self, pools: Any) -> Pools:
        jax.block_until_ready([*pools.values()])
        return Pools({name: self._view(name, array) for name, array in pools.items()})

    def _view(self, name: str, array: Any) -> np.ndarray[Any, Any]:
        address, shape = array.unsafe_buffer_pointer(), array.shape
        known = self._known.get(name)
        if known is not None and known[1] == address and known[2] == shape:
            view = known[3]
        else:
            view = np.asarray(_Bytes(address, shape, array.dtype.itemsize))
        self._known[name] = ref(array), address, shape, view
        return view


class _Bytes:
    """Bytes at an address, [units, bytes]."""

    def __init__(self, address: int, shape: tuple[int, ...], itemsize: int) -> None:
        units, *rest = shape
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (units, prod(rest) * itemsize if units else 0),
            "typestr": "|u1",
            "version": 3,
        }


def store_strips(memory: Memory, plan: CachePlan, pools: Any, pages: Any, strips: Sequence[Strip], units: Any) -> bool:
    """``Ops.move_strips`` with ``store``; False, and nothing is done, where pools or pages lie elsewhere."""
    views = memory.opened(pools, names_of(plan, strips)) if isinstance(pages, np.ndarray) else None
    return views is not None and host.move(plan, views, pages, strips, units, store=True)


def names_of(plan: CachePlan, strips: Sequence[Strip]) -> list[str]:
    """The pools of strips."""
    return [
        name
        for strip in strips
        for region in plan.region(strip.layer, strip.role)
        for name, _ in region.buffers.values()
    ]


def reset(memory: Memory, pools: Any, slots: Any, fresh: Mapping[str, bytes | None]) -> bool:
    """``Ops.reset_slots``, of pools with what a fresh slot of theirs holds; False as above."""
    at = host_view(slots)
    views = None if at is None else memory.opened(pools, list(fresh))
    if at is None or views is None:
        return False
    units = at[at >= 0].tolist()
    for name, fresh_unit in fresh.items():
        view, content = views[name], 0 if fresh_unit is None else np.frombuffer(fresh_unit, np.uint8)
        for unit in units:
            view[unit] = content
    return True
