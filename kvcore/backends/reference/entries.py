"""Compressed entries and index keys in paged blocks: store and gather."""

import numpy as np

from kvcore.backends.reference import rows as place
from kvcore.backends.reference.encoding import DTYPES
from kvcore.ops import AllEntries, Closed, SelectedEntries, bounds


def store_entries(ops, pools, layer, index, entries, index_keys=None):
    """Encode and store entries [closed, d] that the caller compressed, request by request; index keys likewise."""
    if entries is not None:
        ops.store_role(pools, layer, "entries", index, entries)
    if index_keys is not None:
        ops.store_role(pools, layer, "index_keys", index, index_keys)
    return pools


def store_role(ops, pools, layer, role, index, values):
    """Store the entries that the step completes in the pool of one role."""
    (region,) = ops.plan.region(layer, role)
    ratio = ops.component(layer, role).ratio
    rows = ops.encode_rows(region, values, ops.global_scale(layer, role))
    for row, (request, entry) in enumerate(zip(*ops.closed(layer, index, len(values), role), strict=True)):
        if request >= 0 and (entry + 1) * ratio > index.stored[request]:
            place.store(pools, region, *place.locate(region, index, int(request), int(entry)), rows[row])


def closed(ops, layer, index, count=None, role="entries"):
    """The first ``count`` entries that the step completes, in storing order; -1 where there are fewer."""
    ratio = ops.component(layer, role).ratio
    count = bounds.closed(ops.plan, layer, role, index) if count is None else count
    found = [
        (request, entry)
        for request, (start, length) in enumerate(zip(index.starts, index.lengths, strict=True))
        for entry in range(start // ratio, length // ratio)
    ]
    found = (found + [(-1, -1)] * count)[:count]
    requests, entries = np.array(found, np.int32).reshape(count, 2).T
    return Closed(requests, entries)


def gather_entries(ops, pools, layer, index, indices):
    """Entries by logical index, indices [T, k]; valid iff 0 <= i < the request's entries at the end of the step."""
    (region,) = ops.plan.region(layer, "entries")
    component = ops.component(layer, "entries")
    values = np.zeros((*indices.shape, component.dim), DTYPES[region.format.value_code])
    valid = np.zeros(indices.shape, bool)
    for token, request in enumerate(index.request_index):
        if request < 0:
            continue
        count = int(index.lengths[request]) // component.ratio
        for pick, entry in enumerate(indices[token]):
            if 0 <= entry < count:
                stored = place.read(pools, region, index, int(request), int(entry))
                values[token, pick] = ops.decode(region.format, stored)[0]
                valid[token, pick] = True
    return SelectedEntries(values, valid)


def gather_all_entries(ops, pools, layer, index, *, columns=None, role="entries"):
    """Every entry (``role`` entries or index_keys) of every request, as [Q, columns, d]."""
    (region,) = ops.plan.region(layer, role)
    component = ops.component(layer, role)
    columns = bounds.columns(ops.plan, layer, role, index) if columns is None else columns
    requests = len(index.slots)
    values = np.zeros((requests, columns, component.dim), DTYPES[region.format.value_code])
    positions = np.full((requests, columns), -1, np.int32)
    counts = (index.lengths // component.ratio).astype(np.int32)
    for request in range(requests):
        for entry in range(min(int(counts[request]), columns)):
            stored = place.read(pools, region, index, request, entry)
            values[request, entry] = ops.decode(region.format, stored, global_scale=ops.global_scale(layer, role))[0]
            positions[request, entry] = entry * component.ratio
    return AllEntries(values, counts, positions)
