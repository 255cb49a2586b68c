"""Arrays of JAX in an engine's layout: read where they lie, and never written to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcore
from kvcore.adoption import IndexMap, describe
from kvcore.errors import BackendError
from kvcore.spec import CacheSpec, Conv, LayerSpec, Window
from tests.support.engine import SPEC, Engine

LAYOUT = "NL_X_NB_TWO_BS_NH_HS"


def test_arrays_of_jax_are_read_and_not_written():
    engine = Engine(LAYOUT)
    engine.write([7, 3], 0, 20)
    arrays = [jnp.asarray(tensor) for tensor in engine.tensors]
    cache = kvcore.adopt(SPEC, arrays, layout=LAYOUT)
    same = kvcore.adopt(SPEC, engine.tensors, layout=LAYOUT)
    assert np.shares_memory(cache.pools["0.kv.key_codes"], np.asarray(arrays[0]))
    request, twin = (one.admit(blocks=[7, 3, 5], length=20) for one in (cache, same))
    assert cache.digest([request]) == same.digest([twin])
    cache.compare(request, engine.read)
    for one, mine in ((cache, request), (same, twin)):
        with one.step({mine: 0}) as step:
            keys, values = (np.asarray(rows) for rows in step.layer(1).gather_kv()[:2])
        assert (keys[0, :20] == np.stack([engine.at(1, 0, [7, 3][p // 16], p % 16) for p in range(20)])).all()
    blob = cache.export_request(request)
    into = cache.admit(blocks=[1, 2])
    for write in (lambda: cache.step({request: 1}), lambda: cache.import_request(blob, into=into)):
        with pytest.raises(BackendError, match="verbs that read"):
            write()
    assert (request.length, values.shape[-1]) == (20, 8)
    # Into a cache of JAX's own, and the owner may go on with its arrays, donated or not.
    own = kvcore.create_cache(SPEC, backend="jax_pallas", max_requests=1, max_tokens=64)
    assert own.digest([own.import_request(blob)]) == cache.digest([request])
    before = cache.digest([request])
    given = jax.jit(lambda array: array + 1, donate_argnums=0)(arrays[0])
    assert cache.digest([request]) == before
    assert float(given.max()) == float(engine.tensors[0].max() + 1)


def test_rings_of_jax_are_read():
    windows = CacheSpec(layers=[LayerSpec(window=Window(dim=16, window=8, format="fp32"))])
    rings = np.random.default_rng(0).standard_normal((4, 8, 16)).astype(np.float32)
    layout = {"window": "rings NL_X_NB_BS_HS"}
    cache = kvcore.adopt(windows, [jnp.asarray(rings)], layout=layout, max_requests=4)
    request = cache.admit(slot=2, length=11)
    with cache.step({request: 0}) as step:
        rows, positions = step.layer(0).gather_window()
    assert {int(at) for at in positions[0] if at >= 0} <= set(range(3, 11))
    for row, at in zip(rows[0], positions[0], strict=True):
        assert at < 0 or (row == rings[2, at % 8]).all()
    for write in (lambda: cache.step({request: 1}), lambda: cache.fork(request)):
        with pytest.raises(BackendError, match="verbs that read"):
            write()
    assert (cache.free_slots, len(cache.requests)) == (3, 1)


def test_inputs_that_are_shifted_along_do_not_go_back():
    """A shorter request's lie elsewhere, where nobody may write."""
    spec = CacheSpec(layers=[LayerSpec(conv=Conv(dim=5, width=4, format="fp32"))])
    inputs = jnp.asarray(np.random.default_rng(0).standard_normal((4, 5, 3)).astype(np.float32))
    said = IndexMap(name="slot", of="slot", count=4, first=1)
    descriptor = describe(spec, [inputs], {"conv": "rings slot NL_X_NB_HS_BS"}, maps=[said])
    cache = kvcore.adopt(spec, [inputs], layout=descriptor, maps={"slot": np.array([0, 3, 0, 2])}, max_requests=4)
    request = cache.admit(slot=3, length=2)
    before = cache.digest([request])
    with pytest.raises(BackendError, match="truncate into arrays of JAX"):
        cache.truncate(request, 1)
    assert (request.length, cache.digest([request])) == (2, before)
    cache.truncate(request, 2)
