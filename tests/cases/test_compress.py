"""Compressors: pending rows, the overlap between groups, and what an entry is made from.

With overlap (ratio 4) token p contributes p to its own group and 100 + p to the next one. So entry 0 is the mean of
0..3, 1.5, and entry j >= 1 is the mean of 100 + p over group j - 1 and p over group j: 49.5 + 4j.
"""

import numpy as np
import pytest

import kvcore
from tests.support import scene
from tests.support.scene import numbered

OVERLAPPING = [scene.ring(3), scene.compressed(4)]
PLAIN = [scene.ring(3), scene.compressed(4, overlap=False)]


def entries(cache, *requests):
    """Entries of layer 1; the index keys, made from the same rows, must be equal."""
    found = scene.read(cache, scene.entries_of, *requests, layer=1)
    assert scene.read(cache, scene.keys_of, *requests, layer=1) == found
    return found


SPLITS = [[12], *[[k, 12 - k] for k in range(1, 12)], [1] * 12, [8, 3, 1], [0, 5, 0, 7], [7, 2, 3], [6, 3, 3]]


@pytest.mark.parametrize("calls", [pytest.param(calls, id="+".join(map(str, calls))) for calls in SPLITS])
def test_cmp_01_groups_start_at_position_zero_not_at_the_chunk(backend, calls):
    cache = scene.create(OVERLAPPING, backend)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {b: range(200, 205)})
    for new in calls:
        scene.write(cache, {a: range(a.length, a.length + new)})
    assert entries(cache, a, b) == [[1.5, 53.5, 57.5], [201.5]]
    assert a.length % 4 == 0


def test_cmp_02_a_ragged_batch(backend):
    cache = scene.create(OVERLAPPING, backend, max_requests=4)
    requests = [cache.admit() for _ in range(4)]
    lengths = [3, 4, 5, 21]
    scene.write(cache, {request: range(length) for request, length in zip(requests, lengths, strict=True)})
    found = entries(cache, *requests)
    assert [len(values) for values in found] == [0, 1, 1, 5]
    assert [request.length % 4 for request in requests] == [3, 0, 1, 1]
    assert found == [[], [1.5], [1.5], [1.5, 53.5, 57.5, 61.5, 65.5]]
    # The pending rows, and with overlap the group before them.
    pending = [numbered(0, 2), numbered(0, 3), numbered(0, 4), numbered(16, 20)]
    assert scene.read(cache, scene.tail_of, *requests, layer=1) == pending
    assert scene.read(cache, scene.tail_of, *requests, layer=1, role="index_tail") == pending


def test_cmp_03_a_short_prompt_inherits_nothing(backend):
    cache = scene.create([scene.ring(3), scene.compressed(8, overlap=False)], backend, max_requests=1)
    first = cache.admit()
    scene.write(cache, {first: range(600, 608)})
    slot = first.slot
    assert entries(cache, first) == [[603.5]]
    cache.release(first)
    b = cache.admit()
    assert b.slot == slot
    scene.write(cache, {b: range(3)})
    assert entries(cache, b) == [[]]
    assert scene.read(cache, scene.tail_of, b, layer=1) == [numbered(0, 2)]
    scene.write(cache, {b: range(3, 8)})
    assert entries(cache, b) == [[3.5]]


def test_cmp_05_very_negative_scores_do_not_let_stale_rows_win(backend):
    cache = scene.create(OVERLAPPING, backend, max_requests=1)
    old = cache.admit()
    scene.write(cache, {old: [777.0] * 8})
    cache.release(old)
    a = cache.admit()
    scene.write(cache, {a: range(4)}, gate=-(2.0**31))
    assert entries(cache, a) == [[1.5]]


def test_cmp_05_nor_rows_that_were_rolled_back(backend):
    cache = scene.create(OVERLAPPING, backend, max_draft_tokens=8)
    a = cache.admit()
    scene.write(cache, {a: [777.0] * 8})
    cache.truncate(a, 0)
    scene.write(cache, {a: range(4)}, gate=-(2.0**31))
    assert entries(cache, a) == [[1.5]]


def test_cmp_05_a_group_without_weight_is_zero_not_nan(backend):
    cache = scene.create(OVERLAPPING, backend)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {a: range(4)}, gate=-np.inf)
    scene.write(cache, {b: range(3)}, pad_tokens=8, filler=999)
    assert entries(cache, a, b) == [[0.0], []]


@pytest.mark.parametrize("value", [np.nan, np.inf, 777.0])
def test_cmp_05_a_row_without_weight_adds_nothing_whatever_it_holds(backend, value):
    cache = scene.create([scene.compressed(4, overlap=False, indexer=False)], backend)
    a = cache.admit()
    score = np.zeros((4, scene.DIM), np.float32)
    score[2] = -np.inf
    with cache.step({a: 4}) as step:
        layer = step.layer(0)
        layer.append_window(scene.filled(range(4), scene.DIM))
        layer.append_tail(scene.filled([0, 1, value, 5], scene.DIM), score)
        layer.flush()
    assert scene.read(cache, scene.entries_of, a) == [[2.0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cmp_06_masks_are_boolean_and_combined_by_logic(backend, dtype):
    layers = [scene.compressed(4, overlap=False), scene.classic(), scene.classic("ring", chunk=4)]
    cache = scene.create(layers, backend)
    a = cache.admit()
    scene.write(cache, {a: range(8)})
    with cache.step({a: 2}, pad_tokens=4, pad_requests=2) as step:
        scene.fill(step, [8, 9])
        # Rows of padding, masked everywhere; and causality and chunk at once.
        full, chunk = (kvcore.to_numpy(step.layer(layer).mask()) for layer in (1, 2))
        assert full.dtype == chunk.dtype == bool
        assert full.sum(axis=1).tolist() == [9, 10, 0, 0]
        assert chunk.sum(axis=1).tolist() == [1, 2, 0, 0]
        for layer, dim in ((0, scene.DIM), (1, 4), (2, 4)):
            q = cache.asarray(np.zeros((4, 2, dim), _dtype(dtype)))
            out, lse = (kvcore.to_numpy(array) for array in step.layer(layer).attend(q))
            assert out.dtype == _dtype(dtype)
            assert np.isfinite(out.astype(np.float32)).all()
            assert not out[2:].any()
            assert np.isneginf(lse[2:]).all()
            # Four window rows and two entries; nine or ten rows; one or two of the chunk.
            visible = {0: [6, 6], 1: [9, 10], 2: [1, 2]}[layer]
            assert np.exp(lse[:2, 0]).tolist() == pytest.approx(visible)


def _dtype(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def test_cmp_07_padding_is_not_pooled(backend):
    cache = scene.create(PLAIN, backend)
    right, left = cache.admit(), cache.admit()
    scene.write(cache, {right: range(3)}, pad_tokens=4, filler=999)
    assert entries(cache, right) == [[]]
    assert scene.read(cache, scene.tail_of, right, layer=1) == [numbered(0, 2)]
    # A left-padded row brings its real tokens alone; the padding of the step comes last.
    scene.write(cache, {right: [3], left: range(4)}, pad_tokens=10, pad_requests=3, filler=999)
    assert entries(cache, right, left) == [[1.5], [1.5]]


def test_cmp_09_every_slot_has_state(backend):
    cache = scene.create(OVERLAPPING, backend)
    for _ in range(3):
        a, b = cache.admit(), cache.admit()
        slots = {a.slot, b.slot}
        assert len(slots) == 2
        scene.write(cache, {a: range(6), b: range(100, 106)})
        for region in cache.plan.regions:
            if region.growth == "slot":
                for name, _ in region.buffers.values():
                    assert max(slots) < len(cache.pools[name])
        tails = scene.read(cache, scene.tail_of, a, b, layer=1)
        assert tails == [numbered(0, 5), numbered(0, 5, 100)]
        cache.release(b)
        cache.release(a)


def test_cmp_12_a_rejected_entry_is_gone_and_made_anew(backend):
    cache = scene.create(OVERLAPPING, backend, max_draft_tokens=2)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {b: range(1), a: range(7)})
    scene.write(cache, {a: [7, 8]})
    assert entries(cache, a) == [[1.5, 53.5]]
    cache.truncate(a, 7)
    assert entries(cache, a) == [[1.5]]
    assert scene.read(cache, scene.tail_of, a, layer=1) == [numbered(0, 6)]
    with cache.step({a: 0}) as step:
        gathered = step.layer(1).gather_all_entries()
        assert kvcore.to_numpy(gathered.counts).tolist() == [1]
    scene.write(cache, {a: [70]})
    assert entries(cache, a) == [[1.5, 61.375]]


def test_cmp_12_a_rejected_entry_cannot_be_selected(backend):
    cache = scene.create(OVERLAPPING, backend, max_draft_tokens=3)
    a = cache.admit()
    scene.write(cache, {a: range(7)})
    scene.write(cache, {a: [7, 8]})
    cache.truncate(a, 6)
    with cache.step({a: 1}) as step:
        scene.fill(step, [6])
        gathered = step.layer(1).gather_entries(np.array([[0, 1]], np.int32))
        assert kvcore.to_numpy(gathered.valid).tolist() == [[True, False]]
        assert not kvcore.to_numpy(gathered.values)[0, 1].any()


def test_cmp_13_the_slot_is_identity_the_row_is_scheduling(backend):
    cache = scene.create(PLAIN, backend, max_requests=6)
    requests = [cache.admit() for _ in range(6)]
    by_slot = {request.slot: request for request in requests}
    a, b = by_slot[5], by_slot[2]
    values = {a: iter(range(8)), b: iter(range(1000, 1008))}
    for order in [(a, b), (b, a), (b,), (a,), (a, b), (b, a), (a,), (b,), (a, b), (b, a)]:
        scene.write(cache, {request: [next(values[request])] for request in order})
    assert entries(cache, a, b) == [[1.5, 5.5], [1001.5, 1005.5]]
    assert scene.read(cache, scene.tail_of, b, a, layer=1) == [{}, {}]
