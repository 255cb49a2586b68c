"""The JAX backend: the verbs bound to a plan, functional, each compiled once for every kind of layer and shape.

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

from kvcore.arrays import host_view
from kvcore.backends.jax_pallas import (
    attention,
    choice,
    encoding,
    entries,
    indexer,
    kv,
    lifecycle,
    programs,
    recurrent,
    tail,
    window,
)
from kvcore.backends.jax_pallas.entries import store_entries
from kvcore.backends.jax_pallas.layer import Layer
from kvcore.backends.jax_pallas.order import read_first
from kvcore.backends.jax_pallas.runs import pool_shape
from kvcore.backends.jax_pallas.verbs import indexed, reader, turning, writer
from kvcore.errors import BackendError
from kvcore.lanes import row_lanes
from kvcore.ops import Ops, Paging, StepIndex, bounds, facade
from kvcore.ops.choices import Decided, Decision
from kvcore.ops.records import Compression, Streams
from kvcore.pools import Pools, allocate
from kvcore.spec import TAIL_OF
from kvcore.spec.codes import check_known

if TYPE_CHECKING:
    from jax import Array

    from kvcore.ops import RawRows
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


class JaxOps(Decided, Ops):
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
        self._fresh = facade.fresh_slots(plan)
        self.layers = [Layer(plan, number, kernels) for number in range(len(plan.spec.all_layers))]

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

    def index(self, host: StepIndex) -> StepIndex:
        """The step index on the device."""
        return StepIndex(*jax.device_put(tuple(host), self._target))

    def encode(self, format: str | Format, values: Array, global_scale: float = 1.0) -> Array:
        """Values [rows, dim] -> canonical rows [rows, row_bytes] uint8."""
        return programs.encode(encoding.sized(format, values.shape[1]), values, float(global_scale))

    def decode(
        self,
        format: str | Format,
        rows: Array,
        dim: int | None = None,
        global_scale: float = 1.0,
    ) -> Array:
        """Canonical rows [rows, row_bytes] -> values [rows, dim]."""
        return programs.decode(encoding.sized(format, dim), rows, float(global_scale))

    pack_page = facade.verb(encoding.pack_page)
    unpack_page = facade.verb(encoding.unpack_page)
    join = facade.verb(tail.join)
    append_window = writer(window.append_window, "window")
    append_rotated_window = writer(window.append_rotated_window, "window")
    append_tail = writer(tail.append_tail, "tail", role="tail")
    append_index_tail = writer(tail.append_tail, "index_tail", name="append_index_tail", role="index_tail")
    gather_window = reader(window.gather_window, "window")
    compress = reader(tail.compress)
    gather_entries = reader(entries.gather_entries, "entries")
    gather_all_entries = reader(entries.gather_all_entries)
    closed = indexed(entries.closed)
    index_scores = reader(indexer.index_scores, "index_keys")
    attend = reader(attention.attend, "window", "entries")
    append_kv = writer(kv.append_kv, "kv")
    gather_kv = reader(kv.gather_kv, "kv")
    mask = indexed(kv.mask)
    visible_rows = indexed(kv.visible_rows)
    from_batch = facade.verb(programs.from_batch)
    to_batch = facade.verb(programs.to_batch)
    attend_kv = reader(kv.attend_kv, "kv")
    append_state = writer(recurrent.append_state, "state")
    write_state = writer(recurrent.write_state, "state")
    read_state = reader(recurrent.read_state, "state")
    append_conv = writer(recurrent.append_conv, "conv")
    gather_conv = reader(recurrent.gather_conv, "conv")
    gather_rows = reader(lifecycle.gather_rows)
    store_rows = writer(lifecycle.store_rows)
    read_ring = reader(lifecycle.read_ring)
    restore_ring = writer(lifecycle.restore_ring)

    def select(self, scores: Array, k: int) -> Array:
        """Top k of scores [T, n] -> [T, k] int32: highest first, ties to the lowest index, -1 where score is -inf."""
        return programs.select(scores, k, self.kernels)

    def store_entries(
        self, pools: Pools, layer: int, index: StepIndex, entries: Array | None, index_keys: Array | None = None
    ) -> Pools:
        """Encode and store entries [closed, d] that the caller compressed, request by request; index keys likewise."""
        given = {"entries": entries, "index_keys": index_keys}
        writes = tuple(role for role, values in given.items() if values is not None)
        return self._write(store_entries, pools, layer, writes, {"index": index, **given})

    def _flush(self, pools, layer, index, streams, compression, *, closed=None):
        """``flush``, whose index keys may be left out."""
        closed = bounds.closed(self.plan, layer, "entries", index) if closed is None else closed
        if not closed:
            return pools
        writes = ("entries",) if streams.index_kv is None else ("entries", "index_keys")
        reads = tuple(TAIL_OF[role] for role in writes)
        arrays = {"index": index, "streams": streams, "compression": turning(compression)}
        # A launch finds on the device what closes: its trace needs no bound.
        closed = 1 if self._flushes(layer, writes) else self._bucket(closed, index)
        return self._write(tail.flush, pools, layer, writes, arrays, reads, closed=closed)

    flush = facade.of_streams(_flush, "flush")

    def _flushes(self, layer: int, roles: tuple[str, ...]) -> bool:
        """True where a flush of these roles is one launch of a Triton kernel."""
        triton = choice.verbs(self.kernels)
        tails = (TAIL_OF[role] for role in roles)
        return bool(triton and triton.flushes(self.layers[layer].only(*roles, *tails), roles))

    def append_flush(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        kv: Array,
        score: Array,
        index_kv: Array | None = None,
        index_score: Array | None = None,
        *,
        newest: int | None = None,
        closed: int | None = None,
        norm_weight: Array | None = None,
        eps: float = 1e-6,
        rope: Rope | Array | None = None,
        index_norm_weight: Array | None = None,
    ) -> Pools:
        """``flush``, then ``append_tail`` and ``append_index_tail``; one launch where kernels are Triton's."""
        roles = ("entries",) if index_kv is None else ("entries", "index_keys")
        tails = tuple(TAIL_OF[role] for role in roles)
        if self._flushes(layer, roles):
            streams = Streams(kv, score, index_kv, index_score)
            compression = turning(Compression(norm_weight, eps, rope, index_norm_weight))
            arrays = {"index": index, "streams": streams, "compression": compression}
            newest = len(index.positions) if newest is None else newest
            options = {"closed": 1, "append": True, "newest": newest}
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
                names = "kv", "score", "norm_weight"
                return [
                    self._read(
                        tail.flush_latents,
                        pools,
                        layer,
                        (role, TAIL_OF[role]),
                        {"index": index, "rope": frequencies, **dict(zip(names, streams[role], strict=True))},
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

    def reset_slots(self, pools: Pools, slots: Array) -> Pools:
        """Make slots [n] as if never used; -1 is ignored."""
        arrays = programs.written(pools, slots, [pools[name] for name in self._fresh])
        for name, fresh in self._fresh.items():
            arrays[name] = programs.reset(arrays[name], slots, fresh)
        return programs.as_given(pools, arrays)

    def poison(self, pools: Pools, slots: Array, blocks: Array) -> Pools:
        """Fill freed slots [n] and blocks [m] with 0xFF, so that a stale read is seen."""
        units = {"slot": slots, "block": blocks}
        arrays = programs.written(pools, slots, blocks, list(pools.values()))
        for region in self.plan.regions:
            for name, _ in region.buffers.values():
                arrays[name] = programs.poison(arrays[name], units[region.growth])
        return programs.as_given(pools, arrays)

    def copy_slots(self, pools: Pools, sources: Array, targets: Array) -> Pools:
        """Copy whole slots; all sources are read before any target is written."""
        return self._copy(pools, sources, targets, "slot")

    def copy_blocks(self, pools: Pools, sources: Array, targets: Array) -> Pools:
        """Copy whole blocks; all sources are read before any target is written."""
        return self._copy(pools, sources, targets, "block")

    def _copy(self, pools, sources, targets, growth):
        regions = [region for region in self.plan.regions if region.growth == growth]
        names = [name for region in regions for name, _ in region.buffers.values()]
        arrays = programs.written(pools, sources, targets, [pools[name] for name in names])
        for name in names:
            arrays[name] = programs.copy_units(arrays[name], sources, targets)
        return programs.as_given(pools, arrays)

    def digest_rows(self, raw: RawRows, salt: int) -> Array:
        """Two 32-bit lanes for every request over its rows and positions -> [Q, 2] uint32."""
        rows, positions = host_view(raw.rows), host_view(raw.positions)
        if rows is not None and positions is not None:
            # XLA does not make vectors of it on a CPU.
            return jax.device_put(row_lanes(rows, positions, salt).astype(np.uint32), self._target)
        return programs.digest(raw, np.uint32(salt))

    def _bucket(self, count: int, index: StepIndex) -> int:
        return programs.bucket(count, index, programs.SMALLEST_BUCKET[self.kernels == "interpret"])

    def _read(self, verb, pools, number, roles, arrays, **options):
        layer = self.layers[number].only(*roles)
        read = {name: pools[layer.names[name]] for name in layer.names}
        return programs.program(verb)(layer, tuple(sorted(options.items())), {}, read, arrays)

    def _write(self, verb, pools, number, roles, arrays, reads=(), **options):
        layer = self.layers[number].only(*roles, *reads)
        written = {name: pools[layer.names[name]] for name in layer.pools_of(*roles)}
        read = {name: pools[layer.names[name]] for name in layer.pools_of(*reads)}
        # JAX returns mappings in the order of their names. In one line, for nothing to come between.
        run, names = programs.program(verb, writes=True), [layer.names[name] for name in sorted(written)]
        into, how = programs.written(pools, written, read, arrays), tuple(sorted(options.items()))
        into.update(zip(names, run(layer, how, written, read, arrays).values(), strict=True))
        return programs.as_given(pools, into)


class JaxBackend:
    """Creates ``JaxOps``."""

    name = "jax_pallas"

    def create(self, plan: CachePlan, *, device: str | None = None) -> JaxOps:
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
