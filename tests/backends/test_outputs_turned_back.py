"""Attention outputs turned back by the query's position, against complex numbers in fp64, one query at a time.

DeepSeek-V4's published inference code multiplies pairs of a rounded output by conj(exp(i · angle)) and rounds again.
"""

import ml_dtypes
import numpy as np
import pytest

import kvcore
from kvcore.spec import CacheSpec, Entries, LayerSpec, Rope, Tail, Window, Yarn

DIM, HEADS = 24, 3
WINDOW = Window(dim=DIM, window=5, format="bf16")
LAYERS = {
    "window alone": LayerSpec(window=WINDOW),
    "CSA": LayerSpec(
        window=WINDOW, tail=Tail(dim=DIM, ratio=4, overlap=True), entries=Entries(dim=DIM, ratio=4, format="bf16")
    ),
    "HCA": LayerSpec(
        window=WINDOW, tail=Tail(dim=DIM, ratio=8, overlap=False), entries=Entries(dim=DIM, ratio=8, format="bf16")
    ),
}
ROPES = {
    "some channels": Rope(dim=10, theta=10000.0),
    "all channels": Rope(dim=DIM, theta=160000.0),
    # The ramp lies where the short context of these tests can see it.
    "YaRN": Rope(dim=10, theta=50.0, yarn=Yarn(factor=16.0, original_length=64)),
}
STEPS = [[11, 3, 0], [1, 2, 1], [4, 4, 4]]
"""New tokens of three requests, step by step."""


def turned(out, positions, rope):
    """Outputs [T, H, d] as their dtype holds them, turned by exp(-i · fp32(position) · fp32(frequency)), fp64."""
    pairs = np.array(rope.inverse_frequencies, np.float32)
    angles = np.float32(positions)[:, None] * pairs
    want = out.astype(np.float64)
    last = want[:, :, DIM - 2 * len(pairs) :]
    complex_pairs = (last[:, :, 0::2] + 1j * last[:, :, 1::2]) * np.exp(-1j * angles.astype(np.float64))[:, None]
    last[:, :, 0::2], last[:, :, 1::2] = complex_pairs.real, complex_pairs.imag
    return want


@pytest.fixture(params=LAYERS)
def steps(build, request, rng):
    """Three steps of three requests and two padding tokens; yields (handle, positions, picks) while each is open."""

    def run():
        layer = LAYERS[request.param]
        cache = build(CacheSpec(layers=[layer], block_tokens=8), max_requests=4, max_tokens=256)
        requests = [cache.admit() for _ in STEPS[0]]
        for new in STEPS:
            tokens = sum(new) + 2
            with cache.step(dict(zip(requests, new, strict=True)), pad_tokens=tokens, pad_requests=4) as step:
                handle = step.layer(0)
                handle.append_window(rng.standard_normal((tokens, DIM), np.float32))
                if layer.tail is not None:
                    handle.append_tail(*rng.standard_normal((2, tokens, layer.tail.width), np.float32))
                    handle.flush()
                picks = rng.integers(-1, 6, (tokens, 1)).astype(np.int32)
                yield handle, kvcore.to_numpy(step.positions), None if layer.entries is None else picks

    return run


def found(handle, q, picks, **options):
    """(out in its dtype, lse)."""
    return [kvcore.to_numpy(part) for part in handle.attend(q, picks, **options)]


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["fp32", "bf16"])
def test_outputs_are_rounded_then_turned_then_rounded(steps, rng, rope, dtype):
    for handle, positions, picks in steps():
        q = rng.standard_normal((len(positions), HEADS, DIM), np.float32).astype(dtype)
        sink = np.array([0.5, -1.0, 2.0], np.float32)
        for selected, options in ((picks, {"sink": sink, "scale": 0.3}), (None, {})):
            out, lse = found(handle, q, selected, **options)
            back, same = found(handle, q, selected, rope=rope, **options)
            assert back.dtype == out.dtype
            assert same.tobytes() == lse.tobytes()
            want = turned(out, positions, rope)
            # Angles of up to a few dozen, cosines of them and two products, all in fp32.
            bound = 2e-6 if dtype == np.float32 else 2.0**-8 * np.abs(want) + 1e-5
            assert (np.abs(back.astype(np.float64) - want) <= bound).all()
            assert not back[positions < 0].any()


def test_turned_there_and_back(steps, rng):
    rope = ROPES["YaRN"]
    for handle, positions, picks in steps():
        q = rng.standard_normal((len(positions), HEADS, DIM), np.float32)
        out, _ = found(handle, q, picks)
        back, _ = found(handle, q, picks, rope=rope)
        live = positions >= 0
        np.testing.assert_allclose(turned(back, -positions, rope)[live], out[live], atol=2e-6)


def test_a_rope_is_its_frequencies(steps, rng):
    rope = ROPES["YaRN"]
    for handle, positions, picks in steps():
        q = rng.standard_normal((len(positions), HEADS, DIM), np.float32)
        by_rope, _ = found(handle, q, picks, rope=rope)
        by_array, _ = found(handle, q, picks, rope=np.array(rope.inverse_frequencies, np.float32))
        assert by_rope.tobytes() == by_array.tobytes()
        none, _ = found(handle, q, picks, rope=np.zeros(0, np.float32))
        assert none.tobytes() == found(handle, q, picks)[0].tobytes()
