"""Attention from int4 codes, its kernel carried out in NumPy, beside the reference."""

import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from kvcore.kernels.triton import attend_codes
from kvcore.kernels.triton.groups import groups_recorded
from kvcore.kernels.triton.record import recorded
from kvcore.spec import KV
from tests.kernels.attention_in_numpy import answers, decoded
from tests.kernels.gluon_in_numpy import BF16

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

    def spoiled(k, v):
        if large:  # of scales from 2^16 on products would overflow, were they taken as all others
            k[40, 0, 7], v = 3e6, v * 2.0**20
        v[205, 0, 3] = np.nan  # of the second request, in a group that a window has a part of
        return k, v

    case = decoded(kv, all_heads, RANDOM, spoiled, layout=layout, idle=7 if large else None)
    records = [groups_recorded(region) for region in case.plan.region(0, "kv")]
    raw = [recorded(region) for region in case.plan.region(0, "kv_tail")]
    constants = {
        "K": records[0][0], "V": records[1][0], "TK": raw[0][0], "TV": raw[1][0], "LEFT": False,
        "GROUPS": int(np.lcm(key_heads, value_heads)), "DEPTH": attend_codes.STAGES[records[0][0].tokens],
    }  # fmt: skip
    buffers = [name for _, names in records for name in names] + [names.plain for _, names in raw]
    index = case.index
    arrays = index.positions, index.request_index, index.slots, index.block_table, np.zeros(9)
    kernel = attend_codes.attend_codes_kernel
    out, lse = answers(kernel, [attend_codes], ASSEMBLY, case, splits, buffers, arrays, constants, monkeypatch)
    np.testing.assert_allclose(lse, case.want.lse, atol=2e-5)
    np.testing.assert_allclose(out, case.want.out, atol=2.0**-7 * np.nanmax(np.abs(case.want.out)))
