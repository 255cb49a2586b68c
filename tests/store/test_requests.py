"""Requests of a cache in a store, block by block, and back in another cache."""

import numpy as np
import pytest

import kvcore
from kvcore import store as stores
from kvcore.errors import OutOfBlocks, RequestError, ShapeError
from kvcore.requests.prefix import point_key
from kvcore.spec import presets
from kvcore.store import BlockStore, DiskTier, HostTier
from tests.support import stories
from tests.support.engine import SPEC as HEADS
from tests.support.engine import Engine

V4 = presets.deepseek_v4_flash_tiny(draft=False)
CLASSIC = presets.classic(layers=2, key_heads=2, key_dim=8, block_tokens=8, key_format="fp32")
LATENT = stories.LATENT
TOKENS = [(7 * number) % 251 for number in range(100)]


def cache_of(spec, backend="reference", **options):
    return kvcore.create_cache(spec, backend=backend, max_requests=4, max_tokens=512, **options)


@pytest.fixture
def store(tmp_path):
    return BlockStore([HostTier(1 << 12), DiskTier(tmp_path, 1 << 26)])


def told(cache, count, chunk=None):
    request = cache.admit()
    for first in range(0, count, chunk or count):
        stories.tell(cache, {request: TOKENS[first : min(first + (chunk or count), count)]})
    return request


@pytest.mark.parametrize("spec", [CLASSIC, V4], ids=["classic", "v4"])
def test_what_is_saved_is_found_by_another_cache(spec, store):
    cache, other = cache_of(spec), cache_of(spec, "torch_triton", layout="planar")
    count = 2 * spec.block_tokens
    request = told(cache, count)
    assert stores.save(store, cache, request, TOKENS[:count]) == count
    assert stores.find(store, spec, TOKENS) == count
    found = stores.load(store, other, TOKENS)
    assert found.length == count
    assert other.digest([found]) == cache.digest([request])
    # It goes on, and what it then has too is saved beside what is there.
    for one, mine in ((other, found), (cache, request)):
        stories.tell(one, {mine: TOKENS[count : count + spec.block_tokens]})
    assert stores.save(store, other, found, TOKENS) == count + spec.block_tokens
    third = cache_of(spec)
    again = stores.load(store, third, TOKENS[: count + spec.block_tokens + 3])
    assert third.digest([again]) == cache.digest([request])
    # A shorter prompt, another one, another salt.
    assert stores.find(store, spec, TOKENS[: count + 1]) == count
    assert stores.find(store, spec, [1, *TOKENS]) == 0
    assert stores.load(store, third, TOKENS, salt="another") is None
    assert stores.find(store, LATENT, TOKENS) == 0


@pytest.mark.parametrize("spec", [CLASSIC, V4], ids=["classic", "v4"])
@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_there_is_not_read_again(spec, store, monkeypatch, at_once):
    cache, size = cache_of(spec), spec.block_tokens
    request = told(cache, 2 * size)
    stores.save(store, cache, request, TOKENS)
    store.remove(stores.keys_of(spec, TOKENS)[0])
    stories.tell(cache, {request: TOKENS[2 * size : 3 * size]})
    read, rows, strips = [], cache._state.ops.gather_rows, cache._state.ops.move_strips
    steps = {(layer, role): component.tokens_per_row for layer, role, component in spec.components()}

    def gather(pools, layer, role, index, *rest, **options):
        found = rows(pools, layer, role, index, *rest, **options)
        if cache.plan.region(layer, role)[0].growth == "block":
            read.append(kvcore.to_numpy(found.positions).size * steps[layer, role])
        return found

    def move(pools, pages, *rest, **options):
        done = at_once and strips(pools, pages, *rest, **options)
        read.extend([spec.block_tokens * len(pages)] * done)
        return done

    monkeypatch.setattr(cache._state.ops, "gather_rows", gather, raising=False)
    monkeypatch.setattr(cache._state.ops, "move_strips", move, raising=False)
    stores.save(store, cache, request, TOKENS)
    assert set(read) == {2 * size}
    assert (len(read) == 1) == at_once
    read.clear()
    assert stores.save(store, cache, request, TOKENS) == 3 * size
    assert not read
    other = cache_of(spec)
    monkeypatch.setattr("kvcore.store.pages.AT_ONCE", 1)
    assert other.digest([stores.load(store, other, TOKENS)]) == cache.digest([request])
    monkeypatch.setattr(other._state.ops, "move_strips", lambda *_, **__: False, raising=False)
    assert other.digest([stores.load(store, other, TOKENS)]) == cache.digest([request])


def test_where_windows_end_between_blocks_a_checkpoint_is_what_is_found(store):
    cache = cache_of(V4, prefix="full")
    request = cache.admit([*TOKENS[:70]])
    stories.tell(cache, {request: TOKENS[:70]})
    assert stores.save(store, cache, request, TOKENS) == 64
    other = cache_of(V4)
    found = stores.load(store, other, TOKENS)
    assert found.length == stores.find(store, V4, TOKENS)
    assert found.length in (32, 64)
    own = cache_of(V4)
    assert other.digest([found]) == own.digest([told(own, found.length)])


def test_nothing_is_used_of_a_damaged_page_nor_of_what_follows(store, tmp_path):
    cache = cache_of(CLASSIC)
    request = told(cache, 40)
    stores.save(store, cache, request, TOKENS)
    store.flush()
    fresh = BlockStore([DiskTier(tmp_path, 1 << 26)])
    third = stores.keys_of(CLASSIC, TOKENS)[2].hex()
    path = tmp_path / third[:2] / f"{third}.page"
    data = bytearray(path.read_bytes())
    data[200] ^= 4
    path.write_bytes(data)
    other = cache_of(CLASSIC)
    found = stores.load(fresh, other, TOKENS)
    assert (found.length, len(fresh.damaged)) == (16, 1)
    assert other.digest([found]) == other.digest([told(other, 16)])
    # A page of another size under a key of ours is somebody's.
    fresh.put(bytes.fromhex(third), b"short")
    assert stores.load(fresh, other, TOKENS).length == 16


def test_a_state_that_is_damaged_is_not_used(store):
    cache = cache_of(V4)
    request = told(cache, 32)
    stores.save(store, cache, request, TOKENS)
    stories.tell(cache, {request: TOKENS[32:64]})
    stores.save(store, cache, request, TOKENS)
    key = point_key(stores.keys_of(V4, TOKENS)[1], [])
    for tier in store.tiers:
        if tier.has(key):
            tier.put(key, b"x" * 300)
    other = cache_of(V4)
    found = stores.load(store, other, TOKENS)
    assert found.length == 32
    assert other.digest([found]) == other.digest([told(other, 32)])


def test_blocks_of_an_engine_are_filled(store):
    layout = "NL_X_NB_TWO_BS_NH_HS"
    engine = Engine(layout)
    engine.write([7, 3], 0, 32)
    source = kvcore.adopt(HEADS, engine.tensors, layout=layout)
    stores.save(store, source, source.admit(blocks=[7, 3], length=32), TOKENS)
    other = Engine(layout)
    target = kvcore.adopt(HEADS, other.tensors, layout=layout)
    with pytest.raises(OutOfBlocks):
        stores.load(store, target, TOKENS)
    stores.load(store, target, TOKENS, into=target.admit(blocks=[1, 8, 2]))
    for layer in range(3):
        for position in range(32):
            for part in (0, 1):
                ours = engine.at(layer, part, [7, 3][position // 16], position % 16)
                assert np.array_equal(ours, other.at(layer, part, [1, 8][position // 16], position % 16))


def test_what_cannot_be_saved(store):
    cache = cache_of(CLASSIC)
    request = told(cache, 20)
    with pytest.raises(ShapeError, match="20, the request's"):
        stores.save(store, cache, request, TOKENS[:19])
    cache.release(request)
    with pytest.raises(RequestError):
        stores.save(store, cache, request, TOKENS)
