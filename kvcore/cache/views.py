"""A layer's memory where it lies: raw buffers for outside kernels, and rows that need not be copied to be read."""

from typing import Any

from kvcore.cache.ring_writes import AT_ONCE, RingWrites
from kvcore.errors import StepError
from kvcore.ops import Array, PagedView, RingView, StepIndex
from kvcore.ops.arguments import UNKNOWN
from kvcore.plan import Region
from kvcore.spec import KV, State, Window

Views = tuple[Array, Array]


def ring_view(writes: RingWrites) -> RingView:
    """``LayerHandle.window_view``."""
    writes.component("window", Window)
    if "window" in writes.waiting:
        raise StepError(
            got=f"{writes.context.most_new} new tokens of one request",
            where=f"{writes.where}.window_view",
            allowed="at most 1 + max_draft_tokens",
            hint="Use attend, or commit first: a long step's rows overwrite what its own queries need.",
        )
    (region,) = writes.context.plan.layers[writes.number].regions["window"]
    index, _ = writes.readable("window")
    buffers = _buffers(writes, region)
    return RingView(region.format, region.unit, buffers, index.slots, region.rows, index.lengths)


def paged_view(writes: RingWrites, role: str, index: StepIndex) -> PagedView:
    """The same of a role with blocks, up to the lengths of an index."""
    (region,) = writes.context.plan.layers[writes.number].regions[role]
    counts = index.lengths // writes.component(role).ratio
    return PagedView(region.format, region.unit, _buffers(writes, region), index.block_table, region.rows, counts)


def _buffers(writes: RingWrites, region: Region) -> dict[str, Array]:
    return {buffer: writes.context.pools[name] for buffer, (name, _) in region.buffers.items()}


def kv_view(writes: RingWrites) -> Views | None:
    """``LayerHandle.kv_view``."""
    kv, context = writes.component("kv", KV), writes.context
    if "kv" not in writes.own or writes.unwritten("kv") is not None:
        return None
    columns = context.kv_columns(kv, ended=True)
    return context.ops.kv_view(context.pools, writes.number, context.index, columns=columns)


def append_kv_view(writes: RingWrites, k: Any, v: Any) -> Any:
    """``LayerHandle.append_kv_view`` in one verb; ``UNKNOWN``, with nothing done, where its rows must wait."""
    kv, context = writes.component("kv", KV), writes.context
    memo, key, given = context.memo, ("append_kv_view", kv), (k, v)
    if context.traced is not None:
        context.check_outside("append_kv_view", given)
    if key not in memo:
        at_once = kv.tail is None and writes.writing("kv") == AT_ONCE
        memo[key] = at_once, context.kv_columns(kv, ended=True)
    at_once, columns = memo[key]
    if not at_once or "kv" in writes.own:
        return UNKNOWN
    passes = None if context.check else context.key_of("kv", writes.number, given)
    if passes not in context.passed:
        k, v = writes.checked("kv", given)
        context.passes(passes, given, (k, v))
    at = context.pools, writes.number, context.index
    pools, found = context.ops.append_kv_view(*at, k, v, columns=columns)
    context.replace(pools)
    writes.own["kv"] = k, v
    return found


def state_view(writes: RingWrites) -> Array:
    """``LayerHandle.state_view``."""
    check_state(writes, "state_view")
    context, (region,) = writes.context, writes.context.plan.layers[writes.number].regions["state"]
    rows, view = context.rows, getattr(context.ops, "state_view", None)
    if view is not None and rows and len(rows) == context.index.slots.shape[0]:
        first, ring = rows[0], region.rows
        place = (first.start - 1) % ring
        if all(
            row.start and row.slot == first.slot + number and (row.start - 1) % ring == place
            for number, row in enumerate(rows)
        ):
            found = view(context.pools, writes.number, first.slot, len(rows), place)
            if found is not None:
                return found
    return context.ops.read_state(context.pools, writes.number, context.index)


def check_state(writes: RingWrites, verb: str) -> None:
    """Refuse to read a state that is written already, or that belongs to no length."""
    writes.component("state", State)
    if "state" in writes.own:
        raise StepError(got=f"{verb} after the write", where=writes.where, allowed=f"{verb}, then write_state")
    if writes.context.stateless:
        request = writes.context.stateless[0]
        raise StepError(
            got=f"request {request.id}, of whose {request.length} tokens there is no state",
            where=writes.where,
            allowed="a request whose last step wrote this layer's state",
            hint="Truncate it to a length that main layers were stepped to.",
        )
