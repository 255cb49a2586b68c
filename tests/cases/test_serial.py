"""Save, load and transfer: positions keep their rows, nothing is left out, and whole blocks move."""

import numpy as np
import pytest

import kvcore
from kvcore.errors import SnapshotError
from tests.support import portable_form, scene
from tests.support.scene import numbered


@pytest.mark.parametrize("length", [7, 8, 9, 20])
def test_ser_01_a_loaded_ring_goes_on_where_it_was(backend, tmp_path, length):
    layers = [scene.ring(8), scene.classic("ring", window=8), scene.compressed(4, window=8)]
    cache = scene.create(layers, backend, max_requests=3)
    cache.admit()
    request = cache.admit()
    scene.write(cache, {request: range(length)})
    cache.save(tmp_path / "saved.kv", [request])
    blob = cache.export_request(request)
    loaded = kvcore.load(tmp_path / "saved.kv", backend=backend)
    other = scene.create(layers, backend, max_requests=3)
    for _ in range(2):
        scene.write(other, {other.admit(): [999.0] * 13})
    for each, restored in ((loaded, loaded.requests[0]), (other, other.import_request(blob))):
        assert restored.slot != request.slot
        for token in (length, length + 1):
            scene.write(each, {restored: [token]})
        wanted = numbered(max(0, length - 6), length + 1)
        for reader, layer in ((scene.window_of, 0), (scene.kv_of, 1), (scene.window_of, 2)):
            assert scene.read(each, reader, restored, layer=layer) == [wanted]
        first = ((length + 2) // 4 - 1) * 4
        assert scene.read(each, scene.tail_of, restored, layer=2) == [numbered(first, length + 1)]
    scene.write(cache, {request: [length, length + 1]})
    assert loaded.digest() == cache.digest([request]) == other.digest([other.requests[-1]])


def test_ser_03_an_export_is_complete_or_refused(backend):
    layers = [scene.compressed(4), scene.classic(), scene.ring(6)]
    cache = scene.create(layers, backend)
    request = cache.admit()
    scene.write(cache, {request: range(21)})
    blob = cache.export_request(request)
    names = {f"{layer}.{role}" for layer, role, _ in cache.spec.components()}
    assert set(portable_form.rows_of(blob)) == names

    # Into storage that is poisoned through and through.
    target = scene.create(layers, backend)
    moved = target.import_request(blob)
    assert target.digest([moved]) == cache.digest([request])
    assert scene.read(target, scene.entries_of, moved) == scene.read(cache, scene.entries_of, request)
    assert scene.read(target, scene.kv_of, moved, layer=1) == [numbered(0, 20)]
    assert scene.read(target, scene.window_of, moved, layer=2) == [numbered(15, 20)]

    before = scene.raw(target), target.digest()
    for section in (0, 1):
        for number in range(len(portable_form.opened(blob)[0]["layout"]["sections"][section]["strips"])):

            def without(manifest, section=section, number=number):
                del manifest["layout"]["sections"][section]["strips"][number]

            with pytest.raises(SnapshotError, match="places"):
                target.import_request(portable_form.changed(blob, without))

    def ghost(manifest):
        strips = manifest["layout"]["sections"][1]["strips"]
        strips.append({**strips[-1], "role": "ghost"})

    with pytest.raises(SnapshotError, match="places"):
        target.import_request(portable_form.changed(blob, ghost))
    assert (scene.raw(target), target.digest()) == before


def test_ser_04_a_logical_block_is_all_of_its_rows(backend):
    # Blocks of 16 tokens beside a component with a row for every 16 of them.
    layers = [scene.compressed(16, overlap=False), scene.classic(), scene.compressed(4)]
    cache = scene.create(layers, backend, max_tokens=96, block_tokens=16)
    other, request = cache.admit(), cache.admit()
    scene.write(cache, {other: [999.0] * 20, request: range(60)})
    rows = {
        name: np.frombuffer(data, np.uint8)
        for name, data in portable_form.rows_of(cache.export_request(request)).items()
    }
    keys, values = cache.spec.layers[1].kv.parts
    kv = rows["1.kv"].view(np.float32).reshape(60, -1)
    assert kv.shape[1] == keys.heads * keys.format.dim + values.heads * values.format.dim
    split = keys.heads * keys.format.dim
    # Rows 32 to 47 of the keys and values, and the index keys of the same tokens: 8 to 11 of ratio 4, 2 of ratio 16.
    assert kv[32:48, :split].tolist() == [[float(position)] * split for position in range(32, 48)]
    assert kv[32:48, split:].tolist() == [[-float(position)] * (kv.shape[1] - split) for position in range(32, 48)]
    for role in ("entries", "index_keys"):
        fine = rows[f"2.{role}"].view(np.float32).reshape(15, -1)
        assert fine[8:12, 0].tolist() == [81.5, 85.5, 89.5, 93.5]
        assert (fine == fine[:, :1]).all()
        coarse = rows[f"0.{role}"].view(np.float32).reshape(3, -1)
        assert coarse[:, 0].tolist() == [7.5, 23.5, 39.5]


def test_ser_04_an_export_follows_the_last_write(backend):
    cache = scene.create([scene.classic()], backend, block_tokens=16)
    request = cache.admit()
    for first in range(0, 40, 8):
        scene.write(cache, {request: range(first, first + 8)})
        target = scene.create([scene.classic()], backend, block_tokens=16)
        moved = target.import_request(cache.export_request(request))
        assert scene.read(target, scene.kv_of, moved) == [numbered(0, first + 7)]


@pytest.mark.parametrize("blocks", [2, 5])
def test_pool_10_heads_and_streams_are_told_apart_by_name_in_a_transfer(backend, blocks):
    # Two heads, so that the axis of heads is as long as that of keys and values.
    layers = [scene.classic(heads=2, dim=4, value_dim=4)]
    cache = scene.create(layers, backend, max_tokens=4 * blocks, block_tokens=4)
    request = cache.admit()
    heads = np.array([0.0, 10.0], np.float32)[None, :, None]
    keys, values = np.ones((4 * blocks, 2, 4), np.float32) + heads, -np.ones((4 * blocks, 2, 4), np.float32) + heads
    with cache.step({request: 4 * blocks}) as step:
        step.layer(0).append_kv(keys, values)
    target = scene.create(layers, backend, layout="planar", max_tokens=4 * blocks, block_tokens=4)
    moved = target.import_request(cache.export_request(request))
    with target.step({moved: 0}) as step:
        found = [kvcore.to_numpy(part)[0] for part in step.layer(0).gather_kv()[:2]]
    assert found[0][:, :, 0].tolist() == [[1, 11]] * 4 * blocks
    assert found[1][:, :, 0].tolist() == [[-1, 9]] * 4 * blocks


@pytest.mark.parametrize("magnitude", [0.02, 40.0])
def test_qnt_09_moved_and_reused_rows_decode_to_the_same_values(backend, magnitude):
    layers = [
        scene.ring(4, format="v4_584", dim=512),
        scene.classic(heads=1, dim=8, value_dim=8, key_format="int8_row", value_format="fp8_row"),
    ]
    tokens = list(range(9))
    cache = scene.create(layers, backend, block_tokens=4, prefix="full")
    request = cache.admit(tokens)
    rows = magnitude * np.random.default_rng(9).standard_normal((9, 512)).astype(np.float32)
    with cache.step({request: tokens}) as step:
        step.layer(0).append_window(rows)
        step.layer(1).append_kv(rows[:, None, :8], rows[:, None, 8:16])
    wanted = _decoded(cache, request)
    assert np.allclose(wanted[1], rows[:, None, :8], rtol=1 / 16, atol=magnitude / 32)
    target = scene.create(layers, backend, block_tokens=4)
    moved = target.import_request(cache.export_request(request))
    assert all(np.array_equal(a, b) for a, b in zip(_decoded(target, moved), wanted, strict=True))
    hit = cache.admit(tokens)
    assert hit.length == 8
    found = _decoded(cache, hit)
    assert np.array_equal(found[1], wanted[1][:8])
    assert np.array_equal(found[2], wanted[2][:8])
    # The window of 8 tokens ends one row before that of 9.
    assert np.array_equal(found[0][1:4], wanted[0][:3])


def _decoded(cache, request):
    """Window, keys and values of a request, as attention reads them."""
    with cache.step({request: 0}) as step:
        return [
            kvcore.to_numpy(part)[0] for part in (step.layer(0).gather_window().values, *step.layer(1).gather_kv()[:2])
        ]


def test_bat_04_a_snapshot_between_padded_chunks_holds_real_rows_only(backend, tmp_path):
    layers = [scene.classic(), scene.ring(8)]
    cache = scene.create(layers, backend)
    short, long = cache.admit(), cache.admit()
    # Lengths 3 and 5 in chunks of 2 and 3, each padded with rows of 999.
    scene.write(cache, {short: range(2), long: range(100, 102)}, filler=999, pad_tokens=6)
    scene.write(cache, {short: [2], long: range(102, 104)}, filler=999, pad_tokens=6)
    cache.save(tmp_path / "middle.kv", [short])
    scene.write(cache, {short: [], long: [104]}, filler=999, pad_tokens=3)
    cache.save(tmp_path / "end.kv", [short])
    assert (tmp_path / "middle.kv").read_bytes() == (tmp_path / "end.kv").read_bytes()
    loaded = kvcore.load(tmp_path / "middle.kv", backend=backend)
    (restored,) = loaded.requests
    assert restored.length == 3
    assert scene.read(loaded, scene.kv_of, restored) == [numbered(0, 2)]
    scene.write(loaded, {restored: [3]})
    assert scene.read(loaded, scene.kv_of, restored) == [numbered(0, 3)]
    assert scene.read(loaded, scene.window_of, restored, layer=1) == [numbered(0, 3)]
