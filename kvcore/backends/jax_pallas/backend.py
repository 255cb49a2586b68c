"""The JAX backend: the verbs bound to a plan, functional, each compiled once for every kind of layer and shape.

One method for each verb, with its shapes as jaxtyping writes them; nothing here computes. jaxtyping need not be
installed: annotations are never evaluated.

A verb takes pools and returns new ones. Called eagerly it donates the arrays that it writes, so that XLA updates them
in place: the arrays passed in are dead afterwards. Inside the caller's own ``jit`` it is traced in, and the caller
donates at the outermost ``jit``, the only place where donation counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvcore.backends.jax_pallas import attention, encoding, indexer, kv, lifecycle, programs, tail, window
from kvcore.backends.jax_pallas import entries as entry_verbs
from kvcore.backends.jax_pallas.cuda import choice
from kvcore.backends.jax_pallas.layer import Layer
from kvcore.backends.jax_pallas.order import read_first
from kvcore.backends.jax_pallas.runs import pool_shape
from kvcore.errors import BackendError
from kvcore.ops import AllEntries, Closed, Paging, RawRows, StepIndex, VisibleRows, bounds
from kvcore.ops.choices import Decision
from kvcore.ops.composed import ComposedVerbs
from kvcore.pools import Pools, allocate, fresh_unit
from kvcore.spec import TAIL_OF
from kvcore.spec.codes import check_known

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int, UInt8, UInt32

    from kvcore.ops import Attention, SelectedEntries, WindowRows
    from kvcore.plan import CachePlan
    from kvcore.spec import Format, Rope

DEVICES = ("tpu", "cuda", "cpu")
INTERPRETED = "cpu:interpret"
"""The device that runs the TPU's kernels in an interpreter, slowly, and looks for their faults."""

jax.tree_util.register_pytree_with_keys(
    Pools,
    lambda pools: (tuple((jax.tree_util.DictKey(name), pools[name]) for name in pools), tuple(pools)),
    lambda names, arrays: Pools(dict(zip(names, arrays, strict=True))),
)
jax.tree_util.register_static(Paging)


class JaxOps(ComposedVerbs):
    """Every verb of ``kvcore.ops.Ops`` on JAX arrays.

    Attributes:
        plan: what the pools are.
        device: ``tpu``, ``cuda`` or ``cpu``.
        kernels: ``portable``, ``triton``, ``tpu`` or ``interpret``; see ``Layer``.
    """

    in_place = False
    in_trace = staticmethod(programs.in_trace)

    def __init__(self, plan: CachePlan, device: str, target: Any, kernels: str = "portable") -> None:
        self.plan = plan
        self.device = device
        self.kernels = kernels
        self._target = target
        # Built once: the bytes are a static argument, and equal objects are told equal without a look at them.
        self._fresh = {
            name: fresh_unit(region, buffer)
            for region in plan.regions
            for buffer, (name, _) in region.buffers.items()
            if region.growth == "slot"
        }
        self._layers = [Layer(plan, number, kernels) for number in range(len(plan.spec.all_layers))]

    @property
    def how(self) -> str:
        """How the verbs run, as reports say it."""
        if self.kernels == "interpret":
            return f"{self.device}, Pallas TPU interpreter"
        kind = (self._target or jax.devices()[0]).device_kind
        name = self.device if self.device == "cpu" else f"{self.device} ({kind})"
        return f"{name}; kernels: {self.kernels}" if self.device == "cuda" else name

    def decide(self, layer: int | None, verb: str) -> Decision:
        """On the CPU ``jax.numpy``; of kernels it is not told verb by verb."""
        del layer, verb
        if self.kernels == "portable":
            return Decision("jax.numpy", "no kernels: they run on a TPU in tpu_tile, and on CUDA with jax-triton")
        return Decision(
            f"{self.kernels} and jax.numpy", "kernels where they cover the call; docs/backends.md lists them"
        )

    def allocate(self) -> Pools:
        """Fresh pools for the plan."""

        def make(units, size, fresh, region, buffer):
            shape, dtype = pool_shape(region, buffer, units)
            if fresh is None:
                return jnp.zeros(shape, dtype, device=self._target)
            unit = np.frombuffer(fresh, dtype).reshape(shape[1:])
            return jax.device_put(np.broadcast_to(unit, shape), self._target, may_alias=False)

        return allocate(self.plan, make)

    def asarray(self, array: Any) -> Array:
        """A NumPy array as JAX's, copied, int64 as int32; arrays of JAX pass through."""
        if isinstance(array, jax.Array):
            return array
        array = np.asarray(array)
        if array.dtype == np.int64:
            # Far indices must stay out of range, not wrap into it.
            array = np.clip(array, -1, np.iinfo(np.int32).max).astype(np.int32)
        # JAX takes the caller's memory as its own where that happens to be aligned, whatever may_alias says, or copies
        # it later than this call ends.
        return jax.device_put(np.array(array), self._target, may_alias=False)

    def join(self, kv: Float[Array, "tokens width"], score: Float[Array, "tokens width"]) -> Float[Array, "tokens row"]:
        """Kv and score [T, width] side by side."""
        return jnp.concatenate([kv, score], axis=1)

    def index(self, host: StepIndex) -> StepIndex:
        """The step index on the device."""
        return StepIndex(*jax.device_put(tuple(host), self._target))

    def encode(
        self, format: str | Format, values: Float[Array, "rows dim"], global_scale: float = 1.0
    ) -> UInt8[Array, "rows row_bytes"]:
        """Values [rows, dim] -> canonical rows [rows, row_bytes] uint8."""
        return programs.encode(encoding.sized(format, values.shape[1]), values, float(global_scale))

    def decode(
        self,
        format: str | Format,
        rows: UInt8[Array, "rows row_bytes"],
        dim: int | None = None,
        global_scale: float = 1.0,
    ) -> Float[Array, "rows values"]:
        """Canonical rows [rows, row_bytes] -> values [rows, dim]."""
        return programs.decode(encoding.sized(format, dim), rows, float(global_scale))

    def pack_page(self, format: str | Format, rows: UInt8[Array, "rows row_bytes"]) -> UInt8[Array, " page_bytes"]:
        """Canonical rows [P, row_bytes] -> their packed page."""
        return encoding.pack_page(format, rows)

    def unpack_page(
        self, format: str | Format, page: UInt8[Array, " page_bytes"], rows: int
    ) -> UInt8[Array, "rows row_bytes"]:
        """A packed page -> canonical rows [rows, row_bytes]."""
        return encoding.unpack_page(format, page, rows)

    def append_window(self, pools: Pools, layer: int, index: StepIndex, rows: Float[Array, "tokens dim"]) -> Pools:
        """Encode rows [T, d] and store them at slot·C + p mod C."""
        return self._write(window.append_window, pools, layer, ("window",), (index, rows))

    def append_rotated_window(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        rows: Float[Array, "tokens dim"],
        *,
        rope: Rope | Float[Array, " pairs"],
        norm_weight: Float[Array, " dim"] | None = None,
        eps: float = 1e-6,
    ) -> Pools:
        """Norm (if a weight is given) and rotate rows [T, d] at their positions, then ``append_window``."""
        arrays = (index, rows, tail.frequencies_of(rope), norm_weight)
        return self._write(window.append_rotated_window, pools, layer, ("window",), arrays, eps=eps)

    def append_tail(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        kv: Float[Array, "tokens width"],
        score: Float[Array, "tokens width"],
    ) -> Pools:
        """Store raw compressor rows kv and score, [T, width] each, fp32, at slot·R + p mod R."""
        return self._write(tail.append_tail, pools, layer, ("tail",), (index, kv, score), role="tail")

    def append_index_tail(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        kv: Float[Array, "tokens width"],
        score: Float[Array, "tokens width"],
    ) -> Pools:
        """The same for the indexer's compressor."""
        return self._write(tail.append_tail, pools, layer, ("index_tail",), (index, kv, score), role="index_tail")

    def gather_window(
        self, pools: Pools, layer: int, index: StepIndex, rows: Float[Array, "tokens dim"] | None = None
    ) -> WindowRows:
        """The last min(length, W) positions of every request at the end of the step, ascending from row 0."""
        return self._read(window.gather_window, pools, layer, ("window",), (index, rows))

    def compress(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        kv: Float[Array, "tokens width"],
        score: Float[Array, "tokens width"],
        *,
        closed: int | None = None,
        role: str = "entries",
        norm_weight: Float[Array, " dim"] | None = None,
        eps: float = 1e-6,
    ) -> Float[Array, "closed dim"]:
        """Pool and norm each of the first ``closed`` entries that the step completes; -> [closed, d]."""
        closed = bounds.closed(self.plan, layer, role, index) if closed is None else closed
        roles = role, TAIL_OF[role]
        arrays = (index, kv, score, norm_weight)
        options = {"closed": self._bucket(closed, index), "role": role, "eps": eps}
        return self._read(tail.compress, pools, layer, roles, arrays, **options)[:closed]

    def flush(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        kv: Float[Array, "tokens width"],
        score: Float[Array, "tokens width"],
        index_kv: Float[Array, "tokens index_width"] | None = None,
        index_score: Float[Array, "tokens index_width"] | None = None,
        *,
        closed: int | None = None,
        norm_weight: Float[Array, " dim"] | None = None,
        eps: float = 1e-6,
        rope: Rope | Float[Array, " pairs"] | None = None,
        index_norm_weight: Float[Array, " index_dim"] | None = None,
    ) -> Pools:
        """Compress, rotate at position m·i, encode and store every entry that the step completes; then index keys."""
        closed = bounds.closed(self.plan, layer, "entries", index) if closed is None else closed
        if not closed:
            return pools
        streams = (("entries", "tail", kv), ("index_keys", "index_tail", index_kv))
        writes = tuple(role for role, _, given in streams if given is not None)
        reads = tuple(role for _, role, given in streams if given is not None)
        rope = tail.frequencies_of(rope)
        arrays = (index, kv, score, index_kv, index_score, norm_weight, index_norm_weight, rope)
        # A launch finds on the device what closes: its trace needs no bound.
        launched = self._flushes(layer, writes)
        options = {"closed": 1 if launched else self._bucket(closed, index), "eps": eps}
        return self._write(tail.flush, pools, layer, writes, arrays, reads, **options)

    def _flushes(self, layer: int, roles: tuple[str, ...]) -> bool:
        """True where a flush of these roles is one launch of a Triton kernel."""
        triton = choice.verbs(self.kernels)
        tails = (TAIL_OF[role] for role in roles)
        return bool(triton and triton.flushes(self._layers[layer].only(*roles, *tails), roles))

    def append_flush(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        kv: Float[Array, "tokens width"],
        score: Float[Array, "tokens width"],
        index_kv: Float[Array, "tokens index_width"] | None = None,
        index_score: Float[Array, "tokens index_width"] | None = None,
        *,
        newest: int | None = None,
        closed: int | None = None,
        norm_weight: Float[Array, " dim"] | None = None,
        eps: float = 1e-6,
        rope: Rope | Float[Array, " frequencies"] | None = None,
        index_norm_weight: Float[Array, " index_dim"] | None = None,
    ) -> Pools:
        """``flush``, then ``append_tail`` and ``append_index_tail``; one launch where kernels are Triton's."""
        roles = ("entries",) if index_kv is None else ("entries", "index_keys")
        tails = tuple(TAIL_OF[role] for role in roles)
        if self._flushes(layer, roles):
            frequencies = tail.frequencies_of(rope)
            arrays = (index, kv, score, index_kv, index_score, norm_weight, index_norm_weight, frequencies)
            newest = len(index.positions) if newest is None else newest
            options = {"closed": 1, "eps": eps, "append": True, "newest": newest}
            return self._write(tail.flush, pools, layer, (*roles, *tails), arrays, **options)
        weights = {"norm_weight": norm_weight, "index_norm_weight": index_norm_weight}
        if self.kernels != "portable" or not isinstance(next(iter(pools.values())), Tracer):
            options = {"closed": closed, "eps": eps, "rope": rope, **weights}
            return super().append_flush(pools, layer, index, kv, score, index_kv, index_score, **options)
        # In one program the tails are read first: beside the write, XLA would read a copy of them.
        streams = {"entries": (kv, score, norm_weight), "index_keys": (index_kv, index_score, index_norm_weight)}
        closed = bounds.closed(self.plan, layer, "entries", index) if closed is None else closed
        if closed:
            options, frequencies = {"closed": self._bucket(closed, index), "eps": eps}, tail.frequencies_of(rope)

            def read(pools):
                return [
                    self._read(
                        tail.flush_latents,
                        pools,
                        layer,
                        (role, TAIL_OF[role]),
                        (index, *streams[role], frequencies),
                        role=role,
                        **options,
                    )
                    for role in roles
                ]

            latents, after = read_first(read, pools, index)
            pools = self.store_entries(pools, layer, index, *latents)
        else:
            after = index
        pools = self.append_tail(pools, layer, after, kv, score)
        if index_kv is None or index_score is None:
            return pools
        return self.append_index_tail(pools, layer, after, index_kv, index_score)

    def store_entries(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        entries: Float[Array, "closed dim"] | None,
        index_keys: Float[Array, "closed index_dim"] | None = None,
    ) -> Pools:
        """Encode and store entries [closed, d] that the caller compressed, request by request; index keys likewise."""
        given = (("entries", entries), ("index_keys", index_keys))
        writes = tuple(role for role, values in given if values is not None)
        return self._write(entry_verbs.store_entries, pools, layer, writes, (index, entries, index_keys))

    def closed(self, layer: int, index: StepIndex, count: int | None = None, role: str = "entries") -> Closed:
        """The first ``count`` entries that the step completes, in storing order; -1 where there are fewer."""
        count = bounds.closed(self.plan, layer, role, index) if count is None else count
        kind = self._layers[layer].only(role)
        found = programs.indexed(entry_verbs.closed)(
            kind, index, (("count", self._bucket(count, index)), ("role", role))
        )
        return Closed(*(array[:count] for array in found))

    def gather_entries(
        self, pools: Pools, layer: int, index: StepIndex, indices: Int[Array, "tokens k"]
    ) -> SelectedEntries:
        """Entries by logical index, indices [T, k]."""
        return self._read(entry_verbs.gather_entries, pools, layer, ("entries",), (index, indices))

    def gather_all_entries(
        self, pools: Pools, layer: int, index: StepIndex, *, columns: int | None = None, role: str = "entries"
    ) -> AllEntries:
        """Every entry (``role`` entries or index_keys) of every request, as [Q, columns, d]."""
        columns = bounds.columns(self.plan, layer, role, index) if columns is None else columns
        options = {"columns": self._bucket(columns, index), "role": role}
        found = self._read(entry_verbs.gather_all_entries, pools, layer, (role,), (index,), **options)
        return AllEntries(found.values[:, :columns], found.counts, found.positions[:, :columns])

    def index_scores(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        q: Float[Array, "tokens heads dim"],
        weights: Float[Array, "tokens heads"],
        *,
        columns: int | None = None,
    ) -> Float[Array, "tokens columns"]:
        """Lightning-indexer scores [T, columns] fp32."""
        columns = bounds.columns(self.plan, layer, "index_keys", index) if columns is None else columns
        options = {"columns": self._bucket(columns, index)}
        arrays = (index, q, weights)
        return self._read(indexer.index_scores, pools, layer, ("index_keys",), arrays, **options)[:, :columns]

    def select(self, scores: Float[Array, "tokens columns"], k: int) -> Int[Array, "tokens k"]:
        """Top k of scores [T, n] -> [T, k] int32: highest first, ties to the lowest index, -1 where score is -inf."""
        return programs.select(scores, k, self.kernels)

    def attend(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        q: Float[Array, "tokens heads dim"],
        selected: Int[Array, "tokens k"] | None = None,
        *,
        rows: Float[Array, "tokens dim"] | None = None,
        sink: Float[Array, " heads"] | None = None,
        scale: float | None = None,
        rope: Rope | Float[Array, " frequencies"] | None = None,
    ) -> Attention:
        """Attend from q [T, H, d] to the window and the selected (None: all visible) entries, where K = V."""
        arrays = (index, q, selected, rows, sink, tail.frequencies_of(rope))
        if self.kernels == "triton" and isinstance(scale, int | float):
            options = {"scale": float(scale)}
        else:
            arrays, options = (*arrays, scale), {}
        return self._read(attention.attend, pools, layer, ("window", "entries"), arrays, **options)

    def append_kv(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        k: Float[Array, "tokens key_heads key_dim"],
        v: Float[Array, "tokens value_heads value_dim"],
    ) -> Pools:
        """Encode and store k [T, key_heads, key_dim] and v [T, value_heads, value_dim]."""
        return self._write(kv.append_kv, pools, layer, ("kv",), (index, k, v))

    def gather_kv(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        k: Float[Array, "tokens key_heads key_dim"] | None = None,
        v: Float[Array, "tokens value_heads value_dim"] | None = None,
        *,
        columns: int | None = None,
    ) -> tuple[
        Float[Array, "requests columns key_heads key_dim"],
        Float[Array, "requests columns value_heads value_dim"],
        Int[Array, "requests columns"],
    ]:
        """Every row that a query of the step may see: k, v [Q, columns, heads, dim], positions [Q, columns]."""
        columns = bounds.columns(self.plan, layer, "kv", index) if columns is None else columns
        options = {"columns": self._bucket(columns, index)}
        found = self._read(kv.gather_kv, pools, layer, ("kv",), (index, k, v), **options)
        return tuple(array[:, :columns] for array in found)

    def mask(self, layer: int, index: StepIndex, *, columns: int | None = None) -> Bool[Array, "tokens columns"]:
        """[T, columns] bool over ``gather_kv``'s rows: what each query may see."""
        columns = bounds.columns(self.plan, layer, "kv", index) if columns is None else columns
        kind = self._layers[layer].only("kv")
        return programs.indexed(kv.mask)(kind, index, (("columns", self._bucket(columns, index)),))[:, :columns]

    def visible_rows(self, layer: int, index: StepIndex, *, columns: int | None = None) -> VisibleRows:
        """Positions [Q, columns] of ``gather_kv``'s rows, and the mask over them."""
        columns = bounds.columns(self.plan, layer, "kv", index) if columns is None else columns
        kind = self._layers[layer].only("kv")
        options = (("columns", self._bucket(columns, index)),)
        found = programs.indexed(kv.visible_rows)(kind, index, options)
        return VisibleRows(*(array[:, :columns] for array in found))

    def from_batch(self, index: StepIndex, batch: Array) -> Array:
        """A batch [Q, S, ...] padded on the right -> rows [T, ...] in step order."""
        return programs.from_batch(index, batch)

    def to_batch(self, index: StepIndex, rows: Array, width: int) -> Array:
        """Rows [T, ...] -> a batch [Q, width, ...]."""
        return programs.to_batch(index, rows, width)

    def attend_kv(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        q: Float[Array, "tokens heads key_dim"],
        k: Float[Array, "tokens key_heads key_dim"] | None = None,
        v: Float[Array, "tokens value_heads value_dim"] | None = None,
        *,
        columns: int | None = None,
        sink: Float[Array, " heads"] | None = None,
        scale: float | None = None,
    ) -> Attention:
        """Attend from q [T, H, key_dim] to the layer's K-V; out [T, H, value_dim]."""
        columns = bounds.columns(self.plan, layer, "kv", index) if columns is None else columns
        arrays = (index, q, k, v, sink, scale)
        return self._read(kv.attend_kv, pools, layer, ("kv",), arrays, columns=self._bucket(columns, index))

    def reset_slots(self, pools: Pools, slots: Int[Array, " slots"]) -> Pools:
        """Make slots [n] as if never used; -1 is ignored."""
        arrays = programs.written(pools, slots, [pools[name] for name in self._fresh])
        for name, fresh in self._fresh.items():
            arrays[name] = programs.reset(arrays[name], slots, fresh)
        return programs.as_given(pools, arrays)

    def poison(self, pools: Pools, slots: Int[Array, " slots"], blocks: Int[Array, " blocks"]) -> Pools:
        """Fill freed slots [n] and blocks [m] with 0xFF, so that a stale read is seen."""
        units = {"slot": slots, "block": blocks}
        arrays = programs.written(pools, slots, blocks, list(pools.values()))
        for region in self.plan.regions:
            for name, _ in region.buffers.values():
                arrays[name] = programs.poison(arrays[name], units[region.growth])
        return programs.as_given(pools, arrays)

    def copy_slots(self, pools: Pools, sources: Int[Array, " slots"], targets: Int[Array, " slots"]) -> Pools:
        """Copy whole slots; all sources are read before any target is written."""
        return self._copy(pools, sources, targets, "slot")

    def copy_blocks(self, pools: Pools, sources: Int[Array, " blocks"], targets: Int[Array, " blocks"]) -> Pools:
        """Copy whole blocks; all sources are read before any target is written."""
        return self._copy(pools, sources, targets, "block")

    def _copy(self, pools, sources, targets, growth):
        regions = [region for region in self.plan.regions if region.growth == growth]
        names = [name for region in regions for name, _ in region.buffers.values()]
        arrays = programs.written(pools, sources, targets, [pools[name] for name in names])
        for name in names:
            arrays[name] = programs.copy_units(arrays[name], sources, targets)
        return programs.as_given(pools, arrays)

    def gather_rows(
        self,
        pools: Pools,
        layer: int,
        role: str,
        index: StepIndex,
        rows: tuple[Float[Array, "tokens ..."], ...] | None = None,
        *,
        columns: int | None = None,
    ) -> RawRows:
        """The role's live rows in position order as canonical bytes; ``rows`` are the step's own, one per part."""
        columns = bounds.columns(self.plan, layer, role, index) if columns is None else columns
        options = {"role": role, "columns": self._bucket(columns, index)}
        found = self._read(lifecycle.gather_rows, pools, layer, (role,), (index, rows), **options)
        return RawRows(found.rows[:, :columns], found.positions[:, :columns])

    def store_rows(self, pools: Pools, layer: int, role: str, index: StepIndex, raw: RawRows) -> Pools:
        """Write canonical rows at their positions: the inverse of ``gather_rows``; position -1 is ignored."""
        return self._write(lifecycle.store_rows, pools, layer, (role,), (index, RawRows(*raw)), role=role)

    def read_ring(self, pools: Pools, layer: int, role: str, index: StepIndex) -> Any:
        """Raw bytes of the ring rows that the step's tokens will overwrite, for ``restore_ring``."""
        return self._read(lifecycle.read_ring, pools, layer, (role,), (index,), role=role)

    def restore_ring(self, pools: Pools, layer: int, role: str, index: StepIndex, saved: Any) -> Pools:
        """Put back what ``read_ring`` saved."""
        return self._write(lifecycle.restore_ring, pools, layer, (role,), (index, saved), role=role)

    def digest_rows(self, raw: RawRows, salt: int) -> UInt32[Array, "requests 2"]:
        """Two 32-bit lanes for every request over its rows and positions -> [Q, 2] uint32."""
        return programs.digest(raw, np.uint32(salt))

    def _bucket(self, count: int, index: StepIndex) -> int:
        return programs.bucket(count, index, programs.SMALLEST_BUCKET[self.kernels == "interpret"])

    def _read(self, verb, pools, number, roles, arrays, **options):
        layer = self._layers[number].only(*roles)
        read = {name: pools[layer.names[name]] for name in layer.names}
        return programs.program(verb)(layer, tuple(options.items()), {}, read, arrays)

    def _write(self, verb, pools, number, roles, arrays, reads=(), **options):
        layer = self._layers[number].only(*roles, *reads)
        written = {name: pools[layer.names[name]] for name in layer.pools_of(*roles)}
        read = {name: pools[layer.names[name]] for name in layer.pools_of(*reads)}
        # JAX returns mappings in the order of their names. In one line, for nothing to come between.
        run, names = programs.program(verb, writes=True), [layer.names[name] for name in sorted(written)]
        into, how = programs.written(pools, written, read, arrays), tuple(options.items())
        into.update(zip(names, run(layer, how, written, read, arrays).values(), strict=True))
        return programs.as_given(pools, into)


class JaxBackend:
    """Creates ``JaxOps``."""

    name = "jax_pallas"

    def create(self, plan: CachePlan, *, device: str | None = None, check: bool = False) -> JaxOps:
        """Bind the verbs to a plan and a device.

        Raises:
            BackendError: JAX has no such device, a slot is too large for 32-bit addresses, or an element code is not
                known to the encoders.
        """
        check_known((region.format for region in plan.regions), encoding.KNOWN, self.name)
        for region in plan.regions:
            if region.unit.nbytes >= 2**31:
                raise BackendError(
                    got=f"{region.unit.nbytes} bytes",
                    where=f"one {region.growth} of {region.layer}.{region.role}",
                    allowed="less than 2 GiB: JAX addresses are 32 bits wide here",
                    hint="Page the component, or lower max_tokens.",
                )
        if device is None:
            word = _word(jax.devices()[0])
            return JaxOps(plan, word, None, _kernels(plan, word))
        if device not in (*DEVICES, INTERPRETED):
            allowed = f"None or one of {(*DEVICES, INTERPRETED)} for backend='jax_pallas'"
            raise BackendError(got=device, where="device", allowed=allowed)
        try:
            target = jax.devices(device.split(":")[0])[0]
        except RuntimeError as error:
            raise BackendError(got=device, where="device", allowed=f"a device that JAX sees: {error}") from error
        return JaxOps(plan, device.split(":")[0], target, _kernels(plan, device))

    def default_layout(self, device: str | None) -> str:
        """Whole tiles on a TPU; packed, like the engines, where Triton kernels run; else one array a field."""
        device = _word(jax.devices()[0]) if device is None else device
        if device in ("tpu", INTERPRETED):
            return "tpu_tile"
        return "packed" if choice.chosen(device) == "triton" else "planar"


def _kernels(plan: CachePlan, device: str) -> str:
    """Pallas where it runs and rows are whole tiles, Triton on CUDA where it is installed, else jax.numpy."""
    if plan.layout != "tpu_tile":
        return choice.chosen(device)
    return {"tpu": "tpu", INTERPRETED: "interpret"}.get(device, "portable")


def _word(device: Any) -> str:
    """JAX's platform in kvcore's words."""
    return "cuda" if device.platform == "gpu" else device.platform
