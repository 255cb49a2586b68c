"""Keys and values in formats over tokens: groups are coded as their last token comes, an open one stays raw.

A query at position p sees what a request of p + 1 tokens holds. On a GPU nothing asks the device for a value: there are
as many groups as could close in a step of its shape, and those that do not are read as zeros and written nowhere.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from kvcore.backends.torch_triton import cpu_coded, cpu_views, entries
from kvcore.backends.torch_triton import rows as place
from kvcore.backends.torch_triton.cpu_attention import PIECE, fused, joined
from kvcore.backends.torch_triton.layer import Layer
from kvcore.ops import Attention, StepIndex
from kvcore.plan import Region
from kvcore.pools import Pools

Given = tuple[torch.Tensor | None, torch.Tensor | None]


class Closing(NamedTuple):
    """Groups that a step completes: (request, number) of each, -1 where there is none; int64 [n]."""

    requests: torch.Tensor
    groups: torch.Tensor


def append(layer: Layer, pools: Pools, index: StepIndex, k: torch.Tensor, v: torch.Tensor) -> Pools:
    """Code every group that the step completes, then store the step's rows raw at slot·R + p mod R."""
    ratio, tails, found = layer.component("kv").ratio, layer.regions["kv_tail"], closing(layer, index)
    if len(found.groups):
        new = (found.groups + 1) * ratio > place.of_request(index.stored, found.requests)
        requests = torch.where(new, found.requests, -1)
        for part, (region, values) in enumerate(zip(layer.regions["kv"], (k, v), strict=True)):
            rows = coded_rows(layer, pools, index, found, part, place.encode_rows(tails[part], values))
            place.store(pools, region, *place.locate(region, index, requests, found.groups), rows)
    for region, values in cpu_views.append(layer.ops, pools, tails, index, (k, v)):
        place.append(pools, region, index, place.encode_rows(region, values))
    return pools


def closing(layer: Layer, index: StepIndex) -> Closing:
    """The groups that close: on the CPU those there are, on a GPU as many as there could be."""
    ratio, tokens = layer.component("kv").ratio, len(index.positions)
    most = min(tokens, tokens // ratio + len(index.slots))
    if not index.slots.is_cuda:
        most = int((index.lengths // ratio - index.starts // ratio).sum())
    found = entries.closed(layer, index, count=most, role="kv")
    return Closing(found.request_index.long(), found.entry_index.long())


def coded_rows(
    layer: Layer, pools: Pools, index: StepIndex, found: Closing, part: int, own: torch.Tensor | None
) -> torch.Tensor:
    """Canonical rows [n, heads, row_bytes] of groups, coded from their tokens' raw rows."""
    ratio, region = layer.component("kv").ratio, layer.regions["kv"][part]
    tokens = torch.arange(ratio, device=found.groups.device)
    positions = torch.where(found.requests[:, None] >= 0, found.groups[:, None] * ratio + tokens, -1)
    values = raw_rows(layer, pools, index, found.requests[:, None], positions, part, own)
    # [n, tokens, heads, dim] -> a row for every head: channel by channel over tokens, or token by token.
    by_head = values.permute(0, 2, 3, 1) if region.format.tokens > 1 else values.transpose(1, 2)
    return place.encode_rows(region, by_head.reshape(len(values), region.heads, region.format.dim or 0))


def raw_rows(layer, pools, index, requests, positions, part, own):
    """Values [..., heads, dim] of positions [...] that the ring holds, or that are the step's own; zeros at -1."""
    region = layer.regions["kv_tail"][part]
    return place.decode_rows(region, place.read(pools, region, index, requests, positions, own))


def tokens_of(region: Region, stored: torch.Tensor) -> torch.Tensor:
    """Canonical rows [Q, n, heads, row_bytes] of groups -> their tokens' values [Q, n · ratio, heads, dim]."""
    values, ratio = place.decode_rows(region, stored), region.tokens
    requests, groups, heads, channels = values.shape
    if region.format.tokens > 1:
        values = values.reshape(requests, groups, heads, channels // ratio, ratio).permute(0, 1, 4, 2, 3)
    else:
        values = values.reshape(requests, groups, heads, ratio, channels // ratio).transpose(2, 3)
    return values.reshape(requests, groups * ratio, heads, channels // ratio)


def whole(layer: Layer, pools: Pools, index: StepIndex, part: int, own: torch.Tensor | None, columns: int):
    """Values of all groups that are whole at the end of the step: [Q, columns rounded up, heads, dim]; then zeros."""
    ratio, region = layer.component("kv").ratio, layer.regions["kv"][part]
    requests = torch.arange(len(index.slots), device=index.slots.device)[:, None]
    group = torch.arange(-(-columns // ratio), device=index.slots.device)
    numbers = torch.where(group < (index.lengths // ratio)[:, None], group, -1)
    stored = place.load(pools, region, *place.locate(region, index, requests, numbers))
    if own is not None and len(group):
        found = closing(layer, index)
        known = (found.requests >= 0) & (found.groups < len(group))
        # One column more, for what does not close.
        stored = torch.cat([stored, torch.zeros_like(stored[:, :1])], dim=1)
        at = found.requests.clamp(min=0), torch.where(known, found.groups, len(group))
        stored[at] = coded_rows(layer, pools, index, found, part, own)
        stored = stored[:, :-1]
    return place.blank(tokens_of(region, stored), (numbers >= 0).repeat_interleave(ratio, dim=1))


def gather(layer: Layer, pools: Pools, index: StepIndex, positions: torch.Tensor, given: Given) -> list[torch.Tensor]:
    """Keys and values as the step leaves them, at positions [Q, columns]: [Q, columns, heads, dim] each."""
    ratio, columns = layer.component("kv").ratio, positions.shape[1]
    requests = torch.arange(len(index.slots), device=index.slots.device)[:, None]
    closed = (index.lengths // ratio * ratio).long()[:, None]
    dense = []
    for part, own in enumerate(own_rows(layer, given)):
        coded = whole(layer, pools, index, part, own, columns)[:, :columns]
        column = torch.arange(min(ratio, columns), device=index.slots.device)
        at = torch.where(closed + column < index.lengths[:, None], closed + column, -1)
        opened = raw_rows(layer, pools, index, requests, at, part, own).to(coded.dtype)
        if columns:
            is_open = positions >= closed
            row = torch.where(is_open, positions - closed, 0).clamp(max=len(column) - 1)
            coded = torch.where(is_open[:, :, None, None], opened[requests, row], coded)
        dense.append(place.blank(coded.contiguous(), positions >= 0))
    return dense


def attend_last(
    layer: Layer, pools: Pools, index: StepIndex, q: torch.Tensor, *, sink: torch.Tensor | None, scale: float
) -> Attention | None:
    """Attend from the one new token of each request, q [Q, H, dim], to what is stored, a piece of groups at a time.

    None where a step is any other, keys and values are unlike, or a number is not finite: all rows are decoded then.
    """
    component, host = layer.component("kv"), layer.ops.host(index)
    keys, values = component.given
    ratio, heads, dim = component.ratio, keys.heads, keys.format.dim or 0
    if not host.few or (heads, dim) != (values.heads, values.format.dim):
        return None
    outs: list[torch.Tensor] = []
    logs_of: list[torch.Tensor] = []
    whole = None
    if layer.is_decoded_in_c and host.regular:
        whole = cpu_coded.attend_groups(layer.ops, pools, layer.number, index, q, scale=scale)
    for request, (start, length, left) in enumerate(zip(host.starts, host.lengths, host.padding, strict=True)):
        if length != start + 1 or length <= left:
            return None
        first = int(component.first_visible(start, left))
        mine = q[request].to(torch.float32).reshape(1, heads, q.shape[1] // heads, dim)
        closed = length // ratio * ratio
        total: Any = None
        logs: Any = None
        if whole is not None:
            total, logs = (each[request].reshape(1, heads, -1, *each.shape[2:]) for each in whole)
            first = max(first, closed)
        for low, high in _pieces(first, closed, length, ratio):
            k, v = (
                _tokens(layer, pools, index, request, part, range(low, high), raw=low >= closed)[max(first - low, 0) :]
                for part in (0, 1)
            )
            part, part_logs = fused(mine, k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale=scale)
            total, logs = (part, part_logs) if total is None else joined(total, logs, part, part_logs)
        if not logs.max().item() < torch.inf:  # nor NaN, which is the largest if there is one
            return None
        total, logs = total.reshape(-1, dim), logs.reshape(-1)
        if sink is not None:
            total = total * torch.sigmoid(logs - sink.to(torch.float32))[:, None]
        outs.append(total.to(q.dtype))
        logs_of.append(logs)
    return Attention(torch.stack(outs), torch.stack(logs_of)) if outs else None


def _pieces(first: int, closed: int, length: int, ratio: int) -> Iterator[tuple[int, int]]:
    """Positions from the group of ``first`` on, in whole groups; then those of the open one."""
    size = max(PIECE // ratio, 1) * ratio
    yield from ((low, min(low + size, closed)) for low in range(first // ratio * ratio, closed, size))
    if length > closed:
        yield max(first, closed), length


def _tokens(
    layer: Layer, pools: Pools, index: StepIndex, request: int, part: int, positions: range, *, raw: bool
) -> torch.Tensor:
    """Keys or values [n, heads, dim] fp32 of one request, raw ones or those of whole groups."""
    if raw:
        at = torch.arange(positions.start, positions.stop)
        return raw_rows(layer, pools, index, torch.full_like(at, request), at, part, None).to(torch.float32)
    region, ratio = layer.regions["kv"][part], layer.component("kv").ratio
    numbers = torch.arange(positions.start // ratio, positions.stop // ratio)
    stored = place.load(pools, region, *place.locate(region, index, torch.full_like(numbers, request), numbers))
    # Of a single group a view may be left whose channels are no neighbours, which the fused kernel takes for such.
    return tokens_of(region, stored[None])[0].to(torch.float32).contiguous()


def own_rows(layer: Layer, given: Given) -> list[torch.Tensor | None]:
    """The step's own keys and values as raw canonical rows [T, heads, row_bytes]; None where they are not given."""
    regions = zip(layer.regions["kv_tail"], given, strict=True)
    return [None if values is None else place.encode_rows(region, values) for region, values in regions]


def seen(
    layer: Layer, pools: Pools, index: StepIndex, given: Given, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All rows that some query sees, coded and raw: keys, values [Q, n, heads, dim], and which of them, [T, n]."""
    component, request = layer.component("kv"), index.request_index
    ratio, query, device = component.ratio, index.positions[:, None], index.slots.device
    requests = torch.arange(len(index.slots), device=device)[:, None]
    first = (torch.minimum(index.starts + 1, index.lengths) // ratio * ratio).long()[:, None]
    most = (
        len(index.positions) if index.slots.is_cuda else int((index.lengths - index.starts).max()) if len(first) else 0
    )
    column = torch.arange(ratio - 1 + most, device=device)
    opened = torch.where(first + column < index.lengths[:, None], first + column, -1)
    held = []
    for part, own in enumerate(own_rows(layer, given)):
        coded = whole(layer, pools, index, part, own, columns)
        raw = raw_rows(layer, pools, index, requests, opened, part, own).to(coded.dtype)
        held.append(torch.cat([coded, place.blank(raw, opened >= 0)], dim=1))
    coded_at = torch.arange(-(-columns // ratio) * ratio, device=device).expand(len(index.slots), -1)
    position = place.of_request(torch.cat([coded_at, opened], dim=1), request)
    is_coded = torch.arange(position.shape[1], device=device) < coded_at.shape[1]
    left = 0 if index.left_padding is None else place.of_request(index.left_padding, request)[:, None]
    from_here = component.first_visible(query, left, place.maximum)
    closed = (query + 1) // ratio * ratio
    mask = (position >= from_here) & (position <= query) & ((position < closed) == is_coded) & (request >= 0)[:, None]
    return held[0], held[1], mask
