"""The lightning indexer: scores and top-k (DeepSeek-V4 paper section 2.3.1)."""

import jax.numpy as jnp
from jax import Array, lax

from kvcore.backends.jax_pallas import entries, fused
from kvcore.backends.jax_pallas import rows as place
from kvcore.backends.jax_pallas.attention import by_tokens
from kvcore.backends.jax_pallas.choice import fall_back, verbs
from kvcore.backends.jax_pallas.encoding import hadamard
from kvcore.backends.jax_pallas.layer import Layer
from kvcore.backends.jax_pallas.rows import Held
from kvcore.ops import StepIndex


def index_scores(layer: Layer, pools: Held, index: StepIndex, q: Array, weights: Array, *, columns: int) -> Array:
    """``sum_h weights[t,h] · relu(q[t,h] · key[s])`` -> [T, columns] fp32; -inf unless s < (t + 1) div m."""
    component = layer.component("index_keys")
    (region,) = layer.regions["index_keys"]
    triton, scale = verbs(pools.kernels), layer.global_scale("index_keys")
    if triton and triton.scores(region, index, q, scale):
        return triton.index_scores(pools, region, index, q, weights, component.ratio, columns, scale)
    if len(q) and columns and index.block_table.size and fused.scores(pools, region):
        return _fused_scores(layer, pools, index, q, weights, columns=columns)
    keys = entries.gather_all_entries(layer, pools, index, columns=columns, role="index_keys").values
    keys = keys.astype(jnp.float32)
    q = _rotated(q, component)

    def score(request, position, q, weights):
        mine = keys.at[jnp.maximum(request, 0)].get(mode="clip") if len(keys) else jnp.zeros((1, columns, 1))
        products = jnp.einsum("thd,tnd->thn", q, mine, precision=lax.Precision.HIGHEST)
        scores = jnp.einsum("th,thn->tn", weights, jnp.maximum(products, 0), precision=lax.Precision.HIGHEST)
        return _visible(scores, request, position, component)

    if not len(keys) or not columns:
        return jnp.full((len(q), columns), -jnp.inf, jnp.float32)

    tokens = (index.request_index, index.positions, q, weights.astype(jnp.float32))
    return by_tokens(score, tokens, columns * component.dim)


def select(scores: Array, k: int, kernels: str = "portable") -> Array:
    """Top k of scores [T, n] -> [T, k] int32: highest first, ties to the lowest index, -1 where score is -inf."""
    triton = verbs(kernels)
    if triton and triton.selects(scores, k):
        return triton.select(scores, k)
    if fused.selects(kernels, scores, k):
        return fused.select(kernels, scores, k)
    columns = scores.shape[1]
    if scores.size and k:
        fall_back(kernels, "select", f"k = {k} of {columns} scores")
    # NaN is never selected. The order that XLA sorts by has -0 below 0, but the two are a tie.
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    scores = jnp.where(scores == 0, 0, scores)
    best, indices = lax.top_k(scores, min(k, columns))
    indices = jnp.where(best > -jnp.inf, indices.astype(jnp.int32), -1)
    return jnp.pad(indices, ((0, 0), (0, k - indices.shape[1])), constant_values=-1)


def index_select(
    layer: Layer, pools: Held, index: StepIndex, q: Array, weights: Array, *, count: int, columns: int
) -> Array:
    """``select`` of ``index_scores``, in one program: [T, count] int32."""
    return select(index_scores(layer, pools, index, q, weights, columns=columns), count, pools.kernels)


def _fused_scores(layer, pools, index, q, weights, *, columns):
    component = layer.component("index_keys")
    (region,) = layer.regions["index_keys"]
    request, position = index.request_index, index.positions
    keys = jnp.arange(0, columns, region.rows, dtype=jnp.int32)[None]
    keys = jnp.where(keys < _count(request, position, component)[:, None], keys, -1)
    blocks, _ = place.locate(region, index, jnp.broadcast_to(request[:, None], keys.shape), keys)
    # A rotation ends in a rounding to bf16, and a kernel multiplies what is bf16 three times as fast.
    rotates = component.parts[0].format.hadamard
    given = blocks, _rotated(q, component).astype(jnp.bfloat16) if rotates else q, weights
    scores = fused.index_scores(pools, region, *given, layer.global_scale("index_keys"))
    return _visible(scores[:, :columns], request, position, component)


def _rotated(q, component):
    """Queries [T, H, d] as fp32, rotated where the keys are."""
    q = q.astype(jnp.float32)
    return hadamard(q.reshape(-1, component.dim)).reshape(q.shape) if component.parts[0].format.hadamard else q


def _count(request, position, component):
    """[T] index keys that each token sees."""
    return jnp.where(request >= 0, place.divided(position + 1, component.ratio), 0)


def _visible(scores, request, position, component):
    """Scores [T, columns], -inf for keys that the token does not see."""
    seen = jnp.arange(scores.shape[1], dtype=jnp.int32)[None] < _count(request, position, component)[:, None]
    return jnp.where(seen, scores, -jnp.inf)
