"""The named buffers of one plan: a mapping ``"L.role.field"`` -> byte array, with nothing else in it.

Arrays belong to the backend (NumPy, torch, JAX); this module never looks inside. Every array is ``uint8`` of shape
[units, bytes of a unit].
"""

import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NoReturn

from kvcore.errors import ShapeError
from kvcore.plan import CachePlan, Region
from kvcore.spec.layout import BlockLayout


class Pools(dict[str, Any]):
    """A mapping from pool name to array, without verbs that change it.

    Backends that work in place change the arrays; one that gives arrays away puts what it got for them in their place,
    with the verbs of ``dict`` itself.
    """

    __slots__ = ()

    def replace(self, arrays: Mapping[str, Any]) -> "Pools":
        """A copy with some arrays exchanged."""
        return Pools({**self, **arrays})

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays together."""
        return sum(array.nbytes for array in self.values())

    def __repr__(self) -> str:
        return f"Pools({len(self)} arrays, {self.nbytes} bytes)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Pools, (dict(self),)

    def _fixed(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("pools are fixed: cache.pools = pools.replace({name: array}) exchanges an array")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _fixed  # pyright: ignore


def allocate(plan: CachePlan, make: Callable[[int, int, bytes | None, Region, str], Any]) -> Pools:
    """Build the pools of a plan.

    Args:
        plan: what to allocate.
        make: called with (units, unit bytes, fresh bytes of a unit or None for zeros, region, buffer) for every
            buffer; returns the array.
    """
    arrays: dict[str, Any] = {}
    for region in plan.stored:
        for buffer, (name, size) in region.buffers.items():
            arrays[name] = make(plan.units(region), size, fresh_unit(region, buffer), region, buffer)
    return Pools(arrays)


def fresh_unit(region: Region, buffer: str) -> bytes | None:
    """What one unit of a buffer holds before anything is written; None means zeros.

    Only a tail differs from zeros: its scores start at -inf, so that a row that was never written weighs nothing.
    """
    fills = tuple((field.name, field.fill) for field in region.format.fields if field.fill)
    return _filled(region.unit, buffer, fills) if fills else None


@lru_cache(maxsize=64)
def _filled(laid_out: BlockLayout, buffer: str, fills: tuple[tuple[str, float], ...]) -> bytes | None:
    """The same of a unit, whichever layer has it."""
    filling = dict(fills)
    places = [place for place in laid_out.places if place.buffer == buffer and place.field in filling]
    if not places:
        return None
    unit = bytearray(dict(laid_out.buffers)[buffer])
    for place in places:
        row = struct.pack("<f", filling[place.field]) * (place.nbytes // 4)
        for r in range(laid_out.rows):
            start = place.base + r * place.stride
            unit[start : start + place.nbytes] = row
    return bytes(unit)


def check_same_tree(pools: Mapping[str, Any], like: Pools) -> Pools:
    """Accept pools that came back from an op: same names, framework, shapes and dtypes; ShapeError otherwise."""
    if pools is like:
        return like
    _check_mapping(pools)
    if set(pools) != set(like):
        odd = sorted(set(pools) ^ set(like))
        raise ShapeError(got=odd, where="pools", allowed="exactly the names of cache.pools")
    for name, array in pools.items():
        want = like[name]
        got = getattr(array, "shape", None), str(getattr(array, "dtype", None))
        if got != (want.shape, str(want.dtype)):
            raise ShapeError(got=got, where=f"pools[{name!r}]", allowed=f"shape {want.shape}, dtype {want.dtype}")
        if _framework(array) != _framework(want):
            raise ShapeError(
                got=f"an array of {_framework(array)}",
                where=f"pools[{name!r}]",
                allowed=f"an array of {_framework(want)}",
                hint="cache.asarray makes one of the backend's arrays.",
            )
    return pools if isinstance(pools, Pools) else Pools(pools)


def _framework(array: object) -> str:
    """Where an array's type comes from; the types of jaxlib are those of jax."""
    return type(array).__module__.partition(".")[0].removesuffix("lib")


def _check_mapping(pools: object) -> None:
    if not isinstance(pools, Mapping):
        raise ShapeError(got=type(pools).__name__, where="pools", allowed="a mapping like cache.pools")
