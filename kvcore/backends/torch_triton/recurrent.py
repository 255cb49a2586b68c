"""Recurrent layers: the states that tokens go on from, and a short convolution's last inputs."""

import torch

from kvcore.backends.torch_triton import encoding
from kvcore.backends.torch_triton import rows as place
from kvcore.backends.torch_triton.layer import Layer
from kvcore.ops import StepIndex
from kvcore.pools import Pools


def append_state(layer: Layer, pools: Pools, index: StepIndex, states: torch.Tensor) -> Pools:
    """Store the state after every token of the step, [T, heads, key_dim, value_dim], as far as the ring has room."""
    (region,) = layer.regions["state"]
    return place.append(pools, region, index, place.encode_rows(region, states))


def write_state(
    layer: Layer, pools: Pools, index: StepIndex, states: torch.Tensor, *, newest: int | None = None
) -> Pools:
    """Store the state after every request's last token, [Q, heads, key_dim, value_dim]; NaN for its other tokens."""
    (region,) = layer.regions["state"]
    columns = min(region.rows, len(index.positions) if newest is None else newest)
    if not columns or not len(states):
        return pools
    rows = place.encode_rows(region, states)[:, None]
    if columns > 1:
        none = place.encode_rows(region, torch.full_like(states[:1], torch.nan))[:, None]
        rows = torch.cat([rows, none.expand(len(rows), columns - 1, -1, -1)], dim=1)
    positions = index.lengths[:, None] - 1 - torch.arange(columns, device=rows.device)
    positions = torch.where(positions >= index.starts[:, None], positions, -1)
    requests = torch.arange(len(positions), device=rows.device)[:, None]
    unit, row = place.locate(region, index, requests, positions)
    return place.store(pools, region, unit.flatten(), row.flatten(), rows.flatten(0, 1))


def select_state(layer: Layer, pools: Pools, index: StepIndex, states: torch.Tensor, taken: torch.Tensor) -> Pools:
    """Of the states after every token, [T, ...], store that after each request's first ``taken``; NaN before it."""
    (region,) = layer.regions["state"]
    if not len(states):
        return pools
    request, positions = index.request_index, index.positions
    length = place.of_request(index.starts + taken.to(index.starts.dtype), request)
    rows = place.encode_rows(region, states)
    none = place.encode_rows(region, torch.full_like(states[:1], torch.nan))
    rows = torch.where((positions == length - 1)[:, None, None], rows, none)
    kept = (positions < length) & (positions >= length - region.rows)
    unit, row = place.locate(region, index, request, torch.where(kept, positions, -1))
    return place.store(pools, region, unit, row, rows)


def read_state(layer: Layer, pools: Pools, index: StepIndex) -> torch.Tensor:
    """The states that the step's tokens go on from, [Q, heads, key_dim, value_dim]; zeros where there is no token."""
    (region,) = layer.regions["state"]
    found = _before(pools, region, index, 1)
    return found.reshape(len(index.slots), *layer.component("state").shape)


def state_view(layer: Layer, pools: Pools, slot: int, count: int, row: int) -> torch.Tensor | None:
    """Row ``row`` of the rings of ``count`` slots from ``slot`` on as the pool's memory; None: only as a copy."""
    (region,) = layer.regions["state"]
    if not region.format.is_plain or (region.heads > 1 and region.steps[1] != 1):
        return None
    (field,) = region.unit.places
    pool, dtype = pools[region.buffers[field.buffer][0]], encoding.DTYPES[region.format.value_code]
    size, start = region.heads * field.nbytes, field.base + row * region.heads * field.stride
    whole = all(number % dtype.itemsize == 0 for number in (pool.stride(0), pool.storage_offset(), start))
    if field.split or field.stride != field.nbytes or not whole:
        return None
    return pool[slot : slot + count, start : start + size].view(dtype).unflatten(1, layer.component("state").shape)


def append_conv(layer: Layer, pools: Pools, index: StepIndex, rows: torch.Tensor) -> Pools:
    """Store the step's inputs [T, channels]; only each ring's last ones are written."""
    (region,) = layer.regions["conv"]
    return place.append(pools, region, index, place.encode_rows(region, rows))


def gather_conv(layer: Layer, pools: Pools, index: StepIndex) -> torch.Tensor:
    """The inputs right before the step's, oldest first, [Q, width - 1, channels]; zeros before the first token."""
    (region,) = layer.regions["conv"]
    return _before(pools, region, index, layer.component("conv").span).flatten(2)


def _before(pools, region, index, count):
    """Values [Q, count, heads, dim] of the last positions before the step; zeros for those below 0."""
    positions = index.starts[:, None] - count + torch.arange(count, device=index.starts.device)
    requests = torch.arange(len(positions), device=positions.device)[:, None]
    unit, row = place.locate(region, index, requests, positions)
    values = place.decode_rows(region, place.load(pools, region, unit, row))
    return place.blank(values, unit >= 0)
