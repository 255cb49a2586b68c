"""The table of verbs, for functions that are compiled: which arguments are arrays, and which a trace is made for."""

from typing import Any

import jax

from kvcore.backends.jax_pallas import attention, kv, programs, tail
from kvcore.ops import RawRows, StepIndex, facade
from kvcore.ops.records import Compression
from kvcore.spec import TAIL_OF

STATIC = frozenset({"role", "eps", "closed", "count", "columns", "newest"})
"""Options that a trace is made for; all others are arrays."""


def reader(function: Any, *roles: str, name: str = "", **fixed: Any) -> Any:
    """A verb that reads pools of some roles, or of the role that it is given."""
    return _of_layer(function, roles, name, fixed, writes=False)


def writer(function: Any, *roles: str, name: str = "", **fixed: Any) -> Any:
    """A verb that returns pools with those of some roles written, or of the role that it is given."""
    return _of_layer(function, roles, name, fixed, writes=True)


def indexed(function: Any) -> Any:
    """A verb of a layer's index alone."""
    names, size = facade.parameters_of(function).names, facade.SIZES[function.__name__]

    def run(self: Any, layer: int, index: StepIndex, *given: Any, **options: Any) -> Any:
        options.update(zip(names, given, strict=False))
        count = _bucketed(self, size, layer, index, options)
        kind = self.layers[layer].only(size.role or options.get("role", "entries"))
        return _cut(programs.indexed(function)(kind, index, tuple(sorted(options.items()))), size, count)

    return facade.as_verb(run, function)


def turning(compression: Compression) -> Compression:
    """The same with fp32 inverse frequencies for a rope."""
    weights = compression.norm_weight, compression.index_norm_weight
    return Compression(weights[0], float(compression.eps), tail.frequencies_of(compression.rope), weights[1])


def _of_layer(function: Any, roles: tuple[str, ...], name: str, fixed: dict[str, Any], *, writes: bool) -> Any:
    names, size = facade.parameters_of(function).names, facade.SIZES.get(function.__name__)

    def call(self: Any, pools: Any, layer: int, index: StepIndex, given: Any, options: dict[str, Any]) -> Any:
        arrays, static = _sorted_out(self, function, {**dict(zip(names, given, strict=False)), **options})
        count = None if size is None else _bucketed(self, size, layer, index, static)
        touched = roles or _roles(function, static.get("role", "entries"))
        move = self._write if writes else self._read
        found = move(function, pools, layer, touched, {"index": index, **arrays}, **static)
        return found if size is None or function is kv.attend_kv else _cut(found, size, count)

    def of_a_role(self: Any, pools: Any, layer: int, role: str, index: StepIndex, *given: Any, **options: Any) -> Any:
        return call(self, pools, layer, index, given, {**options, "role": role})

    def of_pools(self: Any, pools: Any, layer: int, index: StepIndex, *given: Any, **options: Any) -> Any:
        return call(self, pools, layer, index, given, {**options, **fixed})

    return facade.as_verb(of_a_role if function.__name__ in facade.OF_A_ROLE else of_pools, function, name)


def _sorted_out(ops: Any, function: Any, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays, options of a trace) of a call; what is None is left to the function."""
    arrays: dict[str, Any] = {}
    static: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        if name in STATIC:
            static[name] = float(value) if name == "eps" else value
        elif name == "scale" and function is attention.attend and _is_constant(ops, value):
            static[name] = float(value)
        elif name == "rope":
            arrays[name] = tail.frequencies_of(value)
        else:
            arrays[name] = RawRows(*value) if name == "raw" else value
    return arrays, static


def _is_constant(ops: Any, scale: Any) -> bool:
    """Whether a scale is a constant of a launch."""
    return ops.kernels == "triton" and isinstance(scale, int | float)


def _roles(function: Any, role: str) -> tuple[str, ...]:
    """The roles whose pools a function of a role reads."""
    return (role, TAIL_OF[role]) if function is tail.compress else (role,)


def _bucketed(ops: Any, size: facade.Size, layer: int, index: StepIndex, options: dict[str, Any]) -> int:
    """The size that is asked for; the options get one that changes rarely."""
    size.fill(ops.plan, layer, index, options)
    count = options[size.name]
    options[size.name] = ops._bucket(count, index)
    return count


def _cut(found: Any, size: facade.Size, count: int | None) -> Any:
    """Outputs of the size that was asked for."""
    if size.name == "columns":
        return jax.tree.map(lambda array: array[:, :count] if array.ndim > 1 else array, found)
    return jax.tree.map(lambda array: array[:count], found)
