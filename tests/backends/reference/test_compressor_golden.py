"""The compressor against worked values: overlapping and plain windows, norm, rotation, any split into steps.

Entries are stored as fp32, so that nothing is rounded on the way.
"""

import numpy as np
import pytest

import kvcore
from kvcore.spec import CacheSpec, Entries, LayerSpec, Rope, Tail
from kvcore.step import StepRequest, build_index
from tests.support.backends_under_test import poison

CHUNKINGS = {
    "one step": lambda tokens: [tokens],
    "token by token": lambda tokens: [1] * tokens,
    "5, 1, rest": lambda tokens: [5, 1, tokens - 6] if tokens > 6 else [tokens - 1, 1],
    "in threes, with an empty step": lambda tokens: [3, 0] * (tokens // 3) + [tokens % 3],
}


def make_spec(dim, ratio, overlap, block_tokens):
    tail = Tail(dim=dim, ratio=ratio, overlap=overlap)
    layer = LayerSpec(tail=tail, entries=Entries(dim=dim, ratio=ratio, format="fp32"))
    return CacheSpec(layers=[layer, layer], block_tokens=block_tokens)


def entries_of(cache, kv, score, chunks, *, layer=1, **flush):
    """Feed [tokens, width] rows to one request in chunks, in every layer (reversed in layer 0); the layer's entries."""
    request = cache.admit()
    done = 0
    for new in chunks:
        rows = slice(done, done + new)
        with cache.step({request: new}) as step:
            for number, part in ((0, slice(None, None, -1)), (1, slice(None))):
                handle = step.layer(number)
                handle.append_tail(kv[rows][:, part].copy(), score[rows][:, part].copy())
                handle.flush(**flush)
            gathered = step.layer(layer).gather_all_entries()
        done += new
    assert kvcore.to_numpy(gathered.counts).tolist() == [len(kv) // cache.spec.layers[layer].entries.ratio]
    cache.release(request)
    return kvcore.to_numpy(gathered.values)[0]


# Two channels, ratio 2, four tokens: carry half, then cur half.
SMALL_KV = np.array([[1, 0, 2, 1], [0, 1, 1, 2], [3, 1, 0, 1], [1, 3, 4, 0]], np.float32)
SMALL_RAW = np.array([[0, 0, 0, 1], [1, 0, 1, 0], [0, 1, 0, 0], [1, 1, 2, 0]], np.float32)
SMALL_BIAS = np.array([[0.5, 0, 0, 0.5], [0, 0.5, 0.5, 0]], np.float32)
SMALL_SCORE = SMALL_RAW + SMALL_BIAS[[0, 1, 0, 1]]
ONE_PAIR = np.array([1.0], np.float32)


def small(build):
    cache = build(make_spec(2, 2, overlap=True, block_tokens=2), max_requests=4, max_tokens=32)
    poison(cache)
    return cache


@pytest.mark.parametrize("chunks", [[4], [1, 1, 1, 1], [3, 1], [2, 2], [1, 3], [0, 4]], ids=str)
def test_small_csa(build, chunks):
    entries = entries_of(small(build), SMALL_KV, SMALL_SCORE, chunks, norm_weight=np.ones(2, np.float32), rope=ONE_PAIR)
    np.testing.assert_allclose(entries, [[1.0, 1.0], [-0.847659, 1.132022]], atol=2e-6)


def test_small_csa_before_norm_and_rotation(build):
    entries = entries_of(small(build), SMALL_KV, SMALL_SCORE, [4])
    np.testing.assert_allclose(entries, [[1.182426, 1.182426], [2.870663, 0.622459]], atol=1e-6)


def test_small_csa_after_the_norm(build):
    entries = entries_of(small(build), SMALL_KV, SMALL_SCORE, [4], norm_weight=np.ones(2, np.float32))
    np.testing.assert_allclose(entries[1], [1.382095, 0.299686], atol=1e-6)


def test_compress_gives_what_flush_would_store(build):
    cache = small(build)
    request = cache.admit()
    with cache.step({request: 4}) as step:
        for number in (0, 1):
            handle = step.layer(number)
            handle.append_tail(SMALL_KV, SMALL_SCORE)
            handle.flush()
        closed = step.layer(1).closed
        latents = kvcore.to_numpy(step.layer(1).compress())
        normed = kvcore.to_numpy(step.layer(1).compress(np.ones(2, np.float32)))
    assert kvcore.to_numpy(closed.request_index).tolist() == [0, 0]
    assert kvcore.to_numpy(closed.entry_index).tolist() == [0, 1]
    np.testing.assert_allclose(latents, [[1.182426, 1.182426], [2.870663, 0.622459]], atol=1e-6)
    np.testing.assert_allclose(normed[1], [1.382095, 0.299686], atol=1e-6)


def test_the_weights_of_every_row(build):
    """Four requests in a batch, each with ones in one of the rows that make entry 1: their entries are the weights."""
    cache = small(build)
    requests = [cache.admit() for _ in range(4)]
    kv = np.zeros((4, 4, 4), np.float32)
    for request in range(4):
        kv[request, request] = [1, 1, 0, 0] if request < 2 else [0, 0, 1, 1]  # carry of t0, t1; cur of t2, t3
    with cache.step(dict.fromkeys(requests, 4)) as step:
        for number in (0, 1):
            handle = step.layer(number)
            handle.append_tail(kv.reshape(16, 4), np.tile(SMALL_SCORE, (4, 1)))
            handle.flush()
        found = kvcore.to_numpy(step.layer(1).gather_all_entries().values)[:, 1]
    expected = [[0.093947, 0.188770], [0.154892, 0.311230], [0.056982, 0.311230], [0.694179, 0.188770]]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(found.sum(axis=0), [1, 1], atol=1e-6)


def test_the_carry_is_not_the_earlier_cur_stream(build):
    """Were t0's and t1's cur halves used again for entry 1, it would be (2.958161, 1.0): another number."""
    reused_kv = np.concatenate([SMALL_KV[:, 2:], SMALL_KV[:, 2:]], axis=1)
    reused_score = np.concatenate([SMALL_SCORE[:, 2:], SMALL_SCORE[:, 2:]], axis=1)
    wrong = entries_of(small(build), reused_kv, reused_score, [4])
    right = entries_of(small(build), SMALL_KV, SMALL_SCORE, [4])
    np.testing.assert_allclose(wrong, [[1.182426, 1.182426], [2.958161, 1.0]], atol=1e-6)
    assert abs(wrong[1] - right[1]).max() > 0.08


# Eight channels by formula, ratio 4 with overlap or 8 without, last four rotated with theta 160000.
ROPE = Rope(dim=4, theta=160000.0)
NORM = (1 + np.arange(8) % 3 / 4).astype(np.float32)
CSA = [
    [-0.790455, -0.893467, 1.051221, 1.105777, 0.138885, 0.517398, 0.100111, -2.797585],
    [-0.645652, -0.076431, -2.027187, 0.876645, -2.086365, 2.310644, -0.712975, -0.462729],
]
HCA = [
    [1.400177, -0.759048, -2.947165, -0.177464, 0.346975, -0.886323, -1.017145, -0.704821],
    [-1.365698, 0.370818, 2.461876, 1.247904, 1.525469, -0.165335, -0.820744, 0.279954],
]


def formula(tokens, width, ratio):
    t, c = np.arange(tokens)[:, None], np.arange(width)[None]
    bias = ((3 * (t % ratio) + c) % 5 - 2) / 4
    kv, score = ((7 * t + 3 * c) % 11 - 5) / 4, ((5 * t + 2 * c) % 7 - 3) / 2 + bias
    return kv.astype(np.float32), score.astype(np.float32)


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize(
    ("ratio", "overlap", "tokens", "expected"),
    [pytest.param(4, True, 11, CSA, id="overlapping, ratio 4"), pytest.param(8, False, 19, HCA, id="plain, ratio 8")],
)
def test_entries_by_formula(build, ratio, overlap, tokens, expected, chunking):
    kv, score = formula(tokens, 16 if overlap else 8, ratio)
    cache = build(make_spec(8, ratio, overlap, block_tokens=8), max_requests=2, max_tokens=48)
    poison(cache)
    other = cache.admit()  # a neighbour, so that the request has neither slot 0 nor block 0
    with cache.step({other: 9}) as step:
        for number in (0, 1):
            step.layer(number).append_tail(kv[:9] * 3, score[:9] - 1)
            step.layer(number).flush()
    chunks = CHUNKINGS[chunking](tokens)
    entries = entries_of(cache, kv, score, chunks, norm_weight=NORM, eps=1e-6, rope=ROPE)
    np.testing.assert_allclose(entries, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("ratio", "overlap", "tokens", "expected"),
    [pytest.param(4, True, 11, CSA, id="overlapping, ratio 4"), pytest.param(8, False, 19, HCA, id="plain, ratio 8")],
)
def test_entries_by_formula_through_the_functional_verbs(build, ratio, overlap, tokens, expected):
    """Two steps by hand-made indices: slot 1, blocks 3, 0 and 2."""
    kv, score = formula(tokens, 16 if overlap else 8, ratio)
    cache = build(make_spec(8, ratio, overlap, block_tokens=8), max_requests=2, max_tokens=32)
    poison(cache)
    ops = cache.ops
    pools = ops.reset_slots(cache.pools, ops.asarray(np.array([1], np.int32)))
    for start, new in ((0, 6), (6, tokens - 6)):
        index = ops.index(build_index([StepRequest(slot=1, start=start, new=new, blocks=[3, 0, 2])], max_blocks=4))
        rows = [ops.asarray(part[start : start + new]) for part in (kv, score)]
        closed = (start + new) // ratio - start // ratio
        pools = ops.flush(pools, 1, index, *rows, closed=closed, norm_weight=ops.asarray(NORM), rope=ROPE)
        pools = ops.append_tail(pools, 1, index, *rows)
    gathered = ops.gather_all_entries(pools, 1, index, columns=tokens // ratio, role="entries")
    np.testing.assert_allclose(kvcore.to_numpy(gathered.values)[0], expected, atol=2e-6)
    assert kvcore.to_numpy(gathered.positions).tolist() == [[0, ratio]]


@pytest.mark.parametrize("ratio", [2, 4, 5])
@pytest.mark.parametrize("overlap", [True, False])
def test_entries_appear_with_the_token_that_completes_them(build, ratio, overlap):
    cache = build(make_spec(4, ratio, overlap, block_tokens=2 * ratio), max_requests=1, max_tokens=64)
    request = cache.admit()
    rows = np.ones((1, 8 if overlap else 4), np.float32)
    for length in range(1, 3 * ratio + 2):
        with cache.step({request: 1}) as step:
            for number in (0, 1):
                step.layer(number).append_tail(rows, rows)
                step.layer(number).flush()
            assert kvcore.to_numpy(step.layer(1).gather_all_entries().counts).tolist() == [length // ratio]


def test_a_reused_slot_has_no_old_carry(build):
    """Twenty tokens, release, then a prompt of 2 and two single steps: entry 0 is that of a fresh slot."""
    kv, score = formula(4, 16, 4)
    old_kv, old_score = formula(20, 16, 4)
    fresh = entries_of(
        build(make_spec(8, 4, True, block_tokens=8), max_requests=1, max_tokens=32), kv, score, [2, 1, 1]
    )
    cache = build(make_spec(8, 4, True, block_tokens=8), max_requests=1, max_tokens=32)
    entries_of(cache, old_kv * 50, old_score + 9, [20])
    assert np.array_equal(entries_of(cache, kv, score, [2, 1, 1]), fresh)


@pytest.mark.parametrize("layout", ["packed", "planar", "tpu_tile"])
def test_a_new_slot_holds_no_weight(build, layout):
    """Raw rows of a slot after admission: kv 0, score -inf, also where another request was before."""
    cache = build(make_spec(8, 4, True, block_tokens=8), max_requests=1, max_tokens=32, layout=layout)
    kv, score = formula(20, 16, 4)
    entries_of(cache, kv, score, [20])
    cache.admit()
    names = [name for name in cache.pools if ".tail." in name]
    assert len(names) == {"packed": 2, "planar": 4, "tpu_tile": 2}[layout]
    words = np.concatenate([kvcore.to_numpy(cache.pools[name]).view("<f4").reshape(-1) for name in names])
    rows = 2 * 8 * 16
    assert np.isneginf(words).sum() == rows
    assert (words == 0).sum() == len(words) - rows


def test_entry_0_has_only_its_own_rows(build):
    """With ones everywhere the weights of the current window alone sum to one."""
    ones = np.ones((4, 16), np.float32)
    cache = build(make_spec(8, 4, True, block_tokens=8), max_requests=1, max_tokens=32)
    poison(cache)
    np.testing.assert_allclose(entries_of(cache, ones, ones * 0, [4]), np.ones((1, 8)), atol=1e-6)
