"""Compressed entries and index keys in paged blocks: store and gather."""

import numpy as np

from kvcore.backends.reference import rows as place
from kvcore.backends.reference.encoding import DTYPES, decode
from kvcore.ops import AllEntries, Closed, SelectedEntries, StepIndex
from kvcore.plan import LayerPlan
from kvcore.pools import Pools


def store_entries(
    layer: LayerPlan,
    pools: Pools,
    index: StepIndex,
    entries: np.ndarray | None,
    index_keys: np.ndarray | None = None,
) -> Pools:
    """Encode and store entries [closed, d] that the caller compressed, request by request; index keys likewise."""
    if entries is not None:
        pools = store_role(layer, pools, index, entries, role="entries")
    if index_keys is not None:
        pools = store_role(layer, pools, index, index_keys, role="index_keys")
    return pools


def store_role(layer: LayerPlan, pools: Pools, index: StepIndex, values: np.ndarray, *, role: str) -> Pools:
    """Store the entries that the step completes in the pool of one role."""
    (region,) = layer.regions[role]
    ratio = layer.component(role).ratio
    rows = place.encode_rows(region, values, layer.global_scale(role))
    for row, (request, entry) in enumerate(zip(*closed(layer, index, count=len(values), role=role), strict=True)):
        if request >= 0 and (entry + 1) * ratio > index.stored[request]:
            place.store(pools, region, *place.locate(region, index, int(request), int(entry)), rows[row])
    return pools


def closed(layer: LayerPlan, index: StepIndex, *, count: int, role: str = "entries") -> Closed:
    """The first ``count`` entries that the step completes, in storing order; -1 where there are fewer."""
    ratio = layer.component(role).ratio
    found = [
        (request, entry)
        for request, (start, length) in enumerate(zip(index.starts, index.lengths, strict=True))
        for entry in range(start // ratio, length // ratio)
    ]
    found = (found + [(-1, -1)] * count)[:count]
    requests, entries = np.array(found, np.int32).reshape(count, 2).T
    return Closed(requests, entries)


def gather_entries(layer: LayerPlan, pools: Pools, index: StepIndex, indices: np.ndarray) -> SelectedEntries:
    """Entries by logical index, indices [T, k]; valid iff 0 <= i < the request's entries at the end of the step."""
    (region,) = layer.regions["entries"]
    component = layer.component("entries")
    values = np.zeros((*indices.shape, component.dim), DTYPES[region.format.value_code])
    valid = np.zeros(indices.shape, bool)
    for token, request in enumerate(index.request_index):
        if request < 0:
            continue
        count = int(index.lengths[request]) // component.ratio
        for nth, entry in enumerate(indices[token]):
            if 0 <= entry < count:
                stored = place.read(pools, region, index, int(request), int(entry))
                values[token, nth] = decode(region.format, stored)[0]
                valid[token, nth] = True
    return SelectedEntries(values, valid)


def gather_all_entries(
    layer: LayerPlan, pools: Pools, index: StepIndex, *, columns: int, role: str = "entries"
) -> AllEntries:
    """Every entry (``role`` entries or index_keys) of every request, as [Q, columns, d]."""
    (region,) = layer.regions[role]
    component = layer.component(role)
    requests = len(index.slots)
    values = np.zeros((requests, columns, component.dim), DTYPES[region.format.value_code])
    positions = np.full((requests, columns), -1, np.int32)
    counts = (index.lengths // component.ratio).astype(np.int32)
    for request in range(requests):
        for entry in range(min(int(counts[request]), columns)):
            stored = place.read(pools, region, index, request, entry)
            values[request, entry] = decode(region.format, stored, global_scale=layer.global_scale(role))[0]
            positions[request, entry] = entry * component.ratio
    return AllEntries(values, counts, positions)
