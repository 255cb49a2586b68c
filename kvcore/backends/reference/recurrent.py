"""Recurrent layers: the states that tokens go on from, and a short convolution's last inputs."""

import numpy as np

from kvcore.backends.reference import rows as place
from kvcore.backends.reference.encoding import DTYPES
from kvcore.ops import StepIndex
from kvcore.plan import LayerPlan
from kvcore.pools import Pools


def append_state(layer: LayerPlan, pools: Pools, index: StepIndex, states: np.ndarray) -> Pools:
    """Store the state after every token of the step, [T, heads, key_dim, value_dim], as far as the ring has room."""
    (region,) = layer.regions["state"]
    return place.append(pools, region, index, place.encode_rows(region, states))


def write_state(
    layer: LayerPlan, pools: Pools, index: StepIndex, states: np.ndarray, *, newest: int | None = None
) -> Pools:
    """Store the state after every request's last token, [Q, heads, key_dim, value_dim]; NaN for its other tokens."""
    del newest
    (region,) = layer.regions["state"]
    last = place.encode_rows(region, states)
    none = place.encode_rows(region, np.full_like(states[:1], np.nan))
    for request, (start, length) in enumerate(zip(index.starts, index.lengths, strict=True)):
        for position in range(max(int(start), int(length) - region.rows), int(length)):
            row = last[request] if position == length - 1 else none[0]
            place.store(pools, region, *place.locate(region, index, request, position), row)
    return pools


def select_state(layer: LayerPlan, pools: Pools, index: StepIndex, states: np.ndarray, taken: np.ndarray) -> Pools:
    """Of the states after every token, [T, ...], store that after each request's first ``taken``; NaN before it."""
    (region,) = layer.regions["state"]
    rows = place.encode_rows(region, states)
    none = place.encode_rows(region, np.full_like(states[:1], np.nan))
    for token, (request, position) in enumerate(zip(index.request_index, index.positions, strict=True)):
        length = int(index.starts[request]) + int(taken[request]) if request >= 0 else 0
        if max(length - region.rows, 0) <= position < length:
            row = rows[token] if position == length - 1 else none[0]
            place.store(pools, region, *place.locate(region, index, request, int(position)), row)
    return pools


def read_state(layer: LayerPlan, pools: Pools, index: StepIndex) -> np.ndarray:
    """The states that the step's tokens go on from, [Q, heads, key_dim, value_dim]; zeros where there is no token."""
    (region,) = layer.regions["state"]
    found = _before(pools, region, index, 1)
    return found.reshape(len(index.slots), *layer.component("state").shape)


def state_view(layer: LayerPlan, pools: Pools, slot: int, count: int, row: int) -> np.ndarray | None:
    """Row ``row`` of the rings of ``count`` slots from ``slot`` on as the pool's memory; None: only as a copy."""
    (region,) = layer.regions["state"]
    if not region.format.is_plain or (region.heads > 1 and region.steps[1] != 1):
        return None
    (field,) = region.unit.places
    if field.split or field.stride != field.nbytes:
        return None
    size = region.heads * field.nbytes
    start = field.base + row * size
    pool = pools[region.buffers[field.buffer][0]]
    lent = pool[slot : slot + count, start : start + size].view(DTYPES[region.format.value_code])
    return lent.reshape(count, *layer.component("state").shape)


def append_conv(layer: LayerPlan, pools: Pools, index: StepIndex, rows: np.ndarray) -> Pools:
    """Store the step's inputs [T, channels]; only each ring's last ones are written."""
    (region,) = layer.regions["conv"]
    return place.append(pools, region, index, place.encode_rows(region, rows))


def gather_conv(layer: LayerPlan, pools: Pools, index: StepIndex) -> np.ndarray:
    """The inputs right before the step's, oldest first, [Q, width - 1, channels]; zeros before the first token."""
    (region,) = layer.regions["conv"]
    found = _before(pools, region, index, layer.component("conv").span)
    return found.reshape(*found.shape[:2], layer.component("conv").channels)


def _before(pools, region, index, count):
    """Values [Q, count, heads, dim] of the last positions before the step; zeros for those below 0."""
    values = np.zeros((len(index.slots), count, region.heads, region.format.dim or 0), DTYPES[region.format.value_code])
    for request, start in enumerate(index.starts):
        for position in range(max(int(start) - count, 0), int(start)):
            stored = place.load(pools, region, *place.locate(region, index, request, position))
            values[request, position - int(start)] = place.decode_rows(region, stored)
    return values
