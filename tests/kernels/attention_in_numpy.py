"""Attention of a decode step by kernels in Gluon that are carried out in NumPy, and what the reference makes of it."""

from typing import NamedTuple

import numpy as np

from kvcore.backends.reference.backend import ReferenceOps
from kvcore.plan import plan_cache
from kvcore.spec import CacheSpec, LayerSpec
from kvcore.step import StepRequest, build_index
from tests.kernels.gluon_in_numpy import BF16, at, carried_out, language, memory_of

LENGTHS, BLOCKS = (165, 95), ((0, 3, 5), (1, 4, 2))


class Decoded(NamedTuple):
    """A step of a token of each of two requests.

    Attributes:
        plan: of a layer of keys and values.
        pools: as the reference has written them.
        index: of the step.
        q: bf16.
        sink: of all heads.
        want: what the reference answers.
    """

    plan: object
    pools: object
    index: object
    q: np.ndarray
    sink: np.ndarray
    want: object


def decoded(kv, heads, random, spoil, *, layout="packed", padding=None, idle=None):
    """``spoil`` has keys and values changed before they are written; of queries channel ``idle`` is zero."""
    plan = plan_cache(
        CacheSpec(layers=[LayerSpec(kv=kv)], block_tokens=64), max_requests=2, max_tokens=512, layout=layout
    )
    ops = ReferenceOps(plan)
    pools = {name: np.full_like(pool, 0xFF) for name, pool in ops.allocate().items()}
    rows = [
        StepRequest(slot=slot, start=0, new=length, blocks=BLOCKS[slot], stored=0, left_padding=left)
        for slot, (length, left) in enumerate(zip(LENGTHS, padding or (None, None), strict=True))
    ]
    k, v = (random.standard_normal((sum(LENGTHS), part.heads, part.format.dim)).astype(np.float32) for part in kv.given)
    k[:, :, 5] *= 40
    k, v = spoil(k, v)
    pools = ops.append_kv(pools, 0, ops.index(build_index(rows, max_blocks=3)), k, v)
    last = [row._replace(start=length - 1, new=1) for row, length in zip(rows, LENGTHS, strict=True)]
    index = ops.index(build_index(last, max_blocks=3))
    q = random.standard_normal((2, heads, kv.key_dim)).astype(BF16)
    if idle is not None:
        q[:, :, idle] = 0
    sink = random.standard_normal(heads).astype(np.float32)
    want = ops.attend_kv(pools, 0, index, q.astype(np.float32), columns=max(LENGTHS), sink=sink)
    return Decoded(plan, pools, index, q, sink, want)


def answers(kernel, modules, assembly, case, splits, buffers, arrays, constants, monkeypatch):
    """(outputs [tokens, heads, dim], natural logarithms [tokens, heads]) of a kernel, its parts put together.

    Args:
        kernel: of ``modules``, whose assembly does what ``assembly`` says.
        case: the step.
        splits: programs that share a group's keys.
        buffers: names of the pools that it takes.
        arrays: those that it takes behind them, integers.
        constants: the kernel's.
        monkeypatch: pytest's.
    """
    carried_out(modules, monkeypatch)
    tokens, heads, _ = case.q.shape
    groups, lines = constants["GROUPS"], tokens * splits if splits > 1 else tokens
    out = np.full((lines, heads, constants["V"].dim), np.nan, np.float32)
    lse = np.full((lines, heads), np.nan, np.float32)
    memory = memory_of(case.pools)
    given = (
        at(out), at(lse), at(out), at(lse), at(case.q), at(case.sink),
        *(memory[name] for name in buffers),
        *(at(np.ascontiguousarray(array, np.int32)) for array in arrays),
        heads, case.plan.spec.layers[0].kv.window or 0, 0, True, case.index.block_table.shape[1], splits,
        case.q.shape[2] ** -0.5 * 1.4426950408889634,
    )  # fmt: skip
    for program in range(tokens * groups * -(-(heads // groups) // 8) * splits):
        for module in modules:
            monkeypatch.setattr(module, "gl", language(program, assembly))
        with np.errstate(all="ignore"):
            kernel.fn(*given, **constants)
    return put_together(out, lse, tokens, splits, case.sink) if splits > 1 else (out, lse)


def put_together(out, lse, tokens, splits, sink):
    """What ``merge_kernel`` makes of parts, whose logarithms are to the base 2."""
    lse = lse.reshape(tokens, splits, -1).astype(np.float64) * np.log(2)
    out = np.where(np.isneginf(lse)[..., None], 0, out.reshape(tokens, splits, *out.shape[1:]))
    whole = np.logaddexp.reduce(lse, axis=1)
    weights = np.exp(lse - np.logaddexp(whole, sink)[:, None])
    return (out * weights[..., None]).sum(axis=1), whole
