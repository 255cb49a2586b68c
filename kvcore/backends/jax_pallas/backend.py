"""The JAX backend: the verbs bound to a plan, functional, each compiled once for every kind of layer and shape.

A verb takes pools and returns new ones. Called eagerly it donates the arrays that it writes, so that XLA updates them
in place: the arrays passed in are dead afterwards. Inside the caller's own ``jit`` it is traced in, and the caller
donates at the outermost ``jit``, the only place where donation counts.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvcore.arrays import host_view
from kvcore.backends.jax_pallas import (
    attention,
    buckets,
    canary,
    choice,
    encoding,
    entries,
    host_memory,
    indexer,
    kv,
    lifecycle,
    programs,
    reasons,
    recurrent,
    tail,
    verbs,
    whole,
    window,
)
from kvcore.backends.jax_pallas.block_tables import DeviceTables
from kvcore.backends.jax_pallas.choice import INTERPRETED
from kvcore.backends.jax_pallas.layer import Layer
from kvcore.backends.jax_pallas.runs import pool_shape
from kvcore.backends.jax_pallas.verbs import indexed, reader, writer
from kvcore.digest import row_lanes
from kvcore.errors import BackendError
from kvcore.ops import Ops, Paging, StepIndex, facade
from kvcore.ops.choices import Decided, Decision, strict
from kvcore.pools import Pools, allocate
from kvcore.spec.codes import check_known

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from jax import Array

    from kvcore.ops import RawRows, Strip
    from kvcore.plan import CachePlan
    from kvcore.spec import Format
    from kvcore.step import BlockTables, IndexShape, StepNumbers

DEVICES = ("tpu", "cuda", "cpu")

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
        why_portable: why no kernels run, "" where some do.
    """

    in_place = False
    in_trace = staticmethod(programs.in_trace)

    def __init__(self, plan: CachePlan, device: str, target: Any, kernels: str = "portable") -> None:
        self.plan = plan
        self.device = device
        self.kernels = kernels
        self._target = target
        self._tables = DeviceTables(target)
        self.place = buckets.Place(target, here=device == "cpu", whole=kernels == "interpret")
        self.twins = buckets.Twins(self.place)
        self.plain_class = type(jax.device_put(np.int32(0), target))
        self.memory = host_memory.Memory(self.plain_class)
        self.why_portable = choice.why_portable(plan.layout, device) if kernels == "portable" else ""
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
        """Pallas, Triton through jax-triton, or ``jax.numpy``, and why."""
        return reasons.decide(self, layer, verb)

    def allocate(self) -> Pools:
        """Fresh pools for the plan."""
        blank: dict[str, Any] = {}

        def make(units, size, fresh, region, buffer):
            shape, dtype = pool_shape(region, buffer, units)
            if fresh is None and not self.place.here:
                return blank.setdefault(region.buffers[buffer][0], (shape, dtype))
            unit = np.zeros(shape[1:], dtype) if fresh is None else np.frombuffer(fresh, dtype).reshape(shape[1:])
            return jax.device_put(np.broadcast_to(unit, shape), self._target, may_alias=False)

        pools = allocate(self.plan, make)
        if not blank:
            return pools
        # One program makes all of them: of hundreds, each would be compiled and launched by itself.
        with nullcontext() if self._target is None else jax.default_device(self._target):
            made = programs.zeros(tuple(blank.values()))
        return pools.replace(dict(zip(blank, made, strict=True)))

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

    def copied(self, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """Copies of rows that wait: the caller may give away its own."""
        if self.place.here and buckets.is_known(arrays):  # JAX's own copy is compiled for every shape
            return tuple(jax.device_put([np.array(array) for array in arrays], self._target))
        return copy.deepcopy(arrays)

    def index(self, host: StepIndex) -> StepIndex:
        """The step index on the device."""
        found = self._sent(host)
        return self.twins.note(found, lambda shape: self._sent(buckets.padded(host, shape)))

    def kept_index(self, numbers: StepNumbers, shape: IndexShape, tables: BlockTables) -> StepIndex:
        """The same of a step whose block tables are kept on the host: what changed of them goes along."""
        found = self._tables.index(numbers, shape, tables)
        return self.twins.note(found, lambda larger: self._tables.index(numbers, larger, tables))

    def _sent(self, host: StepIndex) -> StepIndex:
        return StepIndex(*jax.device_put(tuple(host), self._target))

    def encode(self, format: str | Format, values: Array, global_scale: float = 1.0) -> Array:
        """Values [rows, dim] -> canonical rows [rows, row_bytes] uint8."""
        return self._by_rows(programs.encode, encoding.sized(format, values.shape[1]), values, float(global_scale))

    def decode(
        self,
        format: str | Format,
        rows: Array,
        dim: int | None = None,
        global_scale: float = 1.0,
    ) -> Array:
        """Canonical rows [rows, row_bytes] -> values [rows, dim]."""
        return self._by_rows(programs.decode, encoding.sized(format, dim), rows, float(global_scale))

    def _by_rows(self, run: Any, format: Format, rows: Array, scale: float) -> Array:
        count = len(rows)
        if self.place.whole or not buckets.is_known(rows):
            return run(format, rows, scale)
        return self.place.trimmed(run(format, self.place.lengthen(rows, buckets.rounded(count)), scale), count)

    pack_page = facade.verb(encoding.pack_page)
    unpack_page = facade.verb(encoding.unpack_page)
    join = facade.verb(tail.join)
    append_window = writer(window.append_window, "window")
    append_rotated_window = writer(window.append_rotated_window, "window")
    append_tail = writer(tail.append_tail, "tail", role="tail")
    append_index_tail = writer(tail.append_tail, "index_tail", name="append_index_tail", role="index_tail")
    gather_window = reader(window.gather_window, "window", by="requests")
    compress = reader(tail.compress, by=None)
    gather_entries = reader(entries.gather_entries, "entries", by="tokens")
    gather_all_entries = reader(entries.gather_all_entries, by="requests")
    closed = indexed(entries.closed, by=None)
    index_scores = reader(indexer.index_scores, "index_keys", by="tokens")
    attend = reader(attention.attend, "window", "entries", by="tokens")
    append_kv = writer(kv.append_kv, "kv", "kv_tail")
    gather_kv = reader(kv.gather_kv, "kv", "kv_tail", by="requests")
    mask = indexed(kv.mask, by="tokens")
    visible_rows = indexed(kv.visible_rows, by=("requests", "tokens"))
    from_batch = verbs.from_batch
    to_batch = verbs.to_batch
    attend_kv = reader(kv.attend_kv, "kv", "kv_tail", by="tokens")
    append_state = writer(recurrent.append_state, "state")
    write_state = writer(recurrent.write_state, "state", axes={"states": "requests"})
    select_state = writer(recurrent.select_state, "state")
    read_state = reader(recurrent.read_state, "state", by="requests")
    append_conv = writer(recurrent.append_conv, "conv")
    gather_conv = reader(recurrent.gather_conv, "conv", by="requests")
    gather_rows = reader(lifecycle.gather_rows, by="requests")
    store_rows = writer(lifecycle.store_rows)
    read_ring = reader(lifecycle.read_ring, by="tokens")
    restore_ring = writer(lifecycle.restore_ring)

    watch = canary.watch
    rotated_rows = verbs.rotated_rows
    select = verbs.select
    index_select = verbs.index_select
    whole_layer = whole.whole_layer
    store_entries = verbs.store_entries
    flush = facade.of_streams(verbs.flush)
    append_flush = verbs.append_flush
    reset_slots = verbs.reset_slots
    poison = verbs.poison
    copy_slots = verbs.copier("slot")
    copy_blocks = verbs.copier("block")

    def move_strips(
        self, pools: Pools, pages: Array, strips: Sequence[Strip], units: Array, *, store: bool = False
    ) -> bool:
        """A request's rows between pools and pages that both lie in the host's memory."""
        if store:
            return host_memory.store_strips(self.memory, self.plan, pools, pages, strips, units)
        views = self.host_pools({name: pools[name] for name in host_memory.names_of(self.plan, strips)})
        return super().move_strips(views, pages, strips, units)

    def alone(self) -> AbstractContextManager[None]:
        """Of verbs that write to a cache's pools with nobody seeing them in between; see ``host_memory.Memory``."""
        return self.memory.alone()

    def host_pools(self, pools: Any) -> Any:
        """The pools as NumPy's arrays where they lie in the host's memory, to be read; elsewhere as they are."""
        views = self.memory.read(pools)
        return pools if views is None else views

    def digest_rows(self, raw: RawRows, salt: int) -> Array:
        """Two 32-bit lanes for every request over its rows and positions -> [Q, 2] uint32."""
        rows, positions = host_view(raw.rows), host_view(raw.positions)
        if rows is not None and positions is not None:
            # XLA does not make vectors of it on a CPU.
            return jax.device_put(row_lanes(rows, positions, salt).astype(np.uint32), self._target)
        return programs.digest(raw, np.uint32(salt))


def made(plan: CachePlan, device: str, target: Any = None, named: str = "") -> JaxOps:
    """The verbs for a kind of device, none of which need be here.

    Args:
        plan: what the pools are.
        device: ``tpu``, ``cuda`` or ``cpu``.
        target: a device of JAX, or None: wherever the arrays lie.
        named: the word by which kernels are chosen, where that is another.

    Raises:
        BackendError: a slot is too large for 32-bit addresses, or an element code is not known to the encoders.
    """
    check_known((region.format for region in plan.regions), encoding.KNOWN, JaxBackend.name)
    for region in plan.regions:
        if region.unit.nbytes >= 2**31:
            raise BackendError(
                got=f"{region.unit.nbytes} bytes",
                where=f"one {region.growth} of {region.layer}.{region.role}",
                allowed="less than 2 GiB: JAX addresses are 32 bits wide here",
                hint="Page the component, or lower max_tokens.",
            )
    ops = JaxOps(plan, device, target, choice.kernels_of(plan, named or device))
    if strict():
        ops.check_strict()
    return ops


class JaxBackend:
    """Creates ``JaxOps``."""

    name = "jax_pallas"

    def create(self, plan: CachePlan, *, device: str | None = None) -> JaxOps:
        """Bind the verbs to a plan and a device.

        Raises:
            BackendError: JAX has no such device, a slot is too large for 32-bit addresses, or an element code is not
                known to the encoders.
        """
        if device is None:
            return made(plan, choice.word(jax.devices()[0]))
        if device not in (*DEVICES, INTERPRETED):
            allowed = f"None or one of {(*DEVICES, INTERPRETED)} for backend='jax_pallas'"
            raise BackendError(got=device, where="device", allowed=allowed)
        try:
            target = jax.devices(device.split(":")[0])[0]
        except RuntimeError as error:
            raise BackendError(got=device, where="device", allowed=f"a device that JAX sees: {error}") from error
        return made(plan, device.split(":")[0], target, device)

    def default_layout(self, device: str | None) -> str:
        """Whole tiles on a TPU; packed, like the engines, where Triton kernels run; else one array a field."""
        device = choice.word(jax.devices()[0]) if device is None else device
        if device in ("tpu", INTERPRETED):
            return "tpu_tile"
        return "packed" if choice.chosen(device) == "triton" else "planar"
