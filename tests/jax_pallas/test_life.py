"""A random life of requests on the reference and on JAX: equal bytes and gathers, arithmetic within bounds."""

from collections import Counter

import numpy as np
import pytest

import kvcore
from kvcore.spec import CacheSpec, presets
from tests.support.drive import Options, Seen, assert_agrees, classic_spec, drive

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


def assert_alike(seen: Seen) -> None:
    """The arrays of a TPU have other shapes, and the same bytes in the same order."""
    if seen.what == "pool":
        want, got = seen.answers
        assert want.tobytes() == got.tobytes(), f"pool at {seen.where}"
    else:
        assert_agrees(seen)


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
        assert_alike(seen)
    assert caches[1].nbytes == caches[1].plan.nbytes
    assert happened["several requests"], "the workload did not do what it is for"
