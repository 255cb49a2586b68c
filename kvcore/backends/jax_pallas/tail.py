"""The tails: raw rows of tokens awaiting compression, and the compression itself."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvcore.backends.jax_pallas import entries as paged
from kvcore.backends.jax_pallas import fused
from kvcore.backends.jax_pallas import rows as place
from kvcore.backends.jax_pallas.choice import verbs
from kvcore.backends.jax_pallas.encoding import to_bf16
from kvcore.backends.jax_pallas.layer import Layer
from kvcore.backends.jax_pallas.order import read_first
from kvcore.backends.jax_pallas.rows import Held
from kvcore.kernels.pallas.arithmetic import pool
from kvcore.ops import StepIndex
from kvcore.ops.records import Compression, Streams
from kvcore.spec import Rope


def join(kv: Array, score: Array) -> Array:
    """Kv and score [T, width] side by side: [T, 2·width], the channels of a tail row."""
    return jnp.concatenate([kv, score], axis=1)


def append_tail(layer: Layer, pools: Held, index: StepIndex, kv: Array, score: Array, *, role: str) -> Held:
    """Store raw compressor rows kv and score, [T, width] each, fp32, at slot·R + p mod R."""
    (region,) = layer.regions[role]
    triton = verbs(pools.kernels)
    if triton and triton.keeps_tail(layer, role):
        return triton.append_tail(layer, pools, index, kv, score, role=role)
    return place.append(pools, region, index, place.encode_rows(region, join(kv, score)))


def compress(
    layer: Layer,
    pools: Held,
    index: StepIndex,
    kv: Array,
    score: Array,
    *,
    closed: int,
    role: str = "entries",
    norm_weight: Array | None = None,
    eps: float = 1e-6,
) -> Array:
    """Pool, for each of the first ``closed`` entries that the step completes, its window; norm; -> [closed, d].

    DeepSeek-V4 paper sections 2.3.1 (CSA, overlapping) and 2.3.2 (HCA); rounding as in the published inference code.
    """
    component = layer.component(layer.tail_of(role))
    d, m = component.dim, component.ratio
    (region,) = layer.regions[layer.tail_of(role)]
    own = join(kv, score).astype(jnp.float32)
    exact = layer.component(role).parts[0].format.is_fp32
    request, requests, positions = windows(layer, index, closed=closed, role=role)
    raw = place.read_fp32(pools, region, index, requests, positions, own)
    keys, scores = raw[:, :, : component.width], raw[:, :, component.width :]
    if component.overlap:
        # A token in the window before the entry's own lends its carry half, the first; its own tokens the cur half.
        keys = jnp.concatenate([keys[:, :m, :d], keys[:, m:, d:]], axis=1)
        scores = jnp.concatenate([scores[:, :m, :d], scores[:, m:, d:]], axis=1)
    scores = jnp.where((positions >= 0)[:, :, None], scores, -jnp.inf)
    latents = pool(keys, scores)
    latents = latents if exact else to_bf16(latents)
    if norm_weight is not None:
        latents = rms_norm(latents, norm_weight, eps)
        latents = latents if exact else to_bf16(latents)
    return jnp.where((request >= 0)[:, None], latents, 0)


def flush(
    layer: Layer,
    pools: Held,
    index: StepIndex,
    streams: Streams,
    compression: Compression,
    *,
    closed: int,
    append: bool = False,
    newest: int = 0,
    now: Mapping[str, Array] | None = None,
) -> Held:
    """Compress, rotate at position m·i, encode and store every entry that the step completes; then index keys.

    The ``rope`` is the fp32 inverse frequencies, or None. With ``append`` the step's own rows go to the tails, too,
    where that is one launch, or one program of XLA, which keeps those of tails out that are not to have them ``now``.
    """
    triton, eps, rope = verbs(pools.kernels), compression.eps, compression.rope
    given = {role: stream for role, *stream in compression.each(streams)}
    if triton and triton.flushes(layer, given):
        return triton.flush(layer, pools, index, given, rope, eps=eps, append=append, newest=newest)
    if append:
        return _flush_and_append(layer, pools, index, given, rope, closed=closed, eps=eps, now=now)
    for role, (kv, score, weight) in given.items():
        if fused.flushes(layer, pools, role, rope):
            pools = _flush_fused(layer, pools, index, kv, score, weight, rope, closed=closed, role=role, eps=eps)
            continue
        latents = flush_latents(
            layer, pools, index, kv, score, closed=closed, role=role, norm_weight=weight, eps=eps, rope=rope
        )
        pools = paged.store_role(layer, pools, index, latents, role=role)
    return pools


def _flush_and_append(layer, pools, index, given, rope, *, closed, eps, now):
    """``flush``, and the step's own rows to the tails, which are read first: beside the write, XLA would copy them."""
    after = index
    if closed:

        def read(pools):
            held = Held(pools, layer.kernels)
            return [
                flush_latents(
                    layer, held, index, kv, score, closed=closed, role=role, norm_weight=weight, eps=eps, rope=rope
                )
                for role, (kv, score, weight) in given.items()
            ]

        latents, after = read_first(read, dict(pools), index)
        for role, rows in zip(given, latents, strict=True):
            pools = paged.store_role(layer, pools, index, rows, role=role)
    for role, (kv, score, _) in given.items():
        ring = layer.tail_of(role)
        into = after if now is None else place.only_if(now[ring], after)
        pools = append_tail(layer, pools, into, kv, score, role=ring)
    return pools


def window_of(entry: Array, ratio: int, *, overlap: bool) -> Array:
    """[n, rows] positions that entries [n] are pooled from; the first entry's window before its own is -1."""
    first = (entry - 1 if overlap else entry) * ratio
    positions = first[:, None] + jnp.arange(2 * ratio if overlap else ratio, dtype=jnp.int32)[None]
    return jnp.where((entry >= 0)[:, None], jnp.maximum(positions, -1), -1)


def rms_norm(values: Array, weight: Array, eps: float) -> Array:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in fp32."""
    mean = jnp.mean(values * values, axis=-1, keepdims=True)
    return values * (np.float32(1) / jnp.sqrt(mean + np.float32(eps))) * weight.astype(jnp.float32)[None]


def rotate(values: Array, positions: Array, rope: Array) -> Array:
    """Rotate the last channels of values [n, d] in interleaved pairs; angle = fp32(position) * fp32(frequency)."""
    cos, sin = cos_sin(positions, rope)
    first = values.shape[1] - 2 * len(rope)
    even, odd = values[:, first::2], values[:, first + 1 :: 2]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=2)
    return jnp.concatenate([values[:, :first], turned.reshape(len(values), values.shape[1] - first)], axis=1)


def cos_sin(positions, frequencies):
    """Cosine and sine of every angle, [n, frequencies] fp32 each."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
    return jnp.cos(angles), jnp.sin(angles)


def frequencies_of(rope: Any) -> Any:
    """Inverse frequencies as an fp32 array, NumPy's from a Rope, or as they are given; None stays None."""
    return np.asarray(rope.inverse_frequencies, np.float32) if isinstance(rope, Rope) else rope


def flush_latents(layer, pools, index, kv, score, *, closed, role, norm_weight=None, eps=1e-6, rope=None):
    """``compress``, rotated at position m·i where there is a ``rope``: what ``flush`` stores."""
    latents = compress(layer, pools, index, kv, score, closed=closed, role=role, norm_weight=norm_weight, eps=eps)
    component = layer.component(role)
    if rope is None:
        return latents
    _, entries = paged.closed(layer, index, count=closed, role=role)
    latents = rotate(latents, entries * component.ratio, rope)
    return latents if component.parts[0].format.is_fp32 else to_bf16(latents)


def _flush_fused(layer, pools, index, kv, score, weight, rope, *, closed, role, eps):
    """One stream of ``flush`` in one kernel: where rows come from and go to is worked out here."""
    (region,), (ring,) = layer.regions[role], layer.regions[layer.tail_of(role)]
    component = layer.component(role)
    request, requests, positions = windows(layer, index, closed=closed, role=role)
    _, entry = paged.closed(layer, index, count=closed, role=role)
    sources = place.origin(ring, index, requests, positions, len(kv))
    targets = place.locate(region, index, request, paged.untaken(index, request, entry, component.ratio))
    turn = None if rope is None else cos_sin(entry * component.ratio, rope)
    return fused.flush(
        pools,
        region,
        ring,
        (kv, score),
        sources,
        targets,
        jnp.sum(positions < 0, axis=1, dtype=jnp.int32),
        weight,
        turn,
        eps=eps,
        overlap=layer.component(layer.tail_of(role)).overlap,
        global_scale=layer.global_scale(role),
    )


def windows(layer, index, *, closed, role):
    """The first ``closed`` entries that the step completes: request [n], and request and position [n, rows] of rows."""
    tail = layer.component(layer.tail_of(role))
    request, entry = paged.closed(layer, index, count=closed, role=role)
    positions = window_of(entry, tail.ratio, overlap=tail.overlap)
    positions = jnp.where((request >= 0)[:, None], positions, -1)
    return request, jnp.broadcast_to(request[:, None], positions.shape), positions
