"""Compressed entries and index keys in paged blocks: store and gather."""

import torch

from kvcore.backends.torch_triton import rows as place
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
    rows = ops.encode_rows(region, values, ops.global_scale(layer, role))
    request, entry = ops.closed(layer, index, len(values), role)
    taken_over = (entry + 1) * ops.component(layer, role).ratio <= place.of_request(index.stored, request)
    place.store(pools, region, *place.locate(region, index, torch.where(taken_over, -1, request), entry), rows)


def closed(ops, layer, index, count=None, role="entries"):
    """The first ``count`` entries that the step completes, in storing order; -1 where there are fewer."""
    ratio = ops.component(layer, role).ratio
    count = bounds.closed(ops.plan, layer, role, index) if count is None else count
    first = index.starts // ratio
    ends = (index.lengths // ratio - first).cumsum(0, dtype=torch.int32)
    row = torch.arange(count, dtype=torch.int32, device=first.device)
    # The request of a row is the first whose entries end beyond it.
    request = torch.searchsorted(ends, row, right=True, out_int32=True)
    request = torch.where(request < len(ends), request, -1)
    begins = ends - (index.lengths // ratio - first)
    entry = place.of_request(first, request) + row - place.of_request(begins, request)
    return Closed(request, torch.where(request >= 0, entry, -1))


def gather_entries(ops, pools, layer, index, indices):
    """Entries by logical index, indices [T, k]; valid iff 0 <= i < the request's entries at the end of the step."""
    (region,) = ops.plan.region(layer, "entries")
    component = ops.component(layer, "entries")
    request = index.request_index[:, None]
    counts = place.of_request(index.lengths, request) // component.ratio
    valid = (request >= 0) & (indices >= 0) & (indices < counts)
    stored = place.read(pools, region, index, request, torch.where(valid, indices, -1))
    return SelectedEntries(place.blank(ops.decode_rows(region, stored)[:, :, 0], valid), valid)


def gather_all_entries(ops, pools, layer, index, *, columns=None, role="entries"):
    """Every entry (``role`` entries or index_keys) of every request, as [Q, columns, d]."""
    (region,) = ops.plan.region(layer, role)
    component = ops.component(layer, role)
    columns = bounds.columns(ops.plan, layer, role, index) if columns is None else columns
    counts = index.lengths // component.ratio
    entries = place.numbers_from(torch.zeros_like(counts), counts, columns)
    requests = torch.arange(len(index.slots), device=counts.device)[:, None]
    stored = place.read(pools, region, index, requests, entries)
    values = ops.decode_rows(region, stored, ops.global_scale(layer, role))[:, :, 0]
    positions = torch.where(entries >= 0, entries * component.ratio, -1)
    return AllEntries(place.blank(values, entries >= 0), counts.int(), positions.int())
