"""Classic K-V layers: full, sliding and chunked attention over separate keys and values."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from kvcore.backends.jax_pallas import blocks, fused, groups
from kvcore.backends.jax_pallas import rows as place
from kvcore.backends.jax_pallas.attention import by_tokens, finish, no_keys, softmax_sum
from kvcore.backends.jax_pallas.calls import TILED
from kvcore.backends.jax_pallas.choice import fall_back, verbs
from kvcore.backends.jax_pallas.layer import Layer
from kvcore.backends.jax_pallas.rows import Held
from kvcore.ops import Attention, StepIndex, VisibleRows


def append_kv(layer: Layer, pools: Held, index: StepIndex, k: Array, v: Array) -> Held:
    """Encode and store k [T, key_heads, key_dim] and v [T, value_heads, value_dim]."""
    if layer.over_tokens:
        return groups.append(layer, pools, index, k, v)
    triton = verbs(pools.kernels)
    for region, values in zip(layer.regions["kv"], (k, v), strict=True):
        if triton and triton.covers(region):
            pools = triton.append(pools, region, index, values)
            continue
        pools = place.append(pools, region, index, place.encode_rows(region, values))
    return pools


def gather_kv(
    layer: Layer, pools: Held, index: StepIndex, k: Array | None = None, v: Array | None = None, *, columns: int
) -> tuple[Array, Array, Array]:
    """Every row that a query of the step may see: k, v [Q, columns, heads, dim], positions [Q, columns]."""
    if layer.over_tokens:
        positions = place.numbered(place.visible(layer.component("kv"), index), columns)
        keys, values = groups.gather(layer, pools, index, positions, (k, v))
        return keys, values, positions
    triton = verbs(pools.kernels)
    # The kernel's rings begin where the first query's window does, left padding or not.
    padded = layer.component("kv").span is not None and index.left_padding is not None
    if triton and not padded and all(map(triton.covers, layer.regions["kv"])):
        return triton.gather_kv(pools, layer.regions["kv"], index, (k, v), layer.component("kv"), columns)
    if triton and padded:
        fall_back(pools.kernels, "gather_kv", "the step has left padding")
    positions = place.numbered(place.visible(layer.component("kv"), index), columns)
    gathered = []
    for region, values in zip(layer.regions["kv"], (k, v), strict=True):
        own = None if values is None else place.encode_rows(region, values)
        stored = place.read(pools, region, index, place.requests_like(positions), positions, own)
        dense = place.decode_rows(region, stored)
        gathered.append(jnp.where((positions >= 0)[:, :, None, None], dense, 0))
    return gathered[0], gathered[1], positions


def mask(layer: Layer, index: StepIndex, *, columns: int) -> Array:
    """[T, columns] bool over ``gather_kv``'s rows: what each query may see."""
    component = layer.component("kv")
    first, _ = place.visible(component, index)
    rows = place.of(first, index.request_index)[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]
    query = index.positions[:, None]
    left = 0 if index.left_padding is None else place.of(index.left_padding, index.request_index)[:, None]
    seen = (rows >= component.first_visible(query, left, jnp.maximum)) & (rows <= query)
    return seen & (index.request_index >= 0)[:, None]


def visible_rows(layer: Layer, index: StepIndex, *, columns: int) -> VisibleRows:
    """Positions [Q, columns] of ``gather_kv``'s rows, -1 where there is none, and the mask over them."""
    positions = place.numbered(place.visible(layer.component("kv"), index), columns)
    return VisibleRows(positions, mask(layer, index, columns=columns))


def from_batch(index: StepIndex, batch: Array) -> Array:
    """A batch [Q, S, ...] padded on the right -> rows [T, ...] in step order; padding rows are zeros."""
    request = index.request_index
    if not batch.shape[0] * batch.shape[1]:
        return jnp.zeros((len(request), *batch.shape[2:]), batch.dtype)
    column = jnp.clip(index.positions - place.of(index.starts, request), 0, batch.shape[1] - 1)
    request = jnp.maximum(request, 0)
    rows = batch[request, column] if batch.shape[1] > 1 else batch[:, 0][request]
    return jnp.where(jnp.expand_dims(index.request_index >= 0, tuple(range(1, rows.ndim))), rows, jnp.zeros_like(rows))


def to_batch(index: StepIndex, rows: Array, width: int) -> Array:
    """Rows [T, ...] -> a batch [Q, width, ...], zeros where a request has fewer new tokens."""
    new = index.lengths - index.starts
    column = jnp.arange(width, dtype=jnp.int32)[None]
    valid = column < new[:, None]
    if not len(rows):
        return jnp.zeros((*valid.shape, *rows.shape[1:]), rows.dtype)
    token = jnp.where(valid, (jnp.cumsum(new) - new)[:, None] + column, 0)
    batch = rows[token]
    return jnp.where(jnp.expand_dims(valid, tuple(range(2, batch.ndim))), batch, jnp.zeros_like(batch))


def attend_kv(
    layer: Layer,
    pools: Held,
    index: StepIndex,
    q: Array,
    k: Array | None = None,
    v: Array | None = None,
    *,
    columns: int,
    sink: Array | None = None,
    scale: float | Array | None = None,
) -> Attention:
    """Attend from q [T, H, key_dim] to the layer's K-V; H is a multiple of key_heads; out [T, H, value_dim]."""
    dim = q.shape[2]
    factor = jnp.float32(dim**-0.5 if scale is None else scale)
    stored = k is None and v is None and index.block_table.size
    if stored and layer.over_tokens:
        found = groups.attend(layer, pools, index, q, factor, sink, columns)
        if found is not None:
            return Attention(found.out.astype(q.dtype), found.lse)
    elif stored:
        blocks, first, last = seen_blocks(layer, index, columns)
        if fused.attends_kv(pools, layer.regions["kv"], q, blocks.shape[1]):
            out, lse = fused.attend_kv(pools, layer.regions["kv"], blocks, first, last, q, factor, sink)
            return Attention(out.astype(q.dtype), lse)
    elif pools.kernels in TILED and k is not None and fused.attends_kv(pools, layer.regions["kv"], q, 1):
        fall_back(pools.kernels, "attend_kv", "k and v are given")
    if pools.kernels == "portable" and not layer.over_tokens and q.size and index.block_table.shape[1]:
        out, lse = attend_in_place(q, factor, sink, layer, columns, (dict(pools), index, k, v, None))
    else:
        out, lse = _gathered(q, factor, sink, layer, columns, (pools, index, k, v, None))
    return Attention(out.astype(q.dtype), lse)


def _gathered(q, factor, sink, layer, columns, rest) -> Attention:
    """Attention [T, H, d] fp32 to all rows that a query of the step may see, brought together."""
    pools, index, k, v, floors = rest
    if layer.over_tokens:
        keys, values, seen = groups.seen(layer, pools, index, (k, v), columns)
        columns = keys.shape[1]
    else:
        keys, values, positions = gather_kv(layer, pools, index, k, v, columns=columns)
        seen = mask(layer, index, columns=columns)
        if floors is not None and len(keys):
            held = positions >= floors[:, None]
            seen &= held[jnp.maximum(index.request_index, 0)]
    value_dim = values.shape[3]

    def chunk(request, q, seen):
        if not len(keys):
            return no_keys(q.shape[0], q.shape[1], value_dim)
        mine = jnp.maximum(request, 0)
        logits_of = q.astype(jnp.float32)[:, None] * factor
        return softmax_sum(None, logits_of, keys[mine].astype(jnp.float32), values[mine].astype(jnp.float32), seen)

    each = columns * max(keys.shape[2] * q.shape[2], values.shape[2] * value_dim)
    return finish(by_tokens(chunk, (index.request_index, q, seen), each), sink, jnp.float32)


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def attend_in_place(q, factor, sink, layer, columns, rest) -> Attention:
    """The same to rows where they lie.

    Args:
        q: [T, H, d], as it is given. ``factor`` and ``sink`` likewise.
        layer: the layer.
        columns: of all rows that a query may see, where they must be brought together after all.
        rest: pools, index, keys and values of the step that are not stored yet or None, and [Q] first rows that a
            ring still holds, or None.
    """
    del columns
    pools, index, k, v, floors = rest
    regions, component = layer.regions["kv"], layer.component("kv")
    source = blocks.Source(Held(pools, layer.kernels), regions, (1.0, 1.0), regions[1].format.dim)
    own = None
    if k is not None and v is not None:
        given = zip(regions, (k, v), strict=True)
        own = tuple(place.decode_rows(region, place.encode_rows(region, rows)) for region, rows in given)
        own = tuple(rows.astype(jnp.float32) for rows in own)

    def seen(position, request):
        left = jnp.zeros_like(request) if index.left_padding is None else place.of(index.left_padding, request)
        first = component.first_visible(position, left, jnp.maximum)
        first = first if floors is None else jnp.maximum(first, place.of(floors, request))
        return first, jnp.where((request >= 0) & (position >= left), position, -1)

    stop = index.lengths if own is None else index.starts
    return blocks.attend(source, index, q.astype(jnp.float32) * factor, seen, own, stop=stop, sink=sink)


@attend_in_place.defjvp
def _differentiated(layer, columns, primals, tangents):
    """A loop as long as a length is differentiated forwards only: where gradients are asked for, rows are gathered."""
    q, factor, sink, (pools, *others) = primals
    rest = Held(pools, layer.kernels), *others

    def gathered(q, factor, sink):
        return _gathered(q, factor, sink, layer, columns, rest)

    return jax.jvp(gathered, (q, factor, sink), tangents[:3])


def seen_blocks(layer, index, columns):
    """(blocks [T, n] that each token sees of the first that hold ``columns`` rows, first and last position [T]).

    Blocks are -1 where nothing is seen, and so is the last position of padding.
    """
    (region, _), request = layer.regions["kv"], index.request_index
    left = jnp.zeros_like(request) if index.left_padding is None else place.of(index.left_padding, request)
    last = jnp.where((request >= 0) & (index.positions >= left), index.positions, -1)
    first = layer.component("kv").first_visible(last, left, jnp.maximum)
    blocks = index.block_table[jnp.maximum(request, 0), : -(-columns // region.rows)]
    number = jnp.arange(blocks.shape[1], dtype=jnp.int32)[None]
    seen = (number >= first[:, None] // region.rows) & (number * region.rows <= last[:, None])
    return jnp.where(seen, blocks, -1), first, last


def in_order(layer, pools, *, requests, columns):
    """``gather_kv``'s rows of the first ``columns`` positions of requests whose units lie one after another, or None.

    Rows that nobody wrote are whatever lies there.
    """
    found = []
    for region in layer.regions["kv"]:
        stored = place.load_in_order(pools, region, requests)
        if stored is None:
            return None
        if region.steps[1] == 1:
            found.append(place.decode_rows(region, stored[:, :columns]))
            continue
        values = jnp.swapaxes(place.decode_rows(region, stored), 1, 2)
        found.append(values.reshape(requests, -1, *values.shape[2:])[:, :columns])
    return found
