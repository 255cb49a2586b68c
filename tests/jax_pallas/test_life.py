"""A random life of requests on the reference and on JAX: equal bytes and gathers, arithmetic within bounds."""

from collections import Counter

import ml_dtypes
import numpy as np
import pytest

import kvcore
from kvcore.ops import tolerances
from kvcore.spec import CacheSpec, presets
from tests.support.drive import Options, Seen, bits, classic_spec, drive

PAD_TOKENS = 32

# Every kind of layer is a set of programs to compile, minutes in all: one kind a life, and of the classic ones a
# paged, a ring and a chunked one. The conformance kit meets them all, in every layout.
CSA, HCA = (
    CacheSpec(layers=(layer,), block_tokens=16) for layer in presets.deepseek_v4_flash_tiny(block_tokens=16).layers[1:3]
)
EVERY_CLASSIC = classic_spec([("int8_row", "nf4_b64"), ("bf16", "fp32")])
CLASSIC = CacheSpec(layers=[EVERY_CLASSIC.layers[number] for number in (0, 3, 5)], block_tokens=8)

LIVES = [
    pytest.param(CSA, "planar", Options(), True, id="CSA, planar"),
    pytest.param(HCA, "tpu_tile", Options(), True, id="HCA, tpu_tile"),
    pytest.param(CLASSIC, "packed", Options(), True, id="classic"),
]


def padded(cache: kvcore.Cache) -> kvcore.Cache:
    """The cache, padding every step to one shape, so that few traces serve the whole life."""
    step = cache.step
    cache.step = lambda tokens, **_: step(tokens, pad_tokens=PAD_TOKENS, pad_requests=4)
    return cache


def assert_agrees(seen: Seen) -> None:
    """Attention and scores may be summed in another order; everything else is exact."""
    want, got = seen.answers
    where = f"{seen.what} at {seen.where}"
    if seen.what == "pool":
        # The arrays of a TPU have other shapes, and the same bytes in the same order.
        assert want.tobytes() == got.tobytes(), where
        return
    assert (got.shape, got.dtype) == (want.shape, want.dtype), where
    operation = {"attend.0": "attention", "attend.1": "attention", "index_scores": "scores"}.get(seen.what)
    if operation is None:
        wrong = np.argwhere(bits(got) != bits(want))
        assert not len(wrong), f"{where}: {len(wrong)} differ, the first at {wrong[0].tolist()}"
        return
    tolerance = tolerances.computed(operation, "bf16" if want.dtype == ml_dtypes.bfloat16 else "fp32")
    want, got = want.astype(np.float32), got.astype(np.float32)
    largest = np.abs(want[np.isfinite(want)]).max(initial=0)
    np.testing.assert_allclose(got, want, tolerance.relative, tolerance.absolute * largest, err_msg=where)


@pytest.mark.parametrize(("spec", "layout", "options", "pad"), LIVES)
def test_the_same_life_leaves_the_same_bytes_and_answers(
    spec: CacheSpec, layout: str, options: Options, pad: bool, rng: np.random.Generator
) -> None:
    sizes = {"max_requests": 3, "max_tokens": 3 * 64, "max_draft_tokens": 2, "layout": layout}
    caches = [kvcore.create_cache(spec, backend=backend, **sizes) for backend in ("reference", "jax_pallas")]
    if pad:
        caches = [padded(cache) for cache in caches]
    happened: Counter[str] = Counter()
    for seen in drive(caches, int(rng.integers(2**32)), options, happened):
        assert_agrees(seen)
    assert caches[1].nbytes == caches[1].plan.nbytes
    assert happened["several requests"], "the workload did not do what it is for"
