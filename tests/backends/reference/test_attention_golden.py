"""Attention over window and entries against worked values, with and without the sink.

Two heads, eight channels of which the last four are rotated (theta 160000), window 4, ratio 4, query at position 6. The
caller rotates the window's rows and the query at their positions, the entry at position 0; the output is turned back by
the caller or by the verb.
"""

import numpy as np
import pytest

import kvcore
from kvcore.spec import CacheSpec, Entries, LayerSpec, Rope, Window
from tests.support.backends_under_test import poison

FREQUENCIES = np.array([1.0, 160000.0**-0.5], np.float32)
SINK = np.array([0.5, -1.0], np.float32)

LOGITS = [
    [0.250732, -0.231180, 0.469547, -0.397748, -0.175775],
    [-0.054306, -0.188061, -0.199595, 0.198874, -0.374049],
]
LSE = [1.646439, 1.504686]
BEFORE = [0.064116, -0.285220, 0.093508, 0.125457, 0.292859, -0.140371, 0.189363, -0.160576]
FINAL = [
    [0.064116, -0.285220, 0.093508, 0.125457, 0.320416, -0.052950, 0.186933, -0.163398],
    [-0.065570, -0.152811, 0.012256, 0.005052, 0.487014, -0.294137, 0.076229, -0.012197],
]


def rotated(values, position):
    """The last four channels turned by the fp32 angle of ``position``; negative positions turn back."""
    angles = np.float32(position) * FREQUENCIES
    cos, sin = np.cos(angles), np.sin(angles)
    even, odd = values[..., 4::2], values[..., 5::2]
    pairs = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(*values.shape[:-1], 4)
    return np.concatenate([values[..., :4], pairs], axis=-1).astype(np.float32)


J = np.arange(8)
QUERY = rotated(((3 * np.arange(2)[:, None] + 2 * J) % 7 - 3) / 4, 6)
ROWS = np.stack([rotated(((5 * p + 3 * J) % 9 - 4) / 4, p) for p in range(7)])
ENTRY = ((2 * J) % 5 - 2).astype(np.float32)[None] / 2


def make_cache(build, *, window=4, entries=True, requests=2):
    ring = Window(dim=8, window=window, format="fp32") if window else None
    layer = LayerSpec(window=ring, entries=Entries(dim=8, ratio=4, format="fp32") if entries else None)
    cache = build(CacheSpec(layers=[layer, layer], block_tokens=4), max_requests=requests, max_tokens=requests * 8)
    poison(cache)
    return cache


def attended(cache, chunks, *, selected=None, sink=None, rope=None):
    """Seven positions of a request in chunks, beside a neighbour with other rows; out [2, 8], lse [2] of position 6."""
    requests = [cache.admit(), cache.admit()]
    factors = np.float32(-3), np.float32(1)
    start = 0
    for new in chunks:
        rows = ROWS[start : start + new]
        closed = 1 if start < 4 <= start + new else 0
        with cache.step(dict.fromkeys(requests, new)) as step:
            for number, scale in ((0, np.float32(2)), (1, np.float32(1))):
                handle = step.layer(number)
                if cache.spec.layers[number].window is not None:
                    handle.append_window(np.concatenate([rows * scale * factor for factor in factors]))
                if cache.spec.layers[number].entries is not None:
                    handle.store_entries(np.concatenate([ENTRY[:closed] * scale * factor for factor in factors]))
            q = np.tile(QUERY, (new * len(requests), 1, 1))
            picks = None if selected is None else np.tile(np.array([selected], np.int32).reshape(1, -1), (len(q), 1))
            found = step.layer(1).attend(q, picks, sink=sink, rope=rope)
        start += new
    for request in requests:
        cache.release(request)
    return kvcore.to_numpy(found.out)[-1], kvcore.to_numpy(found.lse)[-1]


@pytest.mark.parametrize("chunks", [[7], [1] * 7, [6, 1], [4, 3], [2, 5]], ids=str)
@pytest.mark.parametrize("selected", [None, [0], [0, -1, -1], [7, 0]], ids=str)
def test_output_with_sink(build, chunks, selected):
    out, lse = attended(make_cache(build), chunks, selected=selected, sink=SINK)
    np.testing.assert_allclose(out[0], BEFORE, atol=2e-6)
    np.testing.assert_allclose(rotated(out, -6), FINAL, atol=2e-6)
    np.testing.assert_allclose(lse, LSE, atol=2e-6)
    assert out.dtype == np.float32
    assert lse.dtype == np.float32


@pytest.mark.parametrize("chunks", [[7], [6, 1], [4, 3]], ids=str)
@pytest.mark.parametrize("rope", [FREQUENCIES, Rope(dim=4, theta=160000.0)], ids=["frequencies", "a rope"])
def test_output_turned_back(build, chunks, rope):
    out, lse = attended(make_cache(build), chunks, sink=SINK, rope=rope)
    np.testing.assert_allclose(out, FINAL, atol=2e-6)
    np.testing.assert_allclose(lse, LSE, atol=2e-6)


def test_the_sink_is_in_the_denominator_only(build):
    """Without it outputs grow by 1 + exp(sink - lse); lse does not move."""
    with_sink, lse = attended(make_cache(build), [7], sink=SINK)
    without, same_lse = attended(make_cache(build), [7])
    np.testing.assert_allclose(lse, same_lse, atol=1e-7)
    np.testing.assert_allclose(without, with_sink * (1 + np.exp(SINK - LSE))[:, None], rtol=1e-5)
    np.testing.assert_allclose(without[0, 0], 0.064116 * (1 + np.exp(0.5 - 1.646439)), atol=2e-6)


@pytest.mark.parametrize(
    ("sink", "factor"),
    [(-np.inf, 1.0), (np.inf, 0.0), (1000.0, 0.0), (-1000.0, 1.0)],
    ids=["-inf", "inf", "1000", "-1000"],
)
def test_extreme_sinks(build, sink, factor):
    plain, lse = attended(make_cache(build), [7])
    out, same_lse = attended(make_cache(build), [7], sink=np.full(2, sink, np.float32))
    np.testing.assert_allclose(out, plain * factor, atol=1e-7)
    np.testing.assert_allclose(same_lse, lse, atol=1e-7)


@pytest.mark.parametrize("column", range(4))
def test_logits_of_the_window_one_by_one(build, column):
    """A window of one row: lse is that row's logit, the output is the row."""
    cache = make_cache(build, window=1, entries=False)
    request = cache.admit()
    position = 3 + column
    with cache.step({request: 1}) as step:
        for number in (0, 1):
            step.layer(number).append_window(ROWS[position : position + 1])
        out, lse = (kvcore.to_numpy(part)[0] for part in step.layer(1).attend(QUERY[None]))
    np.testing.assert_allclose(lse, [LOGITS[0][column], LOGITS[1][column]], atol=1e-6)
    np.testing.assert_allclose(out, np.tile(ROWS[position], (2, 1)), atol=1e-6)


def test_logit_of_the_entry_alone(build):
    out, lse = attended(make_cache(build, window=0), [7])
    np.testing.assert_allclose(lse, [LOGITS[0][4], LOGITS[1][4]], atol=1e-6)
    np.testing.assert_allclose(out, np.tile(ENTRY, (2, 1)), atol=1e-6)


def test_lse_is_that_of_the_logits():
    np.testing.assert_allclose(np.log(np.exp(LOGITS).sum(axis=1)), LSE, atol=2e-6)


@pytest.mark.parametrize("selected", [[], [-1], [1, -1], [-2, 5]], ids=str)
def test_no_valid_entry_leaves_the_window(build, selected):
    out, lse = attended(make_cache(build), [7], selected=selected)
    expected = np.log(np.exp(np.array(LOGITS)[:, :4]).sum(axis=1))
    np.testing.assert_allclose(lse, expected, atol=2e-6)
    only_window, _ = attended(make_cache(build, entries=False), [7])
    np.testing.assert_allclose(out, only_window, atol=1e-7)


@pytest.mark.parametrize("rope", [None, FREQUENCIES], ids=["as it is", "turned back"])
def test_a_query_without_keys_gives_zero_and_minus_infinity(build, rope):
    cache = make_cache(build, window=0)
    request = cache.admit()
    with cache.step({request: 3}) as step:
        for number in (0, 1):
            step.layer(number).store_entries(np.zeros((0, 8), np.float32))
        out, lse = step.layer(1).attend(np.tile(QUERY, (3, 1, 1)), sink=SINK, rope=rope)
    assert not kvcore.to_numpy(out).any()
    assert np.isneginf(kvcore.to_numpy(lse)).all()


def test_the_scale_can_be_given(build):
    cache = make_cache(build, window=1, entries=False)
    request = cache.admit()
    with cache.step({request: 1}) as step:
        for number in (0, 1):
            step.layer(number).append_window(ROWS[3:4])
        lse = kvcore.to_numpy(step.layer(1).attend(QUERY[None], scale=1.0).lse)[0]
    np.testing.assert_allclose(lse, np.array([LOGITS[0][0], LOGITS[1][0]]) * 8**0.5, atol=2e-6)
