"""The format table: sizes, fields, exactness, and the registry that refuses what it does not know."""

import subprocess
import sys

import msgspec
import numpy as np
import pytest

from kvcore.errors import SpecError
from kvcore.spec import FORMATS, Field, Format, tail_format
from tests.support.built_in_formats import DIM, FIXED_DIM

FIXED = {
    # name: (dim, row bytes, page alignment, amax floor, values exact in)
    "v4_584": (512, 584, 576, 1e-4, "bf16"),
    "v41_528": (512, 528, 512, 1e-4, "bf16"),
    "v41_fp4_288": (512, 288, 256, 6 * 2.0**-9, "bf16"),
    "v32_656": (576, 656, 1, 0.0, "bf16"),
    "row_580": (512, 580, 1, 1e-4, "fp32"),
    "mxfp4_368": (512, 368, 1, 6 * 2.0**-126, "bf16"),
    "v4_nvfp4_384": (512, 384, 1, 6 * 2.0**-9, "bf16"),
    "v32_nvfp4_352": (576, 352, 1, 6 * 2.0**-9, "bf16"),
    "v32_nvfp4_432": (576, 432, 1, 6 * 2.0**-9, "bf16"),
    "index_fp8_132": (128, 132, 576, 1e-4, "bf16"),
    "index_fp8_132_h": (128, 132, 576, 1e-4, "bf16"),
    "index_fp8_132_fp32scale": (128, 132, 576, 1e-4, "fp32"),
    "index_fp8_132_fp32scale_h": (128, 132, 576, 1e-4, "fp32"),
    "index_fp4_68": (128, 68, 576, 6 * 2.0**-126, "bf16"),
    "index_fp4_68_h": (128, 68, 576, 6 * 2.0**-126, "bf16"),
    "index_nvfp4": (128, 72, 576, 6 * 2.0**-126, "fp32"),
    "index_nvfp4_h": (128, 72, 576, 6 * 2.0**-126, "fp32"),
}
SIZED_BY_COMPONENT = {
    # name: (row bytes at dim 128, row bytes at dim 96, values exact in)
    "bf16": (256, 192, "bf16"),
    "fp16": (256, 192, "fp32"),
    "fp32": (512, 384, "fp32"),
    "int8_row": (132, 100, "fp32"),
    "fp8_row": (132, 100, "fp32"),
    "nf4_b64": (72, 56, "fp32"),
    "mxfp4": (68, 51, "bf16"),
    "int4_g32": (80, 60, "fp32"),
    "int4_g64": (72, 56, "fp32"),
    "int4_ch32": (80, 60, "fp32"),
    "int4_ch64": (72, 56, "fp32"),
    "int8_per_token_head": (132, 100, "fp32"),
    "fp8_per_token_head": (132, 100, "fp32"),
    "mxfp8": (132, 99, "bf16"),
    "fp4_mx_block16": (72, 54, "bf16"),
    "nvfp4": (72, 54, "fp32"),
}


def test_every_built_in_format_is_in_these_tables():
    code = "from kvcore.spec import FORMATS; print(*FORMATS)"  # afresh: other tests register formats
    built_in = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {*built_in} == {*FIXED, *SIZED_BY_COMPONENT} == {*DIM}
    assert {name: FORMATS[name].dim for name in FIXED_DIM} == FIXED_DIM


@pytest.mark.parametrize("name", FIXED)
def test_a_format_with_a_size_of_its_own(name):
    dim, row_bytes, alignment, floor, exact = FIXED[name]
    format = FORMATS[name]
    found = format.dim, format.row_bytes, format.page_alignment, format.amax_floor, format.value_code
    assert found == (dim, row_bytes, alignment, floor, exact)
    assert format.for_dim(dim) is format
    assert format.hadamard == name.endswith("_h")
    assert format.scale_floor == (1e-4 if name == "v32_656" else 0.0)


@pytest.mark.parametrize("name", SIZED_BY_COMPONENT)
def test_a_format_sized_by_its_component(name):
    at_128, at_96, exact = SIZED_BY_COMPONENT[name]
    format = FORMATS[name]
    assert (format.dim, format.row_bytes) == (None, None)
    assert (format.for_dim(128).row_bytes, format.for_dim(96).row_bytes) == (at_128, at_96)
    assert format.for_dim(96).dim == 96
    assert format.for_dim(96).value_code == exact
    assert format.for_dim(96) is format.for_dim(96)
    with pytest.raises(SpecError, match="sized format"):
        _ = format.row


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v4_584", {"codes": (0, 448), "rope": (448, 576), "scales": (576, 583), "pad": (583, 584)}),
        ("v41_528", {"codes": (0, 512), "scales": (512, 528)}),
        ("v41_fp4_288", {"codes": (0, 256), "scales": (256, 288)}),
        ("v32_656", {"codes": (0, 512), "scales": (512, 528), "rope": (528, 656)}),
        ("row_580", {"codes": (0, 448), "rope": (448, 576), "scales": (576, 580)}),
        ("mxfp4_368", {"codes": (0, 224), "scales": (224, 238), "pad": (238, 240), "rope": (240, 368)}),
        ("v32_nvfp4_432", {"codes": (0, 256), "scales": (256, 288), "pad": (288, 304), "rope": (304, 432)}),
        ("index_fp8_132", {"codes": (0, 128), "scales": (128, 132)}),
        ("index_fp4_68", {"codes": (0, 64), "scales": (64, 68)}),
        ("index_nvfp4", {"codes": (0, 64), "scales": (64, 72)}),
    ],
)
def test_bytes_of_the_canonical_row(name, expected):
    format = FORMATS[name]
    assert {field.name: format.byte_range(field.name) for field in format.fields} == expected


@pytest.mark.parametrize(
    ("name", "code", "group", "scale", "groups"),
    [
        ("v4_584", "e4m3", 64, "e8m0", 7),
        ("v41_528", "e4m3", 32, "e8m0", 16),
        ("v41_fp4_288", "e2m1", 16, "e4m3", 32),
        ("v32_656", "e4m3", 128, "fp32", 4),
        ("row_580", "e4m3", 0, "fp32", 1),
        ("mxfp4_368", "e2m1", 32, "e8m0", 14),
        ("v32_nvfp4_432", "e2m1", 16, "e4m3", 32),
        ("index_fp8_132", "e4m3", 0, "fp32", 1),
        ("index_fp4_68", "e2m1", 32, "e8m0", 4),
        ("index_nvfp4", "e2m1", 16, "e4m3", 8),
    ],
)
def test_how_codes_are_scaled(name, code, group, scale, groups):
    codes = FORMATS[name].field("codes")
    assert (codes.code, codes.group, codes.scale, codes.groups) == (code, group, scale, groups)
    assert FORMATS[name].field("scales").dims == groups


def test_a_last_group_may_be_short():
    format = FORMATS["mxfp4"].for_dim(80)
    assert format.field("codes").groups == 3
    assert format.row_bytes == 40 + 3


def test_a_tail_row_starts_with_minus_infinity_scores():
    kv, score = tail_format(6).fields
    assert (kv.name, kv.dims, kv.code, kv.fill) == ("kv", 6, "fp32", 0.0)
    assert (score.name, score.dims, score.code, score.fill) == ("score", 6, "fp32", -np.inf)
    assert tail_format(6).row_bytes == 48


def plain(name="test_plain", **changes):
    fields = {"name": name, "fields": (Field(name="codes", dims=4, code="bf16"),), "planes": (("codes",),)}
    return Format(**{**fields, **changes})


def scaled(codes=None, scales=None, **changes):
    codes = {"name": "codes", "dims": 8, "code": "e4m3", "group": 4, "scale": "e8m0", "rule": "pow2"} | (codes or {})
    scales = {"name": "scales", "dims": 2, "code": "e8m0"} | (scales or {})
    fields = (Field(**codes), Field(**scales))
    settings = {"name": "odd", "fields": fields, "planes": (("codes", "scales"),), "amax_floor": 1e-4}
    return Format(**{**settings, **changes})


@pytest.mark.parametrize(
    ("make", "where"),
    [
        pytest.param(lambda: plain(planes=()), "format test_plain: planes", id="a field in no plane"),
        pytest.param(lambda: plain(planes=(("codes",), ("codes",))), "format test_plain: planes", id="a field twice"),
        pytest.param(lambda: plain(page_alignment=0), "format test_plain: page_alignment", id="alignment 0"),
        pytest.param(lambda: scaled({"dims": 0}), "format odd: field codes: dims", id="no channels"),
        pytest.param(lambda: scaled({"dims": 7, "code": "e2m1"}), "format odd: field codes: dims", id="half a byte"),
        pytest.param(lambda: scaled({"code": "e4m3fnuz"}), "format odd: field codes: code", id="the other FP8"),
        pytest.param(lambda: scaled({"rule": "nearest"}), "format odd: field codes: rule", id="unknown rule"),
        pytest.param(lambda: scaled({"scale": "fp32"}), "format odd: field codes: scale", id="scale of another code"),
        pytest.param(lambda: scaled(scales={"dims": 3}), "format odd: scales: dims", id="a scale too many"),
        pytest.param(lambda: scaled(amax_floor=0.0), "format odd: amax_floor", id="no floor under the scale"),
        pytest.param(
            lambda: plain(fields=(Field(name="codes", dims=12, code="bf16"),), hadamard=True),
            "format test_plain: dim",
            id="a rotation of 12 channels",
        ),
    ],
)
def test_a_format_that_contradicts_itself_is_refused(make, where):
    with pytest.raises(SpecError) as caught:
        make()
    assert caught.value.where == where
    assert caught.value.allowed


def test_the_other_fp8_is_named_in_the_hint():
    with pytest.raises(SpecError, match="e4m3fnuz is another encoding"):
        scaled({"code": "e4m3fnuz"})


@pytest.mark.parametrize("name", ["v4", "", "V4_584", 5, None])
def test_unknown_format_lists_the_known_ones(name):
    with pytest.raises(SpecError) as caught:
        _ = FORMATS[name]
    assert caught.value.where == "format"
    assert {"v4_584", "bf16"} <= set(caught.value.allowed.split(", "))


@pytest.mark.parametrize("name", ["v4_584", "index_fp4_68"])
def test_a_fixed_format_refuses_another_dim(name):
    with pytest.raises(SpecError) as caught:
        FORMATS[name].for_dim(64)
    assert caught.value.allowed == str(FORMATS[name].dim)


def test_unknown_field_is_refused():
    with pytest.raises(SpecError, match="codes, rope, scales, pad"):
        FORMATS["v4_584"].field("nope")
    with pytest.raises(SpecError, match="nope"):
        FORMATS["v4_584"].byte_range("nope")


def test_registering(codec):
    made = plain("test_registering")
    assert FORMATS.register(made) is made
    assert FORMATS.register(plain("test_registering")) == made  # the same again is no conflict
    assert "test_registering" in FORMATS
    with pytest.raises(SpecError, match="a name that is not taken"):
        FORMATS.register(plain("test_registering", page_alignment=64))
    with pytest.raises(SpecError, match="a name that is not taken"):
        FORMATS.register(msgspec.structs.replace(made, name="v4_584"))
    assert codec.encode("test_registering", np.array([[1, -2, 0.5, 0]], np.float32)).tolist() == [
        [0x80, 0x3F, 0, 0xC0, 0, 0x3F, 0, 0]
    ]


def test_a_format_is_frozen_and_hashable():
    with pytest.raises(AttributeError):
        FORMATS["v4_584"].name = "mine"
    assert len({*(FORMATS[name] for name in FORMATS)}) == len(FORMATS)
