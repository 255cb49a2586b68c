"""The verbs inside the caller's own jit: donation, scan, one trace, no copies, memory that stays flat."""

from functools import partial, wraps

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcore
from kvcore.errors import ShapeError
from kvcore.ops import StepIndex
from kvcore.spec import presets
from tests.jax_pallas import whole_step
from tests.support import scene
from tests.support.backends_under_test import poison


@pytest.mark.parametrize("layout", ["planar", "packed", "tpu_tile"])
def test_one_jitted_step_leaves_the_references_bytes(layout: str, rng: np.random.Generator) -> None:
    reference, cache = whole_step.caches(layout)
    poison(reference), poison(cache)
    traces = []

    @partial(jax.jit, donate_argnums=0)
    def step_once(pools, index, inputs):
        traces.append(index)
        return whole_step.functional(cache.ops, pools, index, inputs)

    a, b = [reference.admit(), cache.admit()], [reference.admit(), cache.admit()]
    for new in ({0: 3, 1: 4}, {1: 4, 0: 1}, {0: 4}, {1: 1, 0: 1}, {0: 4, 1: 4}, {0: 0, 1: 3}):
        inputs = whole_step.given(cache.spec, 10, 6, rng)
        padding = {"pad_tokens": 10, "pad_requests": 3}
        wanted, got = ({(a, b)[number][i]: count for number, count in new.items()} for i in range(2))
        with reference.step(wanted, **padding) as step:
            expected = whole_step.through_handles(step, inputs)
        with cache.step(got, **padding) as step:
            before = cache.pools
            pools, outs = step_once(cache.pools, step.index, inputs)
            assert all(array.is_deleted() for array in before.values())
            cache.pools = pools
        for out, want in zip(outs, expected, strict=True):
            np.testing.assert_allclose(np.asarray(out), want, rtol=1e-5, atol=1e-5)
        for name, pool in reference.pools.items():
            assert kvcore.to_numpy(pool).tobytes() == kvcore.to_numpy(cache.pools[name]).tobytes(), (new, name)
    assert reference.digest() == cache.digest()
    assert len(traces) == 1


def test_a_scan_over_decode_steps_is_one_long_step(rng: np.random.Generator) -> None:
    """Pools as the carry; compression on the way. The reference gets the same rows as one prefill."""
    reference, cache = whole_step.caches()
    steps = 24
    inputs = whole_step.given(cache.spec, 2 * steps, 0, rng)
    plain, jaxed = ({cache_.admit(): steps, cache_.admit(): steps} for cache_ in (reference, cache))

    def in_order(tree):
        """Request by request -> step by step."""
        return jax.tree.map(lambda array: jnp.asarray(array).reshape(2, steps, *array.shape[1:]).swapaxes(0, 1), tree)

    @partial(jax.jit, donate_argnums=0)
    def decode(pools, index, inputs):
        def one(carry, x):
            pools, length = carry
            now = StepIndex(
                length, jnp.arange(2, dtype=jnp.int32), index.slots, length, length + 1, index.block_table, index.stored
            )
            pools, outs = whole_step.functional(cache.ops, pools, now, x, flush=True, closed=2)
            return (pools, length + 1), outs

        return jax.lax.scan(one, (pools, index.starts), inputs)

    with reference.step(plain) as step:
        expected = whole_step.through_handles(step, inputs, flush=True)
    with cache.step(jaxed) as step:
        scanned = [x._replace(entries=None, keys=None) for x in inputs]
        (pools, lengths), outs = decode(cache.pools, step.index, in_order(scanned))
        cache.pools = pools
    assert lengths.tolist() == [steps, steps]
    assert reference.digest() == cache.digest()
    for out, want in zip(outs, expected, strict=True):
        got = np.asarray(out).swapaxes(0, 1).reshape(want.shape)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_thousand_decode_steps_under_one_trace_in_place(rng: np.random.Generator) -> None:
    _, cache = whole_step.caches(max_requests=2, max_tokens=2 * 1024)
    traces = []

    @partial(jax.jit, donate_argnums=0)
    def decode(pools, index, inputs):
        traces.append(index)
        return whole_step.functional(cache.ops, pools, index, inputs, flush=True, closed=2)

    requests = [cache.admit(), cache.admit()]
    inputs = jax.device_put(whole_step.given(cache.spec, 2, 0, rng))
    held: list[tuple[list[int], int]] = []
    for number in range(1000):
        with cache.step(dict.fromkeys(requests, 1)) as step:
            cache.pools, outs = decode(cache.pools, step.index, inputs)
        if number in (500, 999):
            jax.block_until_ready(outs)
            held.append((whole_step.pointers(cache.pools), len(jax.live_arrays())))
    assert len(traces) == 1
    assert requests[0].length == 1000
    first, last = held
    assert first[0] == last[0], "the pools have moved"
    assert first[1] == last[1], "arrays pile up"


def test_the_compiled_step_aliases_every_pool_and_holds_no_second_one() -> None:
    _, cache = whole_step.caches(max_tokens=64 * 1024)
    inputs = whole_step.given(cache.spec, 2, 2, np.random.default_rng(0))
    requests = [cache.admit(), cache.admit()]
    with cache.step(dict.fromkeys(requests, 1)) as step:
        decode = jax.jit(partial(whole_step.functional, cache.ops), donate_argnums=0)
        memory = decode.lower(cache.pools, step.index, inputs).compile().memory_analysis()
        step.abort()
    assert memory.alias_size_in_bytes >= cache.nbytes
    assert memory.temp_size_in_bytes < cache.nbytes // 8


def test_eager_verbs_write_in_place_and_are_traced_once_for_layers_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcore.backends.jax_pallas import JaxOps, window
    from kvcore.backends.jax_pallas.verbs import writer

    traces = []

    @wraps(window.append_window)
    def append_window(layer, *arrays, **named):
        traces.append(layer)
        return window.append_window(layer, *arrays, **named)

    monkeypatch.setattr(JaxOps, "append_window", writer(append_window, "window"))
    spec = presets.deepseek_v4_flash_tiny(block_tokens=16)
    cache = kvcore.create_cache(spec, backend="jax_pallas", max_requests=2, max_tokens=256, max_draft_tokens=1)
    request = cache.admit()
    before = whole_step.pointers(cache.pools)
    rows = np.ones((1, 512), np.float32)
    for _ in range(20):
        step = cache.step({request: 1})
        for number in range(len(spec.layers)):
            step.layer(number).append_window(rows)
        cache.pools = cache.pools
        step.commit()
    assert len(traces) == 1
    assert whole_step.pointers(cache.pools) == before


def test_pools_are_a_pytree_with_names() -> None:
    _, cache = whole_step.caches()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(cache.pools)[0]]
    assert paths == [f"['{name}']" for name in cache.pools]
    doubled = jax.tree.map(lambda array: array, cache.pools)
    assert type(doubled) is type(cache.pools)
    assert list(doubled) == list(cache.pools)
    shapes = jax.eval_shape(lambda pools: pools, cache.pools)
    assert {name: shape.shape for name, shape in shapes.items()} == {k: v.shape for k, v in cache.pools.items()}


def test_pools_of_another_framework_are_refused() -> None:
    cache = kvcore.create_cache(presets.deepseek_v4_flash_tiny(), backend="jax_pallas", max_requests=2, max_tokens=64)
    before = cache.pools
    with pytest.raises(ShapeError, match="got an array of numpy; allowed: an array of jax"):
        cache.pools = {name: np.zeros(pool.shape, pool.dtype) for name, pool in before.items()}
    assert cache.pools is before


@pytest.mark.sampled
@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
@pytest.mark.parametrize("new", [1, 4])
def test_an_exception_after_functional_verbs_leaves_the_old_rows(new: int, donated: tuple[int, ...]) -> None:
    """Pools that were not given away are there still; those that were are put together again."""
    cache = scene.create([scene.ring(5)], "jax_pallas")
    request = cache.admit()
    scene.write(cache, {request: range(12)})
    before = cache.digest()
    rows = cache.asarray(np.full((new, scene.DIM), 99, np.float32))

    @partial(jax.jit, donate_argnums=donated)
    def append(pools, index):
        return cache.ops.append_window(pools, 0, index, rows)

    step = cache.step({request: new})
    cache.pools = append(cache.pools, step.index)
    step.abort()
    assert scene.read(cache, scene.window_of, request) == [scene.numbered(7, 11)]
    assert cache.digest() == before
