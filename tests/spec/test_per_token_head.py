"""Rows of vLLM's per-token-head cache dtypes, by its arithmetic written down once more."""

import ml_dtypes
import numpy as np
import pytest

from kvcore.spec import FORMATS, block_layout

DRAW = np.random.default_rng(33)
ROWS = np.concatenate(
    [
        DRAW.standard_normal((64, 96)).astype(ml_dtypes.bfloat16).astype(np.float32) * scale
        for scale in (1, 1e-7, 1e-30, 1e4, 1e37)
    ]
)
ROWS[0] = 0
ROWS[1] = np.linspace(-127, 127, 96)
ROWS[2, :5] = [127, 0.5, -0.5, 1.5, -2.5]
ROWS[2, 5:] = 0
ROWS[3, :4] = [127, 0.49999997, -0.49999997, 126.5]
ROWS[3, 4:] = 0


def by_vllm(rows: np.ndarray, name: str) -> np.ndarray:
    """scale = max(amax / largest, 1e-6); codes of x * (1 / scale), integers truncated from 0.5 farther out."""
    largest = np.float32(127 if name.startswith("int8") else 448)
    scale = np.maximum(np.abs(rows).max(axis=1, keepdims=True) / largest, np.float32(1e-6))
    ratio = rows * (np.float32(1) / scale)
    if name.startswith("int8"):
        ratio = np.where(ratio >= 0, ratio + np.float32(0.5), ratio - np.float32(0.5))
        codes = np.clip(ratio, -128, 127).astype(np.int8).view(np.uint8)
    else:
        codes = np.clip(ratio, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.concatenate([codes, scale.astype(np.float32).view(np.uint8)], axis=1)


@pytest.mark.parametrize("name", ["int8_per_token_head", "fp8_per_token_head"])
def test_rows_are_those_of_vllm(codec, name):
    assert np.array_equal(np.asarray(codec.encode(name, ROWS)), by_vllm(ROWS, name))


@pytest.mark.parametrize("name", ["int8_per_token_head", "fp8_per_token_head"])
def test_a_scale_lies_behind_the_codes_of_its_head(name):
    page = block_layout(FORMATS[name].for_dim(96), 4, "packed")
    assert [(place.field, place.base, place.stride) for place in page.places] == [
        ("codes", 0, 100),
        ("scales", 96, 100),
    ]


def test_a_page_of_v4_in_nvfp4_is_data_then_scales(codec):
    rows = DRAW.standard_normal((2, 512)).astype(np.float32)
    rows[0, :16] = [0.0, -0.0, 0.5, -0.5, 1, -1, 1.5, -1.5, 2, -2, 3, -3, 4, -4, 6, -6]
    page = np.asarray(codec.pack_page("v4_nvfp4_384", codec.encode("v4_nvfp4_384", rows)))
    assert page.nbytes == 2 * 384
    assert page[:8].tolist() == [0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7]
    assert page[2 * 352] == 0x38  # a scale of 1
    for row in (0, 1):
        rope = page[352 * row + 224 : 352 * row + 352]
        assert np.array_equal(rope.view(ml_dtypes.bfloat16), rows[row, 448:].astype(ml_dtypes.bfloat16))
        assert not page[2 * 352 + 32 * row + 28 : 2 * 352 + 32 * row + 32].any()


def test_a_row_of_mla_in_nvfp4_is_codes_scales_zeros_and_rope(codec):
    """Of ``nvfp4_ds_mla``: bytes 0 to 255, 256 to 287, 288 to 303 and 304 to 431, written out."""
    rows = DRAW.standard_normal((3, 576)).astype(np.float32)
    rows[1, :16] = [0.0, -0.0, 0.5, -0.5, 1, -1, 1.5, -1.5, 2, -2, 3, -3, 4, -4, 6, -6]
    rows[1, 496:512] = rows[1, :16] / 4
    stored = np.asarray(codec.encode("v32_nvfp4_432", rows))
    assert stored.shape == (3, 432)
    for group in (slice(0, 8), slice(248, 256)):
        assert stored[1, group].tolist() == [0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7]
    assert stored[1, [256, 287]].tolist() == [0x38, 0x28]  # scales of 1 and of a quarter
    assert not stored[:, 288:304].any()
    assert np.array_equal(stored[:, 304:].view(ml_dtypes.bfloat16), rows[:, 512:].astype(ml_dtypes.bfloat16))
    page = np.asarray(codec.pack_page("v32_nvfp4_432", stored))
    assert page.tobytes() == stored.tobytes()
