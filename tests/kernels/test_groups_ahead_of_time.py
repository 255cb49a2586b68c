"""Kernels of keys and values in formats over tokens, compiled for GPUs that are not there."""

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from kvcore.kernels.triton import append_groups, attend_codes, attend_groups
from kvcore.kernels.triton.groups import groups_fit, groups_recorded
from kvcore.kernels.triton.launches.kv_groups import APPEND_REGISTERS, APPEND_WARPS, CLOSE_WARPS, pieces_of
from kvcore.kernels.triton.record import recorded
from kvcore.plan import plan_cache
from kvcore.spec import KV, CacheSpec, LayerSpec
from tests.kernels.test_words import halves, packed, registers
from tests.support.ahead_of_time import ARCHITECTURES, HOPPER, check

SHARED_OF_CODES = 28 * 1024
"""Bytes of a program of one warp, so that eight are resident."""


def constants_of(keys, values, dims=(128, 128)):
    kv = KV(key_heads=8, key_dim=dims[0], value_dim=dims[1], key_format=keys, value_format=values)
    plan = plan_cache(CacheSpec(layers=[LayerSpec(kv=kv)], block_tokens=64), max_requests=2, max_tokens=512)
    k, v = (groups_recorded(region)[0] for region in plan.region(0, "kv"))
    raw_k, raw_v = (recorded(region)[0] for region in plan.region(0, "kv_tail"))
    return {"K": k, "V": v, "TK": raw_k, "TV": raw_v}


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
@pytest.mark.parametrize(
    ("keys", "values", "dims"),
    [
        ("int4_ch32", "int4_g32", (128, 128)),
        ("int4_ch64", "int4_g64", (128, 128)),
        ("int4_ch32", "int4_g32", (64, 64)),
        ("int4_ch32", "int4_g64", (256, 256)),
    ],
)
def test_attention_from_codes_compiles(keys, values, dims, arch, record):
    constants = constants_of(keys, values, dims)
    assert groups_fit(constants["K"], constants["V"])
    constants |= {"LEFT": False, "GROUPS": 8, "DEPTH": attend_codes.STAGES[constants["K"].tokens]}
    case = f"{keys} and {values}, dim {dims[0]}"
    found = check(record, case, attend_codes.attend_codes_kernel, arch, constants, warps=1, shared=2 * SHARED_OF_CODES)
    if dims[0] <= 128:
        assert found.shared_bytes <= SHARED_OF_CODES
        assert found.spilled_bytes <= (64 if keys == "int4_ch32" else 512), found


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
@pytest.mark.parametrize(
    ("keys", "values"), [("int4_ch32", "int4_g32"), ("int4_ch32", "int4_ch32"), ("int4_ch64", "int4_g64")]
)
def test_other_kernels_of_groups_compile(keys, values, arch, record):
    constants, case = constants_of(keys, values) | {"NATIVE": arch >= 89}, f"{keys} and {values}"
    more = {"LEFT": True, "GROUPS": 8, "HEADS": 16}
    check(record, case, attend_groups.attend_groups_kernel, arch, constants | more, shared=160 * 1024)
    of_append = {"PIECES": min(map(pieces_of, (constants["K"], constants["V"]))), "AHEAD": arch >= HOPPER}
    few = {"warps": APPEND_WARPS, "registers": APPEND_REGISTERS if arch >= 89 and "32" in keys else None}
    check(record, case, append_groups.append_groups_kernel, arch, constants | of_append, **few)
    check(record, case, append_groups.close_groups_kernel, arch, constants | {"REQUESTS": 64}, warps=CLOSE_WARPS)


def test_codes_of_two_halfwords_are_taken_apart():
    first, second = (1, 0, 8, 7), (15, 14, 9, 6)
    found = registers(attend_codes.CODES.value, packed(first, 4) | packed(second, 4) << 16, first=4)
    for n, codes in enumerate(zip(first, second, strict=True)):
        least = 2.0**-133 * (16 if n % 2 else 1)
        assert halves(found[f"${n}"]).tolist() == [code * least for code in codes]
