"""Attention from int4 codes, its kernel carried out in NumPy, beside the reference."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from triton.runtime.jit import JITFunction

from kvcore.backends.reference.backend import ReferenceOps
from kvcore.kernels.triton import attend_codes
from kvcore.kernels.triton.groups import groups_recorded
from kvcore.kernels.triton.record import row_record
from kvcore.plan import plan_cache
from kvcore.spec import KV, CacheSpec, LayerSpec
from kvcore.step import StepRequest, build_index
from tests.kernels import gluon_in_numpy as stand_in
from tests.kernels.gluon_in_numpy import BF16, Pointer

RANDOM = np.random.default_rng(7)


def codes_of(half):
    bits = half.view(np.uint16).astype(np.int32)
    return tuple((bits >> 4 * n & 15).astype(np.float32) for n in range(4))


def scaled(q, scale):
    exact = q.astype(np.float32) * scale.astype(np.float32)
    high = exact.astype(BF16)
    return high, (exact - high.astype(np.float32)).astype(BF16)


def of_codes(half):
    """The bits of bf16 numbers: those of codes 1 and 3 stay four bits further up."""
    parts = (code.astype(np.uint16) << 4 * (n % 2) for n, code in enumerate(codes_of(half)))
    return tuple(np.ascontiguousarray(part).view(BF16) for part in parts)


ASSEMBLY = {
    attend_codes.CODES.value: of_codes,
    attend_codes.SCALED.value: scaled,
    attend_codes.PAIRED.value: lambda weight: weight.astype(BF16),
    attend_codes.TURNED.value: lambda rows: rows.reshape(-1, 8, 8).transpose(0, 2, 1).reshape(rows.shape),
    attend_codes.TIMES.value: lambda a, b: (a.astype(np.float32) * b.astype(np.float32)).astype(BF16),
    attend_codes.SAME.value: lambda offset, _: offset,
}


LAYOUTS = "rows_layout", "operand_layout", "scales_layout", "shared_layout", "copy_layout", "padded_layout"


def attended(plan, pools, index, q, sink, splits, monkeypatch):
    """(parts or outputs [.., heads, dim], base-2 or natural logarithms [.., heads]) of the kernel."""
    for name, value in list(vars(attend_codes).items()):
        if isinstance(value, JITFunction):
            monkeypatch.setattr(attend_codes, name, value.fn)
    for name in LAYOUTS:
        monkeypatch.setattr(attend_codes, name, stand_in.nothing)
    for name in ("RAISED", "UNIT", "LARGE", "LOWERED"):
        monkeypatch.setattr(attend_codes, name, getattr(attend_codes, name).value)
    monkeypatch.setattr(attend_codes, "copy", stand_in.copy)
    monkeypatch.setattr(attend_codes, "barrier", stand_in.nothing)
    monkeypatch.setattr(attend_codes, "mma_v2", stand_in.product)
    waits = SimpleNamespace(commit_group=stand_in.nothing, wait_group=stand_in.nothing)
    monkeypatch.setattr(attend_codes, "async_copy", waits)
    parts, raw = plan.region(0, "kv"), plan.region(0, "kv_tail")
    records = [groups_recorded(region) for region in parts]
    memory = {name: np.ascontiguousarray(pool).reshape(-1).view(np.uint8) for name, pool in pools.items()}
    tokens, heads, _ = q.shape
    dim, groups = records[1][0].dim, int(np.lcm(*(record.heads for record, _ in records)))
    lines = tokens * splits if splits > 1 else tokens
    out = np.full((lines, heads, dim), np.nan, np.float32)
    lse = np.full((lines, heads), np.nan, np.float32)

    def at(array):
        return Pointer(np.ascontiguousarray(array).reshape(-1).view(np.uint8), 0, array.dtype)

    answers = (
        Pointer(out.reshape(-1).view(np.uint8), 0, out.dtype),
        Pointer(lse.reshape(-1).view(np.uint8), 0, lse.dtype),
    )
    given = (
        *answers, *answers, at(q), at(sink),
        *(Pointer(memory[name], 0, np.uint8) for _, names in records for name in names),
        *(Pointer(memory[region.buffers[region.unit.places[0].buffer][0]], 0, np.uint8) for region in raw),
        *(at(np.asarray(array, np.int32)) for array in (index.positions, index.request_index, index.slots)),
        at(np.asarray(index.block_table, np.int32)), at(np.zeros(9, np.int32)),
        heads, plan.spec.layers[0].kv.window or 0, 0, True, index.block_table.shape[1], splits,
        q.shape[2] ** -0.5 * 1.4426950408889634,
    )  # fmt: skip
    constants = {
        "K": records[0][0], "V": records[1][0], "TK": row_record(raw[0])[0], "TV": row_record(raw[1])[0],
        "LEFT": False, "GROUPS": groups, "DEPTH": attend_codes.STAGES[records[0][0].tokens],
    }  # fmt: skip
    kernel = inspect.unwrap(attend_codes.attend_codes_kernel)
    for program in range(tokens * groups * -(-(heads // groups) // 8) * splits):
        monkeypatch.setattr(attend_codes, "gl", stand_in.language(program, ASSEMBLY))
        with np.errstate(all="ignore"):
            kernel(*given, **constants)
    return out, lse


def put_together(out, lse, tokens, splits, sink):
    """What ``merge_kernel`` makes of parts."""
    lse = lse.reshape(tokens, splits, -1).astype(np.float64) * np.log(2)
    out = np.where(np.isneginf(lse)[..., None], 0, out.reshape(tokens, splits, *out.shape[1:]))
    whole = np.logaddexp.reduce(lse, axis=1)
    weights = np.exp(lse - np.logaddexp(whole, sink)[:, None])
    return (out * weights[..., None]).sum(axis=1), whole


@pytest.mark.parametrize(
    ("keys", "values", "heads", "window", "layout", "large"),
    [
        ("int4_ch32", "int4_g32", (2, 2, 8), None, "packed", False),
        ("int4_ch32", "int4_g64", (2, 1, 20), 45, "planar", False),
        ("int4_ch64", "int4_g32", (1, 2, 6), None, "packed", False),
        ("int4_ch32", "int4_g32", (1, 1, 4), None, "packed", True),
    ],
)
@pytest.mark.parametrize("splits", [1, 3])
def test_its_answers_are_those_of_the_reference(keys, values, heads, window, layout, large, splits, monkeypatch):
    key_heads, value_heads, all_heads = heads
    kv = KV(
        key_heads=key_heads, value_heads=value_heads, key_dim=64, value_dim=128, key_format=keys, value_format=values,
        window=window,
    )  # fmt: skip
    plan = plan_cache(
        CacheSpec(layers=[LayerSpec(kv=kv)], block_tokens=64), max_requests=2, max_tokens=512, layout=layout
    )
    ops, blocks, lengths = ReferenceOps(plan), ((0, 3, 5), (1, 4, 2)), (165, 95)
    pools = ops.allocate()
    rows = [
        StepRequest(slot=slot, start=0, new=length, blocks=blocks[slot], stored=0)
        for slot, length in enumerate(lengths)
    ]
    k, v = (RANDOM.standard_normal((sum(lengths), part.heads, part.format.dim)).astype(np.float32) for part in kv.given)
    k[:, :, 5] *= 40
    if large:  # of scales from 2^16 on products would overflow, were they taken as all others
        k[40, 0, 7], v = 3e6, v * 2.0**20
    v[205, 0, 3] = np.nan  # of the second request, in a group that a window has a part of
    pools = ops.append_kv(pools, 0, ops.index(build_index(rows, max_blocks=3)), k, v)
    last = [row._replace(start=length - 1, new=1) for row, length in zip(rows, lengths, strict=True)]
    index = ops.index(build_index(last, max_blocks=3))
    q = RANDOM.standard_normal((2, all_heads, 64)).astype(BF16)
    q[:, :, 7] *= not large
    sink = RANDOM.standard_normal(all_heads).astype(np.float32)
    want = ops.attend_kv(pools, 0, index, q.astype(np.float32), columns=max(lengths), sink=sink)
    out, lse = attended(plan, pools, index, q, sink, splits, monkeypatch)
    if splits > 1:
        out, lse = put_together(out, lse, 2, splits, sink)
    np.testing.assert_allclose(lse, want.lse, atol=2e-5)
    np.testing.assert_allclose(out, want.out, atol=2.0**-7 * np.nanmax(np.abs(want.out)))
