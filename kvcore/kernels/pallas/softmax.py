"""The running softmax of the attention kernels: its state in VMEM, how a token's steps begin, go on and end.

The state is the largest logit and the sum of weights, [H, 128] each, the same in every lane, and the weighted sums
[H, width].
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.spec.layout import LANES

LOG2E = math.log2(math.e)


def state(heads: int, width: int) -> list:
    """Scratch shapes of the state."""
    return [pltpu.VMEM((heads, LANES), jnp.float32)] * 2 + [pltpu.VMEM((heads, width), jnp.float32)]


def sink_input(sink, heads: int):
    """A sink [H] as an input of a kernel: the array [H, 128], and its block."""
    array = jnp.broadcast_to(sink.astype(jnp.float32)[:, None], (heads, LANES))
    return array, pl.BlockSpec((heads, LANES), lambda *_: (0, 0))


def begin(step, largest, total, weighted) -> None:
    """A token's first step has seen no keys."""
    pl.when(step == 0)(lambda: clear(largest, total, weighted))


def clear(largest, total, weighted) -> None:
    """No keys seen."""
    largest[...] = jnp.full(largest.shape, -jnp.inf, jnp.float32)
    total[...] = jnp.zeros(total.shape, jnp.float32)
    weighted[...] = jnp.zeros(weighted.shape, jnp.float32)


def weigh(q, lines, exists, largest, total):
    """Take keys, lines [n, 128] each, into the softmax where ``exists`` [H, n]; logits are in powers of two.

    Returns what is kept of the sums [H, 1], and the new weights [H, n].
    """
    logits = sum(product(q[0, :, LANES * n : LANES * (n + 1)], line, contract=1) for n, line in enumerate(lines))
    return weigh_logits(logits, exists, largest, total, power=jnp.exp2)


def weigh_logits(logits, exists, largest, total, *, power=jnp.exp, share: float = 1.0):
    """The same for keys whose logits [H, n] are known.

    Args:
        logits: in powers of what ``power`` raises.
        exists: None where logits are -inf already of keys that are not there.
        largest, total: of the state.
        power: ``jnp.exp``, or ``jnp.exp2``.
        share: of the weights that the sum counts.
    """
    if exists is not None:
        logits = jnp.where(exists, logits, -jnp.inf)
    before = largest[:, :1]
    higher = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
    base = jnp.where(higher == -jnp.inf, 0, higher)
    weights = power(logits - base)
    kept = power(before - base)
    largest[...] = jnp.broadcast_to(higher, largest.shape)
    added = jnp.sum(weights, axis=1, keepdims=True)
    total[...] = total[...] * kept + (added if share == 1 else added * np.float32(share))
    return kept, weights


def of_powers(largest, total):
    """Where logits are in powers of two: lse, and what weighted sums are multiplied by [H, 128] each."""
    sums = total[...]
    lse = jnp.where(sums == 0, -jnp.inf, largest[...] * np.float32(1 / LOG2E) + jnp.log(sums))
    return lse, 1 / jnp.where(sums == 0, 1, sums)


def sunk(shrink, total, lse, sink):
    """What weighted sums are multiplied by where a sink, an array or a reference to it, or None, is part of the sum."""
    # sigmoid(lse - sink), written so that neither exponential overflows.
    return shrink if sink is None else jnp.where(total == 0, 0, shrink / (1 + jnp.exp(sink[...] - lse)))


def with_sink(out, lse, sink):
    """Out [T, H, d] of weights whose sum a sink [H] is part of, or None; lse [T, H] is without it."""
    return out if sink is None else out / (1 + jnp.exp(sink.astype(jnp.float32)[None] - lse))[..., None]


def add(weights, lines, kept, weighted) -> None:
    """Add values, lines [n, 128] each, by their weights."""
    for n, line in enumerate(lines):
        some = slice(LANES * n, LANES * (n + 1))
        weighted[:, some] = weighted[:, some] * kept + product(weights, line, contract=0)


def end(step, largest, total, weighted, sink, out, lse) -> None:
    """Tokens' last step: out and lse; -inf and 0 where there was no key. ``sink`` is a reference or None."""

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        heads = out.shape[1]
        for token in range(len(out)):
            mine = slice(heads * token, heads * (token + 1))
            rest, shrink = of_powers(largest[mine], total[mine])
            lse[token] = rest
            shrink = sunk(shrink, total[mine], rest, sink)
            for line in range(weighted.shape[1] // LANES):
                some = slice(LANES * line, LANES * (line + 1))
                out[token, :, some] = weighted[mine, some] * shrink


def product(left, right, *, contract: int):
    """Left [m, k] times right, over axis ``contract`` of right, in fp32."""
    return lax.dot_general(
        left,
        right,
        (((1,), (contract,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
