"""Flush: pool, norm, rotate, encode and store the entries that a step completes, an entry a grid step.

DeepSeek-V4 paper sections 2.3.1 (CSA, overlapping windows) and 2.3.2 (HCA). Raw rows come by DMA, from the step's own
tokens or from the ring, one entry ahead of the arithmetic.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import codes, rows_codec
from kvcore.kernels.pallas.arithmetic import pool
from kvcore.kernels.pallas.lines import lanes
from kvcore.kernels.pallas.store_rows import OPERATIONS_A_VALUE, in_place, inside, put, target_scratch
from kvcore.plan import Region
from kvcore.spec.layout import LANES

HALVES = 2


def flush(
    region: Region,
    pools,
    tails,
    own,
    sources,
    places,
    skipped,
    *,
    norm_weight=None,
    eps: float = 1e-6,
    turn=None,
    overlap: bool,
    global_scale: float = 1.0,
    interpret: Any,
):
    """Pools of a region with n entries encoded at their places; a place with unit -1 is skipped.

    Args:
        region: of the entries.
        pools: its pools.
        tails: the ring's kv and score pools, [slots, R, width / 128, 128] fp32.
        own: the step's kv and score, [T, width] fp32.
        sources: (token, unit, row), [n · rows] int32 each: a row of ``own``, or of the ring if token is -1, or neither.
        places: (unit, row), [n] int32 each.
        skipped: [n] int32, how many of an entry's first rows do not exist.
        norm_weight: [d], or None for no norm.
        eps: of the norm.
        turn: (cos, sin), [n, 128] fp32 for the lanes of the last line, each twice; or None.
        overlap: the first half of an entry's rows lend the first half of their width, the others the second.
        global_scale: of formats that have one.
        interpret: as in ``pallas_call``.
    """
    count = len(places[0])
    rows, width = len(sources[0]) // count, own[0].shape[1]
    own = [array.astype(jnp.float32).reshape(-1, width // LANES, LANES) for array in own]
    if not interpret:
        tails = [pltpu.with_memory_space_constraint(tail, pltpu.HBM) for tail in tails]
    inputs, specs = [*own, *tails], [pl.BlockSpec(memory_space=pl.ANY)] * 4
    if norm_weight is not None:
        inputs.append(norm_weight.astype(jnp.float32)[None])
        specs.append(pl.BlockSpec((1, len(norm_weight)), lambda *_: (0, 0)))
    if turn is not None:
        inputs += [array[:, None] for array in turn]
        specs += [pl.BlockSpec((1, 1, LANES), lambda i, *_: (i, 0, 0))] * 2
    held = [pltpu.VMEM((HALVES, rows, width // LANES, LANES), jnp.float32) for _ in own]
    kernel = functools.partial(
        _flush,
        region=region,
        rows=rows,
        normed=norm_weight is not None,
        turned=turn is not None,
        eps=eps,
        overlap=overlap,
        global_scale=global_scale,
        pools=len(pools),
    )
    more = (*held, pltpu.SemaphoreType.DMA((HALVES,)))
    token, unit, number = sources
    # Where neither is, a row is not fetched; no address is checked after this.
    held_rows = (unit < tails[0].shape[0]) & (number >= 0) & (number < tails[0].shape[1])
    sources = jnp.minimum(token, own[0].shape[0] - 1), jnp.where(held_rows, unit, -1), number
    scalars = (*sources, *inside(region, pools, *places), skipped)
    pooled = count * rows * width
    cost = pl.CostEstimate(
        flops=OPERATIONS_A_VALUE * pooled,
        bytes_accessed=2 * 4 * pooled + count * region.format.row,
        transcendentals=pooled,
    )
    return in_place(kernel, region, pools, scalars, inputs, specs, count, 1, more, cost, interpret)


def _flush(
    tokens, units, numbers, place_units, place_rows, skipped, *refs, region, rows, normed, turned, eps, overlap,
    global_scale, pools,
):  # fmt: skip
    own, tails, refs = refs[:2], refs[2:4], refs[4:]
    weight, refs = (refs[0], refs[1:]) if normed else (None, refs)
    (cos, sin), refs = (refs[:2], refs[2:]) if turned else ((None, None), refs)
    pools, refs = refs[pools : 2 * pools], refs[2 * pools :]
    target, (*held, arrived) = refs[: len(target_scratch(region, 1))], refs[len(target_scratch(region, 1)) :]
    step, steps = pl.program_id(0), pl.num_programs(0)

    def each(entry, act):
        half = lax.rem(entry, HALVES)

        def row(i, _):
            at = entry * rows + i
            token, unit = tokens[at], units[at]
            for mine, tail, tile in zip(own, tails, held, strict=True):

                @pl.when(token >= 0)
                def _(mine=mine, tile=tile):
                    act(pltpu.make_async_copy(mine.at[token], tile.at[half, i], arrived.at[half]))

                @pl.when((token < 0) & (unit >= 0))
                def _(tail=tail, tile=tile):
                    act(pltpu.make_async_copy(tail.at[unit, numbers[at]], tile.at[half, i], arrived.at[half]))

            return _

        lax.fori_loop(0, rows, row, None)

    pl.when(step == 0)(lambda: each(step, lambda copy: copy.start()))
    pl.when(step + 1 < steps)(lambda: each(step + 1, lambda copy: copy.start()))
    each(step, lambda copy: copy.wait())
    half = lax.rem(step, HALVES)
    exact = region.format.is_fp32
    lines = []
    for number in range(rows_codec.line_count(region)):
        keys, scores = (_halves(tile, half, number, overlap=overlap) for tile in held)
        exists = lax.broadcasted_iota(jnp.int32, scores.shape, 0) >= skipped[step]
        line = pool(keys[None], jnp.where(exists, scores, -jnp.inf)[None])
        lines.append(line if exact else codes.to_bf16(line))
    if weight is not None:
        dim = region.format.dim or 0
        squares = sum((jnp.sum(line * line, axis=1, keepdims=True) for line in lines), jnp.zeros((1, 1), jnp.float32))
        shrink = np.float32(1) / jnp.sqrt(squares * np.float32(1 / dim) + np.float32(eps))
        for number, line in enumerate(lines):
            line = line * shrink * weight[:, LANES * number : LANES * (number + 1)]
            lines[number] = line if exact else codes.to_bf16(line)
    if turned:
        line = _turned(lines[-1], cos[0], sin[0])
        lines[-1] = line if exact else codes.to_bf16(line)
    put(region, pools, target, lines, [(place_units[step], place_rows[step])], global_scale)


def _halves(tile, half, number: int, *, overlap: bool):
    """Line ``number`` of the channels that each row lends, [rows, 128]."""
    first = tile[half, :, number, :]
    if not overlap:
        return first
    second = tile[half, :, tile.shape[2] // 2 + number, :]
    return jnp.where(lax.broadcasted_iota(jnp.int32, first.shape, 0) < len(first) // 2, first, second)


def _turned(line, cos, sin):
    """Interleaved pairs of lanes rotated: even·cos - odd·sin, even·sin + odd·cos."""
    odd = (lanes(line.shape) & 1) != 0
    other = jnp.where(odd, pltpu.roll(line, 1, 1), pltpu.roll(line, LANES - 1, 1))
    return jnp.where(odd, other * sin + line * cos, line * cos - other * sin)
