"""Compressed entries and index keys in paged blocks: store and gather."""

import torch

from kvcore.backends.torch_triton import rows as place
from kvcore.backends.torch_triton.layer import Layer
from kvcore.ops import AllEntries, Closed, SelectedEntries, StepIndex
from kvcore.pools import Pools


def store_entries(
    layer: Layer,
    pools: Pools,
    index: StepIndex,
    entries: torch.Tensor | None,
    index_keys: torch.Tensor | None = None,
) -> Pools:
    """Encode and store entries [closed, d] that the caller compressed, request by request; index keys likewise."""
    if entries is not None:
        layer.ops.store_role(pools, layer.number, "entries", index, entries)
    if index_keys is not None:
        layer.ops.store_role(pools, layer.number, "index_keys", index, index_keys)
    return pools


def store_role(layer: Layer, pools: Pools, index: StepIndex, values: torch.Tensor, *, role: str) -> Pools:
    """Store the entries that the step completes in the pool of one role."""
    (region,) = layer.regions[role]
    rows = place.encode_rows(region, values, layer.global_scale(role))
    request, entry = closed(layer, index, count=len(values), role=role)
    taken_over = (entry + 1) * layer.component(role).ratio <= place.of_request(index.stored, request)
    return place.store(pools, region, *place.locate(region, index, torch.where(taken_over, -1, request), entry), rows)


def closed(layer: Layer, index: StepIndex, *, count: int, role: str = "entries") -> Closed:
    """The first ``count`` entries that the step completes, in storing order; -1 where there are fewer."""
    ratio = layer.component(role).ratio
    first = index.starts // ratio
    ends = (index.lengths // ratio - first).cumsum(0, dtype=torch.int32)
    row = torch.arange(count, dtype=torch.int32, device=first.device)
    # The request of a row is the first whose entries end beyond it.
    request = torch.searchsorted(ends, row, right=True, out_int32=True)
    request = torch.where(request < len(ends), request, -1)
    begins = ends - (index.lengths // ratio - first)
    entry = place.of_request(first, request) + row - place.of_request(begins, request)
    return Closed(request, torch.where(request >= 0, entry, -1))


def gather_entries(layer: Layer, pools: Pools, index: StepIndex, indices: torch.Tensor) -> SelectedEntries:
    """Entries by logical index, indices [T, k]; valid iff 0 <= i < the request's entries at the end of the step."""
    (region,) = layer.regions["entries"]
    component = layer.component("entries")
    request = index.request_index[:, None]
    counts = place.of_request(index.lengths, request) // component.ratio
    valid = (request >= 0) & (indices >= 0) & (indices < counts)
    stored = place.read(pools, region, index, request, torch.where(valid, indices, -1))
    return SelectedEntries(place.blank(place.decode_rows(region, stored)[:, :, 0], valid), valid)


def gather_all_entries(
    layer: Layer, pools: Pools, index: StepIndex, *, columns: int, role: str = "entries"
) -> AllEntries:
    """Every entry (``role`` entries or index_keys) of every request, as [Q, columns, d]."""
    (region,) = layer.regions[role]
    component = layer.component(role)
    counts = index.lengths // component.ratio
    entries = place.numbers_from(torch.zeros_like(counts), counts, columns)
    requests = torch.arange(len(index.slots), device=counts.device)[:, None]
    stored = place.read(pools, region, index, requests, entries)
    values = place.decode_rows(region, stored, layer.global_scale(role))[:, :, 0]
    positions = torch.where(entries >= 0, entries * component.ratio, -1)
    return AllEntries(place.blank(values, entries >= 0), counts.int(), positions.int())
