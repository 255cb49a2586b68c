"""Requests between shards by head of different numbers, block sizes, layouts and backends."""

import msgspec
import numpy as np
import pytest

import kvcore
from kvcore.errors import OutOfBlocks, RollbackError, ShapeError, SnapshotError, SpecError
from kvcore.handoff import import_shards
from kvcore.sharding import Heads
from kvcore.spec import presets

HEADS, DIM, TOKENS = 4, 8, 37
WHOLE = presets.classic(
    layers=2, key_heads=HEADS, key_dim=DIM, value_dim=4, block_tokens=16, key_format="fp32", window=8, full_every=2
)
KEYS, VALUES = (np.random.default_rng(3).standard_normal((2, TOKENS, HEADS, width)).astype("f4") for width in (DIM, 4))


def local(shards, block_tokens=16):
    """The spec of one shard."""
    count = Heads(HEADS, shards).per_shard
    layers = [
        msgspec.structs.replace(layer, kv=msgspec.structs.replace(layer.kv, key_heads=count)) for layer in WHOLE.layers
    ]
    return msgspec.structs.replace(WHOLE, layers=tuple(layers), block_tokens=block_tokens)


def cache_of(shards, block_tokens=16, backend="reference", **options):
    return kvcore.create_cache(local(shards, block_tokens), backend=backend, max_requests=2, max_tokens=64, **options)


def told(cache, shards, rank):
    """A request with the rows of a rank's heads."""
    request, on = cache.admit(), list(Heads(HEADS, shards).on(rank))
    with cache.step({request: TOKENS}) as step:
        for layer in range(2):
            step.layer(layer).append_kv(KEYS[layer][:, on], VALUES[layer][:, on])
    return request


def blobs_of(shards, **options):
    caches = [cache_of(shards, **options) for _ in range(shards)]
    return [cache.export_request(told(cache, shards, rank)) for rank, cache in enumerate(caches)]


@pytest.mark.parametrize(
    ("sources", "targets"), [(1, 2), (2, 1), (2, 4), (4, 2), (8, 2), (2, 8), (1, 8), (4, 4), (3, 2)]
)
def test_every_shard_has_the_rows_of_its_heads(sources, targets):
    blobs = blobs_of(sources)
    for rank in range(targets):
        cache = cache_of(targets, 8, "torch_triton" if rank % 2 else "reference", layout="planar")
        request = import_shards(cache, blobs, whole=WHOLE, rank=rank, ranks=targets)
        own = cache_of(targets, 8)
        assert cache.digest([request]) == own.digest([told(own, targets, rank)])


@pytest.mark.parametrize("drafts", [(0, 4), (4, 0)])
def test_shards_that_can_be_rolled_back_differently_give_what_all_of_them_have(drafts):
    sources = [cache_of(2, max_draft_tokens=count) for count in drafts]
    blobs = [cache.export_request(told(cache, 2, rank)) for rank, cache in enumerate(sources)]
    cache, own = cache_of(1, max_draft_tokens=4), cache_of(1)
    request = import_shards(cache, blobs, whole=WHOLE)
    assert cache.digest([request]) == own.digest([told(own, 1, 0)])
    with pytest.raises(RollbackError):
        cache.truncate(request, TOKENS - 1)


def test_what_is_refused_changes_nothing():
    blobs, cache = blobs_of(2), cache_of(1)
    damaged = bytearray(blobs[1])
    damaged[-200] ^= 1
    other = cache_of(2)
    request = other.admit()
    short = other.export_request(request)
    cases = [
        ([blobs[0], bytes(damaged)], {}, SnapshotError, "blob 1"),
        ([blobs[0], short], {}, SnapshotError, "parts of one request"),
        ([blobs[0]], {}, SpecError, "of blob 0"),
        (blobs, {"ranks": 2}, SpecError, "the cache's spec"),
        (blobs, {"rank": 1}, ShapeError, "rank 1 of 1"),
        ([], {}, ShapeError, "0 blobs"),
    ]
    for given, options, error, match in cases:
        with pytest.raises(error, match=match):
            import_shards(cache, given, whole=WHOLE, **options)
        assert cache.requests == ()
    import_shards(cache, blobs, whole=WHOLE)
    with pytest.raises(OutOfBlocks):
        import_shards(cache, blobs, whole=WHOLE)
    assert len(cache.requests) == 1
