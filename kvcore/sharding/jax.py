"""Context shards on a JAX mesh: the verbs of ``kvcore.sharding`` under ``shard_map``, called like any backend's.

Paged pools are sharded over the mesh's ``context`` axis, a page of every block on each device; windows, tails and all
arguments are on every device. One program serves all shards, which know themselves by their axis index. A cache of
``create_cache`` is an ordinary one; ``cache.ops`` may also be called inside the caller's own ``jit``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvcore.backends.jax_pallas.attention import inverse_rope
from kvcore.backends.jax_pallas.tail import frequencies_of
from kvcore.cache import Cache
from kvcore.errors import SpecError
from kvcore.ops import Attention
from kvcore.ops.fused import READERS, WRITERS
from kvcore.plan import CachePlan, plan_cache
from kvcore.plugins import Needs, choose_backend
from kvcore.pools import Pools
from kvcore.requests.prefix import Policy, check_policy
from kvcore.sharding import Pages, ShardedOps, ShardPlan
from kvcore.spec import CacheSpec

AXIS = "context"


class JaxExchange:
    """``kvcore.sharding.Exchange`` inside a ``shard_map`` over one mesh axis."""

    def __init__(self, shards: int, axis: str | tuple[str, ...] = AXIS) -> None:
        self.shards = shards
        self._axis = axis

    @property
    def shard(self):
        """This device's place along the axis, traced."""
        return lax.axis_index(self._axis).astype(jnp.int32)

    @property
    def mine(self):
        """[shards] int32, 1 at this device."""
        return (jnp.arange(self.shards, dtype=jnp.int32) == self.shard).astype(jnp.int32)

    def where(self, condition, values):
        """The values where the condition holds, zeros elsewhere."""
        condition = condition.reshape(*condition.shape, *[1] * (values.ndim - condition.ndim))
        return jnp.where(condition, values, jnp.zeros((), values.dtype))

    def from_owner(self, values):
        """Bit for bit the values of the one shard that has them: a sum of bytes."""
        found = lax.psum(lax.bitcast_convert_type(values, jnp.uint8), self._axis)
        return lax.bitcast_convert_type(found, values.dtype)

    def spread(self, scores, rows, columns):
        """Scores of this shard's entries [T, n] -> [T, columns] by canonical entry, -inf elsewhere."""
        pages, entry = Pages(self.shards, rows), jnp.arange(columns, dtype=jnp.int32)
        if not scores.shape[1]:
            return jnp.full((len(scores), columns), -jnp.inf, scores.dtype)
        local = jnp.minimum(pages.local(entry), scores.shape[1] - 1)
        return jnp.where(pages.owner(entry) == self.shard, scores[:, local], -jnp.inf)

    def top(self, scores, selected, entries):
        """Merge every shard's best k: highest first, ties to the lowest entry, -1 where there is none."""
        if not selected.size or not scores.shape[1]:
            return entries
        best = jnp.take_along_axis(scores.astype(jnp.float32), jnp.maximum(selected, 0), axis=1) + 0.0
        best = jnp.where(selected >= 0, best, -jnp.inf)
        best, entries = self._side_by_side(best), self._side_by_side(entries)
        order = jnp.argsort(jnp.where(entries >= 0, entries, jnp.iinfo(jnp.int32).max), axis=1, stable=True)
        best, entries = (jnp.take_along_axis(array, order, axis=1) for array in (best, entries))
        order = jnp.argsort(-best, axis=1, stable=True)
        return jnp.take_along_axis(entries, order, axis=1)[:, : selected.shape[1]]

    def merge(self, parts, once, sink, like):
        """Attention over all shards' parts and what every shard holds, counted once; then the sink, once."""
        lse = jax.nn.logsumexp(lax.all_gather(parts.lse, self._axis), axis=0)
        lse = lse if once is None else jnp.logaddexp(lse, once.lse)
        safe = jnp.where(jnp.isneginf(lse), 0, lse)
        out = lax.psum(parts.out * jnp.exp(parts.lse - safe)[..., None], self._axis)
        if once is not None:
            out = out + once.out * jnp.exp(once.lse - safe)[..., None]
        if sink is not None:
            share = jnp.where(jnp.isneginf(lse), 0, 1 / (1 + jnp.exp(sink.astype(jnp.float32)[None] - lse)))
            out = out * share[..., None]
        return Attention(out.astype(like.dtype), lse)

    def inverse_rope(self, out, positions, rope):
        """Merged outputs [T, H, d] with their last channels turned back by positions [T]."""
        return inverse_rope(out, positions, frequencies_of(rope))

    def widen(self, q):
        """The query in fp32."""
        return q.astype(jnp.float32)

    def _side_by_side(self, values):
        """[T, k] of every shard -> [T, shards · k]."""
        found = lax.all_gather(values, self._axis)
        return jnp.moveaxis(found, 0, 1).reshape(len(values), -1)


class MeshOps:
    """``kvcore.ops.Ops`` over a mesh: each verb one ``shard_map`` of a shard's verb, compiled once for its shapes."""

    in_place = False

    def __init__(self, local: Any, mesh: Mesh) -> None:
        self.plan: CachePlan = local.plan
        self.mesh = mesh
        self._local = local
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._compiled: dict[Any, Callable[..., Any]] = {}
        paged = {name: region.growth == "block" for region in self.plan.regions for name, _ in region.buffers.values()}
        self._specs = {name: PartitionSpec(AXIS) if by_block else PartitionSpec() for name, by_block in paged.items()}

    @property
    def device(self) -> str:
        """The backend's word for the mesh's devices."""
        return self._local.device

    @property
    def how(self) -> str:
        """The backend's, and the number of shards."""
        return self._local.how

    def allocate(self) -> Pools:
        """Fresh pools, each device's own part on it."""
        fresh = self._local.allocate()

        def spread(name: str) -> Any:
            sharding = NamedSharding(self.mesh, self._specs[name])
            copies = self.mesh.shape[AXIS] if self._specs[name] else 1
            return jax.device_put(jnp.concatenate([fresh[name]] * copies), sharding)

        return Pools({name: spread(name) for name in fresh})

    def asarray(self, array: Any) -> Any:
        """A NumPy array on every device."""
        return jax.device_put(self._local.asarray(array), self._whole)

    def index(self, host: Any) -> Any:
        """The step index on every device."""
        return jax.device_put(self._local.index(host), self._whole)

    def append_kv_view(self, *arguments: Any, columns: int | None = None) -> tuple[Pools, None]:
        """``append_kv``; there is no view."""
        del columns
        return self.append_kv(*arguments), None

    def __getattr__(self, name: str) -> Any:
        if name == "padded_index":
            return self.index
        if name not in (*WRITERS, *READERS, "select", "mask"):
            return getattr(self._local, name)
        takes_pools = name not in ("select", "mask")

        def verb(*arguments: Any, **options: Any) -> Any:
            pools, rest = (arguments[0], arguments[1:]) if takes_pools else (None, arguments)
            leaves, tree = jax.tree.flatten((rest, options), is_leaf=lambda leaf: leaf is None)
            arrays = [leaf for leaf in leaves if hasattr(leaf, "dtype")]
            fixed = tuple(None if hasattr(leaf, "dtype") else (leaf,) for leaf in leaves)
            key = name, tree, fixed
            if key not in self._compiled:
                self._compiled[key] = self._compile(name, tree, fixed, takes_pools=takes_pools)
            return self._compiled[key](pools, arrays)

        return verb

    def _compile(self, name: str, tree: Any, fixed: tuple[Any, ...], *, takes_pools: bool) -> Callable[..., Any]:
        def run(pools: Any, arrays: list[Any]) -> Any:
            rest = iter(arrays)
            leaves = [next(rest) if leaf is None else leaf[0] for leaf in fixed]
            arguments, options = jax.tree.unflatten(tree, leaves)
            return getattr(self._local, name)(*([pools] if takes_pools else []), *arguments, **options)

        pools = Pools(self._specs) if takes_pools else PartitionSpec()
        out = Pools(self._specs) if name in WRITERS else PartitionSpec()
        # What is the same on every shard comes of collectives, or of whole arguments; that is not inferred.
        mapped = jax.shard_map(run, mesh=self.mesh, in_specs=(pools, PartitionSpec()), out_specs=out, check_vma=False)
        return jax.jit(mapped, donate_argnums=(0,) if name in WRITERS else ())


def create_cache(
    spec: CacheSpec,
    *,
    mesh: Mesh,
    max_requests: int,
    max_tokens: int | None = None,
    budget_bytes: int | None = None,
    max_draft_tokens: int = 0,
    prefix: Policy = "off",
    layout: str = "packed",
    check: bool = False,
    max_request_tokens: int | None = None,
) -> Cache:
    """A cache over a mesh with one axis, ``context``: history page by page on its devices, the rest on all of them.

    Arguments are those of ``kvcore.create_cache``; ``budget_bytes`` is for one device.

    Raises:
        SpecError: the mesh has other axes, or the spec cannot be spread over them.
    """
    if tuple(mesh.axis_names) != (AXIS,):
        raise SpecError(got=str(mesh.axis_names), where="mesh", allowed=f"one axis, {AXIS!r}")
    shards = ShardPlan(spec=spec, context=mesh.shape[AXIS]).context
    backend = choose_backend("jax_pallas", None, Needs.of(spec, layout))
    policy = check_policy(prefix)
    plan = plan_cache(
        spec,
        max_requests=max_requests,
        max_tokens=max_tokens,
        budget_bytes=budget_bytes,
        max_draft_tokens=max_draft_tokens,
        layout=layout,
        context=shards,
        max_request_tokens=max_request_tokens,
    )
    ops: Any = MeshOps(ShardedOps(backend, plan, JaxExchange(shards), device=None), mesh)
    return Cache(plan, backend, ops, prefix=policy, check=check)
