"""Rings: windows and sliding K-V, the arithmetic of what is still there."""

import numpy as np
import pytest

import kvcore
from kvcore.errors import OutOfBlocks, RollbackError, SpecError
from tests.support import scene
from tests.support.scene import numbered


def sliding(window: int, **options: object) -> list[kvcore.LayerSpec]:
    """Two layers with the same window, one latent and one of keys and values."""
    return [scene.ring(window), scene.classic("ring", window=window, **options)]


def rows(cache: kvcore.Cache, *requests: kvcore.Request) -> list[dict[int, float]]:
    """What both layers of ``sliding`` hold; they must agree."""
    latent = scene.read(cache, scene.window_of, *requests)
    assert scene.read(cache, scene.kv_of, *requests, layer=1) == latent
    return latent


def test_ring_01_the_first_eviction_belongs_to_the_row_after_the_window_is_full(backend):
    cache = scene.create(sliding(8), backend)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {a: range(6), b: range(1000, 1002)})
    expected = [(6, numbered(0, 6)), (7, numbered(0, 7)), (8, numbered(1, 8)), (9, numbered(2, 9))]
    for position, held in expected:
        scene.write(cache, {a: [position]})
        assert rows(cache, b, a) == [numbered(0, 1, 1000), held]


@pytest.mark.parametrize(
    ("window", "calls", "held"),
    [
        pytest.param(4, [3], (0, 2), id="3 tokens"),
        pytest.param(4, [3, 3], (2, 5), id="3 then 3 tokens"),
        pytest.param(4, [3, 3, 1], (3, 6), id="3, 3, then 1 token"),
        pytest.param(8, [6, 4], (2, 9), id="6 then 4 tokens in a window of 8"),
    ],
)
def test_ring_02_content_depends_on_positions_not_on_calls(backend, window, calls, held):
    cache = scene.create(sliding(window), backend)
    a = cache.admit()
    for new in calls:
        scene.write(cache, {a: range(a.length, a.length + new)})
    assert rows(cache, a) == [numbered(*held)]


def test_ring_02_every_pair_of_call_sizes(backend):
    cache = scene.create(sliding(4), backend)
    for first in range(1, 10):
        for second in range(1, 10):
            a = cache.admit()
            scene.write(cache, {a: range(first)})
            scene.write(cache, {a: range(first, first + second)})
            length = first + second
            assert rows(cache, a) == [numbered(max(0, length - 4), length - 1)], (first, second)
            cache.release(a)
            scene.poison(cache)


@pytest.mark.parametrize(
    ("latent", "classic", "dim"),
    [pytest.param("fp32", "fp32", 8, id="plain"), pytest.param("v4_584", "fp8_row", 512, id="quantised")],
)
@pytest.mark.parametrize("drafts", [0, 3])
def test_ring_03_three_tokens_a_call_never_outgrow_the_ring(backend, latent, classic, dim, drafts):
    layers = [scene.ring(8, format=latent, dim=dim), scene.classic("ring", window=8, key_format=classic)]
    cache = scene.create(layers, backend, max_draft_tokens=drafts, max_tokens=None)
    a = cache.admit()
    sizes = {name: array.nbytes for name, array in cache.pools.items()}
    for position in range(8):
        scene.write(cache, {a: [position]})
    for start in range(8, 68, 3):
        scene.write(cache, {a: range(start, start + 3)})
        assert {name: array.nbytes for name, array in cache.pools.items()} == sizes
        (window,) = scene.read(cache, scene.window_of, a, rtol=1 / 8)
        (kv,) = scene.read(cache, scene.kv_of, a, layer=1)
        for held in (window, kv):
            assert list(held) == list(range(start - 5, start + 3))
            assert list(held.values()) == pytest.approx(list(held), rel=1 / 16)
    assert a.length == 68
    assert cache.plan.region(0, "window")[0].rows == 8 + drafts


def test_ring_05_a_prompt_longer_than_the_window(backend):
    cache = scene.create([scene.ring(4), scene.classic("ring", window=4)], backend)
    outcomes = set()
    for _ in range(50):
        a = cache.admit()
        scene.poison(cache)
        with cache.step({a: 10}) as step:
            scene.fill(step, range(10))
            visible = [range(max(0, t - 3), t + 1) for t in range(10)]
            expected = [(len(seen), sum(seen) / len(seen)) for seen in visible]
            assert scene.seen_by(step, 0) == expected
            assert scene.seen_by(step, 1) == expected
        assert rows(cache, a) == [numbered(6, 9)]
        outcomes.add(tuple(scene.raw(cache).values()))
        cache.release(a)
    assert len(outcomes) == 1


@pytest.mark.parametrize("drafts", [0, 2])
def test_ring_05_calls_of_every_size_after_wrapping(backend, drafts):
    cache = scene.create(sliding(4), backend, max_draft_tokens=drafts)
    a = cache.admit()
    for new in (10, 1, 2, 3, 4, 5, 6, 9):
        start = a.length
        with cache.step({a: new}) as step:
            scene.fill(step, range(start, start + new))
            visible = [range(max(0, t - 3), t + 1) for t in range(start, start + new)]
            expected = [(len(seen), sum(seen) / len(seen)) for seen in visible]
            assert scene.seen_by(step, 0) == expected
            assert scene.seen_by(step, 1) == expected
        assert rows(cache, a) == [numbered(a.length - 4, a.length - 1)]


@pytest.mark.parametrize("calls", [pytest.param([5], id="one call"), pytest.param([1] * 5, id="five calls")])
def test_ring_06_the_window_counts_the_query_itself(backend, calls):
    cache = scene.create(sliding(3), backend)
    a, b = cache.admit(), cache.admit()
    seen: dict[int, list[tuple[int, float]]] = {0: [], 1: []}
    masked: list[int] = []
    for new in calls:
        with cache.step({b: 2, a: new}) as step:
            start = a.length
            scene.fill(step, [1000.0] * 2 + list(range(start, start + new)))
            for layer, found in seen.items():
                found += scene.seen_by(step, layer)[2:]
            masked += kvcore.to_numpy(step.layer(1).mask()).sum(axis=1)[2:].tolist()
    expected = [(1, 0), (2, 0.5), (3, 1), (3, 2), (3, 3)]
    assert seen == {0: expected, 1: expected}
    assert masked == [1, 2, 3, 3, 3]


def test_ring_07_without_spare_rows_a_rollback_after_wrapping_is_refused(backend):
    cache = scene.create(sliding(8), backend)
    a = cache.admit()
    scene.write(cache, {a: range(12)})
    before = cache.digest(), scene.raw(cache)
    assert cache.plan.rollback_tokens == 0
    with pytest.raises(RollbackError):
        cache.truncate(a, 9)
    assert (cache.digest(), scene.raw(cache)) == before
    assert rows(cache, a) == [numbered(4, 11)]


def test_ring_07_spare_rows_undo_as_many_tokens(backend):
    cache = scene.create(sliding(8), backend, max_draft_tokens=3)
    a = cache.admit()
    scene.write(cache, {a: range(12)})
    assert cache.plan.rollback_tokens == 3
    cache.truncate(a, 9)
    assert rows(cache, a) == [numbered(1, 8)]
    scene.write(cache, {a: [90, 100]})
    assert rows(cache, a) == [{**numbered(3, 8), 9: 90.0, 10: 100.0}]


def test_ring_07_one_token_more_than_the_spare_rows_is_refused(backend):
    cache = scene.create(sliding(8), backend, max_draft_tokens=3)
    a = cache.admit()
    scene.write(cache, {a: range(12)})
    with pytest.raises(RollbackError):
        cache.truncate(a, 8)
    assert rows(cache, a) == [numbered(4, 11)]
    # The bound counts from the highest position written, so rolling back twice is no way around it.
    cache.truncate(a, 10)
    with pytest.raises(RollbackError):
        cache.truncate(a, 8)
    assert a.length == 10


def test_ring_07_before_wrapping_every_rollback_is_possible(backend):
    cache = scene.create(sliding(8), backend)
    a = cache.admit()
    scene.write(cache, {a: range(8)})
    cache.truncate(a, 3)
    assert rows(cache, a) == [numbered(0, 2)]


def test_ring_07_a_ring_too_small_for_the_drafts_is_refused_when_created(backend):
    with pytest.raises(SpecError, match="0 to 2"):
        scene.create([scene.ring(8, rows=10)], backend, max_draft_tokens=3)


@pytest.mark.parametrize(("tokens", "window"), [(16, 128), (512, 32768)])
def test_ring_09_a_window_beyond_the_maximum_length(backend, tokens, window):
    layers = [scene.ring(window), scene.classic("slot"), scene.classic("ring", window=window)]
    cache = scene.create(layers, backend, max_tokens=tokens)
    roles = [(0, "window"), (1, "kv"), (2, "kv")]
    assert [cache.plan.region(layer, role)[0].rows for layer, role in roles] == [tokens] * 3
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {b: range(1000, 1003), a: range(5)})
    for layer, reader in enumerate((scene.window_of, scene.kv_of, scene.kv_of)):
        assert scene.read(cache, reader, a, b, layer=layer) == [numbered(0, 4), numbered(0, 2, 1000)]
    with pytest.raises(OutOfBlocks):
        cache.step({a: tokens - 4})
    assert a.length == 5


def test_ring_10_spare_rows_are_not_shown(backend):
    cache = scene.create([scene.ring(4, rows=6), scene.classic("ring", window=4)], backend, max_draft_tokens=2)
    a = cache.admit()
    scene.write(cache, {a: range(8)})
    for last in range(7, 20):
        assert rows(cache, a) == [numbered(last - 3, last)]
        scene.write(cache, {a: [last + 1]})


def test_ring_13_a_wrapped_ring_is_read_by_position(backend):
    cache = scene.create(sliding(4), backend, layout="packed")
    a, b = cache.admit(), cache.admit()
    for p in range(6):
        scene.write(cache, {b: [1000 + p], a: [p]} if p % 2 else {a: [p], b: [1000 + p]})
    assert rows(cache, a, b) == [numbered(2, 5), numbered(2, 5, 1000)]
    with scene.at_rest(cache, a) as step:
        view = step.layer(0).window_view()
    ring = kvcore.to_numpy(view.buffers["page"])[kvcore.to_numpy(view.slots)[0]]
    physical = ring[: 4 * scene.DIM * 4].view(np.float32).reshape(4, scene.DIM)[:, 0]
    assert physical.tolist() == [4, 5, 2, 3]
