"""Paged pools: block tables, padding, and the length that decides."""

import numpy as np
import pytest

import kvcore
from kvcore.errors import OutOfBlocks
from tests.support import scene
from tests.support.scene import numbered


def table_index(cache, step, tables):
    """The step's index with the block tables replaced."""
    table = np.full(step.index.block_table.shape, -1, np.int32)
    for request, blocks in enumerate(tables):
        table[request, : len(blocks)] = blocks
    return step.index._replace(block_table=cache.asarray(table))


def test_pool_01_each_request_looks_up_its_own_table(backend):
    cache = scene.create([scene.ring(2), scene.stored(1)], backend, max_tokens=40, block_tokens=4)
    a, b = cache.admit(), cache.admit()
    tables, lengths = [[7, 2], [3, 9]], [5, 6]
    values = [100 * blocks[i // 4] + i % 4 for blocks, n in zip(tables, lengths, strict=True) for i in range(n)]
    with cache.step({a: 5, b: 6}) as step:
        index = table_index(cache, step, tables)
        rows = cache.asarray(scene.filled(values, scene.DIM))
        pools = cache.ops.append_window(cache.pools, 0, index, rows)
        pools = cache.ops.store_entries(pools, 1, index, rows, rows)
        cache.pools = pools
        gathered = cache.ops.gather_all_entries(pools, 1, index, columns=6, role="entries")
        a_rows, b_rows = [700, 701, 702, 703, 200], [300, 301, 302, 303, 900, 901]
        found = scene.rows_of(gathered.values, gathered.positions)
        assert [list(rows.values()) for rows in found] == [a_rows, b_rows]
        assert kvcore.to_numpy(gathered.counts).tolist() == [5, 6]
        picks = cache.asarray(np.array([[4, 0]] * 5 + [[5, 1]] * 6, np.int32))
        selected = cache.ops.gather_entries(pools, 1, index, picks)
        values = kvcore.to_numpy(selected.values)[:, :, 0].tolist()
        assert values == [[200, 700]] * 5 + [[901, 301]] * 6


def test_pool_01_blocks_of_requests_that_grew_by_turns(backend):
    cache = scene.create([scene.classic(), scene.compressed(4)], backend, block_tokens=4)
    a, b = cache.admit(), cache.admit()
    for start in range(0, 15, 3):
        scene.write(cache, {a: range(start, start + 3)})
        scene.write(cache, {b: range(1000 + start, 1003 + start)})
        scene.poison(cache)
    for request in (a, b):
        assert max(request.blocks) - min(request.blocks) > len(request.blocks) == 4
    assert scene.read(cache, scene.kv_of, b, a) == [numbered(0, 14, 1000), numbered(0, 14)]
    found = scene.read(cache, scene.entries_of, a, b, layer=1)
    assert found == [[1.5, 53.5, 57.5], [1001.5, 1053.5, 1057.5]]


def test_pool_02_padding_writes_nowhere(backend):
    layers = [scene.classic(key_format="fp8_row"), scene.compressed(1, window=3, overlap=False)]
    cache = scene.create(layers, backend, max_tokens=16, block_tokens=4)
    a = cache.admit()
    scene.write(cache, {a: range(5)})
    before = scene.raw(cache)
    scene.write(cache, {a: [9]}, pad_tokens=4, pad_requests=4, filler=9)
    found = scene.changed(before, scene.raw(cache))
    block = a.blocks[1]
    for region in cache.plan.regions:
        unit = block if region.growth == "block" else a.slot
        for name, size in region.buffers.values():
            # Position 5 lies in the second row of the second block; rings hold it at 5 mod rows.
            row = 5 % region.rows
            allowed = set()
            for place in region.unit.places:
                for head in range(region.heads):
                    start = unit * size + place.base + (row * region.heads + head) * place.stride
                    allowed |= set(range(start, start + place.nbytes))
            assert set(found.pop(name)) <= allowed
    assert not found


def test_pool_03_a_smaller_batch_leaves_no_old_tables(backend):
    cache = scene.create([scene.classic(), scene.stored(2)], backend, max_requests=3, max_tokens=48, block_tokens=4)
    a, b, c = (cache.admit() for _ in range(3))
    scene.write(cache, {a: range(13), b: range(100, 113), c: range(200, 213)}, pad_requests=3)
    with cache.step({c: 1}, pad_tokens=3, pad_requests=3) as step:
        table = kvcore.to_numpy(step.index.block_table)
        assert table[0, :4].tolist() == list(c.blocks)
        assert (table[0, 4:] == -1).all()
        assert (table[1:] == -1).all()
        assert kvcore.to_numpy(step.index.slots).tolist() == [c.slot, -1, -1]
        scene.fill(step, [213], filler=999)
        keys, values, positions = (kvcore.to_numpy(array) for array in step.layer(0).gather_kv())
        assert (positions[1:] == -1).all()
        assert not keys[1:].any()
        assert not values[1:].any()
        entries = step.layer(1).gather_all_entries()
        assert kvcore.to_numpy(entries.counts).tolist() == [7, 0, 0]
        assert not kvcore.to_numpy(entries.values)[1:].any()


FORMATS = [
    pytest.param("bf16", id="bf16"),
    pytest.param("v4_584", id="fp8 with power-of-two scales"),
    pytest.param("row_580", id="fp8 with an fp32 scale"),
    pytest.param("mxfp4_368", id="fp4 with power-of-two scales"),
    pytest.param("v41_fp4_288", id="fp4 with e4m3 scales"),
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", ["packed", "planar", "tpu_tile"])
def test_pool_04_padding_that_is_nan_poisons_nothing(backend, format, layout):
    layers = [scene.compressed(4, format=format, dim=512), scene.classic(key_format="int8_row")]
    caches = [scene.create(layers, backend, max_tokens=16, layout=layout) for _ in range(2)]
    results = []
    for cache, padding in zip(caches, ({}, {"pad_tokens": 7, "pad_requests": 3}), strict=True):
        a = cache.admit()
        with cache.step({a: 5}, **padding) as step:
            scene.fill(step, range(5), filler=np.nan)
            for layer, dim in ((0, 512), (1, 4)):
                out = kvcore.to_numpy(step.layer(layer).attend(np.ones((len(step.positions), 2, dim), np.float32)).out)
                assert np.isfinite(out).all()
                assert not out[5:].any()
            window = kvcore.to_numpy(step.layer(0).gather_window().values).astype(np.float32)
            entries = kvcore.to_numpy(step.layer(0).gather_all_entries().values).astype(np.float32)
            assert not window[1:].any()
            assert not entries[1:].any()
        results.append(scene.raw(cache))
    assert results[0] == results[1]


@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_pool_06_the_length_decides_not_the_blocks(backend, length):
    cache = scene.create([scene.classic(), scene.stored(1)], backend, max_tokens=96, block_tokens=16)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {b: range(100, 103), a: range(length)})
    assert len(a.blocks) == -(-length // 16)
    surplus = next(block for block in range(cache.plan.blocks) if block not in a.blocks + b.blocks)
    with cache.step({a: 0}) as step:
        index = table_index(cache, step, [[*a.blocks, surplus]])
        keys, values, positions = cache.ops.gather_kv(cache.pools, 0, index, columns=length)
        assert scene.rows_of(keys, positions) == [numbered(0, length - 1)]
        assert np.isfinite(kvcore.to_numpy(values)).all()
        entries = cache.ops.gather_all_entries(cache.pools, 1, index, columns=length + 16, role="entries")
        assert kvcore.to_numpy(entries.counts).tolist() == [length]
        assert len(scene.rows_of(entries.values, entries.positions)[0]) == length
        view = step.layer(1).entries_view()
        assert kvcore.to_numpy(view.counts).tolist() == [length]


def test_pool_15_the_allocator_knows_the_size_of_the_pool(backend):
    cache = scene.create([scene.classic(), scene.stored(2), scene.ring(2)], backend, max_tokens=16, block_tokens=4)
    for region in cache.plan.regions:
        for name, size in region.buffers.values():
            units = cache.plan.blocks if region.growth == "block" else cache.plan.slots
            assert tuple(cache.pools[name].shape) == (units, size)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {a: range(7), b: range(100, 106)})
    assert sorted(a.blocks + b.blocks) == [0, 1, 2, 3]
    before = scene.raw(cache), cache.digest()
    with pytest.raises(OutOfBlocks):
        cache.step({a: 1, b: 3})
    assert (scene.raw(cache), cache.digest()) == before
    assert scene.read(cache, scene.kv_of, a, b) == [numbered(0, 6), numbered(0, 5, 100)]


@pytest.mark.parametrize("index", [-1, 3, 4, 7, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_jit_04_an_index_that_points_nowhere_reads_as_zeros(backend, index, dtype):
    cache = scene.create([scene.ring(4), scene.stored(2)], backend, max_tokens=20, block_tokens=4)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {a: range(6), b: range(100, 108)})
    with cache.step({a: 1, b: 1}) as step:
        scene.fill(step, [6, 108])
        indices = np.array([[index, 2, 0], [index, 1, 0]], dtype)
        gathered = step.layer(1).gather_entries(indices)
        # a has three entries, b has four, which hold 1000 and their number.
        first = [0 <= index < 3, 0 <= index < 4]
        assert kvcore.to_numpy(gathered.valid).tolist() == [[first[0], True, True], [first[1], True, True]]
        found = kvcore.to_numpy(gathered.values)[:, :, 0].tolist()
        assert found == [[0, 2, 0], [1000 + index if first[1] else 0, 1001, 1000]]
        seen = scene.seen_by(step, 1, selected=indices)
        assert [count for count, _ in seen] == [2 + first[0], 2 + first[1]]
