"""Memory: what is kept is what was planned, and nothing larger is kept alive."""

import numpy as np
import pytest

import kvcore
from tests.support import scene


def storage_bytes(array) -> int:
    """Bytes of the memory that an array keeps alive."""
    if hasattr(array, "untyped_storage"):
        return array.untyped_storage().nbytes()
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.nbytes


def test_mem_01_a_window_keeps_no_prompt_alive(backend):
    layers = [scene.classic("ring", heads=1, dim=64, value_dim=64, window=128), scene.ring(128, dim=64)]
    cache = scene.create(layers, backend, max_tokens=None, layout="packed")
    a, b = cache.admit(), cache.admit()
    for start in range(0, 4096, 512):
        scene.write(cache, {a: range(start, start + 512), b: [start]})
    # 128 rows of 64 fp32 channels for each of two slots.
    assert {name: storage_bytes(array) for name, array in cache.pools.items()} == {
        "0.kv.key_page": 2 * 32768,
        "0.kv.value_page": 2 * 32768,
        "1.window.page": 2 * 32768,
    }
    assert cache.nbytes == cache.plan.nbytes == 6 * 32768
    assert scene.read(cache, scene.kv_of, a) == [scene.numbered(3968, 4095)]


def test_mem_01_stored_rows_are_copies(backend):
    cache = scene.create([scene.ring(4), scene.classic(), scene.compressed(2)], backend)
    a = cache.admit()
    rows, k, v, pending = (np.ones(shape, np.float32) for shape in ((3, 8), (3, 2, 4), (3, 2, 6), (3, 16)))
    with cache.step({a: 3}) as step:
        step.layer(0).append_window(rows)
        step.layer(1).append_kv(k, v)
        step.layer(2).append_window(rows)
        step.layer(2).append_tail(pending, pending)
        step.layer(2).append_index_tail(pending, pending)
        step.layer(2).flush()
    digest = cache.digest()
    for array in (rows, k, v, pending):
        array[:] = 999
    assert cache.digest() == digest
    with cache.step({a: 0}) as step:
        gathered = kvcore.to_numpy(step.layer(0).gather_window().values)
        step.layer(0).gather_window().values[:] = 777
        assert (kvcore.to_numpy(step.layer(0).gather_window().values) == gathered).all()
    assert cache.digest() == digest


@pytest.mark.parametrize("kind", ["numpy", "backend"])
@pytest.mark.parametrize("new", [1, 6])
def test_mem_01_a_buffer_may_be_reused_before_the_step_ends(backend, kind, new):
    layers = [scene.ring(2), scene.ring(2), scene.classic("ring", heads=1, dim=8, value_dim=8, window=2)]
    cache = scene.create(layers, backend)
    a = cache.admit()
    buffer = np.zeros((new, 8), np.float32)
    buffer = buffer if kind == "numpy" else cache.asarray(buffer)
    with cache.step({a: new}) as step:
        for number in range(2):
            buffer[:] = number + 1
            step.layer(number).append_window(buffer)
        buffer[:] = 3
        step.layer(2).append_kv(buffer[:, None], -buffer[:, None])
        buffer[:] = 999
    kept = range(max(0, new - 2), new)
    assert scene.read(cache, scene.window_of, a) == [dict.fromkeys(kept, 1.0)]
    assert scene.read(cache, scene.window_of, a, layer=1) == [dict.fromkeys(kept, 2.0)]
    assert scene.read(cache, scene.kv_of, a, layer=2) == [dict.fromkeys(kept, 3.0)]
