"""Storage full of NaN or of large stale values: no reader lets any of it through."""

import struct

import numpy as np
import pytest

import kvcore
from tests.support import scene

PATTERNS = {
    "NaN": b"\xff",
    "1e30 in fp32": struct.pack("<f", 1e30),
    "large in fp8 and bf16": b"\x7e",
}


def observe(backend, pattern, layout):
    """Everything that can be read of a cache whose storage held ``pattern`` before use."""
    layers = [
        scene.compressed(4, format="v4_584", dim=512, key_format="index_fp4_68_h", key_dim=128),
        scene.compressed(2, overlap=False),
        scene.classic(key_format="fp8_row"),
        scene.classic("slot", key_format="int8_row"),
        scene.classic("ring", window=4, key_format="bf16"),
        scene.classic("ring", chunk=4),
    ]
    cache = scene.create(layers, backend, max_tokens=32, block_tokens=8, layout=layout)
    scene.poison(cache, pattern)
    a, b = cache.admit(), cache.admit()
    # Rows of the held slots that nothing was written to. Tails stay as a fresh slot has them.
    held = {}
    for region in cache.plan.regions:
        if region.growth == "slot" and not region.role.endswith("tail"):
            for name, size in region.buffers.values():
                host = np.tile(np.resize(np.frombuffer(pattern, np.uint8), size), (cache.plan.slots, 1))
                held[name] = cache.asarray(host)
    cache.pools = {**cache.pools, **held}
    found = []
    for counts in ({b: 9, a: 2}, {a: 0, b: 0}, {a: 1, b: 0}):
        with cache.step(counts, pad_tokens=12, pad_requests=3) as step:
            if sum(counts.values()):
                scene.fill(step, np.arange(sum(counts.values())), filler=np.nan)
            for number, layer in enumerate(layers):
                found += look(step.layer(number), layer, len(step.positions), ready=bool(sum(counts.values())))
        found.append(np.array([cache.digest() % 2**31]))
    return found


def look(handle, layer, tokens, *, ready):
    """What one layer's readers return, as float64."""
    arrays = []
    if layer.kv is not None:
        arrays += [*handle.gather_kv(), handle.gather_rows("kv").rows]
        if ready:
            arrays += [*handle.attend(np.ones((tokens, 2, 4), np.float32)), handle.mask()]
    else:
        dim = layer.window.dim
        window, entries, keys = handle.gather_window(), handle.gather_all_entries(), handle.gather_all_index_keys()
        arrays += [*window, *entries, *keys]
        arrays += [handle.gather_rows(role).rows for role, _ in layer.components()]
        arrays += handle.gather_entries(np.tile(np.array([0, 1, 5, -1], np.int32), (tokens, 1)))
        if ready:
            q = np.ones((tokens, 2, layer.index_keys.dim), np.float32)
            arrays += [handle.index_scores(q, np.ones((tokens, 2), np.float32))]
            arrays += handle.attend(np.ones((tokens, 2, dim), np.float32))
    return [kvcore.to_numpy(array).astype(np.float64) for array in arrays]


@pytest.mark.parametrize("pattern", [pytest.param(pattern, id=name) for name, pattern in PATTERNS.items()])
@pytest.mark.parametrize("layout", ["packed", "planar", "tpu_tile"])
def test_pool_16_stale_storage_changes_nothing(backend, pattern, layout):
    clean, dirty = observe(backend, b"\0", layout), observe(backend, pattern, layout)
    assert len(clean) == len(dirty) > 100
    for expected, found in zip(clean, dirty, strict=True):
        assert not np.isnan(found).any()
        assert not (np.abs(found[np.isfinite(found)]) > 2**32).any()
        np.testing.assert_array_equal(found, expected)
