"""A cache over a JAX mesh: pools cut by a table of rules, and steps that run on all shards at once.

Requests go over data axes: every shard has its own slots and blocks, and its host side plans its own requests. Blocks
go over context axes: each shard holds one page of every block, and the verbs exchange what is missing as
``kvcore.sharding`` says. Heads of classic layers go over a model axis where they divide, else every shard of it holds
all of them, as it does of latent rows, which are one head. Verbs run under ``shard_map``, so that the mesh's axes may
be Auto or Explicit, and only context shards speak to one another. A step's activations may lie elsewhere in a prefill
than in a decode step; pools never move.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from kvcore import digest
from kvcore.backends.jax_pallas import JaxBackend, JaxOps
from kvcore.errors import SpecError
from kvcore.interop.jax.heads import divides, with_heads
from kvcore.interop.jax.rules import MODES, RULES, Axes, Rules, Table, mode_of
from kvcore.ops import StepIndex
from kvcore.plan import CachePlan, plan_cache
from kvcore.pools import Pools
from kvcore.portable.rows import owned
from kvcore.sharding import ShardedOps, ShardPlan
from kvcore.sharding.jax import JaxExchange
from kvcore.spec import KV, CacheSpec, Component

__all__ = ["MODES", "RULES", "Axes", "Rules", "Sharded"]


class Sharded:
    """A spec's cache spread over a mesh.

    Args:
        spec: of the whole cache.
        mesh: devices; its axes may be Auto or Explicit.
        rules: logical axis -> axes of the mesh.
        modes: mode of a step -> rules of its activations that hold in it instead; see ``Rules``.
        kernels: as of ``JaxOps``; None for what the devices are best served with.
        sizes: of the whole cache, as ``plan_cache`` takes them.

    Attributes:
        rules: the table on the mesh.
        shards: logical axis of pools -> number of shards.
        plan: of one shard.
        ops: the verbs of one shard, for use in ``step``.

    Raises:
        SpecError: what ``Rules`` refuses, a size that the shards of ``requests`` do not divide, or a layer whose
            history cannot be cut into blocks' pages.
    """

    def __init__(
        self,
        spec: CacheSpec,
        mesh: Mesh,
        rules: Table = RULES,
        *,
        modes: Mapping[str, Table] | None = None,
        kernels: str | None = None,
        **sizes: Any,
    ) -> None:
        self.mesh = mesh
        self.rules = Rules(mesh, rules, modes)
        self.shards = {name: self.rules.shards(name) for name in RULES}
        for name in ("max_requests", "max_tokens", "blocks"):
            if sizes.get(name) is not None and sizes[name] % self.shards["requests"]:
                raise SpecError(
                    got=sizes[name], where=name, allowed=f"a multiple of the {self.shards['requests']} request shards"
                )
            if sizes.get(name) is not None:
                sizes[name] //= self.shards["requests"]
        context = ShardPlan(spec=spec, context=self.shards["blocks"]).context
        self.plan: CachePlan = plan_cache(with_heads(spec, self.shards["heads"]), context=context, **sizes)
        self._split = {
            (number, role)
            for number, layer in enumerate(spec.all_layers)
            for role, component in layer.components()
            if isinstance(component, KV) and divides(component, self.shards["heads"])
        }
        local: Any = _Local(kernels)
        exchange = JaxExchange(context, self.rules.axes("blocks"))
        self.ops: Any = local.create(self.plan) if context == 1 else ShardedOps(local, self.plan, exchange)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name} over {count}" for name, count in self.shards.items())
        return f"Sharded({axes}; on each {self.plan})"

    @cached_property
    def specs(self) -> Pools:
        """The partition of every pool: slots over requests, blocks over both, bytes of a unit over cut heads."""
        found = {}
        for region in self.plan.regions:
            split = (region.layer, region.role) in self._split
            units = "requests" if region.growth == "slot" else ("requests", "blocks")
            for name, _ in region.buffers.values():
                found[name] = self.spec(units, "heads" if split else None)
        return Pools(found)

    def spec(self, *axes: str | tuple[str, ...] | None, mode: str | None = None) -> PartitionSpec:
        """``Rules.spec``: the partition of an array whose axes are these logical ones."""
        return self.rules.spec(*axes, mode=mode)

    def splits_heads(self, layer: int) -> bool:
        """Whether a classic layer's heads are cut, so that those of its queries must be: ``heads`` in both."""
        return (layer, "kv") in self._split

    def allocate(self) -> Pools:
        """Fresh pools, each shard made where it belongs."""
        make = jax.shard_map(self.ops.allocate, mesh=self.mesh, in_specs=(), out_specs=self.specs, check_vma=False)
        return jax.jit(make)()

    def put(self, array: np.ndarray, *axes: str | tuple[str, ...] | None, mode: str | None = None) -> jax.Array:
        """``Rules.put``: a whole host array on the mesh, cut along logical axes."""
        return self.rules.put(array, *axes, mode=mode)

    def index(self, shards: Sequence[StepIndex]) -> StepIndex:
        """The request shards' host indices, of one shape each, as one index on the mesh.

        Raises:
            SpecError: another number of indices than shards, or shapes that differ; pad the steps.
        """
        arrays_of: list[tuple[Any, ...]] = [index[:-1] for index in shards]  # without the last, which is no array
        shapes = [tuple(None if array is None else np.shape(array) for array in given) for given in arrays_of]
        if len(shards) != self.shards["requests"] or len(set(shapes)) > 1:
            allowed = f"{self.shards['requests']} indices of one shape"
            raise SpecError(got=shapes, where="index", allowed=allowed, hint="Give step pad_tokens and pad_requests.")
        found: list[Any] = []
        for arrays in zip(*arrays_of, strict=True):
            missing = arrays[0] is None
            found.append(None if missing else self.put(np.concatenate([np.asarray(one) for one in arrays]), "requests"))
        return StepIndex(*found)

    @property
    def queries(self) -> StepIndex:
        """Axes of an index given once more, as an input: of the queries that a shard has where they are cut."""
        split, whole = Axes(("requests", "query_length")), Axes("requests")
        others: list[Any] = [whole] * (len(StepIndex._fields) - 3)  # all arrays but those two
        return StepIndex(split, split, *others)

    def mode_of(self, index: StepIndex) -> str:
        """``decode`` or ``prefill``, by the shapes of an index; see ``jax_rules.mode_of``."""
        return mode_of(index, self.plan.max_draft_tokens)

    def step(self, fn: Callable[..., Any], inputs: Any, outs: Any, mode: str | None = None) -> Callable[..., Any]:
        """``fn(ops, pools, index, *inputs) -> (pools, outs)`` of one shard, compiled for all, the pools donated.

        Inputs may come from anywhere on the mesh and are brought to where the verbs want them.

        Args:
            fn: what a shard does; it sees its own pools, tokens and heads.
            inputs: of each input a partition (``spec(...)``) or ``Axes``, a tuple of such pytrees.
            outs: likewise, a pytree.
            mode: what ``Axes`` are resolved for; None: what ``mode_of`` says of each call's index, a program for each.

        Raises:
            SpecError: an unknown mode or axis.
        """
        if mode is not None or not any(isinstance(leaf, Axes) for leaf in jax.tree.leaves((inputs, outs))):
            return self._program(fn, inputs, outs, mode)
        programs = {mode: self._program(fn, inputs, outs, mode) for mode in ("prefill", "decode")}

        def by_shape(pools: Pools, index: StepIndex, *arrays: Any) -> Any:
            return programs[self.mode_of(index)](pools, index, *arrays)

        return by_shape

    def _program(self, fn: Callable[..., Any], inputs: Any, outs: Any, mode: str | None) -> Callable[..., Any]:
        def resolved(axes: Any, how: Callable[..., PartitionSpec]) -> Any:
            return jax.tree.map(lambda leaf: how(*leaf, mode=mode) if isinstance(leaf, Axes) else leaf, axes)

        wanted = (self.specs, self.spec("requests"), *resolved(inputs, self.rules.seen))
        left = resolved(outs, self.rules.spec)
        run = jax.shard_map(
            partial(fn, self.ops),
            mesh=self.mesh,
            in_specs=wanted,
            out_specs=(self.specs, resolved(outs, self.rules.seen)),
            check_vma=False,
        )

        def whole(pools: Pools, index: StepIndex, *arrays: Any) -> Any:
            arrays = jax.tree.map(lambda leaf, some: self.rules.bring(some, leaf), wanted[2:], arrays)
            pools, found = run(pools, index, *arrays)
            return pools, jax.tree.map(lambda leaf, some: self.rules.bring(some, leaf), left, found)

        return jax.jit(whole, donate_argnums=0)

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
                if (layer, role) in self._split:
                    raw = raw._replace(rows=self._all_heads(component, raw.rows))
                lanes.append(self.ops.digest_rows(raw, digest.region_salt(layer, role)))
            return jax.tree.map(self._all_requests, (index.lengths, lanes))

        specs = (self.specs, self.spec("requests"))
        return jax.jit(jax.shard_map(whole, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False))

    def _all_heads(self, component: Component, rows: Any) -> Any:
        """Canonical rows [Q, n, row bytes] from every shard's own heads: all keys, then all values."""
        shares = lax.all_gather(rows, self.rules.axes("heads"))
        pieces, first = [], 0
        for part in component.parts:
            last = first + part.heads * part.format.row
            pieces += [share[..., first:last] for share in shares]
            first = last
        return jnp.concatenate(pieces, axis=-1)

    def _all_requests(self, array: Any) -> Any:
        """[Q, ...] of every request shard, one after the other."""
        axes = self.rules.axes("requests")
        return lax.all_gather(array, axes, tiled=True) if axes else array


class _Local(JaxBackend):
    """Makes the verbs of one shard, on whatever device runs them."""

    def __init__(self, kernels: str | None) -> None:
        self._kernels = kernels

    def create(self, plan: CachePlan, *, device: str | None = None) -> JaxOps:
        ops = super().create(plan, device=device)
        return ops if self._kernels is None else JaxOps(plan, ops.device, None, self._kernels)
