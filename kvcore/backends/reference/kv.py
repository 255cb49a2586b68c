"""Classic K-V layers: full, sliding and chunked attention over separate keys and values."""

import numpy as np

from kvcore.backends.reference import groups
from kvcore.backends.reference import rows as place
from kvcore.backends.reference.attention import softmax_sum
from kvcore.backends.reference.encoding import DTYPES, decode
from kvcore.ops import Attention, StepIndex, VisibleRows
from kvcore.plan import LayerPlan
from kvcore.pools import Pools
from kvcore.spec import Component


def append_kv(layer: LayerPlan, pools: Pools, index: StepIndex, k: np.ndarray, v: np.ndarray) -> Pools:
    """Encode and store k [T, key_heads, key_dim] and v [T, value_heads, value_dim]."""
    if layer.over_tokens:
        return groups.append(layer, pools, index, k, v)
    for region, values in zip(layer.regions["kv"], (k, v), strict=True):
        pools = place.append(pools, region, index, place.encode_rows(region, values))
    return pools


def gather_kv(
    layer: LayerPlan,
    pools: Pools,
    index: StepIndex,
    k: np.ndarray | None = None,
    v: np.ndarray | None = None,
    *,
    columns: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every row that a query of the step may see: k, v [Q, columns, heads, dim], positions [Q, columns]."""
    component = layer.component("kv")
    requests = len(index.slots)
    positions = np.full((requests, columns), -1, np.int32)
    if layer.over_tokens:
        positions[:] = visible_rows(layer, index, columns=columns).positions
        keys, values = (groups.gather(layer, pools, index, positions, part, own) for part, own in enumerate((k, v)))
        return keys, values, positions
    gathered = []
    for region, values in zip(layer.regions["kv"], (k, v), strict=True):
        own = None if values is None else place.encode_rows(region, values)
        dense = np.zeros((requests, columns, region.heads, region.format.dim or 0), DTYPES[region.format.value_code])
        for request in range(requests):
            seen = _visible(component, index, request)[:columns]
            for column, position in enumerate(seen):
                stored = place.read(pools, region, index, request, position, own)
                dense[request, column] = decode(region.format, stored)
                positions[request, column] = position
        gathered.append(dense)
    return gathered[0], gathered[1], positions


def mask(layer: LayerPlan, index: StepIndex, *, columns: int) -> np.ndarray:
    """[T, columns] bool over ``gather_kv``'s rows: what each query may see."""
    component = layer.component("kv")
    seen = np.zeros((len(index.positions), columns), bool)
    for token, (request, query) in enumerate(zip(index.request_index, index.positions, strict=True)):
        if request < 0:
            continue
        first = component.first_visible(int(query), _left_padding(index, request))
        for column, position in enumerate(_visible(component, index, request)[:columns]):
            seen[token, column] = first <= position <= query
    return seen


def visible_rows(layer: LayerPlan, index: StepIndex, *, columns: int) -> VisibleRows:
    """Positions [Q, columns] of ``gather_kv``'s rows, -1 where there is none, and the mask over them."""
    positions = np.full((len(index.slots), columns), -1, np.int32)
    for request in range(len(index.slots)):
        rows = _visible(layer.component("kv"), index, request)[:columns]
        positions[request, : len(rows)] = rows
    return VisibleRows(positions, mask(layer, index, columns=columns))


def from_batch(index: StepIndex, batch: np.ndarray) -> np.ndarray:
    """A batch [Q, S, ...] padded on the right -> rows [T, ...] in step order; padding rows are zeros."""
    rows = np.zeros((len(index.positions), *batch.shape[2:]), batch.dtype)
    for token, (request, position) in enumerate(zip(index.request_index, index.positions, strict=True)):
        if request >= 0:
            rows[token] = batch[request, position - index.starts[request]]
    return rows


def to_batch(index: StepIndex, rows: np.ndarray, width: int) -> np.ndarray:
    """Rows [T, ...] -> a batch [Q, width, ...], zeros where a request has fewer new tokens."""
    batch = np.zeros((len(index.slots), width, *rows.shape[1:]), rows.dtype)
    for token, (request, position) in enumerate(zip(index.request_index, index.positions, strict=True)):
        if request >= 0 and position - index.starts[request] < width:
            batch[request, position - index.starts[request]] = rows[token]
    return batch


def attend_kv(
    layer: LayerPlan,
    pools: Pools,
    index: StepIndex,
    q: np.ndarray,
    k: np.ndarray | None = None,
    v: np.ndarray | None = None,
    *,
    columns: int,
    sink: np.ndarray | None = None,
    scale: float | None = None,
) -> Attention:
    """Attend from q [T, H, key_dim] to the layer's K-V; H is a multiple of key_heads; out [T, H, value_dim]."""
    component = layer.component("kv")
    tokens, heads, dim = q.shape
    seen = mask(layer, index, columns=columns)
    if layer.over_tokens:
        rows_of = groups.rows_of_queries(layer, pools, index, k, v, columns=columns)
    else:
        gathered = gather_kv(layer, pools, index, k, v, columns=columns)

        def all_rows(token: int) -> tuple[np.ndarray, np.ndarray]:
            keys, values, _ = gathered
            return keys[index.request_index[token]], values[index.request_index[token]]

        rows_of = all_rows

    factor = np.float32(dim**-0.5 if scale is None else scale)
    out = np.zeros((tokens, heads, component.given[1].format.dim or 0), np.float32)
    lse = np.full((tokens, heads), -np.inf, np.float32)
    for token, request in enumerate(index.request_index):
        if request < 0:
            continue
        keys, values = (held[seen[token]].astype(np.float32) for held in rows_of(token))
        for head in range(heads):
            key_head, value_head = (head * part.heads // heads for part in component.parts)
            out[token, head : head + 1], lse[token, head : head + 1] = softmax_sum(
                q[token, head, None].astype(np.float32),
                keys[:, key_head],
                values[:, value_head],
                None if sink is None else sink[head, None],
                factor,
            )
    return Attention(out.astype(q.dtype), lse)


def _visible(component: Component, index: StepIndex, request: int) -> range:
    """Positions that a request's queries may see."""
    return component.visible(int(index.starts[request]), int(index.lengths[request]), _left_padding(index, request))


def _left_padding(index: StepIndex, request: int) -> int:
    """First positions of a request that are no tokens."""
    return 0 if index.left_padding is None else int(index.left_padding[request])
