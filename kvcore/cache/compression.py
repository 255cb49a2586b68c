"""The compressor's part in a layer's step: what closes is pooled, normed, rotated and stored, once its rows are there.

A flush reads rows of tails that its ``RingWrites`` hold back for it, and those of the step. Its options are looked at
once for calls that are alike.
"""

from typing import Any

import numpy as np

from kvcore.cache.ring_writes import NO_STREAMS, RingWrites
from kvcore.errors import StepError
from kvcore.ops import Array
from kvcore.ops.arguments import check_float, check_number, check_rope, check_weight
from kvcore.spec import TAIL_OF, Entries, IndexKeys, Tail, Window


def flushed_roles(writes: RingWrites) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Roles that a flush of the layer stores, and the tails that it reads."""
    memo = writes.context.plan.layers[writes.number].memo
    if "flushed" not in memo:
        spec = writes.spec
        roles = tuple(
            role for role, tail in TAIL_OF.items() if None not in (getattr(spec, tail, None), getattr(spec, role, None))
        )
        memo["flushed"] = roles, tuple(TAIL_OF[role] for role in roles)
    return memo["flushed"]


def own_entries(writes: RingWrites, verb: str) -> Entries:
    """The layer's entries, whose pool must be its own."""
    entries: Entries = writes.component("entries", Entries)
    if entries.shared_from is not None:
        raise StepError(
            got=f"{verb} on a layer that shares layer {entries.shared_from}'s pool",
            where=writes.where,
            allowed=f"{verb} on step.layer({entries.shared_from})",
        )
    return entries


def tail_rows(writes: RingWrites, role: str, verb: str) -> tuple[Array, ...]:
    """The step's own tail rows (kv, score); empty ones in a step without tokens."""
    writes.require(role, verb)
    if role in writes.own:
        return writes.own[role]
    empty = writes.context.ops.asarray(np.zeros((0, getattr(writes.spec, role).width), np.float32))
    return empty, empty


def rotation(writes: RingWrites, rope: Any, norm_weight: Any, eps: Any) -> dict[str, Any]:
    """How window rows are rotated on their way, checked."""
    context, dim = writes.context, writes.component("window", Window).dim
    context.check_outside("append_window", (rope, norm_weight))
    found = {"rope": check_rope(context.ops, rope, "append_window: rope", dim)}
    if norm_weight is not None:
        found["norm_weight"] = check_weight(context.ops, norm_weight, "append_window: norm_weight", dim)
        found["eps"] = check_number(eps, "append_window: eps")
    return found


def flush_options(
    writes: RingWrites, entries: Entries, norm_weight: Any, eps: Any, rope: Any, index_norm_weight: Any
) -> tuple[Any, ...]:
    """The same as ``flush`` passes on, checked."""
    ops, weights = writes.context.ops, {"entries": norm_weight, "index_keys": index_norm_weight}
    narrowest = entries.dim
    for role in flushed_roles(writes)[0]:
        dim = getattr(writes.spec, role).dim
        narrowest = min(narrowest, dim)
        if weights[role] is not None:
            weights[role] = check_weight(ops, weights[role], f"flush: norm weight of {role}", dim)
    eps, rope = check_number(eps, "flush: eps"), check_rope(ops, rope, "flush: rope", narrowest)
    return weights["entries"], eps, rope, weights["index_keys"]


def flush(writes: RingWrites, given: dict[str, Any]) -> None:
    """``LayerHandle.flush``, with its options by name and in its order."""
    context = writes.context
    context.check_open()
    flushed, tails = flushed_roles(writes)
    if writes.flush_again(tails, given):
        writes.stored.update(flushed)
        return
    how = tuple(given.values())
    key = context.key_of("flush", writes.number, how)
    if key not in context.passed:
        entries = own_entries(writes, "flush")
        context.check_outside("flush", (given["norm_weight"], given["rope"], given["index_norm_weight"]))
        writes.component("tail", Tail)
        checked = flush_options(writes, entries, *how)
        context.passes(key, how, checked)
        how = checked
    streams: list[Array | None] = []
    for tail in TAIL_OF.values():
        streams += tail_rows(writes, tail, "flush") if tail in tails else NO_STREAMS
    closed = context.closed_count(writes.spec.entries.ratio)  # type: ignore[union-attr]
    at_once = writes.flush(tails, streams, closed=closed, **dict(zip(given, how, strict=True)))
    writes.stored.update(flushed)
    if at_once:
        options = writes.flush_options(given)
        writes.note("append_flush", tuple(streams), options, (*streams, context.most_new, None, *how))


def store_entries(writes: RingWrites, entries: Any, index_keys: Any) -> None:
    """``LayerHandle.store_entries``."""
    context, spec = writes.context, own_entries(writes, "store_entries")
    context.check_outside("store_entries", (entries, index_keys))
    count = context.closed_count(spec.ratio)
    entries = check_float(context.ops, entries, "store_entries: entries", (count, spec.dim))
    context.check_values(entries, "store_entries: entries", spec)
    if index_keys is not None:
        keys = writes.component("index_keys", IndexKeys)
        index_keys = check_float(context.ops, index_keys, "store_entries: index_keys", (count, keys.dim))
        context.check_values(index_keys, "store_entries: index_keys", keys)
    context.replace(context.ops.store_entries(context.pools, writes.number, context.index, entries, index_keys))
    writes.stored |= {"entries"} if index_keys is None else {"entries", "index_keys"}
    writes.settle()


def compress(writes: RingWrites, norm_weight: Any, eps: Any) -> Array:
    """``LayerHandle.compress``."""
    context, entries = writes.context, own_entries(writes, "compress")
    writes.component("tail", Tail)
    kv, score = tail_rows(writes, "tail", "compress")
    if norm_weight is not None:
        norm_weight = check_weight(context.ops, norm_weight, "compress: norm_weight", entries.dim)
    at = context.pools, writes.number, context.index
    closed, eps = context.closed_count(entries.ratio), check_number(eps, "compress: eps")
    return context.ops.compress(*at, kv, score, closed=closed, norm_weight=norm_weight, eps=eps)
