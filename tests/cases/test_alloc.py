"""Slots and blocks: who holds them, and that none is lost, doubled or read after it was freed."""

import pytest

import kvcore
from kvcore.errors import OutOfBlocks, OutOfSlots, RequestError
from tests.support import scene
from tests.support.scene import numbered


def test_alc_01_nothing_is_freed_twice(backend):
    cache = scene.create([scene.classic()], backend, max_requests=4, max_tokens=16, block_tokens=4)
    a = cache.admit()
    scene.write(cache, {a: range(4)})
    cache.release(a)
    for _ in range(2):
        with pytest.raises(RequestError):
            cache.release(a)
    assert (cache.free_blocks, cache.free_slots) == (4, 4)
    b = cache.admit()
    scene.write(cache, {b: range(16)})
    assert cache.free_blocks == 0
    cache.truncate(b, 2)
    cache.truncate(b, 2)
    assert cache.free_blocks == 3
    cache.release(b)
    requests = [cache.admit() for _ in range(4)]
    scene.write(cache, {request: range(4) for request in requests})
    assert sorted(block for request in requests for block in request.blocks) == [0, 1, 2, 3]
    assert sorted(request.slot for request in requests) == [0, 1, 2, 3]
    with pytest.raises(OutOfBlocks):
        cache.step({requests[0]: 1})
    with pytest.raises(OutOfSlots):
        cache.admit()


def test_alc_02_no_block_leaks_when_drafts_are_rejected(backend):
    layers = [scene.classic(heads=1, dim=2), scene.ring(4)]
    cache = scene.create(layers, backend, max_tokens=64, block_tokens=4, max_draft_tokens=2)
    for turn in range(1000):
        a = cache.admit()
        _write(cache, a, 5)
        assert (len(a.blocks), cache.free_blocks) == (2, 14)
        if turn % 2:
            step = cache.step({a: 7})
            assert (len(a.blocks), cache.free_blocks) == (3, 13)
            step.abort()
            assert (len(a.blocks), cache.free_blocks) == (2, 14)
        cache.truncate(a, 3)
        assert (len(a.blocks), cache.free_blocks) == (1, 15)
        _write(cache, a, 2)
        assert (len(a.blocks), cache.free_blocks) == (2, 14)
        cache.release(a)
        assert (cache.free_blocks, cache.free_slots) == (16, 2)


def _write(cache, request, new):
    scene.write(cache, {request: range(request.length, request.length + new)})


def test_alc_04_a_freed_block_is_no_longer_listed(backend):
    layers = [scene.classic(window=4), scene.ring(4)]
    cache = scene.create(layers, backend, max_tokens=16, block_tokens=2, max_draft_tokens=12)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {a: range(10)})
    freed = a.blocks[2:]
    cache.truncate(a, 4)
    assert len(a.blocks) == 2
    scene.write(cache, {b: [999.0] * 12})
    assert set(freed) <= set(b.blocks)
    assert not set(a.blocks) & set(b.blocks)
    with cache.step({a: 0}) as step:
        table = kvcore.to_numpy(step.index.block_table)[0]
        assert table[:2].tolist() == list(a.blocks)
        assert (table[2:] == -1).all()
        assert scene.kv_of(step, 0) == [numbered(0, 3)]
        assert scene.window_of(step, 1) == [numbered(0, 3)]


def test_alc_04_a_window_over_paged_blocks(backend):
    cache = scene.create([scene.classic(window=4)], backend, max_tokens=24, block_tokens=2)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {b: [999.0] * 4, a: range(9)})
    with cache.step({a: 1, b: 1}) as step:
        scene.fill(step, [9, 999])
        assert scene.seen_by(step) == [(4, 7.5), (4, 999)]


def test_alc_05_after_preemption_a_request_starts_from_nothing(backend):
    layers = [scene.classic(), scene.compressed(4), scene.ring(4)]
    cache = scene.create(layers, backend, max_tokens=48, block_tokens=4)
    a = cache.admit()
    scene.write(cache, {a: range(500, 511)})
    held = a.blocks
    cache.release(a)
    other = cache.admit()
    scene.write(cache, {other: [999.0] * 11})
    assert set(other.blocks) == set(held)
    again = cache.admit()
    assert (again.length, again.blocks) == (0, ())
    # Resumed, and no block yet.
    assert scene.read(cache, scene.kv_of, again) == [{}]
    assert scene.read(cache, scene.entries_of, again, layer=1) == [[]]
    assert scene.read(cache, scene.tail_of, again, layer=1) == [{}]
    assert scene.read(cache, scene.window_of, again, layer=2) == [{}]
    scene.write(cache, {again: range(11)})
    assert not set(again.blocks) & set(other.blocks)
    assert scene.read(cache, scene.kv_of, again, other) == [numbered(0, 10), dict.fromkeys(range(11), 999.0)]
    assert scene.read(cache, scene.entries_of, again, layer=1) == [[1.5, 53.5]]
    assert scene.read(cache, scene.tail_of, again, layer=1) == [numbered(4, 10)]
    assert scene.read(cache, scene.window_of, again, layer=2) == [numbered(7, 10)]


def test_alc_07_several_requests_finish_in_one_step(backend):
    cache = scene.create([scene.compressed(4)], backend, max_requests=4, max_tokens=96)
    a, b, c = (cache.admit() for _ in range(3))
    scene.write(cache, {a: range(5), b: range(100, 105), c: range(200, 205)})
    for request in {a, b, a}:
        cache.release(request)
    with pytest.raises(RequestError):
        cache.release(a)
    assert cache.requests == (c,)
    assert cache.free_slots == 3
    scene.poison(cache)
    new = [cache.admit() for _ in range(3)]
    assert sorted(request.slot for request in (c, *new)) == [0, 1, 2, 3]
    assert [request.length for request in new] == [0, 0, 0]
    assert scene.read(cache, scene.window_of, c, *new) == [numbered(1, 4, 200), {}, {}, {}]
    assert scene.read(cache, scene.entries_of, *new, c) == [[], [], [], [201.5]]
