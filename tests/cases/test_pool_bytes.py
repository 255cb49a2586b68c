"""Where pools keep their bytes: wide addresses, strides, heads, and one writer for every byte."""

import numpy as np
import pytest

import kvcore
from kvcore.spec import CacheSpec, address
from kvcore.spec.formats import Field, Format
from tests.support import scene
from tests.support.scene import numbered


def test_pool_07_addresses_beyond_31_bits():
    inline = Format(
        name="cases_inline_584",
        fields=(Field(name="codes", dims=584, code="int8"),),
        planes=(("codes",),),
    )
    assert address(inline, 1, 3_700_000, 0, "codes") == 2_160_800_000
    # 1780 rows of 584 bytes, padded to a multiple of 576, are a block of 1 039 680 bytes.
    assert address("v4_584", 1780, 2066, 0, "codes") == 2_147_978_880


def test_pool_07_a_live_pool_beyond_31_bits(backend):
    rows = 2**31 // 1024 + 2
    spec = CacheSpec(layers=[scene.ring(1, format="fp32", dim=256), scene.ring(2)])
    cache = kvcore.create_cache(spec, backend=backend, max_requests=rows, layout="packed")
    assert cache.pools["0.window.page"].nbytes > 2**31
    a, b = cache.admit(), cache.admit()
    slots = cache.asarray(np.array([0, rows - 1], np.int32))
    with cache.step({a: 1, b: 1}) as step:
        index = step.index._replace(slots=slots)
        pools = cache.ops.append_window(cache.pools, 0, index, cache.asarray(scene.filled([7, 9], 256)))
        gathered = cache.ops.gather_window(pools, 0, index)
        assert scene.rows_of(gathered.values, gathered.positions) == [{0: 7.0}, {0: 9.0}]
        page = pools["0.window.page"]
        assert kvcore.to_numpy(page[:1]).view(np.float32)[0, 0] == 7
        assert kvcore.to_numpy(page[rows - 1 :]).view(np.float32)[0, 0] == 9
        assert not kvcore.to_numpy(page[1:4000]).any()
        cache.pools = pools


def test_pool_09_a_strided_pool_reads_like_a_dense_one_or_is_refused(backend):
    cache = scene.create([scene.stored(1), scene.classic()], backend, max_tokens=16, block_tokens=4)
    views = {}
    for name, array in cache.pools.items():
        wide = np.full((len(array), 2, array.shape[1]), 0xFF, np.uint8)
        views[name] = cache.asarray(wide)[:, 0]
    try:
        cache.pools = views
    except kvcore.errors.ShapeError:
        return
    a, b = cache.admit(), cache.admit()
    with cache.step({b: 3, a: 6}) as step:
        scene.fill(step, [*range(100, 103), *range(6)])
    assert scene.read(cache, scene.entries_of, b, a) == [[0, 1, 2], [1000, 1001, 1002, 1003, 1004, 1005]]
    assert scene.read(cache, scene.kv_of, b, a, layer=1) == [numbered(0, 2, 100), numbered(0, 5)]


def strided(array: np.ndarray) -> np.ndarray:
    """The same values as every second row of a larger array."""
    wide = np.full((2 * len(array), *array.shape[1:]), np.nan, array.dtype)
    wide[::2] = array
    return wide[::2]


def transposed(array: np.ndarray) -> np.ndarray:
    """The same values with the memory order of the axes reversed."""
    return np.ascontiguousarray(array.T).T


@pytest.mark.parametrize("kind", ["numpy", "backend"])
@pytest.mark.parametrize("view", [strided, transposed])
def test_pool_09_input_in_any_memory_order(backend, view, kind):
    random = np.random.default_rng(9)
    layers = [scene.ring(4, format="v4_584", dim=512), scene.classic(key_format="fp8_row"), scene.compressed(2)]
    inputs = [random.standard_normal(shape, np.float32) for shape in ((6, 512), (6, 2, 4), (6, 2, 6), (6, 8), (6, 16))]
    digests = []
    for change in (np.ascontiguousarray, view):
        cache = scene.create(layers, backend, max_tokens=16)
        a = cache.admit()
        rows, k, v, small, wide = (_as(cache, array, change, kind) for array in inputs)
        with cache.step({a: 6}) as step:
            step.layer(0).append_window(rows)
            step.layer(1).append_kv(k, v)
            step.layer(2).append_window(small)
            step.layer(2).append_tail(wide, wide)
            step.layer(2).append_index_tail(wide, wide)
            step.layer(2).flush()
        digests.append((cache.digest(), scene.raw(cache)))
    assert digests[0] == digests[1]


def _as(cache, array, change, kind):
    """The array in another memory order, as NumPy or as the backend's own."""
    if kind == "numpy":
        return change(array)
    own = cache.asarray(np.ascontiguousarray(array))
    if change is strided:
        return cache.asarray(np.repeat(array, 2, axis=0))[::2]
    axes = tuple(range(array.ndim))[::-1]
    turned = cache.asarray(np.ascontiguousarray(array.T))
    return own if change is np.ascontiguousarray else turned.permute(axes) if hasattr(turned, "permute") else turned.T


def test_pool_10_two_heads_are_not_keys_and_values(backend):
    cache = scene.create([scene.classic(value_dim=4)], backend, max_tokens=4, block_tokens=2)
    assert cache.plan.blocks == 2
    a = cache.admit()
    heads = np.array([0, 10], np.float32)
    k = np.broadcast_to((1 + heads)[None, :, None], (3, 2, 4)).copy()
    v = np.broadcast_to((-1 + heads)[None, :, None], (3, 2, 4)).copy()
    with cache.step({a: 3}) as step:
        step.layer(0).append_kv(k, v)
    with cache.step({a: 0}) as step:
        found = [kvcore.to_numpy(array) for array in step.layer(0).gather_kv()[:2]]
        rows = kvcore.to_numpy(step.layer(0).gather_rows("kv").rows).view(np.float32)
    assert found[0][0, :, :, 0].tolist() == [[1, 11]] * 3
    assert found[1][0, :, :, 0].tolist() == [[-1, 9]] * 3
    assert rows[0].tolist() == [[1.0] * 4 + [11.0] * 4 + [-1.0] * 4 + [9.0] * 4] * 3


@pytest.mark.parametrize("storage", ["paged", "slot", "ring"])
def test_pool_11_a_chunk_shorter_than_the_cache_stays_in_its_head(backend, storage):
    fields = {"window": 4} if storage == "ring" else {}
    layer = scene.classic(storage, heads=2, dim=4, value_dim=4, **fields)
    cache = scene.create([scene.ring(2), layer], backend, max_requests=1, max_tokens=4, block_tokens=4, layout="packed")
    a = cache.admit()
    scene.poison(cache)
    k = np.zeros((2, 2, 4), np.float32)
    k[:] = (10 * np.arange(2)[None, :, None] + np.arange(2)[:, None, None]).astype(np.float32)
    before = scene.raw(cache)["1.kv.key_page"]
    with cache.step({a: 2}) as step:
        step.layer(0).append_window(scene.filled([0, 1], scene.DIM))
        step.layer(1).append_kv(k, k)
    after = scene.raw(cache)["1.kv.key_page"]
    changed = np.flatnonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))
    # Four rows, (position, head) in order, of 16 bytes; the rows of positions 2 and 3 are untouched.
    assert changed.max() < 4 * 16
    with cache.step({a: 0}) as step:
        keys, _, positions = step.layer(1).gather_kv()
        keys, positions = kvcore.to_numpy(keys), kvcore.to_numpy(positions)
    assert positions.tolist() == [[0, 1]]
    assert keys[0, :, 0, 0].tolist() == [0, 1]
    assert keys[0, :, 1, 0].tolist() == [10, 11]


def test_pool_13_every_byte_has_one_writer(backend):
    spec = [scene.ring(1024, format="v4_584", dim=512), scene.ring(300, format="v4_584", dim=512)]
    rows = scene.filled([1] * 1024, 512)
    rows[:, 448:] = 2
    outcomes = set()
    for _ in range(10):
        cache = scene.create(spec, backend, max_requests=1, max_tokens=None)
        a = cache.admit()
        with cache.step({a: 1024}) as step:
            for number in range(2):
                step.layer(number).append_window(rows)
        outcomes.add(tuple(scene.raw(cache).values()))
    assert len(outcomes) == 1
    with cache.step({a: 0}) as step:
        for number, count in enumerate((1024, 300)):
            values = kvcore.to_numpy(step.layer(number).gather_window().values).astype(np.float32)
            assert values.shape == (1, count, 512)
            assert (values[0, :, :448] == 1).all()
            assert (values[0, :, 448:] == 2).all()


def test_pool_14_of_two_tokens_for_one_row_the_later_wins_whole(backend):
    layer = scene.classic("ring", heads=1, dim=2, value_dim=2, window=1, key_format="fp8_row")
    cache = scene.create([layer, scene.ring(1)], backend, max_requests=1)
    a = cache.admit()
    outcomes = set()
    k = np.array([[[1.0, 0.5]], [[1000.0, 10.0]]], np.float32)
    for _ in range(100):
        with cache.step({a: 2}) as step:
            step.layer(0).append_kv(k, k)
            step.layer(1).append_window(scene.filled([1, 1000], scene.DIM))
        with cache.step({a: 0}) as step:
            keys, _, positions = step.layer(0).gather_kv()
            assert kvcore.to_numpy(positions).tolist() == [[a.length - 1]]
            outcomes.add(tuple(kvcore.to_numpy(keys)[0, 0, 0].tolist()))
    ((first, second),) = outcomes
    assert first == pytest.approx(1000, rel=1e-6)
    assert second == pytest.approx(10.04, abs=0.01)
