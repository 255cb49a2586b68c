"""Batches: requests of different length, filler rows, and one rollback over all layers."""

import pytest

import kvcore
from kvcore.errors import RollbackError
from tests.support import scene
from tests.support.scene import numbered


def test_bat_01_a_wrapped_request_beside_one_that_is_not(backend):
    cache = scene.create([scene.ring(8), scene.classic("ring", window=8)], backend)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {a: range(20)})
    scene.write(cache, {b: range(5)})
    with cache.step({a: 0, b: 0}) as step:
        assert kvcore.to_numpy(step.layer(0).gather_window().positions >= 0).sum(axis=1).tolist() == [8, 5]
        assert scene.window_of(step) == scene.kv_of(step, 1) == [numbered(12, 19), numbered(0, 4)]
    with cache.step({b: 1, a: 1}) as step:
        assert kvcore.to_numpy(step.positions).tolist() == [5, 20]
        scene.fill(step, [5, 20])
    assert scene.read(cache, scene.window_of, a, b) == [numbered(13, 20), numbered(0, 5)]
    assert scene.read(cache, scene.kv_of, a, b, layer=1) == [numbered(13, 20), numbered(0, 5)]


def test_bat_04_filler_is_neither_stored_nor_counted(backend):
    layers = [scene.ring(4), scene.classic(), scene.compressed(2, overlap=False)]
    cache, plain = (scene.create(layers, backend, max_requests=3) for _ in range(2))
    digests = []
    for each, padding in ((cache, {"pad_tokens": 10, "pad_requests": 4}), (plain, {})):
        short, long = each.admit(), each.admit()
        for chunk in ({short: range(2), long: range(100, 102)}, {short: [2], long: range(102, 105)}):
            scene.write(each, chunk, filler=999, **padding)
            digests.append(each.digest())
            length = short.length
            assert scene.read(each, scene.kv_of, short, layer=1) == [numbered(0, length - 1)]
            assert scene.read(each, scene.window_of, short) == [numbered(0, length - 1)]
            assert scene.read(each, scene.entries_of, short, layer=2) == [[0.5]]
            # Taken out in the middle and put back, the request is the same.
            again = each.import_request(each.export_request(short))
            assert again.length == length
            assert each.digest([again]) == each.digest([short])
            each.release(again)
        assert (short.length, long.length) == (3, 5)
        scene.write(each, {short: [3]}, filler=999, **padding)
        assert scene.read(each, scene.kv_of, short, layer=1) == [numbered(0, 3)]
        digests.append(each.digest())
    assert digests[:3] == digests[3:]


@pytest.mark.parametrize("drafts", [0, 1, 2])
def test_spc_01_a_rollback_is_one_transaction_over_all_layers(backend, drafts):
    sliding = scene.classic("ring", window=8)
    layers = [scene.classic(), scene.ring(8), scene.compressed(4), sliding, scene.classic("slot")]
    cache = scene.create(layers, backend, max_draft_tokens=drafts)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {b: range(100, 103), a: range(12)})
    before = cache.digest(), scene.raw(cache)
    assert cache.plan.rollback_tokens == drafts
    if drafts < 2:
        with pytest.raises(RollbackError):
            cache.truncate(a, 10)
        assert (cache.digest(), scene.raw(cache)) == before
        length = 12
    else:
        cache.truncate(a, 10)
        length = 10
    assert a.length == length
    assert scene.read(cache, scene.kv_of, a) == [numbered(0, length - 1)]
    assert scene.read(cache, scene.window_of, a, layer=1) == [numbered(length - 8, length - 1)]
    assert scene.read(cache, scene.entries_of, a, layer=2) == [[1.5, 53.5, 57.5][: length // 4]]
    assert scene.read(cache, scene.tail_of, a, layer=2) == [numbered(length // 4 * 4 - 4, length - 1)]
    assert scene.read(cache, scene.kv_of, a, layer=3) == [numbered(length - 8, length - 1)]
    assert scene.read(cache, scene.kv_of, a, layer=4) == [numbered(0, length - 1)]
