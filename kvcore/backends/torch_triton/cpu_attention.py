"""Classic attention on the CPU over rows as they lie: torch's fused attention over pieces of them, then their sums.

What is looked at together is worked out once for all layers of a step whose rows lie alike. Requests that share blocks
look at those in one product, as one: what begins alike is read once, however many there are.
"""

import math
from bisect import bisect_left
from itertools import chain, combinations, pairwise
from typing import Any, NamedTuple

import torch

from kvcore.backends.torch_triton import cpu_coded
from kvcore.backends.torch_triton import rows as place
from kvcore.backends.torch_triton.cpu_views import HostStep, Lines, Place, lines, runs, unlike
from kvcore.ops import Attention

PIECE = 2048
"""Rows of a piece: in fp32, keys of eight heads of 64 take 4 MiB."""

SMALL = 1 << 18
"""Elements of a mask that is kept as the summand that it becomes, one more of four bytes, for all layers of a step."""

MASKED = 1 << 14
"""Tokens by rows of before up to which one product under a mask is quicker than two, one of them without."""

fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""(q, k, v [B, heads, n, dim], mask as a summand) -> (out, log-sum-exp); what torch's attention calls."""


class Product(NamedTuple):
    """Rows that some of a step's tokens look at together: ``count`` of them, or as many again for each of ``batch``.

    Attributes:
        tokens: which: neighbours, or numbers int64.
        where: (request, first position, end).
        places: of the views of keys and values [batch, heads, rows, dim]; empty where rows are decoded.
        seen: bool or the summand [count, rows]; None: every token sees every row, or ``causal`` says which.
        blind: bool [count], tokens that see no row; None if there are none.
        causal: the rows are those of the tokens, and each sees its own and those before it. Half of the product is
            then never computed, as a mask cannot tell.
    """

    tokens: slice | torch.Tensor
    count: int
    where: tuple[int, int, int]
    places: tuple[Place, ...]
    seen: torch.Tensor | None = None
    blind: torch.Tensor | None = None
    batch: int = 1
    causal: bool = False


class Wave(NamedTuple):
    """Products of which no token is in two; ``order`` are their tokens one after the other, None if all in order."""

    products: list[Product]
    order: torch.Tensor | None


def attend(ops, pools, layer, index, q, *, sink, scale) -> Attention | None:
    """Attend from q [T, H, dim] to what the pools hold; None where this is not possible, and another way must be taken.

    That is: a padded step, keys and values of different heads or dims, or a number that is not finite, which a sum over
    unseen rows would spread.
    """
    regions, host = ops.plan.region(layer, "kv"), ops.host(index)
    stored = [lines(ops, pools, region) for region in regions]
    if None in stored and ops.layers[layer].is_decoded_in_c:
        found = cpu_coded.attend(ops, pools, layer, index, q, sink=sink, scale=scale)
        if found is not None:
            return found
    if not host.few or unlike(*regions):
        return None
    (tokens, heads, dim), key_heads = q.shape, regions[0].heads
    grouped = q.to(torch.float32).reshape(tokens, key_heads, heads // key_heads, dim)
    total: Any = None
    logs: Any = None
    for products, order in waves(regions, stored, ops.component(layer, "kv"), host, tokens):
        found = [over_rows(ops, pools, regions, stored, index, grouped, product, scale) for product in products]
        outs = [one for one in found if one is not None]
        if len(outs) < len(found):
            return None
        more, more_logs = outs[0] if len(outs) == 1 else map(torch.cat, zip(*outs, strict=True))
        if order is None:
            total, logs = (more, more_logs) if total is None else joined(total, logs, more, more_logs)
            continue
        if total is None:
            total, logs = nothing(tokens, heads, dim, torch.float32)
        else:
            more, more_logs = joined(total[order], logs[order], more, more_logs)
        total, logs = total.index_copy(0, order, more), logs.index_copy(0, order, more_logs)
    if total is None:
        return Attention(*nothing(tokens, heads, dim, q.dtype))
    if not finite(logs):
        return None
    if sink is not None:
        total = total * torch.sigmoid(logs - sink.to(torch.float32))[..., None]
    return Attention(total.to(q.dtype), logs)


def finite(logs) -> bool:
    """Whether no log-sum-exp is infinite, nor NaN, which is the largest if there is one; -inf is of no key at all."""
    return not logs.numel() or logs.max().item() < torch.inf


def nothing(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to no row."""
    return torch.zeros((tokens, heads, dim), dtype=dtype), torch.full((tokens, heads), -torch.inf)


def waves(regions, stored, component, host: HostStep, tokens: int) -> list[Wave]:
    """What a step's tokens look at: the first piece of every request, then the second ones, and so on.

    Worked out once for all layers of equal components whose rows lie alike.
    """
    key = waves, *(None if found is None else found.kind for found in stored), component
    if key not in host.kept:
        found: list[dict[Any, list[Product]]] = []
        shared, token = shared_rows(regions, host), 0
        for request, (start, length) in enumerate(zip(host.starts, host.lengths, strict=True)):
            own = shared[request], token
            for number, product in enumerate(products_of(regions, stored, component, host, request, *own)):
                found.extend({} for _ in range(number + 1 - len(found)))
                mine = not product.places or product.seen is not None or product.causal
                alike = (request, number) if mine else product.places
                found[number].setdefault(alike, []).append(product)
            token += length - start
        joint = ([together(some) for some in groups.values()] for groups in found)
        host.kept[key] = [wave_of([batched(some) for some in evenly(products)], tokens) for products in joint]
    return host.kept[key]


def shared_rows(regions, host: HostStep) -> list[int]:
    """By request the positions, from 0 on, that lie in blocks which another request of the step has as well."""
    if any(region.growth == "slot" for region in regions):
        return [0] * len(host.starts)
    tables = [host.table(request) for request in range(len(host.starts))]
    blocks = [0] * len(tables)
    for one, two in combinations(range(len(tables)), 2):
        mine, other = tables[one], tables[two]
        if mine[:1] != other[:1] or not mine or mine[0] < 0:
            continue
        # Tables that have parted share no further block: where they do is found by halves.
        alike = bisect_left(range(1, min(len(mine), len(other)) + 1), True, key=lambda n: mine[:n] != other[:n])
        blocks[one], blocks[two] = max(blocks[one], alike), max(blocks[two], alike)
    return [number * regions[0].rows for number in blocks]


def products_of(regions, stored, component, host: HostStep, request: int, shared: int, token: int):
    """The pieces of one request, whose new tokens are those from ``token`` on and whose first rows are ``shared``."""
    start, length, left = host.starts[request], host.lengths[request], host.padding[request]
    new = length - start
    if length <= max(start, left):
        return
    first = component.first_visible(max(start, left), left)
    # Of several tokens all see what was there before, as far as no window ends in it; one token sees all there is.
    middle = max(first, start) if new * (start - first) > MASKED else first if new > 1 else length
    cuts = sorted({first, min(max(first, shared), start), middle, length})
    parts = (pieces(regions, stored, host, request, low, high) for low, high in pairwise(cuts))
    for low, high, line in chain.from_iterable(parts):
        places = () if line is None else tuple(place_of(found, line, high - low) for found in stored)
        seen = blind = None
        causal = (low, high) == (start, length) and new > 1 and component.first_visible(length - 1, left) <= low
        if not causal and (high > start + 1 or component.first_visible(length - 1, left) > low):
            position, query = torch.arange(low, high), torch.arange(start, length)
            first_of = component.first_visible(query, left, place.maximum)
            seen = (position <= query[:, None]) & (position >= first_of[:, None])
            blind = ~seen.any(dim=1)
            blind = blind if bool(blind.any()) else None
            seen = torch.where(seen, 0.0, -torch.inf) if seen.numel() <= SMALL else seen
        yield Product(slice(token, token + new), new, (request, low, high), places, seen, blind, causal=causal)


def together(products: list[Product]) -> Product:
    """One product of several over the same rows, each of neighbours that all see all of them."""
    first, *others = products
    return first._replace(tokens=all_of(products), count=sum(one.count for one in products)) if others else first


def all_of(products: list[Product]) -> slice | torch.Tensor:
    """The tokens of several products, one after the other."""
    numbers = [number for one in products for number in numbers_of(one.tokens)]
    begin, end = numbers[0], numbers[0] + len(numbers)
    return slice(begin, end) if numbers == list(range(begin, end)) else torch.tensor(numbers)


def numbers_of(tokens: slice | torch.Tensor) -> list[int]:
    """Numbers of tokens."""
    return list(range(tokens.start, tokens.stop)) if isinstance(tokens, slice) else tokens.tolist()


def evenly(products: list[Product]) -> list[list[Product]]:
    """The products in groups of those that are one batch: as many tokens and rows, one mask, evenly spaced rows.

    In the order of their rows where that makes fewer groups.
    """
    by_place = sorted(products, key=lambda one: one.places[0][2] if one.places else -1)
    return min(_groups(products), _groups(by_place), key=len)


def _groups(products: list[Product]) -> list[list[Product]]:
    groups: list[list[Product]] = []
    for one in products:
        if groups and one.places and _goes_on(groups[-1], one):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _goes_on(group: list[Product], one: Product) -> bool:
    first, last = group[0], group[-1]
    if first.count != one.count or not first.places or first.places[0][0] != one.places[0][0]:
        return False
    if first.causal != one.causal or first.blind is not None or one.blind is not None:
        return False
    if (len(group) + 1) * one.places[0][0][2] > PIECE:
        return False
    if first.seen is None or one.seen is None:
        if first.seen is not one.seen:
            return False
    elif not torch.equal(first.seen, one.seen):
        return False
    steps = steps_of(last, one)
    return min(steps) >= 0 and (len(group) == 1 or steps_of(first, group[1]) == steps)


def steps_of(one: Product, two: Product) -> tuple[int, ...]:
    """How far, in keys and in values, the rows of one product are from those of another."""
    return tuple(after[2] - before[2] for before, after in zip(one.places, two.places, strict=True))


def batched(products: list[Product]) -> Product:
    """One product of evenly spaced ones."""
    first, *others = products
    if not others:
        return first
    places = tuple(
        ((len(products), *shape[1:]), (step, *strides[1:]), begin)
        for (shape, strides, begin), step in zip(first.places, steps_of(first, others[0]), strict=True)
    )
    return first._replace(tokens=all_of(products), places=places, batch=len(products))


def wave_of(products: list[Product], tokens: int) -> Wave:
    """The products with the order of their tokens."""
    order = [number for product in products for number in numbers_of(product.tokens)]
    return Wave(products, None if order == list(range(tokens)) else torch.tensor(order))


def place_of(stored: Lines, line: int, count: int) -> Place:
    """The view [1, heads, count, dim] of rows from ``line`` on."""
    (_, heads, dim), (row, head, channel) = stored.rows.shape, stored.rows.stride()
    return (1, heads, count, dim), (0, head, row, channel), stored.rows.storage_offset() + line * row


def over_rows(ops, pools, regions, stored, index, grouped, product: Product, scale: float):
    """(out [n, H, dim], lse [n, H]) fp32 of a product from queries [T, key heads, group, dim]; None as ``attend``."""
    _, key_heads, group, dim = grouped.shape
    count, batch, places, seen = product.count, product.batch, product.places, product.seen
    if places:
        k, v = (found.rows.as_strided(*where) for found, where in zip(stored, places, strict=True))
    else:
        k, v = (decoded(ops, pools, region, index, *product.where)[None] for region in regions)
    k, v = widened(ops, "wide keys", k), widened(ops, "wide values", v)
    # What some query does not look at is no summand of 0: nothing but finite values may be there. A sum that overflows
    # takes the other way, too.
    if (seen is not None or product.causal) and not math.isfinite(v.sum().item()):
        return None
    q = grouped[product.tokens]
    if count > 1:
        q = q.reshape(batch, count, key_heads, group, dim).permute(0, 2, 3, 1, 4)
    if product.causal:
        q = q.reshape(batch, key_heads * group, count, dim)
        k, v = (one[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for one in (k, v))
    elif count > 1:
        q = q.reshape(batch, key_heads, group * count, dim)
    mask = None
    if seen is not None:
        mask = torch.where(seen, 0.0, -torch.inf) if seen.dtype == torch.bool else seen
        mask = mask.repeat(group, 1)[None, None]
    out, logs = fused(q, k, v, is_causal=product.causal, attn_mask=mask, scale=scale)
    if product.blind is not None:
        logs = logs.masked_fill(product.blind.repeat(group), -torch.inf)
    if count > 1:
        out, logs = (part.reshape(batch, key_heads, group, count, *part.shape[3:]) for part in (out, logs))
        out, logs = out.permute(0, 3, 1, 2, 4), logs.permute(0, 3, 1, 2)
    return out.reshape(batch * count, key_heads * group, dim), logs.reshape(batch * count, key_heads * group)


def widened(ops, name: str, rows: torch.Tensor) -> torch.Tensor:
    """Rows [batch, heads, n, dim] as fp32: themselves, or in memory that the next piece's go to, enough for most."""
    if rows.dtype == torch.float32:
        return rows
    room = PIECE * rows.shape[1] * rows.shape[3]
    wide = ops.spare.empty(name, (max(room, rows.numel()),), torch.float32)
    return wide[: rows.numel()].view(rows.shape).copy_(rows)


def pieces(regions, stored, host, request, first, last):
    """(first position, end, line of the first in keys and in values alike) of pieces in one run; None where decoded.

    The order of keys does not matter to a sum: a ring that lies once and has wrapped is two pieces, never put in order.
    """
    alike = {
        None if lines is None else (region.growth, region.rows, region.places, lines.unit)
        for region, lines in zip(regions, stored, strict=True)
    }
    if len(alike) == 1 and None not in alike:
        for run in runs(regions[0], host, request, first, last, stored[0].unit, regions[0].places):
            for done in range(0, run.count, PIECE):
                some = min(PIECE, run.count - done)
                yield first + done, first + done + some, run.line + done
            first += run.count
        return
    for low in range(first, last, PIECE):
        yield low, min(low + PIECE, last), None


def decoded(ops, pools, region, index, request, low, high):
    """Rows low .. high - 1 of a request as fp32 [heads, n, dim]."""
    numbers = torch.arange(low, high)
    rows = place.load(pools, region, *place.locate(region, index, torch.full_like(numbers, request), numbers))
    return ops.decode_rows(region, rows).to(torch.float32).transpose(0, 1)


def joined(out, logs, more, more_logs):
    """Attention over two sets of keys from the attention over each."""
    total = torch.logaddexp(logs, more_logs)
    share = torch.exp(more_logs - total).nan_to_num(0)  # no key in either: -inf less -inf
    return torch.lerp(out, more, share[..., None]), total
