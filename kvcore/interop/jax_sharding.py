"""A cache over a JAX mesh: pools cut by a table of rules, and steps that run on all shards at once.

Requests go over data axes: every shard has its own slots and blocks, and its host side plans its own requests. Blocks
go over context axes: each shard holds one page of every block, and the verbs exchange what is missing as
``kvcore.shards`` says. Heads of classic layers go over a model axis where they divide, else every shard of it holds all
of them, as it does of latent rows, which are one head. Verbs run under ``shard_map``, so that the mesh's axes may be
Auto or Explicit, and only context shards speak to one another.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvcore import digest
from kvcore.backends.jax_pallas import JaxBackend, JaxOps
from kvcore.content import owned
from kvcore.errors import SpecError
from kvcore.interop.jax_shards import JaxExchange
from kvcore.ops import StepIndex
from kvcore.plan import CachePlan, plan_cache
from kvcore.pools import Pools
from kvcore.shards import ShardedOps, ShardPlan
from kvcore.spec import KV, CacheSpec, Component

Rule = str | tuple[str, ...] | None

RULES: Mapping[str, Rule] = {"requests": "data", "blocks": "context", "heads": "model"}
"""Logical axis -> axes of the mesh, None for none. An axis that the mesh lacks counts as one shard."""


class Sharded:
    """A spec's cache spread over a mesh.

    Args:
        spec: of the whole cache.
        mesh: devices; its axes may be Auto or Explicit.
        rules: logical axis -> axes of the mesh.
        kernels: as of ``JaxOps``; None for what the devices are best served with.
        sizes: of the whole cache, as ``plan_cache`` takes them.

    Attributes:
        shards: logical axis -> number of shards.
        plan: of one shard.
        ops: the verbs of one shard, for use in ``step``.

    Raises:
        SpecError: an unknown logical axis, an axis of the mesh that two of them name, a size that the shards of
            ``requests`` do not divide, or a layer whose history cannot be cut into blocks' pages.
    """

    def __init__(
        self,
        spec: CacheSpec,
        mesh: Mesh,
        rules: Mapping[str, Rule] = RULES,
        *,
        kernels: str | None = None,
        **sizes: Any,
    ) -> None:
        for axis in rules:
            if axis not in RULES:
                raise SpecError(got=axis, where="rules", allowed=", ".join(RULES))
        self.mesh = mesh
        self._axes = {name: _present(mesh, rules.get(name)) for name in RULES}
        used = [axis for axes in self._axes.values() for axis in axes]
        if len(set(used)) < len(used):
            raise SpecError(got=str(dict(rules)), where="rules", allowed="every axis of the mesh once")
        self.shards = {name: prod(mesh.shape[axis] for axis in axes) for name, axes in self._axes.items()}
        for name in ("max_requests", "max_tokens", "blocks"):
            if sizes.get(name) is not None and sizes[name] % self.shards["requests"]:
                raise SpecError(
                    got=sizes[name], where=name, allowed=f"a multiple of the {self.shards['requests']} request shards"
                )
            if sizes.get(name) is not None:
                sizes[name] //= self.shards["requests"]
        context = ShardPlan(spec=spec, context=self.shards["blocks"]).context
        self.plan: CachePlan = plan_cache(_with_heads(spec, self.shards["heads"]), context=context, **sizes)
        self._cut = {
            (number, role)
            for number, layer in enumerate(spec.all_layers)
            for role, component in layer.components()
            if isinstance(component, KV) and _divides(component, self.shards["heads"])
        }
        local: Any = _Local(kernels)
        exchange = JaxExchange(context, self._axes["blocks"])
        self.ops: Any = local.create(self.plan) if context == 1 else ShardedOps(local, self.plan, exchange)

    def __repr__(self) -> str:
        cut = ", ".join(f"{name} over {count}" for name, count in self.shards.items())
        return f"Sharded({cut}; on each {self.plan})"

    @cached_property
    def specs(self) -> Pools:
        """The partition of every pool: slots over requests, blocks over both, bytes of a unit over cut heads."""
        found = {}
        for region in self.plan.regions:
            cut = (region.layer, region.role) in self._cut
            units = "requests" if region.growth == "slot" else ("requests", "blocks")
            for name, _ in region.buffers.values():
                found[name] = self.spec(units, "heads" if cut else None)
        return Pools(found)

    def spec(self, *axes: str | tuple[str, ...] | None) -> PartitionSpec:
        """The partition of an array whose axes are these logical ones, several of them together where a tuple."""
        names = ((axis,) if isinstance(axis, str) else axis or () for axis in axes)
        return PartitionSpec(*(sum((self._axes[name] for name in some), ()) or None for some in names))

    def allocate(self) -> Pools:
        """Fresh pools, each shard made where it belongs."""
        make = jax.shard_map(self.ops.allocate, mesh=self.mesh, in_specs=(), out_specs=self.specs, check_vma=False)
        return jax.jit(make)()

    def put(self, array: np.ndarray, *axes: str | tuple[str, ...] | None) -> jax.Array:
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

    def digests(self, pools: Pools, index: StepIndex) -> list[int]:
        """What ``Cache.digest`` says of every request of an index, alone: equal on any mesh, and on no mesh.

        Requests come shard by shard, padding (0 tokens) included; every process gets all of them.
        """
        lengths, lanes = self._lanes(pools, index)
        lanes = np.stack([np.asarray(pair) for pair in lanes], axis=1)
        return [
            digest.combine([(int(length), [(int(a), int(b)) for a, b in lane])])
            for length, lane in zip(np.asarray(lengths), lanes, strict=True)
        ]

    @cached_property
    def _lanes(self) -> Callable[..., Any]:
        """(pools, index) -> lengths [Q] and for every pool's rows two lanes [Q, 2], on every device."""

        def whole(pools: Pools, index: StepIndex) -> Any:
            # Of the request as it is after the step: nothing of it is in the step's own rows any more.
            now = index._replace(
                positions=index.positions[:0], request_index=index.request_index[:0], starts=index.lengths
            )
            lanes = []
            for layer, role, component in owned(self.plan.spec):
                raw = self.ops.gather_rows(pools, layer, role, now)
                if (layer, role) in self._cut:
                    raw = raw._replace(rows=self._all_heads(component, raw.rows))
                lanes.append(self.ops.digest_rows(raw, digest.region_salt(layer, role)))
            return jax.tree.map(self._all_requests, (index.lengths, lanes))

        specs = (self.specs, self.spec("requests"))
        return jax.jit(jax.shard_map(whole, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False))

    def _all_heads(self, component: Component, rows: Any) -> Any:
        """Canonical rows [Q, n, row bytes] from every shard's own heads: all keys, then all values."""
        shares = lax.all_gather(rows, self._axes["heads"])
        pieces, first = [], 0
        for part in component.parts:
            last = first + part.heads * part.format.row
            pieces += [share[..., first:last] for share in shares]
            first = last
        return jnp.concatenate(pieces, axis=-1)

    def _all_requests(self, array: Any) -> Any:
        """[Q, ...] of every request shard, one after the other."""
        return lax.all_gather(array, self._axes["requests"], tiled=True) if self._axes["requests"] else array


class _Local(JaxBackend):
    """Makes the verbs of one shard, on whatever device runs them."""

    def __init__(self, kernels: str | None) -> None:
        self._kernels = kernels

    def create(self, plan: CachePlan, *, device: str | None = None, check: bool = False) -> JaxOps:
        ops = super().create(plan, device=device, check=check)
        return ops if self._kernels is None else JaxOps(plan, ops.device, None, self._kernels)


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
