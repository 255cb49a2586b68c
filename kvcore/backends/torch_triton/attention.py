"""Attention over the window and the compressed entries, straight from the pools (DeepSeek-V4 paper section 2.3.3)."""

import torch

from kvcore.backends.torch_triton import cpu_attention
from kvcore.backends.torch_triton import rows as place
from kvcore.backends.torch_triton.layer import Layer
from kvcore.backends.torch_triton.tail import rotate
from kvcore.ops import Attention, StepIndex
from kvcore.pools import Pools
from kvcore.spec import Rope


def attend(
    layer: Layer,
    pools: Pools,
    index: StepIndex,
    q: torch.Tensor,
    selected: torch.Tensor | None = None,
    *,
    rows: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    rope: Rope | torch.Tensor | None = None,
) -> Attention:
    """Attend from q [T, H, d] to the window and the selected (None: all visible) entries, where K = V."""
    tokens, heads, dim = q.shape
    factor = dim**-0.5 if scale is None else scale
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float32, device=q.device)
    if not tokens or not heads or not len(index.slots):
        return Attention(out, lse)
    if selected is None and rope is None and q.device.type == "cpu":
        found = _shared(layer, pools, index, q, sink, factor)
        if found is not None:
            return found
    sources = []
    if layer.component("window") is not None:
        sources.append(_window_source(layer, pools, index, rows))
    if layer.component("entries") is not None:
        sources.append(_entries_source(layer, pools, index, selected))
    for some in place.portions(tokens, dim * sum(columns for columns, _ in sources)):
        keys, seen = zip(*(read(some) for _, read in sources), strict=True)
        keys, seen = place.blank(torch.cat(keys, dim=1), torch.cat(seen, dim=1)), torch.cat(seen, dim=1)
        found, lse[some] = softmax_sum(q[some].to(torch.float32), keys, keys, sink, factor, seen[:, None])
        out[some] = found.to(q.dtype)
    return Attention(out if rope is None else inverse_rope(out, index.positions, rope), lse)


def _shared(layer, pools, index, q, sink, factor) -> Attention | None:
    """Attention on the CPU where every token has its entry and requests have equally many new ones; None elsewhere.

    A request's queries then share its entries, which are decoded once and multiplied as they are. An entry that is
    not finite is left to the other way, which multiplies no query with what it does not see.
    """
    component = layer.component("entries")
    if layer.component("window") is not None or component is None or component.ratio != 1:
        return None
    host, (tokens, heads, dim) = layer.ops.host(index), q.shape
    counts = {length - start for start, length in zip(host.starts, host.lengths, strict=True)}
    new = tokens // len(host.slots)
    if counts != {new} or not host.regular:
        return None
    most = max(host.lengths)
    rows = layer.ops.gather_all_entries(pools, layer.number, index, columns=most, role="entries").values
    keys = rows.to(torch.float32)[:, None]
    seen = None
    if new > 1 or min(host.lengths) < most:
        if new > 1 and not bool(keys.isfinite().all()):
            return None
        seen = torch.arange(most) <= index.positions.view(-1, new, 1)
        seen = torch.where(seen, 0.0, -torch.inf).repeat_interleave(heads, dim=1)[:, None]
    mine = q.reshape(-1, 1, new * heads, dim).to(torch.float32)
    out, lse = cpu_attention.fused(mine, keys, keys, attn_mask=seen, scale=factor)
    lse = lse.view(tokens, heads)
    out = out.view(tokens, heads, dim)
    if sink is not None:
        out = out * torch.sigmoid(lse - sink.to(torch.float32))[..., None]
    return Attention(out.to(q.dtype), lse) if cpu_attention.finite(lse) else None


def inverse_rope(out: torch.Tensor, positions: torch.Tensor, rope: Rope | torch.Tensor) -> torch.Tensor:
    """Outputs [T, H, d] with their last channels turned by minus the tokens' positions [T], rounded like ``out``."""
    rows = out.flatten(0, 1).to(torch.float32)
    return rotate(rows, -positions.repeat_interleave(out.shape[1]), rope).view_as(out).to(out.dtype)


def _window_source(layer, pools, index, rows):
    """(W, function of a slice of tokens -> window keys [t, W, d] fp32 and whether they are seen [t, W]).

    Each ring is decoded once, however many of its rows a query shares with the next one.
    """
    (region,) = layer.regions["window"]
    component = layer.component("window")
    unit = index.slots.long()[:, None].expand(-1, region.rows)
    stored = place.load(pools, region, unit, torch.arange(region.rows, device=unit.device).expand_as(unit))
    ring = len(unit) * region.rows
    stored = stored.flatten(0, 1)
    if rows is not None:
        stored = torch.cat([stored, place.encode_rows(region, rows)])
    table = place.decode_rows(region, stored)[:, 0]

    def read(some):
        request, position = index.request_index[some, None].long(), index.positions[some, None].long()
        number = position - torch.arange(component.window - 1, -1, -1, device=position.device)
        left = 0 if index.left_padding is None else place.of_request(index.left_padding, request)
        seen = (request >= 0) & (number >= 0) & (number >= left)
        line = request * region.rows + number % region.rows
        if rows is not None:
            new, token = place.own_token(index, request, number, len(rows))
            line = torch.where(new, ring + token, line)
        return table[torch.where(seen, line, 0)].to(torch.float32), seen

    return component.window, read


def _entries_source(layer, pools, index, selected):
    """(k, function of a slice of tokens -> entry keys [t, k, d] fp32 and whether they are seen [t, k])."""
    (region,) = layer.regions["entries"]
    component = layer.component("entries")
    shared, table, most = selected is None, None, 0
    # A decode step with a selection reads just what it selects. Otherwise queries share entries, which are decoded
    # once; how many there are must then be asked of the device.
    if shared or len(selected) > len(index.slots):
        most = int((index.lengths // component.ratio).max())
        found = layer.ops.gather_all_entries(pools, layer.number, index, columns=most, role="entries")
        table = found.values.flatten(0, 1)
        selected = torch.arange(most, device=table.device)[None] if shared else selected

    def read(some):
        request, position = index.request_index[some, None].long(), index.positions[some, None]
        number = (selected if shared else selected[some]).long()
        seen = (request >= 0) & (number >= 0) & (number < (position + 1) // component.ratio)
        if table is None:
            stored = place.read(pools, region, index, request, torch.where(seen, number, -1))
            return place.decode_rows(region, stored)[:, :, 0].to(torch.float32), seen
        if not len(table):
            return table.new_zeros((*seen.shape, table.shape[1]), dtype=torch.float32), seen
        return table[torch.where(seen, request * most + number, 0)].to(torch.float32), seen

    return selected.shape[1], read


def softmax_sum(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sink: torch.Tensor | None,
    scale: float,
    seen: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [..., H, d] to keys [..., n, d] and values [..., n, e] -> out [..., H, e], lse [..., H].

    The sink is one logit a head, unscaled, in the denominator only: it has no value and is not part of lse. ``seen``
    [..., n] or broadcastable says which keys count; values that no query sees must be finite.
    """
    logits = torch.where(seen, q @ keys.transpose(-1, -2) * scale, -torch.inf)
    if not logits.shape[-1]:
        return q.new_zeros((*q.shape[:-1], values.shape[-1])), q.new_full(q.shape[:-1], -torch.inf)
    largest = logits.amax(dim=-1)
    weights = torch.exp(logits - torch.where(largest.isneginf(), 0, largest)[..., None])
    total = weights.sum(dim=-1)
    lse = largest + torch.log(total)
    out = weights @ values / torch.where(total == 0, 1, total)[..., None]
    if sink is not None:
        # out · sigmoid(lse - sink), written so that neither exponential overflows.
        out = torch.where(total == 0, 0, 1 / (1 + torch.exp(sink.to(torch.float32) - lse)))[..., None] * out
    return out, lse
