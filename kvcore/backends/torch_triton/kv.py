"""Classic K-V layers: full, sliding and chunked attention over separate keys and values."""

from itertools import accumulate

import torch

from kvcore.backends.torch_triton import cpu_attention, cpu_views
from kvcore.backends.torch_triton import groups as over_tokens
from kvcore.backends.torch_triton import rows as place
from kvcore.backends.torch_triton.attention import softmax_sum
from kvcore.backends.torch_triton.encoding import DTYPES
from kvcore.backends.torch_triton.layer import Layer
from kvcore.ops import Attention, StepIndex, VisibleRows
from kvcore.pools import Pools


def append_kv(layer: Layer, pools: Pools, index: StepIndex, k: torch.Tensor, v: torch.Tensor) -> Pools:
    """Encode and store k [T, key_heads, key_dim] and v [T, value_heads, value_dim]."""
    if layer.over_tokens:
        return over_tokens.append(layer, pools, index, k, v)
    for region, values in cpu_views.append(layer.ops, pools, layer.regions["kv"], index, (k, v)):
        cpu_views.append_rows(layer.ops, pools, region, index, place.encode_rows(region, values))
    return pools


def kv_view(layer: Layer, pools: Pools, index: StepIndex, *, columns: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values [Q, columns, heads, dim] as they lie in the pools; None if not possible."""
    if layer.over_tokens:
        return None
    return cpu_views.view(layer.ops, pools, layer.regions["kv"], layer.component("kv"), index, columns)


def append_kv_view(
    layer: Layer, pools: Pools, index: StepIndex, k: torch.Tensor, v: torch.Tensor, *, columns: int
) -> tuple[Pools, tuple[torch.Tensor, torch.Tensor] | None]:
    """``append_kv``, then ``kv_view``: with few calls on the way, which are what a decode step waits for."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return append_kv_view(layer, pools, index, k, v, columns=columns)
    views = None
    if not layer.over_tokens:
        views = cpu_views.append_and_view(layer.ops, pools, layer.number, index, k, v, columns)
    return (append_kv(layer, pools, index, k, v), None) if views is None else (pools, views)


def gather_kv(
    layer: Layer,
    pools: Pools,
    index: StepIndex,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    columns: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every row that a query of the step may see: k, v [Q, columns, heads, dim], positions [Q, columns]."""
    component, regions = layer.component("kv"), layer.regions["kv"]
    if layer.over_tokens:
        positions = _positions_of(component, index, columns)
        keys, values = over_tokens.gather(layer, pools, index, positions, (k, v))
        return keys, values, positions.int()
    if k is None and v is None and not index.slots.is_cuda:
        found = cpu_views.gather(layer.ops, pools, regions, component, index, columns)
        if found is not None:
            return found
    positions = _positions_of(component, index, columns)
    requests = torch.arange(len(index.slots), device=positions.device)[:, None]
    valid = positions >= 0
    # Where the answer is at hand, ask whether anything is to be blanked; on a GPU blank without asking.
    complete = not positions.is_cuda and bool(valid.all())
    gathered = []
    for region, values in zip(regions, (k, v), strict=True):
        dense = None
        if values is None and positions.is_cuda:
            dense = _bulk(layer, pools, region, index, positions)
        if dense is None:
            own = None if values is None else place.encode_rows(region, values)
            dense = place.decode_rows(region, place.read(pools, region, index, requests, positions, own))
        gathered.append(dense if complete else place.blank(dense, valid))
    return gathered[0], gathered[1], positions.int()


def _positions_of(component, index, columns):
    """[Q, columns] int64 positions that the step's queries may see, ascending, then -1."""
    left = 0 if index.left_padding is None else index.left_padding
    first, end = component.visible_bounds(index.starts, index.lengths, left, place.maximum)
    return place.numbers_from(first, end - first, columns)


def _bulk(layer, pools, region, index, positions):
    """Whole units of a plain format, copied as they lie: [Q, columns, heads, dim] by position, or None if not possible.

    It is what a real model's decode step waits for: whole blocks through the table, no work per row.
    """
    (first, *others), (value, *more) = region.unit.places, region.format.fields
    if others or more or value.group is not None or value.code not in DTYPES:
        return None
    if layer.component("kv").span is not None:
        return None
    columns, units = positions.shape[1], place.numbers(pools, region, first, DTYPES[value.code])
    if units is None:
        return None
    if region.growth == "slot":
        dense = units[:, :columns].index_select(0, index.slots.clamp(min=0))
    else:
        blocks = index.block_table[:, : -(-columns // region.rows)].clamp(min=0)
        dense = units.index_select(0, blocks.reshape(-1))
        dense = dense.reshape(len(blocks), -1, *dense.shape[2:])[:, :columns]
    return dense.to(DTYPES[region.format.value_code])


def mask(layer: Layer, index: StepIndex, *, columns: int) -> torch.Tensor:
    """[T, columns] bool over ``gather_kv``'s rows: what each query may see."""
    component = layer.component("kv")
    request, query = index.request_index, index.positions[:, None]
    position = place.of_request(_positions_of(component, index, columns), request)
    left = 0 if index.left_padding is None else place.of_request(index.left_padding, request)[:, None]
    first = component.first_visible(query, left, place.maximum)
    seen = (position >= first) & (position <= query) & (position >= 0)
    return seen & (request >= 0)[:, None]


def visible_rows(layer: Layer, index: StepIndex, *, columns: int) -> VisibleRows:
    """Positions [Q, columns] of ``gather_kv``'s rows, -1 where there is none, and the mask over them."""
    positions = _positions_of(layer.component("kv"), index, columns).int()
    return VisibleRows(positions, mask(layer, index, columns=columns))


def from_batch(index: StepIndex, batch: torch.Tensor) -> torch.Tensor:
    """A batch [Q, S, ...] padded on the right -> rows [T, ...] in step order; padding rows are zeros."""
    request = index.request_index
    if not batch.shape[0] * batch.shape[1]:
        return batch.new_zeros((len(request), *batch.shape[2:]))
    column = (index.positions - place.of_request(index.starts, request)).clamp(min=0, max=batch.shape[1] - 1)
    return place.blank(batch[request.clamp(min=0).long(), column.long()], request >= 0)


def to_batch(index: StepIndex, rows: torch.Tensor, width: int) -> torch.Tensor:
    """Rows [T, ...] -> a batch [Q, width, ...], zeros where a request has fewer new tokens."""
    new = (index.lengths - index.starts).long()
    column = torch.arange(width, device=rows.device)
    valid = column < new[:, None]
    if not len(rows):
        return rows.new_zeros((*valid.shape, *rows.shape[1:]))
    token = torch.where(valid, (new.cumsum(0) - new)[:, None] + column, 0)
    return place.blank(rows[token], valid)


def attend_kv(
    layer: Layer,
    pools: Pools,
    index: StepIndex,
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    columns: int,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
) -> Attention:
    """Attend from q [T, H, key_dim] to the layer's K-V; H is a multiple of key_heads; out [T, H, value_dim]."""
    tokens, heads, dim = q.shape
    if not tokens or not heads:
        # torch's own attention divides by the number of heads.
        out = q.new_zeros((tokens, heads, layer.component("kv").given[1].format.dim or 0))
        return Attention(out, torch.full((tokens, heads), -torch.inf, dtype=torch.float32, device=q.device))
    if k is None and not q.is_cuda:
        factor = dim**-0.5 if scale is None else scale
        if layer.over_tokens:
            found = over_tokens.attend_last(layer, pools, index, q, sink=sink, scale=factor)
        else:
            found = cpu_attention.attend(layer.ops, pools, layer.number, index, q, sink=sink, scale=factor)
        if found is not None:
            return found
    if layer.over_tokens:
        keys, values, seen = over_tokens.seen(layer, pools, index, (k, v), columns)
        columns = keys.shape[1]
    else:
        keys, values, _ = layer.ops.gather_kv(pools, layer.number, index, k, v, columns=columns)
        seen = mask(layer, index, columns=columns)
    scale = dim**-0.5 if scale is None else scale
    out = torch.zeros((tokens, heads, values.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float32, device=q.device)
    if not len(keys):
        return Attention(out, lse)
    # One product for all of a request's queries needs values that are finite also where a query doesn't look. A decode
    # step takes its rows token by token, without asking the device anything.
    if tokens > len(keys) and bool(values.isfinite().all()):
        groups = _by_request(index, heads * columns)
    else:
        row = keys.shape[2:].numel() + values.shape[2:].numel()
        groups = [(some, None) for some in place.portions(tokens, row * columns)]
    for some, request in groups:
        if request is None:
            mine = index.request_index[some]
            block = q[some, None], place.of_request(keys, mine), place.of_request(values, mine), seen[some, None]
            place.blank(block[2], seen[some])
        else:
            block = q[None, some], keys[request], values[request], seen[None, some]
        found, logs = _grouped(*block, sink, scale)
        out[some], lse[some] = found.flatten(0, 1).to(q.dtype), logs.flatten(0, 1)
    return Attention(out, lse)


def _by_request(index, elements):
    """(slice of the step's tokens, slice of its one request) for every request, in portions of ``elements`` a token."""
    new = (index.lengths - index.starts).tolist()
    return [
        (slice(first + some.start, first + some.stop), slice(request, request + 1))
        for request, first in enumerate(accumulate(new[:-1], initial=0))
        for some in place.portions(new[request], elements)
    ]


def _grouped(q, keys, values, seen, sink, scale):
    """Attend from q [B, t, H, d] to keys [B, n, key heads, d] and values [B, n, value heads, e], as ``softmax_sum``.

    Query heads that share a key head are rows of one product.
    """
    batch, tokens, heads, dim = q.shape
    if keys.shape[2] != values.shape[2]:
        shared = torch.arange(heads, device=q.device)
        keys = keys[:, :, shared * keys.shape[2] // heads]
        values = values[:, :, shared * values.shape[2] // heads]
    groups = keys.shape[2]
    q = q.to(torch.float32).reshape(batch, tokens, groups, heads // groups, dim).permute(0, 2, 3, 1, 4)
    sink = None if sink is None else sink.reshape(groups, heads // groups, 1)
    out, lse = softmax_sum(
        q,
        keys.to(torch.float32).permute(0, 2, 1, 3)[:, :, None],
        values.to(torch.float32).permute(0, 2, 1, 3)[:, :, None],
        sink,
        scale,
        seen[:, None, None],
    )
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3)
