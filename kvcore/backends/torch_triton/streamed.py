"""Classic attention on the CPU, request by request over pieces of its rows, none of them held longer than needed.

Rows of plain formats are read where they lie, others are decoded piece by piece. A piece's result is torch's own fused
attention in fp32, and pieces are joined by their log-sums; query heads that share a key head are queries of one
product.
"""

import torch

from kvcore.backends.torch_triton import plain
from kvcore.backends.torch_triton import rows as place
from kvcore.ops import Attention
from kvcore.ops.choices import Decision

PIECE = 2048
"""Rows of a piece: in fp32, keys of eight heads of 64 take 4 MiB."""

fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""(q, k, v [B, heads, n, dim], mask as a summand) -> (out, log-sum-exp); what torch's attention calls."""


def attend(ops, pools, layer, index, q, *, sink, scale) -> Attention | None:
    """Attend from q [T, H, dim] to what the pools hold; None where this is not possible, and another way must be taken.

    That is: a padded step, keys and values of different heads or dims, or a number that is not finite, which a sum over
    unseen rows would spread.
    """
    keys, values = ops.plan.region(layer, "kv")
    heads, host = q.shape[1], ops.host(index)
    if not host.few or unlike(keys, values):
        return None
    component = ops.component(layer, "kv")
    outs, logs_of, token = [], [], 0
    for request, (start, length) in enumerate(zip(host.starts, host.lengths, strict=True)):
        new = length - start
        if length <= max(start, host.padding[request]):
            outs.append(q.new_zeros((new, heads, keys.format.dim)))
            logs_of.append(torch.full((new, heads), -torch.inf, dtype=torch.float32))
        else:
            mine = (
                q[token : token + new].to(torch.float32).reshape(new, keys.heads, heads // keys.heads, keys.format.dim)
            )
            where = index, request, start, host.padding[request]
            found = one_request(ops, pools, component, (keys, values), where, mine, scale)
            if found is None:
                return None
            total, logs = found
            if sink is not None:
                total = total * torch.sigmoid(logs - sink.to(torch.float32))[..., None]
            outs.append(total.to(q.dtype))
            logs_of.append(logs)
        token += new
    if len(outs) == 1:
        return Attention(outs[0], logs_of[0])
    return Attention(torch.cat(outs), torch.cat(logs_of)) if outs else None


def unlike(keys, values) -> str:
    """Why keys and values are not attended to in pieces; "" where they are."""
    alike = (keys.heads, keys.format.dim) == (values.heads, values.format.dim)
    return "" if alike else "keys and values have different heads or dims: all rows are gathered, then attended to"


def decide(ops, layer) -> Decision:
    """How a layer's classic attention runs on the CPU."""
    why = unlike(*ops.plan.region(layer, "kv")) or (
        "torch's fused attention over pieces of the rows; all rows are gathered first where k and v are given, in a "
        "padded step, and where a number is not finite"
    )
    return Decision("torch", why)


def one_request(ops, pools, component, regions, where, q, scale):
    """(out [n, H, dim], lse [n, H]) fp32 of one request's new tokens q [n, key heads, group, dim]; None as above.

    ``where`` is (the step's index, which request, its length before the step, its left padding).
    """
    index, request, start, left = where
    new, key_heads, group, dim = q.shape
    # Of a single token the queries lie by key head already.
    grouped = q if new == 1 else q.permute(1, 2, 0, 3).reshape(1, key_heads, group * new, dim)
    total = logs = None
    stored = [plain.lines(ops, pools, region) for region in regions]
    first = component.first_visible(max(start, left), left)
    for low, high, places in pieces(regions, stored, ops.host(index), request, first, start + new):
        k, v = (
            read(ops, pools, region, index, request, low, high, lines, line)
            for region, lines, line in zip(regions, stored, places, strict=True)
        )
        seen = None
        if high > start + 1 or component.first_visible(start + new - 1, left) > low:
            position, query = torch.arange(low, high), torch.arange(start, start + new)
            first_of = component.first_visible(query, left, place.maximum)
            seen = (position <= query[:, None]) & (position >= first_of[:, None])
            # What no query of this request looks at is no summand of 0: nothing but finite values may be there.
            if not bool(v.isfinite().all()):
                return None
        mask = None if seen is None else torch.where(seen, 0.0, -torch.inf).repeat(group, 1)[None, None]
        part, part_logs = fused(grouped, k[None], v[None], attn_mask=mask, scale=scale)
        if seen is not None:
            part_logs = torch.where(seen.any(dim=1).repeat(group), part_logs, -torch.inf)
        if not part_logs.max().item() < torch.inf:  # nor NaN, which is the largest if there is one
            return None
        total, logs = (part, part_logs) if total is None else joined(total, logs, part, part_logs)
    assert total is not None
    assert logs is not None  # there is at least the query's own row
    if new == 1:
        return total.reshape(1, key_heads * group, dim), logs.reshape(1, key_heads * group)
    out = total.reshape(key_heads, group, new, dim).permute(2, 0, 1, 3).flatten(1, 2)
    return out, logs.reshape(key_heads, group, new).permute(2, 0, 1).flatten(1, 2)


def pieces(regions, stored, host, request, first, last):
    """(first position, end, line of the first in keys and in values) of pieces that lie in one run, or are decoded.

    The order of keys does not matter to a sum: a ring that lies once and has wrapped is two pieces, never put in order.
    """
    alike = {
        None if lines is None else (region.growth, region.rows, region.places, lines.unit)
        for region, lines in zip(regions, stored, strict=True)
    }
    if len(alike) == 1 and None not in alike:
        for run in plain.runs(regions[0], host, request, first, last, stored[0].unit, regions[0].places):
            for done in range(0, run.count, PIECE):
                some = min(PIECE, run.count - done)
                yield first + done, first + done + some, (run.line + done,) * 2
            first += run.count
        return
    for low in range(first, last, PIECE):
        yield low, min(low + PIECE, last), (None, None)


def read(ops, pools, region, index, request, low, high, lines, line):
    """Rows low .. high - 1 of a request as fp32 [heads, n, dim]; ``line`` is where they lie if in one run."""
    if line is not None:
        return lines.rows[line : line + high - low].to(torch.float32).transpose(0, 1)
    numbers = torch.arange(low, high)
    rows = place.load(pools, region, *place.locate(region, index, torch.full_like(numbers, request), numbers))
    return ops.decode_rows(region, rows).to(torch.float32).transpose(0, 1)


def joined(out, logs, more, more_logs):
    """Attention over two sets of keys from the attention over each."""
    total = torch.logaddexp(logs, more_logs)
    share = torch.exp(more_logs - total).nan_to_num(0)  # no key in either: -inf less -inf
    return torch.lerp(out, more, share[..., None]), total
