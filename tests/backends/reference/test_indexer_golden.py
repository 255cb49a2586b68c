"""The lightning indexer against worked values: scores, visibility, top-k and ties."""

import numpy as np
import pytest

import kvcore
from kvcore.spec import CacheSpec, Entries, IndexKeys, LayerSpec
from tests.support.backends_under_test import poison

NEG = -np.inf


def make_cache(build, tokens, *, dim=8, ratio=4, format="fp32", block_tokens=8, requests=2):
    layer = LayerSpec(
        entries=Entries(dim=4, ratio=ratio, format="fp32"),
        index_keys=IndexKeys(dim=dim, ratio=ratio, heads=3, topk=2, format=format),
    )
    spec = CacheSpec(layers=[layer, layer], block_tokens=block_tokens)
    cache = build(spec, max_requests=requests, max_tokens=requests * (tokens + block_tokens))
    poison(cache)
    return cache


def by_formula(tokens):
    t, h = np.arange(tokens)[:, None], np.arange(3)[None]
    j, s = np.arange(8), np.arange(tokens // 4)[:, None]
    q = ((5 * t[..., None] + 3 * h[..., None] + 2 * j) % 9 - 4) / 4
    keys = ((4 * s + 5 * j) % 7 - 3) / 2
    weights = ((2 * t + 3 * h) % 5 - 1.5) / 4
    return q.astype(np.float32), keys.astype(np.float32), weights.astype(np.float32)


SCORES = {
    3: [0.546875],
    7: [-0.656250, 0.703125],
    8: [-0.265625, 0.109375],
    15: [0.765625, -0.093750, 0.140625, 0.453125],
}
TOP_2 = {3: [0, -1], 7: [1, 0], 8: [1, 0], 15: [0, 3]}


@pytest.mark.parametrize("chunks", [[16], [1] * 16, [5, 6, 5], [3, 13]], ids=str)
def test_scores_and_top_2(build, chunks):
    """Sixteen tokens of a request in every split, beside another request whose keys are different."""
    q, keys, weights = by_formula(16)
    cache = make_cache(build, 16)
    other, request = cache.admit(), cache.admit()
    start = 0
    for new in chunks:
        stored = slice(start // 4, (start + new) // 4)
        count = stored.stop - stored.start
        with cache.step({other: new, request: new}) as step:
            for number, scale in ((0, 7), (1, 1)):
                both = np.concatenate([-5 * keys[stored], scale * keys[stored]])
                step.layer(number).store_entries(np.ones((2 * count, 4), np.float32), both)
            rows = slice(start, start + new)
            found = step.layer(1).index_scores(np.tile(q[rows], (2, 1, 1)), np.tile(weights[rows], (2, 1)))
            picks = step.layer(1).select(found, 2)
        scores, picks = kvcore.to_numpy(found)[new:], kvcore.to_numpy(picks)[new:]
        assert scores.shape[1] == (start + new) // 4
        for token in set(range(start, start + new)) & set(SCORES):
            visible = len(SCORES[token])
            np.testing.assert_allclose(scores[token - start, :visible], SCORES[token], atol=1e-6)
            assert (scores[token - start, visible:] == NEG).all()
            assert picks[token - start].tolist() == TOP_2[token]
        start += new


VISIBLE = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 1, 7: 2, 8: 2, 11: 3, 12: 3}


@pytest.mark.parametrize("chunks", [[13], [1] * 13, [4, 4, 5], [3, 1, 9]], ids=str)
def test_entry_i_is_visible_from_the_token_that_completes_it(build, chunks):
    """At t of ratio 4 there are (t + 1) div 4 entries: one more than t div 4 at t = 3, 7, 11."""
    cache = make_cache(build, 13, dim=2)
    request = cache.admit()
    start, visible = 0, {}
    for new in chunks:
        count = (start + new) // 4 - start // 4
        with cache.step({request: new}) as step:
            for number in (0, 1):
                step.layer(number).store_entries(np.ones((count, 4), np.float32), np.ones((count, 2), np.float32))
            scores = step.layer(1).index_scores(np.ones((new, 3, 2), np.float32), np.ones((new, 3), np.float32))
            picks = kvcore.to_numpy(step.layer(1).select(scores, 8))
        for token, row in enumerate(kvcore.to_numpy(scores), start):
            visible[token] = int((row > NEG).sum())
            # All scores are equal, so every visible entry is picked, lowest first.
            assert picks[token - start].tolist() == [*range(visible[token])] + [-1] * (8 - visible[token])
        start += new
    assert {token: visible[token] for token in VISIBLE} == VISIBLE


def test_relu_comes_before_the_weights(build):
    """One head, one key: 2 * relu(3) = 6, -2 * relu(3) = -6, 2 * relu(-3) = 0, weights may be negative."""
    cache = make_cache(build, 1, dim=2, ratio=1)
    request = cache.admit()
    with cache.step({request: 1}) as step:
        for number in (0, 1):
            step.layer(number).store_entries(np.ones((1, 4), np.float32), np.array([[1, 0]], np.float32))

        def score(q, weight):
            q, weight = np.array([[[q, 9.0]]], np.float32), np.array([[weight]], np.float32)
            return kvcore.to_numpy(step.layer(1).index_scores(q, weight)).item()

        assert [score(3, 2), score(3, -2), score(-3, 2), score(-3, -2)] == [6, -6, 0, 0]


@pytest.mark.parametrize(
    ("scores", "k", "expected"),
    [
        pytest.param([0, 0, 0, 0], 2, [0, 1], id="four zeros: the lowest entries"),
        pytest.param([0, 5, 0, 0, 0], 3, [1, 0, 2], id="zeros behind a winner"),
        pytest.param([0.0, -0.0, 0.0], 3, [0, 1, 2], id="both zeros are equal"),
        pytest.param([-0.0, 0.0], 2, [0, 1], id="the negative zero first"),
        pytest.param([1, 2, 2, 1], 4, [1, 2, 0, 3], id="two ties"),
        pytest.param([-3, NEG, -1], 3, [2, 0, -1], id="a negative score beats an invisible entry"),
        pytest.param([NEG, NEG], 2, [-1, -1], id="nothing visible"),
        pytest.param([7], 4, [0, -1, -1, -1], id="k beyond the entries"),
        pytest.param([3, 1, 2], 0, [], id="k is zero"),
        pytest.param([], 3, [-1, -1, -1], id="no entries yet"),
        pytest.param([1, np.nan, 2], 3, [2, 0, -1], id="NaN is never picked"),
        pytest.param([1, np.inf, 2], 2, [1, 2], id="infinity is the highest"),
        pytest.param([2.0**-149, 0, 2.0**-148], 3, [2, 0, 1], id="subnormals are told apart"),
        pytest.param([1, 1 + 2.0**-23, 1], 2, [1, 0], id="one unit in the last place decides"),
    ],
)
def test_select(build, scores, k, expected):
    cache = make_cache(build, 1, dim=2, ratio=1)
    request = cache.admit()
    with cache.step({request: 2}) as step:
        rows = np.array([scores, scores[::-1]], np.float32).reshape(2, len(scores))
        picks = kvcore.to_numpy(step.layer(0).select(rows, k))
        for number in (0, 1):
            step.layer(number).store_entries(np.ones((2, 4), np.float32), np.ones((2, 2), np.float32))
    assert picks.dtype == np.int32
    assert picks[0].tolist() == expected
    backwards = [scores[::-1][i] for i in picks[1] if i >= 0]
    assert backwards == [scores[i] for i in expected if i >= 0]


def test_selection_does_not_depend_on_the_width(build):
    """Exact zeros competing for the last places: the same picks whatever columns stand beside them."""
    cache = make_cache(build, 1, dim=2, ratio=1)
    request = cache.admit()
    with cache.step({request: 1}) as step:
        row = np.zeros((1, 9), np.float32)
        row[0, 4] = 1
        for width in range(5, 200):
            wide = np.full((1, width), NEG, np.float32)
            wide[0, :9] = row[0, : min(width, 9)]
            assert kvcore.to_numpy(step.layer(0).select(wide, 4)).tolist() == [[4, 0, 1, 2]]
        for number in (0, 1):
            step.layer(number).store_entries(np.ones((1, 4), np.float32), np.ones((1, 2), np.float32))


@pytest.mark.parametrize(("format", "tolerance"), [("index_fp4_68", 4), ("index_fp8_132", 1)])
@pytest.mark.parametrize("twin", ["", "_h"], ids=["plain", "rotated"])
def test_a_rotated_format_has_its_queries_rotated(build, format, tolerance, twin):
    """The caller rotates neither keys nor queries; scores move by quantisation only (by 37 if one side stayed)."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((8, 3, 128)).astype(np.float32)
    keys, weights = rng.standard_normal((2, 128)).astype(np.float32), rng.standard_normal((8, 3)).astype(np.float32)
    exact = np.einsum("th,ths->ts", weights, np.maximum(q @ keys.T, 0))
    cache = make_cache(build, 8, dim=128, format=format + twin)
    request = cache.admit()
    with cache.step({request: 8}) as step:
        for number in (0, 1):
            step.layer(number).store_entries(np.ones((2, 4), np.float32), keys)
        found = kvcore.to_numpy(step.layer(1).index_scores(q, weights))
        stored = kvcore.to_numpy(step.layer(1).gather_all_index_keys().values)[0].astype(np.float32)
    assert abs(found[3:, 0] - exact[3:, 0]).max() < tolerance
    assert abs(found[7, 1] - exact[7, 1]) < tolerance
    unrotated = np.einsum("th,ths->ts", weights, np.maximum(q @ stored.T, 0))
    assert (abs(unrotated[3:, 0] - exact[3:, 0]).max() > 30) == (twin == "_h")
