"""Attention from codes of a byte and of NF4, its kernel carried out in NumPy, beside the reference."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from kvcore.kernels.triton import attend_codes, attend_packed
from kvcore.kernels.triton.device import LARGE, DeviceProps
from kvcore.kernels.triton.packed import BYTES, LEAST_CAPABILITY, LEVELS_TIMES, packed_of, packed_work, splits_of
from kvcore.kernels.triton.record import recorded
from kvcore.plan import plan_cache
from kvcore.spec import KV, CacheSpec, LayerSpec
from kvcore.spec.codes import NF4_LEVELS
from tests.kernels.attention_in_numpy import answers, decoded
from tests.kernels.test_words import packed, registers
from tests.support.ahead_of_time import ARCHITECTURES, check

RANDOM = np.random.default_rng(11)
SHARED = 224 * 1024
"""Bytes of shared memory for the programs that are to be resident."""
LEVELS = np.array(NF4_LEVELS, np.float32) * np.float32(LEVELS_TIMES)
NEAR = LEVELS.astype(np.float16)
LACKING = (LEVELS - NEAR.astype(np.float32)).astype(np.float16)


def of_e4m3(codes):
    return codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float16)


NUMBERS = {
    "E4M3": (2, of_e4m3),
    "INT8": (2, lambda codes: codes.astype(np.uint8).view(np.int8).astype(np.float16)),
    "NF4": (4, lambda codes: NEAR[codes]),
}


def of_keys(parts, number):
    """Two halfwords side by side -> pairs side by side: codes 2 p and 2 p + 1 of both."""

    def take(half, *_):
        codes = np.moveaxis(codes_of(half, parts), 0, -1).reshape(len(half), -1, 2 * parts)
        return tuple(number(codes[:, :, 2 * p : 2 * p + 2]).reshape(half.shape) for p in range(parts))

    return take


def of_values(parts, number):
    return lambda half, *_: tuple(number(codes) for codes in codes_of(half, parts))


def codes_of(half, parts):
    bits = half.view(np.uint16).astype(np.int32)
    return np.stack([bits >> 16 // parts * n & (1 << 16 // parts) - 1 for n in range(parts)])


ASSEMBLY = {
    attend_packed.PAIRED.value: lambda weight: weight.astype(np.float16),
    attend_codes.TURNED.value: lambda rows: rows.reshape(-1, 8, 8).transpose(0, 2, 1).reshape(rows.shape),
}
for name, (parts, number) in NUMBERS.items():
    keys, values = getattr(attend_packed, name)
    ASSEMBLY |= {keys.value: of_keys(parts, number), values.value: of_values(parts, number)}
ASSEMBLY[attend_packed.NF4_LACKING.value] = of_keys(4, lambda codes: LACKING[codes])


@pytest.mark.parametrize(
    ("keys", "values", "heads", "dims", "window", "padding", "keys_a_tile"),
    [
        ("fp8_row", "fp8_row", (2, 2, 8), (64, 128), None, None, 32),
        ("int8_row", "nf4_b64", (2, 1, 20), (64, 128), 45, None, 16),
        ("nf4_b64", "int8_row", (1, 2, 6), (128, 64), None, (17, 4), 16),
        ("nf4_b64", "nf4_b64", (1, 1, 4), (64, 64), None, None, 32),
    ],
)
@pytest.mark.parametrize("splits", [1, 3])
def test_its_answers_are_those_of_the_reference(
    keys, values, heads, dims, window, padding, keys_a_tile, splits, monkeypatch
):
    key_heads, value_heads, all_heads = heads
    kv = KV(
        key_heads=key_heads, value_heads=value_heads, key_dim=dims[0], value_dim=dims[1], key_format=keys,
        value_format=values, window=window, storage="paged",
    )  # fmt: skip

    def spoiled(k, v):
        return k, v * np.exp2(RANDOM.integers(-14, 15, (len(v), 1, 1)).astype(np.float32))

    case = decoded(kv, all_heads, RANDOM, spoiled, padding=padding)
    records = [recorded(region) for region in case.plan.region(0, "kv")]
    constants = {
        "K": records[0][0], "V": records[1][0], "SK": packed_of(records[0][0]), "SV": packed_of(records[1][0]),
        "LEFT": padding is not None, "GROUPS": int(np.lcm(key_heads, value_heads)), "KEYS": keys_a_tile, "DEPTH": 3,
    }  # fmt: skip
    buffers, index = [name for _, names in records for name in names[:2]], case.index
    left = np.zeros(9) if padding is None else index.left_padding
    arrays = index.positions, index.request_index, index.block_table, left
    kernel, modules = attend_packed.attend_packed_kernel, [attend_codes, attend_packed]
    out, lse = answers(kernel, modules, ASSEMBLY, case, splits, buffers, arrays, constants, monkeypatch)
    np.testing.assert_allclose(lse, case.want.lse, atol=2e-5)
    np.testing.assert_allclose(out, case.want.out, atol=2.0**-9 * np.abs(case.want.out).max())


def pairs_of(assembly, word, parts):
    """The pairs of fp16 numbers that a register of codes is taken to."""
    held = [word & 0xFFFFFFFF for held in attend_packed.HELD for word in (held, held)]
    found = registers(assembly.value, word, *held, first=parts)
    return np.array([[found[f"${n}"] & 0xFFFF, found[f"${n}"] >> 16] for n in range(parts)], np.uint16).view(np.float16)


@pytest.mark.parametrize("codes", [(-128, -1, 0, 127), (1, -2, 64, -127)])
def test_int8_codes_of_a_register_are_taken_apart(codes):
    of_key, of_two_values = attend_packed.INT8
    assert pairs_of(of_key, packed(codes, 8), 2).reshape(-1).tolist() == list(codes)
    first, second = packed(codes[:2], 8), packed(codes[2:], 8)
    assert pairs_of(of_two_values, first | second << 16, 2).T.reshape(-1).tolist() == list(codes)


@pytest.mark.parametrize("codes", [range(8), range(8, 16), (15, 0, 8, 7, 1, 14, 9, 6)])
def test_nf4_codes_of_a_register_are_taken_apart(codes):
    codes = list(codes)
    of_key, of_two_values = attend_packed.NF4
    near = pairs_of(of_key, packed(codes, 4), 4).reshape(-1).astype(np.float32)
    assert near.tolist() == NEAR[codes].tolist()
    lacking = pairs_of(attend_packed.NF4_LACKING, packed(codes, 4), 4).reshape(-1).astype(np.float32)
    assert np.abs(near + lacking - LEVELS[codes]).max() <= 2.0**-15 * np.abs(LEVELS).max()
    assert pairs_of(of_two_values, packed(codes, 4), 4).T.reshape(-1).tolist() == NEAR[codes].tolist()


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES.values() if arch >= LEAST_CAPABILITY])
@pytest.mark.parametrize(
    ("keys", "values", "dim"),
    [
        ("fp8_row", "fp8_row", 128),
        ("int8_row", "int8_row", 128),
        ("nf4_b64", "nf4_b64", 128),
        ("int8_row", "nf4_b64", 64),
        ("fp8_row", "int8_row", 32),
    ],
)
def test_it_compiles(keys, values, dim, arch, record):
    kv = KV(key_heads=8, key_dim=dim, key_format=keys, value_format=values)
    plan = plan_cache(CacheSpec(layers=[LayerSpec(kv=kv)]), max_requests=2, max_tokens=512)
    k, v = (recorded(region)[0] for region in plan.region(0, "kv"))
    cut = packed_work(k, v, DeviceProps(arch, 132, LARGE))
    constants = {
        "K": k, "V": v, "SK": cut.keys, "SV": cut.values, "LEFT": False, "GROUPS": 8, "KEYS": cut.config.keys,
        "DEPTH": cut.config.stages,
    }  # fmt: skip
    kernel, case = attend_packed.attend_packed_kernel, f"{keys} and {values}, dim {dim}"
    found = check(record, case, kernel, arch, constants, warps=cut.config.warps, shared=64 * 1024)
    assert found.shared_bytes <= SHARED // cut.config.resident


@pytest.mark.parametrize(
    ("keys", "values", "options", "block"),
    [
        ("fp8_row", "bf16", {}, 64),  # plain values
        ("mxfp4", "mxfp4", {}, 64),  # scales that are no fp32 numbers
        ("fp8_per_token_head", "fp8_per_token_head", {}, 64),  # rows off multiples of 16 bytes
        ("int8_row", "int8_row", {"window": 8, "storage": "ring"}, 64),
        ("int8_row", "int8_row", {}, 8),  # blocks smaller than a tile
        ("int8_row", "int8_row", {"key_dim": 96}, 64),
        ("int8_row", "int8_row", {"key_dim": 256}, 64),
    ],
)
def test_what_it_does_not_take(keys, values, options, block):
    kv = KV(**{"key_heads": 2, "key_dim": 128, "key_format": keys, "value_format": values, **options})
    plan = plan_cache(CacheSpec(layers=[LayerSpec(kv=kv)], block_tokens=block), max_requests=2, max_tokens=512)
    k, v = (recorded(region)[0] for region in plan.region(0, "kv"))
    assert packed_work(k, v, DeviceProps(90, 132, LARGE)) is None
    assert packed_work(k, v, DeviceProps(80, 108, LARGE)) is None


@pytest.mark.parametrize(("programs", "keys"), [(512, 32768), (128, 32768), (1, 1), (8, 70), (4096, 512)])
def test_programs_share_keys_where_they_fill_the_device(programs, keys):
    splits = splits_of(DeviceProps(90, 132, LARGE), programs, keys, BYTES)
    assert 1 <= splits <= max(1, -(-keys // BYTES.keys))
    if keys == 32768:
        assert 1 <= programs * splits / (132 * BYTES.resident) <= 6  # some turns of them
    if programs == 4096:
        assert splits == 1
