"""The indexer: visibility, selection, indices that point nowhere, and where its bytes lie."""

import itertools

import numpy as np
import pytest

import kvcore
from kvcore.spec import FORMATS, Entries, IndexKeys, LayerSpec, Window, address
from kvcore.spec.formats import Field, Format
from tests.support import scene


def indexed(ratio: int, *, key_format: str = "fp32", key_dim: int = scene.DIM) -> LayerSpec:
    """A window, and entries and index keys that the caller makes."""
    return LayerSpec(
        window=Window(dim=scene.DIM, window=4, format="fp32"),
        entries=Entries(dim=scene.DIM, ratio=ratio, format="fp32"),
        index_keys=IndexKeys(dim=key_dim, ratio=ratio, heads=2, topk=4, format=key_format),
    )


def write(cache, request, new, scores, *, layer=0):
    """New tokens whose entries hold their own number and whose index keys score as given."""
    with cache.step({request: new}) as step:
        for number in range(len(cache.spec.layers)):
            handle = step.layer(number)
            handle.append_window(scene.filled(range(request.length, request.length + new), scene.DIM))
            entries = kvcore.to_numpy(handle.closed.entry_index)
            keys = np.zeros((len(entries), scene.DIM), np.float32)
            keys[:, 0] = np.asarray(scores, np.float32)[entries] if number == layer else 0
            handle.store_entries(scene.filled(entries, scene.DIM), keys)
        return kvcore.to_numpy(_scores(step, layer))


def _scores(step, layer):
    tokens = len(step.positions)
    q = np.zeros((tokens, 2, scene.DIM), np.float32)
    q[:, 1, 0] = 1
    return step.layer(layer).index_scores(q, np.ones((tokens, 2), np.float32))


def test_idx_01_no_query_selects_an_entry_of_later_tokens(backend):
    cache = scene.create([indexed(2), indexed(4)], backend)
    a, b = cache.admit(), cache.admit()
    write(cache, b, 8, [5, 6, 7, 8])
    with cache.step({a: 12}) as step:
        for number, entries in enumerate((6, 3)):
            layer = step.layer(number)
            layer.append_window(scene.filled(range(12), scene.DIM))
            keys = np.zeros((entries, scene.DIM), np.float32)
            keys[:, 0] = [1, 2, 9][:entries] if number else range(entries)
            layer.store_entries(scene.filled(range(10, 10 + entries), scene.DIM), keys)
        layer = step.layer(1)
        scores = _scores(step, 1)
        visible = np.isfinite(kvcore.to_numpy(scores)).sum(axis=1)
        assert visible.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
        picks = kvcore.to_numpy(layer.select(scores, 2))
        assert picks[2].tolist() == [-1, -1]
        assert picks[3].tolist() == [0, -1]
        assert picks[7].tolist() == [1, 0]
        assert picks[11].tolist() == [2, 1]
        gathered = layer.gather_entries(picks)
        values = kvcore.to_numpy(gathered.values)
        assert values.shape == (12, 2, scene.DIM)
        assert values[:, :, 0].tolist() == [[10.0 + i if i >= 0 else 0.0 for i in row] for row in picks.tolist()]
        assert kvcore.to_numpy(gathered.valid).tolist() == (picks >= 0).tolist()


def test_idx_01_attention_shows_a_query_no_later_entry(backend):
    cache = scene.create([indexed(4)], backend)
    a = cache.admit()
    with cache.step({a: 12}) as step:
        layer = step.layer(0)
        layer.append_window(scene.filled(range(12), scene.DIM))
        layer.store_entries(scene.filled([10, 20, 30], scene.DIM), np.zeros((3, scene.DIM), np.float32))
        everything = np.tile(np.array([2, 0, 1, -1], np.int64), (12, 1))
        expected = []
        for t in range(12):
            rows = [*range(max(0, t - 3), t + 1), *[10, 20, 30][: (t + 1) // 4]]
            expected.append((len(rows), pytest.approx(sum(rows) / len(rows), abs=1e-3)))
        assert scene.seen_by(step, 0) == expected
        assert scene.seen_by(step, 0, selected=everything) == expected


DISTINCT = [(7 * i) % 25 + 1 for i in range(25)]
SPLITS = [[100], [96, 4], [88, 12], [50, 50], [1] * 100]


@pytest.mark.parametrize("calls", [pytest.param(calls, id=f"{len(calls)} calls, first {calls[0]}") for calls in SPLITS])
@pytest.mark.parametrize(
    ("scores", "best"),
    [
        pytest.param(DISTINCT, sorted(range(25), key=lambda i: -DISTINCT[i])[:4], id="distinct scores"),
        pytest.param([3] * 25, [0, 1, 2, 3], id="all scores equal"),
        pytest.param([5, 1, 4, 4, 9, 4, *[2] * 19], [4, 0, 2, 3], id="a tie at the cut"),
        pytest.param([0] * 20 + [1, 0, 0, 0, 0], [20, 0, 1, 2], id="a tie of zeros at the cut"),
    ],
)
def test_idx_04_selection_depends_on_scores_and_length_alone(backend, calls, scores, best):
    cache = scene.create([indexed(4)], backend, max_tokens=128)
    a = cache.admit()
    for new in calls:
        found = write(cache, a, new, scores)
    with cache.step({a: 0}) as step:
        empty = step.layer(0).select(np.zeros((0, 25), np.float32), 4)
        assert kvcore.to_numpy(empty).shape == (0, 4)
    picks = kvcore.to_numpy(cache.ops.select(cache.asarray(found[-1:]), 4))
    assert picks.tolist() == [best]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_idx_05_indices_beyond_the_entries(backend, dtype):
    cache = scene.create([scene.stored(4), indexed(1)], backend, max_tokens=32, block_tokens=8)
    a, b = cache.admit(), cache.admit()
    with cache.step({b: 9}) as step:
        scene.fill(step, range(9))
    with cache.step({a: 9}) as step:
        step.layer(0).store_entries(scene.filled([10, 20], scene.DIM), scene.filled([0, 0], scene.DIM))
        scene.fill_layer(step.layer(1), cache.spec.layers[1], np.arange(9, dtype=np.float32))
        beyond = 1000000 if dtype == np.int32 else 2**33 + 1
        indices = np.tile(np.array([0, 5, -1, beyond, 1, 2, -(2**31)], dtype), (9, 1))
        for _ in range(2):
            gathered = step.layer(0).gather_entries(indices)
            values = kvcore.to_numpy(gathered.values)
            assert values.tolist() == [[[v] * scene.DIM for v in (10, 0, 0, 0, 20, 0, 0)]] * 9
            assert kvcore.to_numpy(gathered.valid).tolist() == [[True, False, False, False, True, False, False]] * 9
            indices = cache.asarray(indices)


def test_idx_06_fewer_entries_than_k(backend):
    cache = scene.create([indexed(4)], backend)
    a, b = cache.admit(), cache.admit()
    write(cache, a, 11, [3, 1])
    with cache.step({a: 1, b: 1}, pad_tokens=3, pad_requests=3) as step:
        layer = step.layer(0)
        layer.append_window(scene.filled([11, 0, np.nan], scene.DIM))
        keys = np.zeros((1, scene.DIM), np.float32)
        keys[0, 0] = 2
        layer.store_entries(scene.filled([2], scene.DIM), keys)
        picks = layer.select(_scores(step, 0), 512)
        assert kvcore.to_numpy(picks).tolist() == [[0, 2, 1, *[-1] * 509], [-1] * 512, [-1] * 512]
        gathered = layer.gather_entries(picks)
        assert kvcore.to_numpy(gathered.valid).sum(axis=1).tolist() == [3, 0, 0]
        values = kvcore.to_numpy(gathered.values)
        assert values[0, :3, 0].tolist() == [0, 2, 1]
        assert not values[0, 3:].any()
        assert not values[1:].any()


def byte_range(array) -> tuple[int, int]:
    """First and one-past-last address of an array's storage."""
    start = array.data_ptr() if hasattr(array, "data_ptr") else array.__array_interface__["data"][0]
    return start, start + array.nbytes


def test_idx_08_every_layer_has_its_own_bytes(backend):
    cache = scene.create([indexed(4, key_format="index_fp8_132", key_dim=128)] * 3, backend, max_tokens=8)
    a = cache.admit()
    with cache.step({a: 4}) as step:
        for number in range(3):
            layer = step.layer(number)
            layer.append_window(scene.filled(range(4), scene.DIM))
            # A largest magnitude of 448·2^n is stored with the scale 2^n.
            layer.store_entries(scene.filled([number], scene.DIM), scene.filled([448.0 * 2**number], 128))
    with cache.step({a: 0}) as step:
        views = [step.layer(number).indexer_view() for number in range(3)]
        rows = [kvcore.to_numpy(step.layer(number).gather_rows("index_keys").rows)[0, 0] for number in range(3)]
    assert [row[128:].view(np.float32).tolist() for row in rows] == [[1.0], [2.0], [4.0]]
    ranges = sorted(byte_range(buffer) for view in views for buffer in view.buffers.values())
    assert len(ranges) >= 3
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    for number, view in enumerate(views):
        owned = [byte_range(array) for name, array in cache.pools.items() if name.startswith(f"{number}.index_keys.")]
        assert sorted(byte_range(buffer) for buffer in view.buffers.values()) == sorted(owned)


# A page of 4 rows: 8 key bytes each, then 4 scale bytes each, 48 in all.
SMALL_KEYS = FORMATS.register(
    Format(
        name="cases_keys_12",
        fields=(
            Field(name="codes", dims=8, code="e4m3", group=0, scale="fp32", rule="pow2"),
            Field(name="scales", dims=1, code="fp32"),
        ),
        planes=(("codes",), ("scales",)),
        amax_floor=1e-4,
    )
)


def test_idx_09_keys_and_scales_are_addressed_through_their_page(backend):
    assert address(SMALL_KEYS, 4, 2, 3, "codes") == 120
    assert address(SMALL_KEYS, 4, 2, 3, "scales") == 140
    assert address(SMALL_KEYS, 4, 1, 3, "codes") == 48 + 24
    cache = scene.create(
        [scene.stored(2, key_format=SMALL_KEYS.name)], backend, max_tokens=32, block_tokens=8, layout="packed"
    )
    a = cache.admit()
    scene.write(cache, {a: range(17)})
    assert a.blocks == (0, 1, 2)
    before = scene.raw(cache)
    with cache.step({a: 1}) as step:
        step.layer(0).store_entries(scene.filled([5], scene.DIM), scene.filled([7.0], 8))
    found = scene.changed(before, scene.raw(cache))["0.index_keys.page"]
    assert found == [*range(96, 104), *range(128, 132)]


def test_idx_09_the_real_page():
    assert address("index_fp8_132", 64, 0, 63, "codes") == 63 * 128
    assert address("index_fp8_132", 64, 0, 0, "scales") == 8192
    assert address("index_fp8_132", 64, 0, 63, "scales") + 4 == 8448
