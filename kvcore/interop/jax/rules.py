"""Where arrays lie on a JAX mesh: logical axes to axes of the mesh by one table, with overrides for a step's mode.

Pools have one partition, whatever the mode: between a prefill and the next decode step nothing of a cache may move.
What modes change is where a step's activations lie: queries, keys, values, new rows and outs.
"""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvcore.errors import ShapeError, SpecError
from kvcore.ops import StepIndex

Rule = str | tuple[str, ...] | None
Table = Mapping[str, Rule]

RULES: Table = MappingProxyType({"requests": "data", "blocks": "context", "heads": "model"})
"""Logical axis of pools -> axes of the mesh, None for none. An axis that the mesh lacks counts as one shard."""

ACTIVATIONS = ("query_length", "query_heads")
"""Logical axes of activations alone: tokens of one request shard, cut by nothing if the table does not say; heads of
queries and outs, cut like ``heads`` if it does not."""

MODES = ("train", "prefill", "decode", "insert")
"""What a step does; ``insert`` brings in what was computed elsewhere. Each may override the rules of activations."""


class Axes(tuple[str | tuple[str, ...] | None, ...]):
    """Logical axes of an array, an entry a dimension, which a step's mode turns into a partition; a leaf of pytrees."""

    __slots__ = ()

    def __new__(cls, *axes: str | tuple[str, ...] | None) -> "Axes":
        return super().__new__(cls, axes)


class Rules:
    """A table of rules on a mesh.

    Args:
        mesh: devices; its axes may be Auto or Explicit.
        rules: logical axis -> axes of the mesh, of pools and of activations.
        modes: mode -> rules of activations that hold in it instead.

    Raises:
        SpecError: an unknown logical axis or mode, an override of a pool's axis, or an axis of the mesh that two
            logical axes of pools name.
    """

    def __init__(self, mesh: Mesh, rules: Table = RULES, modes: Mapping[str, Table] | None = None) -> None:
        self.mesh = mesh
        _known("rules", rules, (*RULES, *ACTIVATIONS))
        used = [axis for name in RULES for axis in _present(mesh, rules.get(name))]
        if len(set(used)) < len(used):
            raise SpecError(got=str(dict(rules)), where="rules", allowed="every axis of the mesh once")
        given = {"query_heads": rules.get("heads"), **rules}
        self._tables: dict[str | None, dict[str, tuple[str, ...]]] = {}
        self._tables[None] = {name: _present(mesh, given.get(name)) for name in (*RULES, *ACTIVATIONS)}
        _known("modes", modes or {}, MODES)
        for mode in MODES:
            changed = (modes or {}).get(mode, {})
            for name in changed:
                if name in RULES:
                    raise SpecError(
                        got=name,
                        where=f"modes[{mode!r}]",
                        allowed=", ".join(ACTIVATIONS),
                        hint="Pools lie alike in every mode: anything else would move all their bytes between steps.",
                    )
            _known(f"modes[{mode!r}]", changed, ACTIVATIONS)
            self._tables[mode] = {
                **self._tables[None],
                **{name: _present(mesh, rule) for name, rule in changed.items()},
            }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and (self.mesh, self._tables) == (other.mesh, other._tables)

    def __hash__(self) -> int:
        return hash((self.mesh, tuple(self._tables[None].items())))

    def axes(self, name: str, mode: str | None = None) -> tuple[str, ...]:
        """The axes of the mesh that a logical axis is cut over; None is no mode's: the table alone.

        Raises:
            SpecError: an unknown logical axis or mode.
        """
        if mode is not None:
            _known("mode", (mode,), MODES)
        _known("axis", (name,), (*RULES, *ACTIVATIONS))
        return self._tables[mode][name]

    def shards(self, name: str, mode: str | None = None) -> int:
        """The number of shards of a logical axis."""
        return prod(self.mesh.shape[axis] for axis in self.axes(name, mode))

    def spec(self, *axes: str | tuple[str, ...] | None, mode: str | None = None) -> PartitionSpec:
        """The partition of an array whose dimensions are these logical axes, several of them together where a tuple.

        Raises:
            SpecError: an unknown logical axis or mode, or two dimensions over one axis of the mesh.
        """
        return self._partition(axes, mode, ())

    def seen(self, *axes: str | tuple[str, ...] | None, mode: str | None = None) -> PartitionSpec:
        """The same as verbs see the array: shards of one block know all of its tokens."""
        return self._partition(axes, mode, self.axes("blocks"))

    def constrain(self, array: Any, *axes: str | tuple[str, ...] | None, mode: str | None = None) -> Any:
        """An array, or a pytree of them, brought to where ``spec`` says; for use inside the caller's ``jit``."""
        return self.bring(array, self.spec(*axes, mode=mode))

    def bring(self, array: Any, partition: PartitionSpec) -> Any:
        """The same for a partition."""
        sharding = NamedSharding(self.mesh, partition)
        if AxisType.Explicit in self.mesh.axis_types:
            return jax.tree.map(lambda one: jax.sharding.reshard(one, sharding), array)
        return jax.tree.map(lambda one: lax.with_sharding_constraint(one, sharding), array)

    def put(self, array: Any, *axes: str | tuple[str, ...] | None, mode: str | None = None) -> jax.Array:
        """A whole host array on the mesh; every process gives the whole of it.

        Raises:
            ShapeError: a dimension that its shards do not divide.
        """
        for dimension, (size, names) in enumerate(zip(array.shape, axes, strict=False)):
            count = prod(self.shards(name, mode) for name in _tuple(names))
            if size % count:
                raise ShapeError(got=size, where=f"put: dimension {dimension}", allowed=f"a multiple of {count}")
        sharding = NamedSharding(self.mesh, self.spec(*axes, mode=mode))
        return jax.make_array_from_callback(array.shape, sharding, lambda some: array[some])

    def _partition(
        self, axes: tuple[str | tuple[str, ...] | None, ...], mode: str | None, but: tuple[str, ...]
    ) -> PartitionSpec:
        found = []
        for names in axes:
            over = [axis for name in _tuple(names) for axis in self.axes(name, mode)]
            kept = "query_length" in _tuple(names)
            found.append(tuple(axis for axis in over if not (kept and axis in but)))
        used = [axis for over in found for axis in over]
        if len(set(used)) < len(used):
            hint = "Override a rule for this mode, or cut one dimension only."
            raise SpecError(got=str(tuple(axes)), where="axes", allowed="every axis of the mesh once", hint=hint)
        return PartitionSpec(*(over or None for over in found))


def mode_of(index: StepIndex, max_draft_tokens: int = 0) -> str:
    """``decode`` where a step has no more tokens than one, and its drafts, for each request; else ``prefill``.

    Shapes decide, padding included, so that the answer is known when a step is traced.
    """
    return "decode" if len(index.positions) <= len(index.slots) * (1 + max_draft_tokens) else "prefill"


def _known(where: str, given: Any, allowed: tuple[str, ...]) -> None:
    for one in given:
        if one not in allowed:
            raise SpecError(got=one, where=where, allowed=", ".join(allowed))


def _tuple(rule: Rule) -> tuple[str, ...]:
    return (rule,) if isinstance(rule, str) else rule or ()


def _present(mesh: Mesh, rule: Rule) -> tuple[str, ...]:
    return tuple(axis for axis in _tuple(rule) if axis in mesh.shape)
