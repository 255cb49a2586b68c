"""Prefix reuse: one length for all components, one unit for look-up and publication, copies that stay apart."""

import numpy as np
import pytest

import kvcore
from kvcore.spec import CacheSpec
from tests.support import scene
from tests.support.scene import numbered


def _create(layers, backend, **sizes):
    return scene.create(layers, backend, **{"max_requests": 3, "max_tokens": 96, "block_tokens": 16, **sizes})


def _write(cache, request, tokens):
    """The rows of a token hold its id."""
    with cache.step({request: tokens}) as step:
        scene.fill(step, tokens)


@pytest.mark.parametrize("prefix", ["full", "zero", kvcore.Periodic(16)], ids=str)
def test_pfx_01_a_hit_never_comes_with_a_foreign_ring(backend, prefix):
    cache = _create([scene.compressed(4)], backend, block_tokens=4, prefix=prefix)
    tokens = list(range(16))
    a, foreign = cache.admit(tokens), cache.admit()
    _write(cache, a, tokens)
    _write(cache, foreign, [999] * 16)
    cache.release(foreign)
    b = cache.admit([*tokens, 16])
    assert b.slot == 1
    if prefix == "zero":
        # Reuse of the entries, and the last 7 tokens, the span of the tail, again.
        assert cache.restorable([*tokens, 16]) == (16, 7, True)
        assert b.length == 9
        _write(cache, b, tokens[9:])
    assert b.length == 16
    assert scene.read(cache, scene.window_of, b) == [numbered(12, 15)]
    assert scene.read(cache, scene.tail_of, b) == [numbered(12, 15)]
    assert scene.read(cache, scene.tail_of, b, role="index_tail") == [numbered(12, 15)]
    assert scene.read(cache, scene.entries_of, b) == [[1.5, 53.5, 57.5, 61.5]]
    assert scene.read(cache, scene.keys_of, b) == [[1.5, 53.5, 57.5, 61.5]]


@pytest.mark.parametrize(("published", "boundary"), [(24, 24), (23, 20)], ids=["whole pages", "an entry shorter"])
def test_pfx_03_what_is_published_keeps_a_whole_window(backend, published, boundary):
    cache = _create([scene.ring(8), scene.classic()], backend, block_tokens=4, max_tokens=32, prefix="full")
    tokens = list(range(published))
    a = cache.admit(tokens)
    _write(cache, a, tokens)
    cache.release(a)
    assert cache.restorable([*range(24), 99]).length == boundary
    b = cache.admit([*range(24), 99])
    assert b.length == boundary
    # All eight rows that the next query sees, not what a frontier left of them.
    assert scene.read(cache, scene.window_of, b) == [numbered(boundary - 8, boundary - 1)]
    assert scene.read(cache, scene.kv_of, b, layer=1) == [numbered(0, boundary - 1)]
    # Evicted, it is no hit any more.
    cache.release(b)
    c = cache.admit()
    _write(cache, c, [999] * 32)
    assert cache.restorable([*range(24), 99]).length == 0


def test_pfx_04_one_length_for_rings_of_several_sizes(backend):
    layers = [scene.ring(4), scene.ring(16), scene.classic()]
    cache = _create(layers, backend, block_tokens=2, prefix=kvcore.Periodic(1000))
    tokens = list(range(10))
    a = cache.admit(tokens)
    _write(cache, a, tokens)
    cache.checkpoint(a)
    # The rings hold the state of length 10 and of no other, whatever the largest of them still has.
    for n, length in ((3, 0), (4, 0), (6, 0), (9, 0), (10, 10)):
        assert cache.restorable(tokens, n) == (length, 0, True)
    b = cache.admit([*tokens, 10])
    assert [scene.read(cache, scene.window_of, b, layer=layer) for layer in (0, 1)] == [
        [numbered(6, 9)],
        [numbered(0, 9)],
    ]


def test_pfx_04_all_groups_use_the_shorter_length(backend):
    cache = _create([scene.ring(4), scene.classic()], backend, block_tokens=4, prefix=kvcore.Periodic(8))
    tokens = list(range(13))
    a = cache.admit(tokens)
    for piece in (tokens[:8], tokens[8:]):
        _write(cache, a, piece)
    # Three pages of the paged layer match, the window's state is that of 8.
    b = cache.admit(tokens)
    assert (b.length, len(b.blocks)) == (8, 2)
    assert scene.read(cache, scene.window_of, b) == [numbered(4, 7)]
    assert scene.read(cache, scene.kv_of, b, layer=1) == [numbered(0, 7)]


def test_pfx_05_blocks_are_shared_only_where_all_their_tokens_are_equal(backend):
    cache = _create([scene.compressed(4)], backend, max_requests=5, max_tokens=192, prefix="full")
    p = list(range(100, 132))
    a = cache.admit(p)
    _write(cache, a, p)
    q = [*p[:12], *range(500, 520)]
    r = [*p[:16], *range(600, 616)]
    for tokens, shared in ((q, 0), (r, 1), (p, 2)):
        request = cache.admit([*tokens, 1])
        assert len(set(request.blocks) & set(a.blocks)) == shared
        assert request.cached_tokens == 16 * shared
        _write(cache, request, [*tokens, 1][request.length :])
        alone = _create([scene.compressed(4)], backend, max_requests=1)
        single = alone.admit()
        _write(alone, single, [*tokens, 1])
        assert cache.digest([request]) == alone.digest([single])


def test_pfx_07_a_snapshot_that_is_restored_does_not_grow(backend, tmp_path):
    layers = [scene.ring(4), scene.compressed(4), scene.classic()]
    spec = CacheSpec(layers=layers, block_tokens=4)
    cache = scene.create(spec, backend, prefix="zero")
    six = list(range(6))
    request = cache.admit()
    _write(cache, request, six)
    blob, path = cache.export_request(request), tmp_path / "six.kv"
    cache.save(path, [request])
    cache.checkpoint(request)
    before = path.read_bytes(), bytes(blob)
    digest = cache.digest([request])
    for _ in range(3):
        other = scene.create(spec, backend)
        for each, restored in (
            (cache, cache.admit([*six, 6, 7, 8])),
            (other, other.import_request(blob)),
            (loaded := kvcore.load(path, backend=backend), loaded.requests[0]),
        ):
            assert restored.length == 6
            assert each.digest([restored]) == digest
            _write(each, restored, [6, 7, 8])
            assert restored.length == 9
            assert scene.read(each, scene.kv_of, restored, layer=2) == [numbered(0, 8)]
            if each is cache:
                cache.release(restored)
        assert (path.read_bytes(), bytes(blob)) == before
        assert cache.digest([request]) == digest
        assert np.array_equal(request.tokens, six)
