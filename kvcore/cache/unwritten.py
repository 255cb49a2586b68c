"""Paged rows that a step leaves out: NaN is seen, and never taken for the bytes of a block's last owner."""

from typing import Any

import numpy as np

from kvcore.cache.ring_writes import RingWrites


def fill_unwritten(writes: RingWrites) -> None:
    """Store NaN for entries that close and were not stored, and for keys and values that a draft layer did not get."""
    context, kv, number = writes.context, writes.spec.kv, writes.number
    tokens = len(context.index.positions) if kv is not None and kv.growth == "block" else 0
    if kv is not None and "kv" not in writes.own and tokens:
        shapes = ((tokens, part.heads, part.format.dim or 0) for part in kv.parts)
        k, v = (context.ops.asarray(np.full(shape, np.nan, np.float32)) for shape in shapes)
        context.replace(context.ops.append_kv(context.pools, number, context.index, k, v))
    unstored = [] if writes.stored.issuperset(writes.spec.compressed) else writes.unstored()
    if unstored:
        blank: dict[str, Any] = {}
        for role in unstored:
            component = getattr(writes.spec, role)
            shape = context.closed_count(component.ratio), component.dim
            blank[role] = context.ops.asarray(np.full(shape, np.nan, np.float32))
        entries, keys = blank.get("entries"), blank.get("index_keys")
        context.replace(context.ops.store_entries(context.pools, number, context.index, entries, keys))
