"""Rotary frequencies and angles: YaRN's ramp, fp32 frequencies, and fp32 angles at long positions."""

import math
import struct

import numpy as np
import pytest

import kvcore
from kvcore.errors import SpecError
from kvcore.spec import CacheSpec, Entries, LayerSpec, Rope, Tail, Yarn
from kvcore.step import StepRequest, build_index

COMPRESS = Rope(dim=64, theta=160000.0, yarn=Yarn(factor=16.0, original_length=65536))
PLAIN = Rope(dim=64, theta=160000.0)
WINDOW = Rope(dim=64, theta=10000.0)


@pytest.mark.parametrize(
    ("rope", "pair", "expected"),
    [
        (COMPRESS, 0, 1.0), (COMPRESS, 1, 0.687656), (COMPRESS, 15, 0.0036355385), (COMPRESS, 16, 0.0022656249),
        (COMPRESS, 20, 2.96977783e-4), (COMPRESS, 25, 5.3723124e-6), (COMPRESS, 31, 5.6805294e-7),
        (WINDOW, 0, 1.0), (WINDOW, 1, 0.7498942), (WINDOW, 31, 1.3335215e-4),
    ],
)  # fmt: skip
def test_frequencies_written_out(rope, pair, expected):
    assert rope.inverse_frequencies[pair] == pytest.approx(expected, rel=1e-6)


def test_the_ramp_runs_from_pair_15_to_pair_25():
    kept = [
        scaled / plain for scaled, plain in zip(COMPRESS.inverse_frequencies, PLAIN.inverse_frequencies, strict=True)
    ]
    assert kept[:16] == [1.0] * 16
    assert kept[16] == pytest.approx(0.90625, rel=1e-6)
    assert kept[20] == pytest.approx(0.53125, rel=1e-6)
    assert kept[25:] == [1 / 16] * 7
    assert kept == sorted(kept, reverse=True)


def test_the_ends_of_the_ramp_follow_from_the_correction_dims():
    """64 ln(65536 / (2 pi beta)) / (2 ln theta) is 15.4533 for beta 32 and 24.7084 for beta 1."""
    found = [64 * math.log(65536 / (2 * math.pi * beta)) / (2 * math.log(160000)) for beta in (32, 1)]
    assert found == pytest.approx([15.4533, 24.7084], abs=1e-4)
    steeper = Rope(dim=64, theta=160000.0, yarn=Yarn(factor=16.0, original_length=65536, beta_fast=1.0))
    assert steeper.inverse_frequencies[:25] == PLAIN.inverse_frequencies[:25]
    assert steeper.inverse_frequencies[25] == PLAIN.inverse_frequencies[25] / 16


@pytest.mark.parametrize("rope", [COMPRESS, PLAIN, WINDOW, Rope(dim=6, theta=500.0)])
def test_frequencies_are_fp32_numbers(rope):
    assert len(rope.inverse_frequencies) == rope.dim // 2
    for frequency in rope.inverse_frequencies:
        assert struct.unpack("<f", struct.pack("<f", frequency))[0] == frequency


@pytest.mark.parametrize("dim", [0, -2, 3, 2.0, True, "64", None])
def test_dim_is_even_and_positive(dim):
    with pytest.raises(SpecError) as caught:
        Rope(dim=dim, theta=10000.0)
    assert caught.value.where == "rope.dim"


@pytest.mark.parametrize("theta", [0, -1.0, float("nan"), float("inf"), 1.0, "10000", None])
def test_theta_is_a_number_above_one(theta):
    with pytest.raises(SpecError) as caught:
        Rope(dim=64, theta=theta)
    assert caught.value.where == "rope.theta"


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"factor": 0.0, "original_length": 65536}, "rope.yarn.factor"),
        ({"factor": float("nan"), "original_length": 65536}, "rope.yarn.factor"),
        ({"factor": 16.0, "original_length": 0}, "rope.yarn.original_length"),
        ({"factor": 16.0, "original_length": 65536, "beta_fast": 0.0}, "rope.yarn.beta_fast"),
        ({"factor": 16.0, "original_length": 65536, "beta_slow": -1.0}, "rope.yarn.beta_slow"),
    ],
)
def test_yarn_is_checked(fields, where):
    with pytest.raises(SpecError) as caught:
        Yarn(**fields)
    assert caught.value.where == where


def test_a_rope_is_frozen_and_hashable():
    assert Rope(dim=64, theta=160000.0) == PLAIN
    assert len({PLAIN, Rope(dim=64, theta=160000.0), COMPRESS}) == 2
    with pytest.raises(AttributeError):
        PLAIN.theta = 1.0


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param(np.array([1.0, COMPRESS.inverse_frequencies[1]], np.float32), id="inverse frequencies"),
        pytest.param(Rope(dim=4, theta=(1 / COMPRESS.inverse_frequencies[1]) ** 2), id="a Rope"),
    ],
)
def test_angles_are_fp32_products(build, rope):
    """At 1,048,572, pair 1: the fp32 product is 721056.875 (cos 0.0998), the exact one 721056.850 (cos 0.0751).

    Entry 262,143 of ratio 4 starts there. Its latent is (1, 0, 1, 0), so it is stored as (cos, sin, cos, sin).
    """
    tail, entries = Tail(dim=4, ratio=4, overlap=False), Entries(dim=4, ratio=4, format="fp32")
    spec = CacheSpec(layers=[LayerSpec(tail=tail, entries=entries)], block_tokens=2**20)
    cache = build(spec, max_requests=1, max_tokens=2**20)
    ops, start = cache.ops, 1_048_572
    index = ops.index(build_index([StepRequest(slot=0, start=start, new=4, blocks=[0])], max_blocks=1))
    kv = ops.asarray(np.tile(np.array([1, 0, 1, 0], np.float32), (4, 1)))
    score = ops.asarray(np.zeros((4, 4), np.float32))
    given = rope if isinstance(rope, Rope) else ops.asarray(rope)
    pools = ops.append_tail(cache.pools, 0, index, kv, score)
    pools = ops.flush(pools, 0, index, kv, score, closed=1, rope=given)
    picks = ops.asarray(np.full((4, 1), 262_143, np.int32))
    stored = kvcore.to_numpy(ops.gather_entries(pools, 0, index, picks).values)[0, 0].astype(float)
    first = math.cos(start), math.sin(start)
    assert stored[:2] == pytest.approx(first, abs=1e-6)
    assert stored[2] == pytest.approx(0.0998, abs=5e-5)
    assert stored[2:] == pytest.approx((math.cos(721056.875), math.sin(721056.875)), abs=1e-6)
