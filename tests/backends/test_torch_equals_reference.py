"""torch_triton against the reference: equal bytes for equal input, gathers alike to the bit, arithmetic within bounds."""

from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from backends_under_test import Codec, seed_of
from drive import Options, Seen, classic_spec, drive

import kvcore
from kvcore import tolerances
from kvcore.spec import FORMATS, LAYOUTS, CacheSpec, Entries, LayerSpec, Tail, Window, presets
from kvcore.tolerances import Tolerance

SPECS = {
    "V4-Flash, tiny": presets.deepseek_v4_flash_tiny(block_tokens=16),
    "V4-Pro, tiny": presets.deepseek_v4_pro_tiny(block_tokens=16),
    "V4.1-Flash, tiny": presets.deepseek_v4_1_flash_tiny(block_tokens=16),
    "V3.2, two layers": CacheSpec(layers=presets.deepseek_v3_2().layers[:2], block_tokens=16),
    "classic, bf16 and fp32": classic_spec([("bf16", "fp32"), ("fp16", "bf16")]),
    "classic, int8_row and fp8_row": classic_spec([("int8_row", "fp8_row"), ("fp8_row", "int8_row")]),
    "classic, nf4_b64 and mxfp4": classic_spec([("nf4_b64", "mxfp4"), ("mxfp4", "nf4_b64")]),
}

PLAIN = CacheSpec(
    layers=[
        LayerSpec(
            window=Window(dim=16, window=5, format="fp32"),
            tail=Tail(dim=16, ratio=ratio, overlap=overlap),
            entries=Entries(dim=16, ratio=ratio, format="fp32"),
        )
        for ratio, overlap in ((4, True), (4, False), (2, True), (1, False))
    ],
    block_tokens=8,
    name="unrounded entries",
)

HAPPENS = ("several requests", "no new tokens", "more tokens than a ring", "padded step", "failed step", "release", "truncate")
SEEDS = {"first": 1, "second": 2}


def pair(spec: CacheSpec, layout: str) -> list[kvcore.Cache]:
    """The same cache on both backends: three slots, two drafts, room for three full requests."""
    sizes = {"max_requests": 3, "max_tokens": 3 * 64, "max_draft_tokens": 2, "layout": layout}
    return [kvcore.create_cache(spec, backend=backend, **sizes) for backend in ("reference", "torch_triton")]


def bits(array: np.ndarray) -> np.ndarray:
    """Integers that tell -0 from 0 and make every NaN alike."""
    if array.dtype.kind not in "fV":
        return array
    words = array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])
    return np.where(np.isnan(array.astype(np.float32)), np.uint32(0x7FC00000), words)


def assert_same(seen: Seen) -> None:
    want, got = seen.answers
    assert (got.shape, got.dtype) == (want.shape, want.dtype), seen.what
    wrong = np.argwhere(bits(got) != bits(want))
    assert not len(wrong), f"{seen.what} at {seen.where}: {len(wrong)} differ, the first at {wrong[0].tolist()}"


def assert_near(seen: Seen, tolerance: Tolerance) -> None:
    """Within relative·|want| + absolute·largest; NaN and infinities must be in the same places."""
    want, got = seen.answers
    assert (got.shape, got.dtype) == (want.shape, want.dtype), seen.what
    want, got = want.astype(np.float32), got.astype(np.float32)
    largest = np.abs(want[np.isfinite(want)]).max(initial=0)
    where = f"{seen.what} at {seen.where}"
    np.testing.assert_allclose(got, want, tolerance.relative, tolerance.absolute * largest, err_msg=where)


def assert_agrees(seen: Seen) -> None:
    """Attention and scores may be summed in another order; everything else is exact."""
    operation = {"attend.0": "attention", "attend.1": "attention", "index_scores": "scores"}.get(seen.what)
    if operation is None:
        assert_same(seen)
        return
    precision = "bf16" if seen.answers[0].dtype == ml_dtypes.bfloat16 else "fp32"
    assert_near(seen, tolerances.computed(operation, precision))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_same_life_leaves_the_same_bytes_and_answers(spec: CacheSpec, layout: str, rng: np.random.Generator) -> None:
    happened: Counter[str] = Counter()
    for seen in drive(pair(spec, layout), int(rng.integers(2**32)), Options(steps=40), happened):
        assert_agrees(seen)
    rings = any(region.growth == "slot" for region in kvcore.plan.plan_cache(spec, max_requests=1, max_tokens=64).regions)
    missing = [what for what in HAPPENS if not happened[what] and (rings or what != "more tokens than a ring")]
    assert not missing, "the workload did not do what it is for"
    assert happened["closed entries"] or spec.name == "every classic kind"
