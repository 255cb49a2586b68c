"""Keys and values in formats over tokens: groups are coded as their last token comes, an open one stays raw.

A query at position p sees what a request of p + 1 tokens holds. A trace knows shapes alone, so there are as many groups
as could close in a step of its shape, and those that do not are read as zeros and written nowhere.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from kvcore.backends.jax_pallas import entries, fused, tiles
from kvcore.backends.jax_pallas import rows as place
from kvcore.backends.jax_pallas.attention import finish, softmax_sum
from kvcore.backends.jax_pallas.layer import Layer
from kvcore.backends.jax_pallas.rows import Held
from kvcore.ops import Attention, Closed, StepIndex
from kvcore.plan import Region

Given = tuple[Array | None, Array | None]


def append(layer: Layer, pools: Held, index: StepIndex, k: Array, v: Array) -> Held:
    """Code every group that the step completes, then store the step's rows raw at slot·R + p mod R."""
    ratio, tails, found = layer.component("kv").ratio, layer.regions["kv_tail"], closing(layer, index)
    own: list[Any] = own_rows(layer, (k, v))
    before = pools
    if len(found.entry_index):
        groups = entries.untaken(index, found.request_index, found.entry_index, ratio)
        for part, region in enumerate(layer.regions["kv"]):
            rows = coded_rows(layer, before, index, found, part, own[part])
            pools = place.store(pools, region, *place.locate(region, index, found.request_index, groups), rows)
    for region, rows in zip(tails, own, strict=True):
        pools = place.append(pools, region, index, rows)
    return pools


def closing(layer: Layer, index: StepIndex) -> Closed:
    """The groups that close, as many as there could be: -1 where there are fewer."""
    tokens = len(index.positions)
    most = min(tokens, tokens // layer.component("kv").ratio + len(index.slots))
    return entries.closed(layer, index, count=most, role="kv")


def own_rows(layer: Layer, given: Given) -> list[Array | None]:
    """The step's own keys and values as raw canonical rows [T, heads, row_bytes]; None where they are not given."""
    regions = zip(layer.regions["kv_tail"], given, strict=True)
    return [None if values is None else place.encode_rows(region, values) for region, values in regions]


def coded_rows(layer: Layer, pools: Held, index: StepIndex, found: Closed, part: int, own: Array | None) -> Array:
    """Canonical rows [n, heads, row_bytes] of groups, coded from their tokens' raw rows."""
    ratio, region, request = layer.component("kv").ratio, layer.regions["kv"][part], found.request_index[:, None]
    tokens = jnp.arange(ratio, dtype=jnp.int32)[None]
    positions = jnp.where(request >= 0, found.entry_index[:, None] * ratio + tokens, -1)
    values = raw_rows(layer, pools, index, request + 0 * positions, positions, part, own)
    # [n, tokens, heads, dim] -> a row for every head: channel by channel over tokens, or token by token.
    by_head = values.transpose(0, 2, 3, 1) if region.format.tokens > 1 else values.transpose(0, 2, 1, 3)
    return place.encode_rows(region, by_head.reshape(len(values), region.heads, region.format.dim or 0))


def raw_rows(layer, pools, index, request, positions, part, own):
    """Values [..., heads, dim] of positions [...] that the ring holds, or that are the step's own; zeros at -1."""
    region = layer.regions["kv_tail"][part]
    values = place.decode_rows(region, place.read(pools, region, index, request, positions, own))
    return jnp.where((positions >= 0)[..., None, None], values, 0)


def tokens_of(region: Region, stored: Array) -> Array:
    """Canonical rows [Q, n, heads, row_bytes] of groups -> their tokens' values [Q, n · ratio, heads, dim]."""
    values, ratio = place.decode_rows(region, stored), region.tokens
    requests, groups, heads, channels = values.shape
    if region.format.tokens > 1:
        values = values.reshape(requests, groups, heads, channels // ratio, ratio).transpose(0, 1, 4, 2, 3)
    else:
        values = values.reshape(requests, groups, heads, ratio, channels // ratio).transpose(0, 1, 3, 2, 4)
    return values.reshape(requests, groups * ratio, heads, channels // ratio)


def whole(layer: Layer, pools: Held, index: StepIndex, part: int, own: Array | None, columns: int) -> Array:
    """Values of all groups that are whole at the end of the step: [Q, columns rounded up, heads, dim]; then zeros."""
    ratio, region = layer.component("kv").ratio, layer.regions["kv"][part]
    numbers = place.numbered((0 * index.lengths, index.lengths // ratio), -(-columns // ratio))
    request = place.requests_like(numbers)
    stored = place.load(pools, region, *place.locate(region, index, request, numbers))
    if own is not None and numbers.size:
        found = closing(layer, index)
        # Outside the array, where nothing closes: what is written there is dropped.
        at = jnp.where(found.request_index >= 0, found.request_index, len(numbers)), found.entry_index
        stored = stored.at[at].set(coded_rows(layer, pools, index, found, part, own), mode="drop")
    known = jnp.repeat(numbers >= 0, ratio, axis=1)[:, :, None, None]
    return jnp.where(known, tokens_of(region, stored), 0)


def gather(layer: Layer, pools: Held, index: StepIndex, positions: Array, given: Given) -> list[Array]:
    """Keys and values as the step leaves them, at positions [Q, columns]: [Q, columns, heads, dim] each."""
    ratio, columns = layer.component("kv").ratio, positions.shape[1]
    closed = (index.lengths // ratio * ratio)[:, None]
    at = place.numbered((closed[:, 0], index.lengths), ratio)
    dense = []
    for part, own in enumerate(own_rows(layer, given)):
        coded = whole(layer, pools, index, part, own, columns)[:, :columns]
        opened = raw_rows(layer, pools, index, place.requests_like(at), at, part, own).astype(coded.dtype)
        row = jnp.clip(positions - closed, 0, ratio - 1)[:, :, None, None]
        is_open = (positions >= closed)[:, :, None, None]
        dense.append(jnp.where(is_open, jnp.take_along_axis(opened, row, axis=1), coded))
    return dense


def seen(layer: Layer, pools: Held, index: StepIndex, given: Given, columns: int) -> tuple[Array, Array, Array]:
    """All rows that some query sees, coded and raw: keys, values [Q, n, heads, dim], and which of them, [T, n]."""
    component, request = layer.component("kv"), index.request_index
    ratio, query = component.ratio, index.positions[:, None]
    first = jnp.minimum(index.starts + 1, index.lengths) // ratio * ratio
    opened = place.numbered((first, index.lengths), ratio - 1 + len(index.positions))
    held = []
    for part, own in enumerate(own_rows(layer, given)):
        coded = whole(layer, pools, index, part, own, columns)
        raw = raw_rows(layer, pools, index, place.requests_like(opened), opened, part, own)
        held.append(jnp.concatenate([coded, raw.astype(coded.dtype)], axis=1))
    columns = held[0].shape[1] - opened.shape[1]
    coded_at = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), (len(index.slots), columns))
    position = jnp.concatenate([coded_at, opened], axis=1)[jnp.maximum(request, 0)]
    is_coded = jnp.arange(position.shape[1])[None] < columns
    left = 0 if index.left_padding is None else place.of(index.left_padding, request)[:, None]
    closed = (query + 1) // ratio * ratio
    mask = (position >= component.first_visible(query, left, jnp.maximum)) & (position <= query)
    return held[0], held[1], mask & ((position < closed) == is_coded) & (request >= 0)[:, None]


def attend(layer: Layer, pools: Held, index: StepIndex, q: Array, factor, sink, columns: int) -> Attention | None:
    """Attention [T, H, d] fp32 to what is stored: whole groups by a kernel, raw rows beside it; None without one."""
    component, request = layer.component("kv"), index.request_index
    regions, ratio = layer.regions["kv"], component.ratio
    left = jnp.zeros_like(request) if index.left_padding is None else place.of(index.left_padding, request)
    position = jnp.where((request >= 0) & (index.positions >= left), index.positions, -1)
    first, closed = component.first_visible(position, left, jnp.maximum), (position + 1) // ratio * ratio
    last = jnp.where(first < closed, closed - 1, -1)
    held = regions[0].rows * ratio
    blocks = index.block_table[jnp.maximum(request, 0), : -(-columns // held)]
    number = jnp.arange(blocks.shape[1], dtype=jnp.int32)[None]
    blocks = jnp.where((number >= first[:, None] // held) & (number * held <= last[:, None]), blocks, -1)
    if not fused.attends_kv(pools, regions, q, blocks.shape[1]):
        return None
    # One more than there can be: whole tiles are read, and none is cut off.
    at = place.numbered((jnp.maximum(first, closed), position + 1), ratio)
    whose = jnp.broadcast_to(request[:, None], at.shape)
    raw: list[Array] = []
    for region in layer.regions["kv_tail"]:
        rows = tiles.load_bf16(pools, region, *place.locate(region, index, whose, at))
        # One after another, here and below: bytes and rows of all at once would be several times as much.
        at, rows = lax.optimization_barrier((at, rows))
        raw.append(rows.astype(jnp.float32))
    keys, values = raw
    mine = softmax_sum(None, q.astype(jnp.float32)[:, None] * factor, keys, values, at >= 0)
    q, mine = lax.optimization_barrier((q, mine))
    out, lse = fused.attend_kv(pools, regions, blocks, first, last, q, factor, None)
    most = jnp.maximum(mine[0], lse)
    base = jnp.where(jnp.isneginf(most), 0, most)
    raw_share, share = jnp.exp(mine[0] - base), jnp.exp(lse - base)
    joined = mine[2] * raw_share[:, :, None] + out * share[:, :, None]
    return finish((most, mine[1] * raw_share + share, joined), sink, jnp.float32)
