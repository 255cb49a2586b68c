"""Prefix reuse: a length is shared only where every component has it, and only where every token is equal.

A token's value is its id, so what was taken over from another request shows whose it was.
"""

import pytest
import scene
from scene import numbered

import kvcore


def tell(cache, request, ids):
    """A step whose rows hold the token ids."""
    with cache.step({request: ids}) as step:
        scene.fill(step, ids)


def holds(ids, first=0):
    """Position -> id from a position on: what a reader should find."""
    return {position: float(ids[position]) for position in range(max(0, first), len(ids))}


def test_pfx_01_a_hit_brings_the_ring_and_the_tail_along(backend):
    layers = [scene.compressed(4, window=4), scene.classic("ring", window=4)]
    cache = scene.create(layers, backend, block_tokens=8, max_tokens=96, prefix="full")
    used, a = cache.admit(), cache.admit()
    tell(cache, used, [999] * 16)
    prompt = list(range(10, 30))
    tell(cache, a, prompt[:16])
    cache.release(used)
    b = cache.admit(prompt)
    assert b.cached_tokens == b.length == 16
    assert b.slot != a.slot
    for request in (b, a):
        assert scene.read(cache, scene.window_of, request) == [holds(prompt[:16], 12)]
        assert scene.read(cache, scene.kv_of, request, layer=1) == [holds(prompt[:16], 12)]
        assert scene.read(cache, scene.tail_of, request) == [holds(prompt[:16], 12)]
        assert scene.read(cache, scene.tail_of, request, role="index_tail") == [holds(prompt[:16], 12)]
    tell(cache, b, prompt[16:])
    tell(cache, a, prompt[16:])
    assert cache.digest([b]) == cache.digest([a])


@pytest.mark.parametrize(("published", "boundary"), [(24, 24), (23, 20)])
def test_pfx_03_a_published_prefix_has_a_whole_window(backend, published, boundary):
    cache = scene.create([scene.ring(8), scene.classic()], backend, block_tokens=4, prefix="full")
    a = cache.admit()
    prompt = list(range(100, 125))
    tell(cache, a, prompt[:published])
    cache.release(a)
    b = cache.admit([*prompt[:published], 7])
    assert b.cached_tokens == boundary
    (window,) = scene.read(cache, scene.window_of, b)
    assert len(window) == 8
    assert window == holds(prompt[:boundary], boundary - 8)
    assert scene.read(cache, scene.kv_of, b, layer=1) == [holds(prompt[:boundary])]


@pytest.mark.parametrize("n", [3, 4, 6, 9, 10])
@pytest.mark.parametrize("policy", ["full", "zero", kvcore.Periodic(10)], ids=str)
def test_pfx_04_one_length_for_all_layers(backend, n, policy):
    layers = [scene.ring(4), scene.ring(16), scene.classic(), scene.classic("ring", window=4)]
    cache = scene.create(layers, backend, block_tokens=2, prefix=policy)
    a = cache.admit()
    prompt = list(range(50, 62))
    tell(cache, a, prompt[:10])
    # The rings of 4 still hold 6..9, which no shorter prefix than 9 can use; those of 16 hold everything.
    length, replay, exact = cache.restorable(prompt[:n])
    assert exact
    assert length <= n
    if policy == kvcore.Periodic(10):
        assert (length, replay) == ((10, 0) if n == 10 else (0, 0))
    b = cache.admit([*prompt[:n], 1])
    assert b.cached_tokens == b.length == length - replay
    kept = prompt[: b.length]
    assert scene.read(cache, scene.window_of, b) == [holds(kept, b.length - 4)]
    assert scene.read(cache, scene.window_of, b, layer=1) == [holds(kept, b.length - 16)]
    assert scene.read(cache, scene.kv_of, b, layer=2) == [holds(kept)]
    assert scene.read(cache, scene.kv_of, b, layer=3) == [holds(kept, b.length - 4)]


def test_pfx_04_the_shortest_component_decides(backend):
    layers = [scene.ring(4), scene.classic()]
    cache = scene.create(layers, backend, block_tokens=4, prefix=kvcore.Periodic(8))
    a = cache.admit()
    tell(cache, a, list(range(8)))
    tell(cache, a, list(range(8, 12)))
    # Blocks match 12 tokens; the state of the ring was kept at 8.
    assert cache.restorable(list(range(12))).length == 8
    b = cache.admit([*range(12), 77])
    assert b.length == 8
    assert scene.read(cache, scene.window_of, b) == [numbered(4, 7)]
    assert scene.read(cache, scene.kv_of, b, layer=1) == [numbered(0, 7)]


def test_pfx_05_blocks_are_shared_by_all_their_tokens(backend):
    cache = scene.create([scene.compressed(4)], backend, block_tokens=16, max_requests=4, max_tokens=160, prefix="full")
    p = cache.admit()
    prompt = list(range(1000, 1032))
    tell(cache, p, prompt)
    others = [[*prompt[:12], *range(20)], [*prompt[:16], *range(16)], prompt]
    for ids, shared in zip(others, (0, 1, 2), strict=True):
        request = cache.admit([*ids, 5])
        assert request.cached_tokens == 16 * shared
        assert request.blocks == p.blocks[:shared]
        tell(cache, request, ids[request.length :])
        assert len(set(request.blocks) & set(p.blocks)) == shared
        fresh = scene.create([scene.compressed(4)], backend, block_tokens=16)
        twin = fresh.admit()
        tell(fresh, twin, ids)
        assert cache.digest([request]) == fresh.digest([twin])


def test_pfx_07_a_snapshot_is_not_what_it_is_restored_to(backend, tmp_path):
    layers = [scene.compressed(4), scene.classic()]
    cache = scene.create(layers, backend, max_requests=4, max_tokens=96)
    a = cache.admit()
    tell(cache, a, list(range(6)))
    blob, digest = cache.export_request(a), cache.digest([a])
    kept = bytes(blob)
    cache.save(tmp_path / "six.kv", [a])
    stored = (tmp_path / "six.kv").read_bytes()
    for turn in range(3):
        again = cache.import_request(blob)
        loaded = kvcore.load(tmp_path / "six.kv", backend=backend)
        (other,) = loaded.requests
        assert (again.length, other.length) == (6, 6)
        assert cache.digest([again]) == loaded.digest([other]) == digest
        for target, request in ((cache, again), (loaded, other)):
            tell(target, request, [90 + turn, 91, 92])
            assert request.length == 9
        assert bytes(blob) == kept
        assert (tmp_path / "six.kv").read_bytes() == stored
        assert cache.digest([a]) == digest
        cache.release(again)
