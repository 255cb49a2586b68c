"""Where a block's bytes lie: places that cover a page exactly, addresses, sizes, and round trips of every layout."""

import numpy as np
import pytest

from kvcore.errors import SpecError
from kvcore.spec import FORMATS, LAYOUTS, Field, Format, address, block_layout
from tests.support.built_in_formats import DIM

BLOCK_ROWS = (1, 2, 3, 32, 64, 256)
INDEX_PAGE = Format(
    name="test_index_page_12",
    fields=(
        Field(name="codes", dims=8, code="e4m3", group=0, scale="fp32", rule="fp32"),
        Field(name="scales", dims=1, code="fp32"),
    ),
    planes=(("codes",), ("scales",)),
    amax_floor=1e-4,
)
ROW_584 = Format(name="test_row_584", fields=(Field(name="codes", dims=292, code="bf16"),), planes=(("codes",),))


def byte_places(place, row):
    """Offsets in the block's part of its buffer of the field's bytes, in canonical order."""
    start = place.base + row * place.stride
    if not place.split:
        return [start + k for k in range(place.nbytes)]
    elements = place.nbytes // 2
    return [start + (1 - k % 2) * elements + k // 2 for k in range(place.nbytes)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "dim"), DIM.items(), ids=DIM)
def test_no_two_fields_overlap(name, dim, layout):
    format = FORMATS[name].for_dim(dim)
    for rows in BLOCK_ROWS:
        block = block_layout(format, rows, layout)
        seen = {buffer: np.zeros(size, np.int32) for buffer, size in block.buffers}
        for place in block.places:
            for row in range(rows):
                np.add.at(seen[place.buffer], byte_places(place, row), 1)
        assert max(count.max() for count in seen.values()) == 1
        stored = sum(int(count.sum()) for count in seen.values())
        whole = layout in ("packed", "by_head")
        pads = 0 if whole else sum(field.nbytes for field in format.fields if field.name == "pad")
        assert stored == rows * (format.row_bytes - pads)
        assert {place.field for place in block.places} == {
            field.name for field in format.fields if whole or field.name != "pad"
        }
        assert block.nbytes == sum(len(count) for count in seen.values())


@pytest.mark.parametrize(("name", "dim"), DIM.items(), ids=DIM)
def test_every_byte_of_a_packed_page_is_a_field_or_zero_padding(codec, name, dim):
    format = FORMATS[name].for_dim(dim)
    for rows in (1, 3, 32):
        canonical = np.full((rows, format.row_bytes), 0xA5, np.uint8)
        page = codec.pack_page(format, canonical)
        assert len(page) == -(-rows * format.row_bytes // format.page_alignment) * format.page_alignment
        assert (page[: rows * format.row_bytes] == 0xA5).all()
        assert not page[rows * format.row_bytes :].any()
        assert np.array_equal(codec.unpack_page(format, page, rows), canonical)


@pytest.mark.parametrize(
    ("name", "rows", "page"),
    [
        ("v4_584", 1, 1152), ("v4_584", 2, 1728), ("v4_584", 32, 19008), ("v4_584", 64, 37440), ("v4_584", 128, 74880),
        ("v4_584", 256, 149760), ("v32_656", 64, 41984), ("v41_528", 64, 33792), ("v41_fp4_288", 64, 18432),
        ("index_fp8_132", 64, 8640), ("index_fp4_68", 64, 4608), ("index_fp4_68_h", 64, 4608), ("mxfp4_368", 64, 23552),
        ("row_580", 64, 37120), ("v41_528", 1, 1024), ("v41_fp4_288", 1, 512), ("v32_nvfp4_432", 64, 27648),
    ],
)  # fmt: skip
def test_bytes_of_a_packed_page(name, rows, page):
    block = block_layout(FORMATS[name], rows, "packed")
    assert block.buffers == (("page", page),)


@pytest.mark.parametrize("rows", [1, 2, 32, 64, 256])
def test_addresses_in_a_v4_page(rows):
    """Codes at r·576, rope 448 on, seven scales at P·576 + r·8, then the pad."""
    stride = -(-rows * 584 // 576) * 576
    for block in (0, 5):
        for row in {0, rows // 2, rows - 1}:
            found = {field: address("v4_584", rows, block, row, field) for field in ("codes", "rope", "scales", "pad")}
            scales = block * stride + rows * 576 + row * 8
            assert found == {
                "codes": block * stride + row * 576,
                "rope": block * stride + row * 576 + 448,
                "scales": scales,
                "pad": scales + 7,
            }


@pytest.mark.parametrize(
    ("name", "block_rows", "block", "row", "field", "expected"),
    [
        ("v32_656", 64, 1, 2, "scales", 64 * 656 + 2 * 656 + 512),
        ("v32_656", 64, 0, 63, "rope", 63 * 656 + 528),
        ("v32_nvfp4_432", 64, 1, 2, "scales", 64 * 432 + 2 * 432 + 256),
        ("v32_nvfp4_432", 64, 0, 63, "rope", 63 * 432 + 304),
        ("mxfp4_368", 4, 1, 1, "scales", 4 * 368 + 368 + 224),
        ("mxfp4_368", 4, 0, 2, "rope", 2 * 368 + 240),
        ("row_580", 4, 1, 1, "codes", 4 * 580 + 448),
        ("row_580", 4, 1, 1, "rope", 4 * 580 + 4 * 448 + 128),
        ("row_580", 4, 1, 1, "scales", 4 * 580 + 4 * 576 + 4),
        ("index_fp8_132", 64, 2, 3, "codes", 2 * 8640 + 3 * 128),
        ("index_fp8_132", 64, 2, 3, "scales", 2 * 8640 + 64 * 128 + 3 * 4),
        ("index_fp4_68", 64, 2, 3, "codes", 2 * 4608 + 3 * 64),
        ("index_fp4_68", 64, 2, 3, "scales", 2 * 4608 + 64 * 64 + 3 * 4),
        ("v41_528", 64, 1, 5, "scales", 33792 + 64 * 512 + 5 * 16),
        ("v41_fp4_288", 64, 1, 5, "scales", 18432 + 64 * 256 + 5 * 32),
    ],
)  # fmt: skip
def test_addresses_in_other_pages(name, block_rows, block, row, field, expected):
    assert address(name, block_rows, block, row, field) == expected


def test_idx_09_moving_an_index_key_moves_its_own_bytes_only(codec):
    """A page's first axis is pages, not rows: all keys of a page, then all its scales."""
    assert block_layout(INDEX_PAGE, 4, "packed").nbytes == 48
    assert address(INDEX_PAGE, 4, 2, 3, "codes") == 120
    assert address(INDEX_PAGE, 4, 2, 3, "scales") == 140
    pool = np.arange(3 * 48, dtype=np.uint8).reshape(3, 48)
    source, target = (codec.unpack_page(INDEX_PAGE, pool[page], 4) for page in (1, 2))
    target[0] = source[3]
    moved = pool.copy()
    moved[2] = codec.pack_page(INDEX_PAGE, target)
    assert np.flatnonzero(moved.reshape(-1) != pool.reshape(-1)).tolist() == [*range(96, 104), *range(128, 132)]
    assert moved[2, :8].tolist() == [*range(72, 80)]
    assert moved[2, 32:36].tolist() == [*range(92, 96)]


def test_pool_07_addresses_do_not_wrap_at_two_gibibytes():
    assert address(ROW_584, 1, 3_700_000, 0, "codes") == 2_160_800_000
    assert block_layout(FORMATS["v4_584"], 1780, "packed").nbytes == 1_039_680
    assert address("v4_584", 1780, 2066, 0, "codes") == 2_147_978_880
    assert address("v4_584", 64, 57_359, 0, "codes") == 2_147_520_960 > 2**31 - 1


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        pytest.param(("v4_584", 64, 0, 64, "codes"), "row", id="row beyond the block"),
        pytest.param(("v4_584", 64, 0, -1, "codes"), "row", id="row -1"),
        pytest.param(("v4_584", 64, -1, 0, "codes"), "block", id="block -1"),
        pytest.param(("v4_584", 64, 0, 0, "value"), "field", id="unknown field"),
        pytest.param(("v4", 64, 0, 0, "codes"), "format", id="unknown format"),
        pytest.param(("bf16", 64, 0, 0, "codes"), "format", id="a format without a size"),
    ],
)
def test_address_refuses(arguments, where):
    with pytest.raises(SpecError) as caught:
        address(*arguments)
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("rows", "layout", "where"), [(0, "packed", "rows of a block"), (4, "tiled", "layout"), (4, None, "layout")]
)
def test_block_layout_refuses(rows, layout, where):
    with pytest.raises(SpecError) as caught:
        block_layout(FORMATS["v4_584"], rows, layout)
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("name", "dim", "expected"),
    [
        ("v4_584", 512, {"codes": 448, "rope": 128, "scales": 7}),
        ("row_580", 512, {"codes": 448, "rope": 128, "scales": 4}),
        ("v41_fp4_288", 512, {"codes": 256, "scales": 32}),
        ("mxfp4_368", 512, {"codes": 224, "scales": 14, "rope": 128}),
        ("v32_nvfp4_432", 576, {"codes": 256, "scales": 32, "rope": 128}),
        ("bf16", 96, {"codes": 192}),
    ],
)
def test_planar_has_one_array_a_field_and_no_padding(name, dim, expected):
    block = block_layout(FORMATS[name].for_dim(dim), 5, "planar")
    assert dict(block.buffers) == {field: 5 * size for field, size in expected.items()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("v4_584", {"tile0": 640}, id="V4: four lines of codes and scales, one of rope"),
        pytest.param("v32_656", {"tile0": 768}, id="V3.2: four lines of codes, one of scales, one of rope"),
        pytest.param("v41_528", {"tile0": 640}, id="V4.1 window: codes fill four lines"),
        pytest.param("v41_fp4_288", {"tile0": 512}, id="V4.1 entries: one tile"),
        pytest.param("v32_nvfp4_432", {"tile0": 512}, id="MLA in four bits: three lines and one of rope"),
        pytest.param("index_fp4_68", {"tile0": 128}, id="FP4 index keys: a quarter of a tile"),
        pytest.param("index_fp8_132", {"tile0": 256}, id="FP8 index keys: half a tile"),
    ],
)
def test_tpu_tiles_are_whole_tiles_lane_wide_parts_or_lines_across_two(name, expected):
    block = block_layout(FORMATS[name], 8, "tpu_tile")
    assert dict(block.buffers) == {buffer: 8 * size for buffer, size in expected.items()}


@pytest.mark.parametrize(
    ("name", "dim", "expected"),
    [
        ("fp8_row", 128, {"tile0": 128, "words": 4}),
        ("int8_row", 128, {"tile0": 128, "words": 4}),
        ("int8_row", 96, {"tile0": 128, "words": 4}),
        ("mxfp4", 128, {"tile0": 64, "words": 4}),
        ("mxfp4", 64, {"tile0": 32, "words": 4}),
        ("nf4_b64", 128, {"tile0": 64, "words": 8}),
        ("int4_g64", 128, {"tile0": 64, "words": 8}),
        ("int4_g32", 128, {"tile0": 64, "words": 16}),
        ("fp8_row", 600, {"tile0": 1024, "words": 4}),
    ],
)
def test_what_scales_keys_and_values_has_words_of_its_own_in_tiles(name, dim, expected):
    block = block_layout(FORMATS[name].for_dim(dim), 512, "tpu_tile")
    assert dict(block.buffers) == {buffer: 512 * size for buffer, size in expected.items()}
    assert sum(place.nbytes for place in block.places) == block.format.row_bytes


def test_tpu_tile_splits_rope_into_high_and_low_bytes():
    (rope,) = [place for place in block_layout(FORMATS["v4_584"], 2, "tpu_tile").places if place.field == "rope"]
    assert rope.split
    assert byte_places(rope, 1)[:4] == [640 + 512 + 64, 640 + 512, 640 + 512 + 65, 640 + 512 + 1]


@pytest.mark.parametrize("name", ["v4_584", "v41_528", "v32_656", "row_580"])
@pytest.mark.parametrize("rows", [1, 2, 3, 145])
def test_a_row_across_tiles_ends_in_the_tile_after_that_in_which_it_begins(name, rows):
    block = block_layout(FORMATS[name], rows, "tpu_tile")
    ((_, size),) = block.buffers
    stride = block.places[0].stride
    for row in range(rows):
        first, last = row * stride // 512, ((row + 1) * stride - 1) // 512
        assert last == first + 1 < size // 512
