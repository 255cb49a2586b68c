"""Classic K-V caches: reset, positions, capacity, and what is announced against what is returned."""

import pytest

import kvcore
from kvcore.errors import OutOfBlocks
from tests.support import scene
from tests.support.scene import numbered

KINDS = {
    "full paged": scene.classic(),
    "full in a slot": scene.classic("slot"),
    "sliding": scene.classic("ring", window=4),
    "chunked": scene.classic("ring", chunk=4),
    "sliding, paged": scene.classic(window=4),
    "compressed with overlap": scene.compressed(4),
    "compressed without overlap": scene.compressed(4, overlap=False),
}


SIZES = {"max_requests": 2, "max_tokens": 64}


def slot_bytes(cache, slot):
    """Every byte that a slot holds, by pool."""
    names = [name for region in cache.plan.regions if region.growth == "slot" for name, _ in region.buffers.values()]
    return {name: kvcore.to_numpy(cache.pools[name])[slot].tobytes() for name in names}


@pytest.mark.parametrize("layer", [pytest.param(layer, id=kind) for kind, layer in KINDS.items()])
def test_cls_02_a_reused_slot_is_a_fresh_one(backend, layer):
    cache = scene.create([scene.ring(3), layer], backend, **SIZES)
    fresh = scene.create([scene.ring(3), layer], backend, **SIZES)
    old = cache.admit()
    scene.write(cache, {old: range(500, 505)})
    slot = old.slot
    cache.release(old)
    scene.poison(cache)
    a, twin = cache.admit(), fresh.admit()
    assert a.slot == slot
    assert a.length == 0
    assert slot_bytes(cache, slot) == slot_bytes(kvcore.create_cache(cache.spec, backend=backend, **SIZES), slot)
    assert scene.raw(cache) == scene.raw(fresh)
    scene.write(cache, {a: range(3)})
    scene.write(fresh, {twin: range(3)})
    assert a.length == 3
    assert cache.digest() == fresh.digest()
    assert scene.raw(cache) == scene.raw(fresh)
    if layer.kv is not None:
        assert scene.read(cache, scene.kv_of, a, layer=1) == [numbered(0, 2)]
        return
    assert scene.read(cache, scene.entries_of, a, layer=1) == [[]]
    assert scene.read(cache, scene.keys_of, a, layer=1) == [[]]
    assert scene.read(cache, scene.tail_of, a, layer=1) == [numbered(0, 2)]
    assert scene.read(cache, scene.tail_of, a, layer=1, role="index_tail") == [numbered(0, 2)]


def test_cls_03_positions_belong_to_requests(backend):
    cache = scene.create([scene.classic(), scene.classic("ring", window=16), scene.ring(16)], backend)
    a, b = cache.admit(), cache.admit()
    with cache.step({a: 3, b: 5}, pad_tokens=10) as step:
        assert kvcore.to_numpy(step.positions).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, -1, -1]
        assert kvcore.to_numpy(step.request_index).tolist() == [0, 0, 0, 1, 1, 1, 1, 1, -1, -1]
        scene.fill(step, [*range(3), *range(1000, 1005)], filler=999)
    with cache.step({a: 1, b: 1}) as step:
        assert kvcore.to_numpy(step.positions).tolist() == [3, 5]
        scene.fill(step, [3, 1005])
    for layer in (0, 1):
        assert scene.read(cache, scene.kv_of, a, b, layer=layer) == [numbered(0, 3), numbered(0, 5, 1000)]
    assert scene.read(cache, scene.window_of, a, b, layer=2) == [numbered(0, 3), numbered(0, 5, 1000)]


@pytest.mark.parametrize("storage", ["paged", "slot"])
def test_cls_04_past_the_end_is_refused_not_clamped(backend, storage):
    cache = scene.create([scene.classic(storage), scene.ring(3)], backend, max_tokens=8, max_requests=1, block_tokens=4)
    a = cache.admit()
    scene.write(cache, {a: range(6)})
    before = scene.raw(cache), cache.digest(), cache.free_blocks, a.blocks
    with pytest.raises(OutOfBlocks):
        cache.step({a: 3})
    assert (scene.raw(cache), cache.digest(), cache.free_blocks, a.blocks) == before
    scene.write(cache, {a: [6, 7]})
    assert scene.read(cache, scene.kv_of, a) == [numbered(0, 7)]


def test_cls_06_as_many_rows_as_the_mask_announces(backend):
    layers = [scene.classic("ring", window=4), scene.classic("ring", chunk=4), scene.classic(), scene.ring(4)]
    cache = scene.create(layers, backend, max_draft_tokens=3)
    a = cache.admit()
    scene.write(cache, {a: range(6)})
    for draft in (6, 7, 8):
        with cache.step({a: 1}) as step:
            scene.fill(step, [draft])
            for layer, first in ((0, draft - 3), (1, draft // 4 * 4), (2, 0)):
                held = numbered(first, draft)
                keys, _, positions = step.layer(layer).gather_kv()
                mask = kvcore.to_numpy(step.layer(layer).mask())
                assert scene.kv_of(step, layer) == [held]
                assert keys.shape[1] == positions.shape[1] == mask.shape[1] == len(held)
            assert kvcore.to_numpy(step.layer(0).mask()).tolist() == [[True] * 4]
            assert scene.window_of(step, 3) == [numbered(draft - 3, draft)]
