"""Number formats: scales that are never zero, casts that never overflow, packing, and one value on every way out."""

import numpy as np
import pytest

import kvcore
from kvcore.errors import NonFiniteError
from kvcore.spec import CacheSpec, Entries, IndexKeys, LayerSpec, Window
from tests.support import scene

QUANTISED = [
    pytest.param("v4_584", 512, id="fp8 with power-of-two scales"),
    pytest.param("v32_656", 576, id="fp8 with power-of-two fp32 scales"),
    pytest.param("fp8_row", 64, id="fp8 with an fp32 scale"),
    pytest.param("row_580", 512, id="fp8 with one fp32 scale a row"),
    pytest.param("mxfp4_368", 512, id="fp4 with power-of-two scales"),
    pytest.param("v41_fp4_288", 512, id="fp4 with e4m3 scales"),
    pytest.param("index_nvfp4", 128, id="fp4 with two levels of scales"),
    pytest.param("int8_row", 64, id="int8"),
    pytest.param("nf4_b64", 64, id="nf4"),
]


def through(codec, format, values, **options):
    """Encoded and decoded, as float64."""
    values = np.atleast_2d(np.asarray(values, np.float32))
    rows = codec.encode(format, values, **options)
    return codec.decode(format, rows, values.shape[1], **options).astype(np.float64)


def scales_of(codec, format, values, dtype=np.uint8, **options):
    """The stored scales of one row."""
    sized = kvcore.spec.FORMATS[format].for_dim(len(values))
    first, last = sized.byte_range("scales")
    return codec.encode(format, np.asarray(values, np.float32)[None], **options)[0, first:last].view(dtype)


@pytest.mark.parametrize(("format", "dim"), QUANTISED)
def test_qnt_01_a_block_of_zeros_is_zeros(codec, format, dim):
    tiny = np.zeros(dim, np.float32)
    tiny[3] = 2.0**-30
    decoded = through(codec, format, [np.zeros(dim), np.full(dim, -0.0), tiny, np.ones(dim)])
    assert np.isfinite(decoded).all()
    assert not decoded[:2].any()
    assert not np.delete(decoded[2], 3).any()
    assert 0 <= decoded[2, 3] <= 2.0**-29
    assert decoded[3] == pytest.approx(np.ones(dim), rel=1 / 16)
    scales = scales_of(codec, format, np.zeros(dim))
    assert scales.any()


@pytest.mark.parametrize("value", [448.0, 464.0, 465.0, 1000.0, -1000.0, 3e38])
def test_qnt_02_finite_values_never_become_nan(codec, value):
    row = np.zeros(512, np.float32)
    row[0] = row[64] = value
    row[65] = 448
    for format in ("v4_584", "row_580"):
        decoded = through(codec, format, row)[0]
        assert np.isfinite(decoded).all()
        assert decoded[[0, 64]] == pytest.approx([value, value], rel=1 / 16)
        codes = codec.encode(format, row[None])[0, :448]
        assert not np.isin(codes, [0x7F, 0xFF]).any()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_qnt_02_a_fault_is_visible_and_stays_in_its_group(codec, value):
    row = np.ones(512, np.float32)
    row[70] = value
    stored = codec.encode("v4_584", row[None])[0]
    assert stored[64:128].tolist() == [0] * 64
    # One is the code 0x78 (256) times the scale 2^-8 (119).
    assert stored[:64].tolist() == [0x78] * 64
    assert stored[576:].tolist() == [119, 0xFF, 119, 119, 119, 119, 119, 0]
    decoded = through(codec, "v4_584", row)[0]
    assert np.isnan(decoded[64:128]).all()
    assert (np.delete(decoded, range(64, 128)) == 1).all()


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_qnt_02_or_refused_under_check(backend, value):
    cache = scene.create([scene.ring(4, format="v4_584", dim=512)], backend, check=True)
    a = cache.admit()
    rows = scene.filled([1, 2], 512)
    rows[1, 7] = value
    with pytest.raises(NonFiniteError, match=r"\[1, 7\]"), cache.step({a: 2}) as step:
        step.layer(0).append_window(rows)
    assert a.length == 0


@pytest.mark.parametrize("smallest", [0.0, 1e-45])
def test_qnt_03_a_zero_block_beside_others_with_two_levels_of_scales(codec, smallest):
    values = np.zeros(128, np.float32)
    values[:16] = smallest
    values[16:] = 0.006 * np.linspace(-1, 1, 112)
    scale = 0.006 / (6 * 448)
    scales = scales_of(codec, "index_nvfp4", values, global_scale=scale)
    # The smallest positive e4m3 code, not NaN; the group with the largest value takes the largest code.
    assert scales[0] == 0x01
    assert scales.max() == 0x7E
    rows = codec.encode("index_nvfp4", values[None], global_scale=scale)
    assert not rows[0, :8].any()
    decoded = codec.decode("index_nvfp4", rows, 128, global_scale=scale)[0]
    assert not decoded[:16].any()
    assert decoded[16:] == pytest.approx(values[16:], abs=0.006 / 6 + 1e-6)


# amax -> exponent byte of the smallest power of two >= max(amax, 1e-4) / 448, and the largest code's value.
POWERS = [
    pytest.param(0.0, 105, 0.0, id="zero"),
    pytest.param(1e-45, 105, 0.0, id="smallest subnormal"),
    pytest.param(448.0, 127, 448.0, id="exactly the largest code"),
    pytest.param(449.0, 128, 224.5, id="just above it"),
    pytest.param(627.2, 128, 313.6, id="ratio 1.4"),
    pytest.param(896.0, 128, 448.0, id="an exact power is not raised"),
    pytest.param(1344.0, 129, 336.0, id="ratio 3"),
]


@pytest.mark.parametrize(("amax", "byte", "largest"), POWERS)
def test_qnt_05_power_of_two_scales_round_up(codec, amax, byte, largest):
    row = np.zeros(512, np.float32)
    row[5] = -amax
    assert scales_of(codec, "v4_584", row).tolist() == [byte, *[105] * 6]
    decoded = through(codec, "v4_584", row)[0]
    assert -decoded[5] / 2.0 ** (byte - 127) == pytest.approx(largest, rel=1 / 16)
    # The same exponent where the scale is stored as fp32; there it is the scale that has a floor, of 1e-4.
    wide = scales_of(codec, "v32_656", np.resize(row, 576), np.float32)
    assert wide[0] == max(2.0 ** (byte - 127), 2.0**-13)


def test_qnt_06_the_even_channel_is_in_the_low_nibble(codec):
    row = np.zeros(512, np.float32)
    row[:4] = [0.5, 6, -1, 3]
    stored = codec.encode("mxfp4_368", row[None])
    assert stored[0, :3].tolist() == [0x71, 0x5A, 0x00]
    assert stored[0, 224] == 127
    assert codec.decode("mxfp4_368", stored)[0, :4].astype(float).tolist() == [0.5, 6, -1, 3]


def e4m3(byte: int) -> float:
    """The value of an e4m3fn byte, from its definition."""
    sign, exponent, mantissa = -1 if byte & 0x80 else 1, byte >> 3 & 0xF, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def test_qnt_07_all_256_codes(codec):
    assert [e4m3(byte) for byte in (0x01, 0x07, 0x08, 0x38, 0x7E, 0xFE)] == [2**-9, 7 * 2**-9, 2**-6, 1, 448, -448]
    rows = np.zeros((256, 584), np.uint8)
    rows[:, 0] = np.arange(256)
    rows[:, 576:583] = 127
    decoded = codec.decode("v4_584", rows)[:, 0].astype(np.float64)
    expected = np.array([e4m3(byte) for byte in range(256)])
    np.testing.assert_array_equal(decoded, expected)
    assert np.signbit(decoded[0x80])
    assert np.isnan(decoded[[0x7F, 0xFF]]).all()


@pytest.mark.parametrize("scale", [0.02, 40.0])
@pytest.mark.parametrize("layout", ["packed", "planar", "tpu_tile"])
def test_qnt_09_every_way_of_reading_applies_the_scale(backend, scale, layout):
    """A row of tens, and one channel that makes the stored scale about ``scale``."""
    value = np.full(512, 10.0 * scale, np.float32)
    value[1] = 448 * scale
    spec = CacheSpec(
        layers=[
            LayerSpec(
                window=Window(dim=512, window=3, format=format),
                entries=Entries(dim=512, ratio=1, format=format),
            )
            for format in ("row_580", "v4_584")
        ],
        block_tokens=4,
    )
    cache = scene.create(spec, backend, layout=layout)
    a, b = cache.admit(), cache.admit()
    rows = np.tile(value, (7, 1))
    with cache.step({b: 2, a: 5}) as step:
        for number in range(2):
            step.layer(number).append_window(rows)
            step.layer(number).store_entries(rows)
    with cache.step({b: 0, a: 0}) as step:
        for number, format in enumerate(("row_580", "v4_584")):
            layer = step.layer(number)
            stored = cache.ops.encode(format, cache.asarray(value[None]))
            expected = kvcore.to_numpy(cache.ops.decode(format, stored))[0].astype(np.float64)
            assert expected[2] == pytest.approx(10 * scale, rel=1 / 16)
            found = [
                kvcore.to_numpy(layer.gather_window().values)[1, :3],
                kvcore.to_numpy(layer.gather_all_entries().values)[1, :5],
                _decoded(cache, format, layer.gather_rows("window").rows)[1, :3],
                _decoded(cache, format, layer.gather_rows("entries").rows)[1, :5],
            ]
            if layout == "packed":
                view = layer.entries_view()
                page = cache.asarray(kvcore.to_numpy(view.buffers["page"])[a.blocks[0]])
                found.append(kvcore.to_numpy(cache.ops.decode(format, cache.ops.unpack_page(format, page, 4))))
            for values in found:
                np.testing.assert_array_equal(values.astype(np.float64), np.tile(expected, (len(values), 1)))
    with cache.step({a: 1}) as step:
        for number in range(2):
            layer = step.layer(number)
            layer.append_window(rows[:1])
            layer.store_entries(rows[:1])
            picked = kvcore.to_numpy(layer.gather_entries(np.array([[5, 0]], np.int32)).values)[0]
            np.testing.assert_array_equal(picked[0], picked[1])
            out = kvcore.to_numpy(layer.attend(np.zeros((1, 1, 512), np.float32)).out)[0, 0]
            assert out.astype(np.float64) == pytest.approx(picked[0].astype(np.float64), rel=1e-5)


def _decoded(cache, format, rows):
    """Canonical rows [Q, n, row_bytes] -> values [Q, n, d]."""
    host = kvcore.to_numpy(rows)
    flat = cache.asarray(host.reshape(-1, host.shape[2]))
    return kvcore.to_numpy(cache.ops.decode(format, flat)).reshape(*host.shape[:2], -1)


def test_qnt_10_large_blocks_are_not_clipped_in_silence(codec, backend):
    row = np.zeros(512, np.float32)
    row[0] = 2688
    assert through(codec, "v41_fp4_288", row)[0, 0] == 2688
    row[0] = 5376
    two_levels = np.zeros(128, np.float32)
    two_levels[0] = 5376
    assert through(codec, "index_nvfp4", two_levels, global_scale=2.0)[0, 0] == 5376
    layer = LayerSpec(entries=Entries(dim=512, ratio=1, format="v41_fp4_288"))
    cache = scene.create([layer], backend, check=True)
    a = cache.admit()
    with pytest.raises(NonFiniteError, match="2688"), cache.step({a: 1}) as step:
        step.layer(0).store_entries(row[None])
    assert a.length == 0


def test_qnt_10_the_limit_follows_the_global_scale(backend):
    keys = IndexKeys(dim=128, ratio=1, heads=1, topk=1, format="index_nvfp4", global_scale=2.0)
    layer = LayerSpec(entries=Entries(dim=8, ratio=1, format="fp32"), index_keys=keys)
    cache = scene.create([layer], backend, check=True)
    a = cache.admit()
    with cache.step({a: 1}) as step:
        step.layer(0).store_entries(scene.filled([1], 8), scene.filled([5376], 128))
    with cache.step({a: 0}) as step:
        assert (kvcore.to_numpy(step.layer(0).gather_all_index_keys().values) == 5376).all()
    with pytest.raises(NonFiniteError, match="5376"), cache.step({a: 1}) as step:
        step.layer(0).store_entries(scene.filled([1], 8), scene.filled([5400], 128))
