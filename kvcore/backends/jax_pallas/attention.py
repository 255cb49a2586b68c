"""Attention over the window and the compressed entries, straight from the pools (DeepSeek-V4 paper section 2.3.3)."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvcore.backends.jax_pallas import fused
from kvcore.backends.jax_pallas import rows as place
from kvcore.backends.jax_pallas.calls import TILED
from kvcore.backends.jax_pallas.choice import fall_back, verbs
from kvcore.backends.jax_pallas.encoding import to_bf16
from kvcore.backends.jax_pallas.gradients import constant
from kvcore.backends.jax_pallas.layer import Layer
from kvcore.backends.jax_pallas.rows import Held
from kvcore.backends.jax_pallas.tail import rotate
from kvcore.ops import Attention, StepIndex

CHUNK_VALUES = 1 << 24
"""Decoded fp32 values that one chunk of tokens may bring together: 64 MiB."""

LARGEST_EXPONENT = 88.0
"""Above it an fp32 ``exp`` is infinite, and what is divided by it is 0."""

ENTRIES_A_ROUND = 128
"""Entries of a token that are read together where all are seen: blocks of two rows would be thousands of rounds."""


def attend(
    layer: Layer,
    pools: Held,
    index: StepIndex,
    q: Array,
    selected: Array | None = None,
    *,
    rows: Array | None = None,
    sink: Array | None = None,
    scale: float | Array | None = None,
    rope: Array | None = None,
) -> Attention:
    """Attend from q [T, H, d] to the window and the selected (None: all visible) entries, where K = V.

    ``rope`` is the fp32 inverse frequencies by which outputs are turned back, or None.
    """
    dim = q.shape[2]
    scale = dim**-0.5 if scale is None else scale
    window, entries = layer.component("window"), layer.component("entries")
    triton = verbs(pools.kernels)
    # A number that the caller computes on the device is no constant of a launch, which takes q's rows for the step's.
    launches = triton and isinstance(scale, float) and (rows is None or len(rows) == len(q))
    shorter = window is not None and index.left_padding is not None
    if launches and not shorter and triton.attends(layer, index, q):
        own = None if rows is None or window is None else place.encode_rows(layer.regions["window"][0], rows)[:, 0]
        return Attention(*triton.attend(layer, pools, index, q, selected, own, sink, scale, rope))

    if triton and not launches:
        fall_back(pools.kernels, "attend", "scale is an array, or rows are others than the step's")
    if triton and shorter:
        fall_back(pools.kernels, "attend", "a window begins later than it does by itself")
    if pools.kernels in TILED and rows is not None:
        fall_back(pools.kernels, "attend", "rows of the step are given")

    def finished(found):
        return found if rope is None else found._replace(out=inverse_rope(found.out, index.positions, rope))

    factor = jnp.float32(scale)
    if rows is None:
        sources = _sources(layer, index, selected)
        if fused.attends(pools, [source[0] for source in sources], q, sum(source[1].shape[1] for source in sources)):
            out, lse = fused.attend(pools, q, sources, sink, factor)
            return finished(Attention(out.astype(q.dtype), lse))
    if entries is not None and selected is None:
        # As many rounds as there are entries: a loop that JAX differentiates forwards only.
        q = constant("attend: q", q, "Select entries: gradients go through those that are given as selected.")
    own = None
    if window is not None and rows is not None:
        own = place.encode_rows(layer.regions["window"][0], rows)

    def chunk(request, position, q, selected=None):
        logits_of = q.astype(jnp.float32)[:, None] * factor
        state, found = None, []
        if window is not None:
            found.append(
                read(layer, pools, index, "window", request, _in_window(window, index, request, position), own)
            )
        count = None if entries is None else jnp.where(request >= 0, place.divided(position + 1, entries.ratio), 0)
        if together:
            selected = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], (len(request), size))
        if count is not None and selected is not None:
            found.append(read(layer, pools, index, "entries", request, _existing(selected, count)))
        if found:
            # All at once: every sum of its own is compiled, and run, by itself.
            keys, valid = (jnp.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
            state = softmax_sum(None, logits_of, keys, keys, valid)
        state = no_keys(q.shape[0], q.shape[1], dim) if state is None else state
        if count is None or selected is not None:
            return state

        def some(round, state):
            numbers = round * size + jnp.arange(size, dtype=jnp.int32)[None]
            numbers = jnp.where(numbers < count[:, None], numbers, -1)
            keys, valid = read(layer, pools, index, "entries", request, numbers)
            return softmax_sum(state, logits_of, keys, keys, valid)

        return lax.fori_loop(0, place.divided(jnp.max(count, initial=0) + size - 1, size), some, state)

    size, together = 0, False
    if entries is not None:
        (region,) = layer.regions["entries"]
        size = _round_of(region, index, pools)
        # One round holds all that there can be: those that are there are read beside the window.
        together = selected is None and pools.kernels == "portable" and size == index.block_table.shape[1] * region.rows
    columns = (window.window if window is not None else 0) + (size if selected is None else selected.shape[1])
    tokens = (index.request_index, index.positions, q) + (() if selected is None else (selected,))
    state = by_tokens(chunk, tokens, max(columns, 64) * dim)
    return finished(finish(state, sink, q.dtype))


def inverse_rope(out, positions, rope):
    """Outputs [T, H, d] with their last channels turned by minus the tokens' positions [T], rounded like ``out``."""
    rows = out.astype(jnp.float32).reshape(-1, out.shape[2])
    # XLA may leave out a rounding that is undone at once.
    rows = to_bf16(rows) if out.dtype == jnp.bfloat16 else rows
    return rotate(rows, jnp.repeat(-positions, out.shape[1]), rope).reshape(out.shape).astype(out.dtype)


def _round_of(region, index, pools):
    """Entries that are read together: of one block where each is a DMA of its own, else many blocks' at once."""
    if pools.kernels != "portable":
        return region.rows
    return max(1, min(ENTRIES_A_ROUND, index.block_table.shape[1] * region.rows))


def _sources(layer, index, selected):
    """What a token attends to, for the kernel: (region, unit [T, n], row [T, n], global scale) of each component."""
    request, position = index.request_index, index.positions
    window, entries = layer.component("window"), layer.component("entries")
    numbers = {}
    if window is not None:
        numbers["window"] = _in_window(window, index, request, position)
    if entries is not None:
        count = jnp.where(request >= 0, place.divided(position + 1, entries.ratio), 0)
        if selected is None:
            columns = index.block_table.shape[1] * layer.regions["entries"][0].rows
            selected = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32)[None], (len(request), columns))
        numbers["entries"] = _existing(selected, count)
    sources = []
    for role, wanted in numbers.items():
        (region,) = layer.regions[role]
        requests = jnp.broadcast_to(request[:, None], wanted.shape)
        sources.append((region, *place.locate(region, index, requests, wanted), layer.global_scale(role)))
    return [source for source in sources if source[1].shape[1]]


def _in_window(window, index, request, position):
    """[t, W] positions that tokens see in the window, -1 before the first."""
    numbers = position[:, None] - window.window + 1 + jnp.arange(window.window, dtype=jnp.int32)[None]
    if index.left_padding is None:
        return jnp.maximum(numbers, -1)
    return jnp.where(numbers >= place.of(index.left_padding, request)[:, None], numbers, -1)


def _existing(selected, count):
    """Selected entries [t, k], -1 where the token has no such entry."""
    return jnp.where((selected >= 0) & (selected < count[:, None]), selected, -1)


def read(layer, pools, index, role, request, numbers, own=None):
    """Decoded rows ``numbers`` [t, n] of each token's request: values [t, n, 1, d] fp32, valid [t, n]."""
    (region,) = layer.regions[role]
    requests = jnp.broadcast_to(request[:, None], numbers.shape)
    valid = (requests >= 0) & (numbers >= 0)
    numbers = jnp.where(valid, numbers, -1)
    values = place.read_values(pools, region, index, requests, numbers, own, layer.global_scale(role))
    return values.astype(jnp.float32), valid


def by_tokens(function, tokens, values_each):
    """``function(*tokens)`` over arrays [T, ...], in chunks of tokens where ``values_each`` a token would add up."""
    count = len(tokens[0])
    size = max(1, CHUNK_VALUES // max(values_each, 1))
    if count <= size:
        return function(*tokens)
    chunks = -(-count // size)

    def split(array):
        # Padding repeats token rows; what is computed for them is cut off again.
        rows = jnp.arange(chunks * size, dtype=jnp.int32) % count
        return array[rows].reshape(chunks, size, *array.shape[1:])

    found = lax.map(lambda chunk: function(*chunk), tuple(split(array) for array in tokens))
    return jax.tree.map(lambda array: array.reshape(chunks * size, *array.shape[2:])[:count], found)


def no_keys(tokens, heads, dim):
    """The state of a softmax over no keys: largest logit [t, H], sum of weights [t, H], weighted sum [t, H, e]."""
    return (
        jnp.full((tokens, heads), -jnp.inf, jnp.float32),
        jnp.zeros((tokens, heads), jnp.float32),
        jnp.zeros((tokens, heads, dim), jnp.float32),
    )


def softmax_sum(
    state: tuple[Array, Array, Array] | None, q: Array, keys: Array, values: Array, valid: Array
) -> tuple[Array, Array, Array]:
    """More keys for every token: q [t, 1, H, d] scaled, keys [t, n, heads, d], values [t, n, heads, e], valid [t, n].

    Query heads are grouped over key heads, and over value heads, in order. A state of None has no keys.
    """
    tokens, _, heads, _ = q.shape
    grouped = q.reshape(tokens, keys.shape[2], heads // keys.shape[2], q.shape[3])
    logits = jnp.einsum("tkgd,tnkd->tkgn", grouped, keys, precision=lax.Precision.HIGHEST)
    logits = jnp.where(valid[:, None], logits.reshape(tokens, heads, keys.shape[1]), -jnp.inf)
    higher = jnp.max(logits, axis=2, initial=-jnp.inf)
    higher = higher if state is None else jnp.maximum(state[0], higher)
    base = jnp.where(jnp.isneginf(higher), 0, higher)
    weights = jnp.where(valid[:, None], jnp.exp(logits - base[:, :, None]), 0)
    # A row that a token may not see can hold NaN for one that may: it is taken out, not weighted with 0.
    values = jnp.where(valid[:, :, None, None], values, 0)
    shared = weights.reshape(tokens, values.shape[2], heads // values.shape[2], values.shape[1])
    added = jnp.einsum("tvgn,tnve->tvge", shared, values, precision=lax.Precision.HIGHEST)
    total, out = jnp.sum(weights, axis=2), added.reshape(tokens, heads, values.shape[3])
    if state is None:
        return higher, total, out
    kept = jnp.exp(state[0] - base)
    return higher, state[1] * kept + total, state[2] * kept[:, :, None] + out


def finish(state, sink, dtype):
    """Out and lse of a softmax state.

    The sink is one logit a head, unscaled, in the denominator only: it has no value and is not part of lse.
    """
    largest, total, out = state
    # Where there is no key, or the sink takes everything, log and exp get what they have a finite derivative at: it is
    # multiplied by 0.
    nothing = total == 0
    out = out / jnp.where(nothing, 1, total)[:, :, None]
    lse = largest + jnp.log(jnp.where(nothing, 1, total))
    if sink is not None:
        # out · sigmoid(lse - sink), written so that neither exponential overflows.
        over = sink.astype(jnp.float32)[None] - lse
        hidden = nothing | (over > LARGEST_EXPONENT)
        shrunk = out / (1 + jnp.exp(jnp.where(hidden, 0, over)))[:, :, None]
        out = jnp.where(hidden[:, :, None], 0, shrunk)
    return Attention(out.astype(dtype), jnp.where(nothing, -jnp.inf, lse))
