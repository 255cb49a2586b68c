"""The planner reproduces every published figure: per token, at a million tokens, per request, per padded block."""

from fractions import Fraction

import pytest

from kvcore.plan import bytes_per_token, logical_bytes, plan_cache
from kvcore.spec import presets
from tests.support.plan_figures import flash, gqa, pro, v32_bf16, v41

MILLION = 2**20


def compressed(spec, tokens):
    found = logical_bytes(spec, tokens)
    return found.get("entries", 0) + found.get("index_keys", 0)


@pytest.mark.parametrize(
    ("make", "slope", "gib", "window", "total_gib"),
    [
        pytest.param(lambda: flash("bf16", "bf16"), "6880", 6.719, 5_636_096, 6.724, id="Flash, bf16"),
        pytest.param(
            lambda: flash("v4_584", "index_fp8_132"), "3850.25", 3.760, 3_214_336, 3.763, id="Flash, 584 + FP8"
        ),
        pytest.param(
            lambda: flash("v4_584", "index_fp4_68_h"), "3514.25", 3.432, 3_214_336, 3.435, id="Flash, 584 + FP4"
        ),
        pytest.param(lambda: flash("mxfp4_368", "index_fp4_68"), "2346.5", 2.292, 2_025_472, 2.293, id="Flash, MXFP4"),
        pytest.param(
            lambda: flash("test_nvfp4_384", "index_fp4_68"), "2433", 2.376, 2_113_536, 2.378, id="Flash, NVFP4"
        ),
        pytest.param(lambda: flash("row_580", "index_fp4_68"), "3492.625", 3.411, 3_192_320, 3.414, id="Flash, 580"),
        pytest.param(lambda: pro("bf16", "bf16"), "9848", 9.617, 7_995_392, 9.625, id="Pro, bf16"),
        pytest.param(lambda: pro("v4_584", "index_fp8_132"), "5511.4375", 5.382, 4_559_872, 5.387, id="Pro, 584 + FP8"),
        pytest.param(
            lambda: pro("v4_584", "index_fp4_68_h"), "5031.4375", 4.914, 4_559_872, 4.918, id="Pro, 584 + FP4"
        ),
        pytest.param(lambda: pro("test_naive_512", "test_naive_64"), "4444", 4.340, 3_997_696, 4.344, id="Pro, naive"),
        pytest.param(lambda: pro("mxfp4_368", "index_fp4_68"), "3359.125", 3.280, 2_873_344, 3.283, id="Pro, MXFP4"),
        pytest.param(v41, "890", 0.869, 2_703_360, 0.872, id="V4.1-Flash"),
        pytest.param(presets.deepseek_v3_2, "48068", 46.94, 0, 46.94, id="V3.2"),
    ],
)
def test_bytes_per_token_and_at_a_million_tokens(make, slope, gib, window, total_gib):
    spec = make()
    assert bytes_per_token(spec) == Fraction(slope)
    at_a_million = compressed(spec, MILLION)
    assert at_a_million == Fraction(slope) * MILLION
    digits = 2 if gib > 40 else 3
    assert round(at_a_million / 2**30, digits) == gib
    found_window = logical_bytes(spec, MILLION).get("window", 0)
    assert found_window == window
    assert round((at_a_million + window) / 2**30, digits) == total_gib


def test_grouped_query_attention():
    assert bytes_per_token(gqa(61)) == 249_856
    assert logical_bytes(gqa(61), MILLION) == {"kv": 244 * 2**30}


@pytest.mark.parametrize(
    ("tokens", "expected", "window"),
    [
        (0, 0, 0), (1, 0, 25_112), (127, 424_452, 3_189_224), (128, 449_824, 3_214_336), (129, 449_824, 3_214_336),
        (4_096, 14_394_368, 3_214_336), (65_536, 230_309_888, 3_214_336), (131_072, 460_619_776, 3_214_336),
        (1_000_000, 3_514_244_160, 3_214_336), (MILLION, 3_684_958_208, 3_214_336),
    ],
)  # fmt: skip
def test_flash_totals(tokens, expected, window):
    spec = flash("v4_584", "index_fp4_68_h")
    assert compressed(spec, tokens) == expected
    assert logical_bytes(spec, tokens)["window"] == window


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (127, 606_360), (128, 644_024), (4_096, 20_608_768), (131_072, 659_480_576), (1_000_000, 5_031_428_448),
        (MILLION, 5_275_844_608),
    ],
)  # fmt: skip
def test_pro_totals(tokens, expected):
    assert compressed(pro("v4_584", "index_fp4_68_h"), tokens) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(1, 356), (2, 1_780), (3, 2_136), (MILLION, 933_232_640)])
def test_v41_totals_count_shared_pools_once(tokens, expected):
    assert compressed(v41(), tokens) == expected


@pytest.mark.parametrize(
    ("make", "block", "padded"),
    [
        pytest.param(lambda: flash("v4_584", "index_fp4_68_h"), 917_568, "3584.25", id="Flash, FP4 keys"),
        pytest.param(lambda: flash("v4_584", "index_fp8_132_h"), 1_002_240, "3915", id="Flash, FP8 keys"),
        pytest.param(lambda: pro("v4_584", "index_fp4_68_h"), 1_315_008, "5136.75", id="Pro, FP4 keys"),
        pytest.param(lambda: pro("v4_584", "index_fp8_132_h"), 1_435_968, "5609.25", id="Pro, FP8 keys"),
    ],
)
def test_bytes_of_a_padded_block(make, block, padded):
    plan = plan_cache(make(), max_requests=1, max_tokens=1)
    assert plan.block_bytes == block
    assert Fraction(plan.block_bytes, 256) == Fraction(padded)
    assert plan.blocks == 1  # one token already costs a whole block


def test_a_draft_layer_of_windows_adds_nothing_to_a_block():
    assert plan_cache(presets.deepseek_v4_pro(), max_requests=1, max_tokens=1).block_bytes == 1_315_008
    assert plan_cache(presets.deepseek_v4_flash(), max_requests=1, max_tokens=1).block_bytes == 917_568


@pytest.mark.parametrize(
    ("role", "rows", "page"), [("entries", 64, 37_440), ("entries", 2, 1_728), ("index_keys", 64, 4_608)]
)
def test_pages_of_a_256_token_block(role, rows, page):
    plan = plan_cache(presets.deepseek_v4_flash(), max_requests=1, max_tokens=256)
    layer = 2 if rows == 64 else 3
    (region,) = plan.region(layer, role)
    assert (region.rows, region.unit.nbytes) == (rows, page)


def test_shares_of_other_caches():
    flash_slope = bytes_per_token(flash("v4_584", "index_fp4_68_h"))
    pro_slope = bytes_per_token(pro("v4_584", "index_fp4_68_h"))
    v32 = bytes_per_token(presets.deepseek_v3_2())
    assert round(float(100 * pro_slope / v32), 2) == 10.47
    assert round(float(100 * flash_slope / v32), 2) == 7.31
    assert round(float(100 * pro_slope / bytes_per_token(gqa(61))), 2) == 2.01
    assert round(float(100 * flash_slope / bytes_per_token(gqa(43))), 2) == 2.00
    assert round(float(flash_slope / bytes_per_token(v41())), 2) == 3.95
    assert bytes_per_token(gqa(95)) == 389_120  # DeepSeek-V1 67B: 95 layers of 8 K-V heads of 128
    assert round(float(bytes_per_token(gqa(95)) / bytes_per_token(v41())), 1) == 437.2


def test_v32_in_bf16():
    assert bytes_per_token(v32_bf16()) == 85_888
    assert (
        logical_bytes(v32_bf16(), MILLION)["entries"] + logical_bytes(v32_bf16(), MILLION)["index_keys"]
        == 83.875 * 2**30
    )


@pytest.mark.parametrize(
    ("make", "ratio"),
    [(lambda: flash("v4_584", "index_fp4_68_h"), 7.95), (lambda: pro("v4_584", "index_fp4_68_h"), 7.88)],
    ids=["Flash", "Pro"],
)
def test_keeping_every_window_row_costs_eight_times_the_entries(make, ratio):
    spec = make()
    window_rows = sum(layer.window is not None for layer in spec.layers) * 584
    entries_per_token = Fraction(logical_bytes(spec, MILLION)["entries"], MILLION)
    assert round(float(window_rows / entries_per_token), 2) == ratio


@pytest.mark.parametrize(
    ("make", "csa", "index", "hca", "window", "total"),
    [
        pytest.param(
            lambda: flash("v4_584", "index_fp4_68_h"), 1_376_256, 344_064, 10_485_760, 3_214_336, 15_420_416, id="Flash"
        ),
        pytest.param(
            lambda: pro("v4_584", "index_fp4_68_h"), 1_966_080, 491_520, 16_252_928, 4_559_872, 23_270_400, id="Pro"
        ),
    ],
)
def test_state_of_a_request(make, csa, index, hca, window, total):
    """Rings without drafts: 8 fp32 rows of a CSA tail, 128 of an HCA one, 128 window rows."""
    spec = make()
    plan = plan_cache(spec, max_requests=1, max_tokens=MILLION)
    found = {"csa": 0, "index_tail": 0, "hca": 0, "window": 0}
    for region in plan.regions:
        if region.growth == "slot":
            tail = spec.layers[region.layer].tail
            name = region.role if region.role != "tail" else "csa" if tail is not None and tail.overlap else "hca"
            found[name] += region.rows * region.format.row_bytes
    assert found == {"csa": csa, "index_tail": index, "hca": hca, "window": window}
    assert sum(found.values()) == total


def test_state_of_a_v41_request():
    """Three gated sources keep 2 rows of kv and score, 512 fp32 channels each: 24,576 bytes."""
    plan = plan_cache(v41(), max_requests=1, max_tokens=MILLION)
    tails = [region for region in plan.regions if region.role == "tail"]
    assert [region.layer for region in tails] == [2, 8, 14]
    assert sum(region.rows * region.format.row_bytes for region in tails) == 24_576
