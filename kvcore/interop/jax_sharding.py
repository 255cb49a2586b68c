"""A cache over a JAX mesh: pools cut by a table of rules, and steps that run on all shards at once.

Requests go over data axes: every shard has its own slots and blocks, and its host side plans its own requests. Heads of
classic layers go over a model axis where they divide, else every shard of it holds all of them, as it does of latent
rows, which are one head. Verbs run under ``shard_map``, so that nothing moves between shards and the mesh's axes may be
Auto or Explicit. History over a context axis is ``kvcore.shards``' matter.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvcore.backends.jax_pallas import JaxOps
from kvcore.errors import SpecError
from kvcore.ops import StepIndex
from kvcore.plan import CachePlan, plan_cache
from kvcore.pools import Pools
from kvcore.spec import KV, CacheSpec

Rule = str | tuple[str, ...] | None

RULES: Mapping[str, Rule] = {"requests": "data", "heads": "model"}
"""Logical axis -> axes of the mesh, None for none. An axis that the mesh lacks counts as one shard."""


class Sharded:
    """A spec's cache spread over a mesh.

    Args:
        spec: of the whole cache.
        mesh: devices; its axes may be Auto or Explicit.
        rules: logical axis -> axes of the mesh.
        kernels: as of ``JaxOps``.
        sizes: of the whole cache, as ``plan_cache`` takes them.

    Raises:
        SpecError: an unknown logical axis, or a size that the shards of ``requests`` do not divide.
    """

    def __init__(
        self, spec: CacheSpec, mesh: Mesh, rules: Mapping[str, Rule] = RULES, *, kernels: str = "portable", **sizes: Any
    ) -> None:
        for axis in rules:
            if axis not in RULES:
                raise SpecError(got=axis, where="rules", allowed=", ".join(RULES))
        self.mesh = mesh
        self._axes = {name: _present(mesh, rules.get(name)) for name in RULES}
        self.shards = {name: prod(mesh.shape[axis] for axis in axes) for name, axes in self._axes.items()}
        for name in ("max_requests", "max_tokens", "blocks"):
            if sizes.get(name) is not None and sizes[name] % self.shards["requests"]:
                raise SpecError(
                    got=sizes[name], where=name, allowed=f"a multiple of the {self.shards['requests']} request shards"
                )
            if sizes.get(name) is not None:
                sizes[name] //= self.shards["requests"]
        self.plan: CachePlan = plan_cache(_with_heads(spec, self.shards["heads"]), **sizes)
        self._cut = {
            (number, role)
            for number, layer in enumerate(spec.all_layers)
            for role, component in layer.components()
            if isinstance(component, KV) and _divides(component, self.shards["heads"])
        }
        self.ops = JaxOps(self.plan, jax.default_backend(), None, kernels)

    @cached_property
    def specs(self) -> Pools:
        """The partition of every pool: units over requests, the bytes of a unit over heads where those are cut."""
        found = {}
        for region in self.plan.regions:
            cut = (region.layer, region.role) in self._cut
            for name, _ in region.buffers.values():
                found[name] = self.spec("requests", "heads" if cut else None)
        return Pools(found)

    def spec(self, *axes: str | None) -> PartitionSpec:
        """The partition of an array whose axes are these logical ones."""
        return PartitionSpec(*(self._axes[axis] or None if axis else None for axis in axes))

    def allocate(self) -> Pools:
        """Fresh pools, each shard made where it belongs."""
        make = jax.shard_map(self.ops.allocate, mesh=self.mesh, in_specs=(), out_specs=self.specs, check_vma=False)
        return jax.jit(make)()

    def put(self, array: np.ndarray, *axes: str | None) -> jax.Array:
        """A whole host array on the mesh, cut along logical axes; every process gives the whole of it."""
        sharding = NamedSharding(self.mesh, self.spec(*axes))
        return jax.make_array_from_callback(array.shape, sharding, lambda some: array[some])

    def index(self, shards: Sequence[StepIndex]) -> StepIndex:
        """The request shards' host indices, of one shape each, as one index on the mesh.

        Raises:
            SpecError: another number of indices than shards, or shapes that differ; pad the steps.
        """
        shapes = [tuple(None if array is None else np.shape(array) for array in index) for index in shards]
        if len(shards) != self.shards["requests"] or len(set(shapes)) > 1:
            allowed = f"{self.shards['requests']} indices of one shape"
            raise SpecError(got=shapes, where="index", allowed=allowed, hint="Give step pad_tokens and pad_requests.")
        found = []
        for arrays in zip(*shards, strict=True):
            missing = arrays[0] is None
            found.append(None if missing else self.put(np.concatenate([np.asarray(one) for one in arrays]), "requests"))
        return StepIndex(*found)

    def step(self, fn: Callable[..., Any], inputs: Any, outs: Any) -> Callable[..., Any]:
        """``fn(ops, pools, index, *inputs) -> (pools, outs)`` of one shard, compiled for all, the pools donated.

        Args:
            fn: what a shard does; it sees its own pools, tokens and heads.
            inputs: partitions of the inputs, a tuple of ``spec(...)``.
            outs: partitions of the outs, a pytree of them.
        """
        run = jax.shard_map(
            partial(fn, self.ops),
            mesh=self.mesh,
            in_specs=(self.specs, self.spec("requests"), *inputs),
            out_specs=(self.specs, outs),
            check_vma=False,
        )
        return jax.jit(run, donate_argnums=0)


def _present(mesh: Mesh, rule: Rule) -> tuple[str, ...]:
    axes = (rule,) if isinstance(rule, str) else rule or ()
    return tuple(axis for axis in axes if axis in mesh.shape)


def _divides(component: KV, shards: int) -> bool:
    return not any(part.heads % shards for part in component.parts)


def _with_heads(spec: CacheSpec, shards: int) -> CacheSpec:
    """The spec of one shard: its share of the heads, or all where they do not divide."""

    def local(layer: Any) -> Any:
        if layer.kv is None or not _divides(layer.kv, shards):
            return layer
        keys, values = (part.heads // shards for part in layer.kv.parts)
        return msgspec.structs.replace(layer, kv=msgspec.structs.replace(layer.kv, key_heads=keys, value_heads=values))

    layers, drafts = (tuple(local(layer) for layer in found) for found in (spec.layers, spec.draft_layers))
    return msgspec.structs.replace(spec, layers=layers, draft_layers=drafts)
