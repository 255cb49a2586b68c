"""Faults of the first prototypes, in their own words; some are told apart further in the numbered cases."""

import numpy as np
import pytest

import kvcore
from kvcore.errors import OutOfBlocks, RollbackError
from kvcore.spec import CacheSpec, from_json, to_json
from tests.support import scene
from tests.support.scene import numbered


def test_seed_a_partly_full_ring_overflows_without_a_gap(backend):
    cache = scene.create([scene.classic("ring", window=8), scene.ring(8)], backend)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {a: range(6), b: range(100, 101)})
    scene.write(cache, {a: range(6, 10), b: range(101, 110)})
    for reader, layer in ((scene.kv_of, 0), (scene.window_of, 1)):
        assert scene.read(cache, reader, a, b, layer=layer) == [numbered(2, 9), numbered(2, 9, 100)]


def test_seed_a_cache_rebuilt_from_its_parts_keeps_layer_window_and_length(backend):
    sliding, chunked = scene.classic("ring", window=4), scene.classic("ring", chunk=4)
    spec = CacheSpec(layers=[sliding, scene.classic("slot"), scene.compressed(4), chunked], block_tokens=8)
    cache, again = scene.create(spec, backend), scene.create(from_json(to_json(spec)), backend)
    assert again.spec == cache.spec
    assert again.spec.digest == cache.spec.digest
    assert again.plan == cache.plan
    held = [each.admit() for each in (cache, again)]
    for each, request in zip((cache, again), held, strict=True):
        scene.write(each, {request: range(10)})
    # The same pools as a plain mapping, put back.
    again.pools = dict(cache.pools)
    for each, request in zip((cache, again), held, strict=True):
        scene.write(each, {request: [10]})
        assert scene.read(each, scene.kv_of, request) == [numbered(7, 10)]
        assert scene.read(each, scene.kv_of, request, layer=1) == [numbered(0, 10)]
        assert scene.read(each, scene.entries_of, request, layer=2) == [[1.5, 53.5]]
        assert scene.read(each, scene.kv_of, request, layer=3) == [numbered(8, 10)]


@pytest.mark.parametrize("storage", ["slot", "paged"])
def test_seed_a_write_past_the_end_hits_neither_the_last_rows_nor_a_neighbour(backend, storage):
    cache = scene.create([scene.classic(storage)], backend, max_tokens=16, block_tokens=8)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {a: range(7), b: range(100, 107)})
    before = scene.raw(cache)
    with pytest.raises(OutOfBlocks):
        cache.step({b: 10})
    assert scene.raw(cache) == before
    assert scene.read(cache, scene.kv_of, b, a) == [numbered(0, 6, 100), numbered(0, 6)]


def test_seed_there_is_no_sentinel_for_the_missing_group(backend):
    cache = scene.create([scene.compressed(4)], backend, max_requests=1)
    for _ in range(2):
        a = cache.admit()
        scene.write(cache, {a: range(4)}, gate=-3e38)
        assert scene.read(cache, scene.entries_of, a) == [[1.5]]
        scene.write(cache, {a: [777.0] * 7}, gate=3e38)
        cache.release(a)


def test_seed_a_gather_keeps_the_request_axis(backend):
    cache = scene.create([scene.compressed(2, overlap=False)], backend)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {a: range(6), b: range(100, 104)})
    assert scene.read(cache, scene.entries_of, a) == [[0.5, 2.5, 4.5]]
    assert scene.read(cache, scene.entries_of, b, a) == [[100.5, 102.5], [0.5, 2.5, 4.5]]
    for order, values in (((a,), [[[2.5]]]), ((b, a), [[[102.5]], [[2.5]]])):
        with cache.step(dict.fromkeys(order, 1)) as step:
            scene.fill(step, [0] * len(order))
            gathered = step.layer(0).gather_entries(np.ones((len(order), 1), np.int64))
            assert kvcore.to_numpy(gathered.values)[:, :, :1].tolist() == values
            assert kvcore.to_numpy(gathered.valid).tolist() == [[True]] * len(order)


def test_seed_a_short_window_says_which_rows_are_real(backend):
    cache = scene.create([scene.ring(8)], backend, max_tokens=None)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {a: range(3)})
    with cache.step({b: 0, a: 0}) as step:
        gathered = step.layer(0).gather_window()
        assert kvcore.to_numpy(gathered.positions).tolist() == [[-1] * 8, [0, 1, 2, *[-1] * 5]]
        values = kvcore.to_numpy(gathered.values)
        assert not values[0].any()
        assert not values[1, 3:].any()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_seed_selected_indices_may_be_minus_one_or_beyond(backend, dtype):
    cache = scene.create([scene.compressed(2, overlap=False, window=2)], backend)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {b: [500.0] * 8, a: range(4)})
    with cache.step({a: 1}) as step:
        scene.fill(step, [4])
        beyond = np.array([[-1, 2, 1, 2**31 - 1, 3, -(2**31)]], dtype)
        # Window rows 3 and 4, and entry 1 alone, which is 2.5.
        assert scene.seen_by(step, selected=beyond) == [(3, pytest.approx(9.5 / 3, abs=1e-3))]


def test_seed_a_rows_place_has_one_source_of_truth(backend):
    cache = scene.create([scene.ring(4), scene.compressed(4), scene.classic()], backend, max_draft_tokens=2)
    rows = {region.role for region in cache.plan.regions}
    assert {name.split(".")[1] for name in cache.pools} == rows
    a = cache.admit()
    scene.write(cache, {a: range(9)})
    cache.truncate(a, 7)
    scene.write(cache, {a: [70.0]})
    assert scene.read(cache, scene.window_of, a) == [{**numbered(4, 6), 7: 70.0}]
    with pytest.raises(RollbackError):
        cache.truncate(a, 6)
