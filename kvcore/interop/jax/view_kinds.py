"""What layer views of one kind share: their verbs, and where their arrays lie on a mesh.

Over a mesh every shard is a cache of its own: its share of the batch, and of the heads where these divide. Nothing is
exchanged between shards but for a pure form, which has all heads of a row together and so fits any mesh.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvcore.backends.jax_pallas import choice
from kvcore.backends.jax_pallas.backend import made
from kvcore.errors import SpecError
from kvcore.interop.jax.heads import divides, layer_with_heads
from kvcore.interop.jax.rules import Rules, Table
from kvcore.ops import StepIndex
from kvcore.plan import plan_cache
from kvcore.plugins import choose_backend
from kvcore.spec import CacheSpec, LayerSpec

HELD: dict[str, tuple[tuple[str, ...], ...]] = {
    "kv": (("kv",),),
    "latents": (("entries",), ("entries", "index_keys")),
    "compressed": (
        ("window",),
        ("window", "tail", "entries"),
        ("window", "tail", "entries", "index_tail", "index_keys"),
    ),
    "recurrent": (("state",), ("conv",), ("state", "conv")),
}
"""What views hold -> the roles that such a layer may have."""

VERBS = {
    "kv": ("append", "attend"),
    "latents": ("append_latents", "attend_latents"),
    "compressed": ("attend_compressed",),
    "recurrent": ("recall",),
}
"""What a view holds -> the verbs of its steps."""


def held_by(layer: LayerSpec, where: str) -> str:
    """Which of ``HELD`` a layer is.

    Raises:
        SpecError: a layer that has other components, or that shares another's.
    """
    found = next((name for name, roles in HELD.items() if layer.roles in roles), None)
    parts = [component for _, component in layer.components()]
    # Without a tail nothing but single tokens become entries.
    plain = found != "latents" or all(component.tokens_per_row == 1 for component in parts)
    if found is None or not plain or any(component.shared_from is not None for component in parts):
        raise SpecError(
            got=", ".join(layer.roles) or "no component",
            where=where,
            allowed="kv alone; entries of one token each (MLA), with index keys or without; a window, with a tail and "
            "its entries or without; a recurrent state or a convolution; all of the layer's own",
            hint="kvcore.create_cache(spec, backend='jax_pallas') has every layer; its ops run inside jit.",
        )
    return found


def rules_of(mesh: Mesh | None, rules: Table) -> Rules | None:
    """The table on a mesh that views lie on; None without one.

    Raises:
        SpecError: what ``Rules`` refuses, or a table that cuts ``blocks``.
    """
    table = None if mesh is None else Rules(mesh, rules)
    if table is not None and table.shards("blocks") > 1:
        hint = "Sharded (kvcore.interop.jax.sharding) cuts them."
        allowed = "none: a view's columns are together"
        raise SpecError(got=str(table.axes("blocks")), where="rules: blocks", allowed=allowed, hint=hint)
    return table


class Kind:
    """The verbs of a one-layer cache, shared by all layers of its spec; equal kinds share traces.

    Attributes:
        rules: of the mesh that the arrays lie on, or None. A batch or heads that do not divide are on every shard.
        layers: how many layers' sequences the pools hold, one layer's after another's; see ``LayerStack``.
        device: what the verbs are for, in kvcore's words: the mesh's devices, which need not be here, or the default.
        local: the kind of one shard; itself without a mesh.
    """

    def __init__(
        self,
        layer: LayerSpec,
        batch: int,
        length: int,
        block_tokens: int,
        rules: Rules | None = None,
        layers: int = 1,
        device: str | None = None,
    ) -> None:
        self.layers = layers
        first = jax.devices()[0] if rules is None else rules.mesh.devices.flat[0]
        self.device = choice.word(first) if device is None else device
        self.layer, self.batch, self.length, self.block_tokens = layer, batch, length, block_tokens
        self.rules = rules
        self.blocks = -(-length // block_tokens)
        self._over: dict[str, tuple[str, ...]] = {"requests": (), "heads": ()}
        self.local = self
        if rules is not None:
            requests, heads = rules.shards("requests"), rules.shards("heads")
            if batch % requests == 0:
                self._over["requests"] = rules.axes("requests")
                batch //= requests
            if layer.kv is not None and divides(layer.kv, heads):
                self._over["heads"] = rules.axes("heads")
            local = layer_with_heads(layer, heads)
            self.local = Kind(local, batch, length, block_tokens, layers=layers, device=self.device)
            self.ops: Any = self.local.ops
            self.units: dict[str, int] = self.local.units
            return
        backend = choose_backend("jax_pallas", None)
        paged = any(component.growth == "block" for _, component in layer.components())
        layout = backend.default_layout(self.device)
        if layout == "planar" and layer.kv is not None and layer.kv.span is None:
            # As attention reads them; a ring would lie twice, for views that JAX does not have.
            layout = "by_head"
        plan = plan_cache(
            CacheSpec(layers=(layer,), block_tokens=block_tokens),
            max_requests=batch * layers,
            # Blocks are planned for all sequences together, contiguous rows for each slot.
            max_tokens=self.blocks * block_tokens * (batch * layers if paged else 1),
            layout=layout,
            max_request_tokens=self.blocks * block_tokens,
        )
        self.ops = made(plan, self.device)
        self.units = {
            name: self.blocks if region.growth == "block" else 1
            for region in plan.regions
            for name, _ in region.buffers.values()
        }

    @property
    def ring_rows(self) -> int | None:
        """Rows that the layer's ring holds of each sequence; None: every row is kept."""
        kv = self.layer.kv
        return None if kv is None or kv.span is None else self.ops.plan.region(0, "kv")[0].rows

    @cached_property
    def holds(self) -> str:
        """Which of ``HELD`` the layer is."""
        return held_by(self.layer, "layer")

    @property
    def latent_roles(self) -> tuple[str, ...]:
        """Roles of a latent layer's rows, one row a token in each; none of any other layer."""
        return self.layer.roles if self.holds == "latents" else ()

    @property
    def goes_back(self) -> bool:
        """Whether a shorter length has what it needs: raw rows of entries that closed, and states, are gone by then."""
        return self.holds in ("kv", "latents")

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.layer, self.batch, self.length, self.block_tokens, self.rules, self.layers, self.device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Axes of the mesh that the batch and the heads are cut over."""
        return self._over["requests"], self._over["heads"]

    def partition(self, *names: str | None) -> PartitionSpec:
        """The partition of an array whose dimensions are ``requests`` (or their units), ``heads`` or neither."""
        return PartitionSpec(*(self._over[name] or None if name else None for name in names))

    @property
    def pools(self) -> PartitionSpec:
        """The partition of every pool: units, then bytes of a unit."""
        return self.partition("requests", "heads")

    def put(self, array: Any, partition: PartitionSpec) -> jax.Array:
        """An array where it belongs."""
        array = jnp.asarray(array)
        return array if self.rules is None else jax.device_put(array, NamedSharding(self.rules.mesh, partition))

    def shape_of(self, array: Any, partition: PartitionSpec) -> Any:
        """The shape of an array, and where it belongs."""
        lies = None if self.rules is None else NamedSharding(self.rules.mesh, partition)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=lies)

    def allocate(self) -> dict[str, jax.Array]:
        """Fresh pools, each shard's made where they belong."""
        if self.rules is None:
            return dict(self.ops.allocate())
        return jax.jit(self.on_shards(lambda: dict(self.local.ops.allocate()), (), self.pools))()

    def on_shards(self, fn: Callable[..., Any], inputs: tuple[Any, ...], outs: Any) -> Callable[..., Any]:
        """``fn`` of one shard, over all of them; inputs are brought to their partitions, pytrees of these, first."""
        rules = self.rules
        if rules is None:
            return fn
        run = jax.shard_map(fn, mesh=rules.mesh, in_specs=inputs, out_specs=outs, check_vma=False)

        def brought(arrays: Any, lies: Any) -> Any:
            def bring(partition: PartitionSpec, some: Any) -> Any:
                return rules.bring(some, partition)

            return jax.tree.map(bring, lies, arrays, is_leaf=lambda one: isinstance(one, PartitionSpec))

        return lambda *arrays: run(*map(brought, arrays, inputs))

    def placed(self, pools: dict[str, jax.Array], others: dict[str, jax.Array], slot: Any) -> dict[str, jax.Array]:
        """Pools with the units of the sequences from ``slot`` on exchanged for those of others, all of which fit."""
        lies, whole = self.pools, self.partition(None, "heads")
        return _placed(self, tuple(self.units.items()), (lies, whole), pools, others, slot)

    def exchanged(self, values: jax.Array, others: jax.Array, slot: Any) -> jax.Array:
        """Values [B] with those from ``slot`` on exchanged."""
        lies, whole = self.partition("requests"), self.partition(None)
        return _placed(self, (("values", 1),), (lies, whole), {"values": values}, {"values": others}, slot)["values"]

    @cached_property
    def _whole(self) -> "Kind":
        """A shard's sequences with all of their heads."""
        return Kind(self.layer, self.local.batch, self.length, self.block_tokens, device=self.device)

    def joined(self, pools: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Pools that hold every row's heads together: as without a mesh, whatever this one cuts."""
        return _joined(self, pools) if self._over["heads"] else pools

    def shared_out(self, pools: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The inverse of ``joined``."""
        return _shared_out(self, pools) if self._over["heads"] else pools


def index_of(
    kind: Kind,
    starts: jax.Array,
    lengths: jax.Array,
    left_padding: jax.Array,
    columns: int,
    number: jax.Array | None = None,
) -> StepIndex:
    """The index of a step that brings up to ``columns`` tokens of every sequence: tokens first, padding last.

    ``number`` is which layer's sequences they are, where the pools hold several layers'.
    """
    batch = len(starts)
    new = jnp.clip(lengths - starts, 0, columns)
    ends = jnp.cumsum(new)
    token = jnp.arange(batch * columns, dtype=jnp.int32)
    request = jnp.sum(token[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    kept = request < batch
    position = token + (starts - ends + new)[jnp.minimum(request, batch - 1)]
    slots = jnp.arange(batch, dtype=jnp.int32) + (0 if number is None else number * batch)
    table = slots[:, None] * kind.blocks + jnp.arange(kind.blocks, dtype=jnp.int32)[None]
    return StepIndex(
        positions=jnp.where(kept, position, -1),
        request_index=jnp.where(kept, request, -1),
        slots=slots,
        starts=starts,
        lengths=lengths,
        block_table=table,
        stored=jnp.zeros(batch, jnp.int32),
        left_padding=left_padding,
    )


@partial(jax.jit, static_argnums=(0, 1, 2))
def _placed(kind: Kind, units: Any, lies: Any, pools: Any, others: Any, slot: Any) -> Any:
    batch = kind.local.batch

    def place(pools: Any, others: Any, slot: Any) -> Any:
        axes, _ = kind.axes
        first = slot - (lax.axis_index(axes).astype(jnp.int32) * batch if axes else 0)
        found = {}
        for name, each in units:
            unit = first * each + jnp.arange(len(others[name]), dtype=jnp.int32)
            # Sequences of other shards; an index below zero would be counted from the end.
            unit = jnp.where(unit < 0, len(pools[name]), unit)
            found[name] = pools[name].at[unit].set(others[name], mode="drop")
        return found

    run = kind.on_shards(place, (*lies, PartitionSpec()), lies[0])
    return run(pools, others, jnp.asarray(slot, jnp.int32))


def _every_row(kind: Kind) -> StepIndex:
    """An index whose tokens are all rows that a kind's pools have room for, written or not."""
    region = kind.ops.plan.region(0, "kv")[0]
    rows = region.rows * (kind.blocks if region.growth == "block" else 1)
    none = jnp.zeros(kind.batch, jnp.int32)
    return index_of(kind, none, none + rows, none, rows)


@partial(jax.jit, static_argnums=0)
def _joined(kind: Kind, pools: Any) -> Any:
    _, heads = kind.axes
    whole, local = kind._whole, kind.local

    def join(pools: Any) -> Any:
        rows = local.ops.read_ring(pools, 0, "kv", _every_row(local))
        rows = tuple(lax.all_gather(part, heads, axis=1, tiled=True) for part in rows)
        return dict(whole.ops.restore_ring(dict(whole.ops.allocate()), 0, "kv", _every_row(whole), rows))

    return kind.on_shards(join, (kind.pools,), kind.partition("requests"))(pools)


@partial(jax.jit, static_argnums=0)
def _shared_out(kind: Kind, pools: Any) -> Any:
    _, heads = kind.axes
    whole, local = kind._whole, kind.local

    def share(pools: Any) -> Any:
        rows = whole.ops.read_ring(pools, 0, "kv", _every_row(whole))
        shard, regions = lax.axis_index(heads).astype(jnp.int32), local.ops.plan.region(0, "kv")
        mine = tuple(
            lax.dynamic_slice_in_dim(part, shard * region.heads, region.heads, axis=1)
            for part, region in zip(rows, regions, strict=True)
        )
        return dict(local.ops.restore_ring(dict(local.ops.allocate()), 0, "kv", _every_row(local), mine))

    return kind.on_shards(share, (kind.partition("requests"),), kind.pools)(pools)
