"""Bytes of the packed pages, as the CUDA engines write them: whole-page hashes and rows written out.

The hashes of ``v4_584`` and ``v32_656`` were taken from FlashMLA's own quantiser, the raw index hashes from DeepGEMM's.
"""

import numpy as np
import pytest

from tests.support.golden_input import golden_values, short_hash


def page_of(codec, name, rows, dim):
    return codec.pack_page(name, codec.encode(name, golden_values(rows, dim)))


def bytes_of(text):
    return list(bytes.fromhex(text.replace("|", " ")))


@pytest.mark.parametrize(
    ("name", "rows", "dim", "hashed", "page_bytes", "expected"),
    [
        pytest.param("v4_584", 2, 512, 1728, 1728, "4019a1018d767c2d", id="V4 page of 2 rows"),
        pytest.param("v4_584", 64, 512, 37440, 37440, "fa5820ed1b553a26", id="V4 page of 64 rows"),
        pytest.param("v32_656", 4, 576, 2624, 2624, "dd8f879cd38610fa", id="V3.2 inline rows"),
        pytest.param("mxfp4_368", 2, 512, 736, 736, "80985d03b61ddb37", id="MXFP4 inline rows"),
        pytest.param("v32_nvfp4_432", 2, 576, 864, 864, "efb69f8f6a4eecc8", id="MLA in four bits, inline rows"),
        pytest.param("index_fp8_132", 64, 128, 8448, 8640, "8d175cf6a789fc98", id="FP8 index keys, power-of-two scale"),
        pytest.param("index_fp4_68", 64, 128, 4352, 4608, "adac7e2388f2687f", id="FP4 index keys"),
        pytest.param("v41_528", 64, 512, 33792, 33792, "877c6d39867b5c96", id="V4.1 window rows"),
        pytest.param("v41_fp4_288", 64, 512, 18432, 18432, "22aa288fe1a1ab89", id="V4.1 compressed entries"),
    ],
)
def test_page_hash(codec, name, rows, dim, hashed, page_bytes, expected):
    page = page_of(codec, name, rows, dim)
    assert page.dtype == np.uint8
    assert len(page) == page_bytes
    assert short_hash(page[:hashed]) == expected
    assert not page[hashed:].any()


@pytest.mark.parametrize(
    ("name", "rows", "dim", "first_byte", "expected"),
    [
        pytest.param("v4_584", 2, 512, 0, "f8 f3 ee e0 62 6e 74 f8 f3 ed df 63 6f 74 f8 f3", id="V4 codes, tile 0"),
        pytest.param("v4_584", 2, 512, 64, "f1 e9 40 6a 71 76 f6 f1", id="V4 codes, tile 1"),
        pytest.param("v4_584", 2, 512, 448, "00 00 94 3f 14 40 5e 40 5a c0 10 c0 8c bf 80 3d", id="V4 rope of row 0"),
        pytest.param("v4_584", 2, 512, 576, "4c 6a 72 76 f5 f1 e8 52", id="V4 codes of row 1"),
        pytest.param(
            "v4_584", 2, 512, 1152, "77 78 79 7a 7b 77 78 00 | 78 79 7a 7b 77 78 79 00", id="V4 scales of both rows"
        ),
        pytest.param("mxfp4_368", 2, 512, 0, "de 9b 41 e5", id="MXFP4 codes"),
        pytest.param(
            "mxfp4_368", 2, 512, 224, "7d 7d 7e 7e 7f 7f 80 80 81 81 7d 7d 7e 7e 00 00", id="MXFP4 scales, pad"
        ),
        pytest.param("index_fp8_132", 64, 128, 0, "f0 eb e6 d8 5a 66 6c f0", id="FP8 index codes"),
        pytest.param("index_fp8_132", 64, 128, 8192, "00 00 00 3c", id="FP8 index scale 0.0078125"),
        pytest.param(
            "index_fp8_132_fp32scale", 64, 128, 0, "f6 f2 ec df 61 6c 72 f6", id="FP8 index codes, fp32 scale"
        ),
        pytest.param("index_fp4_68", 64, 128, 0, "de 9b 41 e5 bd 19 54 de", id="FP4 index codes"),
        pytest.param("index_fp4_68", 64, 128, 4096, "7d 7d 7e 7e", id="FP4 index scales"),
        pytest.param("v41_528", 64, 512, 0, "f8 f3 ee e0", id="V4.1 window codes"),
        pytest.param(
            "v41_528", 64, 512, 32768, "77 77 78 78 79 79 7a 7a 7b 7b 77 77 78 78 79 79", id="V4.1 window scales"
        ),
        pytest.param("v41_fp4_288", 64, 512, 0, "ef ac 52 f6", id="V4.1 entry codes"),
        pytest.param("v41_fp4_288", 64, 512, 16384, "23 22 22 22", id="V4.1 entry scales"),
    ],
)
def test_bytes_of_a_page(codec, name, rows, dim, first_byte, expected):
    wanted = bytes_of(expected)
    assert page_of(codec, name, rows, dim)[first_byte : first_byte + len(wanted)].tolist() == wanted


def test_v4_page_is_zero_after_the_scales(codec):
    assert not page_of(codec, "v4_584", 2, 512)[2 * 584 :].any()


def test_v4_row_decodes_to_rounded_values(codec):
    rows = codec.encode("v4_584", golden_values(2, 512))
    assert golden_values(2, 512)[0, :4].tolist() == [-1, -0.7109375, -0.421875, -0.1328125]
    assert codec.decode("v4_584", rows)[0, :4].astype(float).tolist() == [-1, -0.6875, -0.4375, -0.125]


def test_v32_scales_are_powers_of_two(codec):
    rows = codec.encode("v32_656", golden_values(4, 576))
    assert rows[0, 512:528].copy().view("<f4").tolist() == [0.0078125, 0.03125, 0.0625, 0.015625]


def test_fp32_scale_is_a_product_not_a_quotient(codec):
    """DeepGEMM divides amax by 448; kvcore's rule is the product with fp32(1/448), which XLA cannot rewrite.

    On these 64 keys the two differ in 15 scales, by one unit in the last place each, and in no code.
    """
    values = golden_values(64, 128)
    page = page_of(codec, "index_fp8_132_fp32scale", 64, 128)
    scales = page[8192:8448].view("<f4")
    amax = np.abs(values).max(axis=1)
    divided = (amax.astype(np.float64) / 448).astype(np.float32)
    multiplied = (amax.astype(np.float64) * float(np.float32(1 / 448))).astype(np.float32)
    assert scales.tolist() == multiplied.tolist()
    assert np.float32(0.00446429) == pytest.approx(scales[0], rel=1e-5)

    different = np.flatnonzero(scales != divided)
    assert different.tolist() == [3, 4, 9, 10, 15, 22, 28, 31, 35, 38, 44, 45, 51, 56, 63]
    assert (scales.view(np.int32) - divided.view(np.int32))[different].tolist() == [1] * 15

    with_divided_scales = np.concatenate([page[:8192], divided.view(np.uint8)])
    assert short_hash(with_divided_scales) == "b57b5b1d2631a5fa"


@pytest.mark.parametrize(
    ("name", "values", "codes", "scale", "decoded"),
    [
        pytest.param(
            "v4_584",
            [3.5, -1, 0.10009766, 0, 0.00099945, -3.5, 0.02001953, 0.30078125],
            "7e f0 55 00 20 fe 42 62",
            "78",
            [3.5, -1, 0.1015625, 0, 0.0009765625, -3.5, 0.01953125, 0.3125],
            id="a tile of 64 with amax 3.5",
        ),
        pytest.param("v4_584", [2.0**-10] * 64, "78" * 64, "6d", [2.0**-10] * 64, id="a tile of 2^-10"),
        pytest.param(
            "mxfp4",
            [6.5, -1, 0.25, 0.75, 3, -0.1, 2.5, 5],
            "95 10 83 42",
            "80",
            [6, -1, 0, 1, 3, -0.0, 2, 4],
            id="an MXFP4 block with amax 6.5",
        ),
        pytest.param(
            "v41_fp4_288",
            [5, -1, 0.3, 2.2, 0.7, -4],
            "a7 51 e2",
            "35",
            [4.875, -0.8125, 0.40625, 2.4375, 0.8125, -3.25],
            id="a V4.1 group whose scale rounds down",
        ),
    ],
)
def test_one_group_written_out(codec, name, values, codes, scale, decoded):
    dim = {"v4_584": 512, "mxfp4": 64, "v41_fp4_288": 512}[name]
    scale_at = {"v4_584": 576, "mxfp4": 32, "v41_fp4_288": 256}[name]
    row = np.zeros((1, dim), np.float32)
    row[0, : len(values)] = values
    stored = codec.encode(name, row)
    wanted = bytes_of(codes)
    assert stored[0, : len(wanted)].tolist() == wanted
    assert stored[0, scale_at] == int(scale, 16)
    back = codec.decode(name, stored, dim)[0, : len(decoded)].astype(np.float64)
    assert back.tolist() == decoded
    assert np.signbit(back).tolist() == np.signbit(decoded).tolist()


@pytest.mark.parametrize(
    ("name", "rows", "dim"),
    [("v4_584", 3, 512), ("v32_656", 3, 576), ("index_fp4_68_h", 3, 128), ("v41_fp4_288", 3, 512)],
)
def test_unpacking_a_page_gives_its_rows_back(codec, name, rows, dim):
    canonical = codec.encode(name, golden_values(rows, dim))
    assert (codec.unpack_page(name, codec.pack_page(name, canonical), rows) == canonical).all()
