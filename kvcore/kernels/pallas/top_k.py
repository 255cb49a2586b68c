"""Top k by a bitonic sort of (score, index) across lanes and sublanes: no scratch, no data-dependent control."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.spec.layout import LANES

SMALLEST, LARGEST = 1024, 8192
"""Columns that are sorted: at least one register of 8 by 128, at most what keeps the unrolled network short."""
OPERATIONS_A_STAGE = 12
"""Of the network, on each score: who the partner is, and which of both stays."""


def top_k(scores, k: int, *, interpret: Any):
    """Indices of the k highest of scores [T, n] -> [T, k] int32: ties to the lowest index, -1 where a score is -inf.

    NaN is never selected, and -0 ties with 0. n is at most ``LARGEST``.
    """
    tokens, columns = scores.shape
    size = max(SMALLEST, 1 << max(columns - 1, 0).bit_length())
    scores = jnp.pad(scores.astype(jnp.float32), ((0, 0), (0, size - columns)), constant_values=-jnp.inf)
    lines = -(-min(k, size) // LANES)
    stages = size.bit_length() * (size.bit_length() - 1) // 2
    selected = pl.pallas_call(
        _sort,
        out_shape=jax.ShapeDtypeStruct((tokens, lines, LANES), jnp.int32),
        grid=(tokens,),
        in_specs=[pl.BlockSpec((1, size // LANES, LANES), lambda t: (t, 0, 0))],
        out_specs=pl.BlockSpec((1, lines, LANES), lambda t: (t, 0, 0)),
        cost_estimate=pl.CostEstimate(
            flops=OPERATIONS_A_STAGE * stages * scores.size,
            bytes_accessed=scores.nbytes + 4 * tokens * lines * LANES,
            transcendentals=0,
        ),
        interpret=interpret,
    )(scores.reshape(tokens, size // LANES, LANES))
    selected = selected.reshape(tokens, lines * LANES)[:, :k]
    return jnp.pad(selected, ((0, 0), (0, k - selected.shape[1])), constant_values=-1)


def _sort(scores, selected):
    score = scores[0]
    score = jnp.where(score != score, -jnp.inf, score)
    number = lax.broadcasted_iota(jnp.int32, score.shape, 0) * LANES + lax.broadcasted_iota(jnp.int32, score.shape, 1)
    place, index = number, number
    size = 2
    while size <= score.size:
        stride = size // 2
        while stride:
            second = (place & stride) != 0
            other_score, other_index = (_partner(array, stride, second) for array in (score, index))
            precedes = (score > other_score) | ((score == other_score) & (index < other_index))
            # Blocks of ``size`` are sorted downwards and upwards in turn, so that two make a bitonic block.
            first_wanted = second == ((place & size) != 0)
            kept = precedes == first_wanted
            score, index = jnp.where(kept, score, other_score), jnp.where(kept, index, other_index)
            stride //= 2
        size *= 2
    count = selected.shape[1]
    selected[0] = jnp.where(score[:count] > -jnp.inf, index[:count], -1)


def _partner(array, stride: int, second):
    """What lies ``stride`` places on, or back where that is the second of the pair."""
    axis, by = (1, stride) if stride < LANES else (0, stride // LANES)
    return jnp.where(second, pltpu.roll(array, by, axis), pltpu.roll(array, array.shape[axis] - by, axis))
