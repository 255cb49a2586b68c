"""What keeps something beyond a trace is refused inside one, and nothing has happened; then it is done right."""

# ruff: noqa: ARG005 - all calls take a cache, its step and what makes rows, whatever they need

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kvcore.errors import ShapeError, StepError
from kvcore.ops import StepIndex
from kvcore.pools import Pools
from tests.support import functional_cases as cases

TOKENS = 4


def floats(*shape: int) -> jax.Array:
    return jnp.asarray(cases.floats(*shape))


def fill(step: Any) -> None:
    """All that the step is to store."""
    step.layer(0).append_window(floats(TOKENS, 16))
    step.layer(0).append_tail(floats(TOKENS, 32), floats(TOKENS, 32))
    step.layer(0).append_index_tail(floats(TOKENS, 64), floats(TOKENS, 64))
    step.layer(0).flush()
    for layer in (cases.PAGED, cases.RING, cases.SLOT):
        step.layer(layer).append_kv(floats(TOKENS, 2, 16), floats(TOKENS, 2, 16))
    step.layer(cases.PLAIN).append_window(floats(TOKENS, 16))


VERBS = {
    "append_window": lambda cache, step, x: step.layer(cases.PLAIN).append_window(x(TOKENS, 16)),
    "append_tail": lambda cache, step, x: step.layer(0).append_tail(x(TOKENS, 32), x(TOKENS, 32)),
    "append_index_tail": lambda cache, step, x: step.layer(0).append_index_tail(x(TOKENS, 64), x(TOKENS, 64)),
    "append_kv": lambda cache, step, x: step.layer(cases.PAGED).append_kv(x(TOKENS, 2, 16), x(TOKENS, 2, 16)),
    "append_kv, waiting": lambda cache, step, x: step.layer(cases.RING).append_kv(x(TOKENS, 2, 16), x(TOKENS, 2, 16)),
    "append_kv_view": lambda cache, step, x: step.layer(cases.SLOT).append_kv_view(x(TOKENS, 2, 16), x(TOKENS, 2, 16)),
    "store_entries": lambda cache, step, x: step.layer(0).store_entries(x(2, 16), x(2, 32)),
    "flush": lambda cache, step, x: step.layer(0).flush(),
    "commit": lambda cache, step, x: step.commit(),
    "admit": lambda cache, step, x: cache.admit(),
    "step.index": lambda cache, step, x: step.index,
    "cache.pools": lambda cache, step, x: setattr(cache, "pools", cache.pools),
}
WAYS = {
    "jit": lambda act: jax.jit(lambda number: act(lambda *shape: floats(*shape) * number))(1.0),
    "jit, of arrays from outside": lambda act: jax.jit(lambda: act(lambda *shape: MADE[shape]))(),
    "eval_shape": lambda act: jax.eval_shape(lambda number: act(lambda *shape: floats(*shape) * number), 1.0),
}
SHAPES = [(TOKENS, 16), (TOKENS, 32), (TOKENS, 64), (TOKENS, 2, 16), (2, 16), (2, 32)]
MADE = {shape: floats(*shape) for shape in SHAPES}


@pytest.fixture(scope="module")
def right() -> int:
    cache = cases.create("jax_pallas")
    with cache.step({cache.admit(): TOKENS}) as step:
        fill(step)
    return cache.digest()


@pytest.mark.sampled
@pytest.mark.parametrize("check", [False, True], ids=["fast", "checked"])
@pytest.mark.parametrize("way", WAYS)
def test_what_changes_a_cache_is_refused_in_a_trace(way: str, check: bool, right: int) -> None:
    cache = cases.create("jax_pallas", check=check)
    with cache.step({cache.admit(): TOKENS}) as step:
        before = dict(cache.pools)
        for name, verb in VERBS.items():
            with pytest.raises(StepError, match=r"JAX traces(.|\n)*cache\.ops"):
                WAYS[way](lambda x, verb=verb: verb(cache, step, x) and None)
            assert all(array is before[pool] for pool, array in cache.pools.items()), name
        fill(step)
    assert cache.digest() == right
    assert not any(isinstance(array, jax.core.Tracer) for array in cache.pools.values())


KEPT_ROWS = ("append_window", "append_tail", "append_kv", "append_kv, waiting", "append_kv_view", "store_entries")


@pytest.mark.parametrize("check", [False, True], ids=["fast", "checked"])
def test_rows_that_are_mapped_or_differentiated_are_refused_and_others_are_not(check: bool, right: int) -> None:
    cache = cases.create("jax_pallas", check=check)
    with cache.step({cache.admit(): TOKENS}) as step:
        for name in KEPT_ROWS:

            def keep(number: jax.Array, verb: Any = VERBS[name]) -> jax.Array:
                verb(cache, step, lambda *shape: floats(*shape) * number)
                return number

            with pytest.raises(StepError, match="JAX traces"):
                jax.vmap(keep)(jnp.ones(2))
            with pytest.raises(ShapeError, match="a differentiated array"):
                jax.grad(keep)(1.0)
        jax.grad(lambda number: [number, fill(step)][0])(1.0)
    assert cache.digest() == right


def test_a_refused_append_may_be_followed_by_a_right_one(right: int) -> None:
    cache = cases.create("jax_pallas")
    with cache.step({cache.admit(): TOKENS}) as step:
        for wrong in (floats(TOKENS, 17), floats(3, 16), floats(TOKENS, 16).astype(jnp.int32), None):
            for layer in (0, cases.PLAIN):
                with pytest.raises(ShapeError):
                    step.layer(layer).append_window(wrong)
        for layer in (cases.PAGED, cases.RING, cases.SLOT):
            with pytest.raises(ShapeError):
                step.layer(layer).append_kv(floats(TOKENS, 2, 16), floats(TOKENS, 2, 15))
        fill(step)
    assert cache.digest() == right


def test_functional_verbs_are_what_a_trace_is_for() -> None:
    cache = cases.create("jax_pallas")

    @jax.jit
    def stored(pools: Pools, index: StepIndex, rows: jax.Array) -> Pools:
        return cache.ops.append_window(pools, cases.PLAIN, index, rows)

    with cache.step({cache.admit(): TOKENS}) as step:
        cache.pools = stored(cache.pools, step.index, floats(TOKENS, 16))
        found = step.layer(cases.PLAIN).gather_window().values
        step.abort()
    assert found.shape[-1] == 16


READERS = {
    "gather_window": lambda step, x: step.layer(cases.PLAIN).gather_window(),
    "gather_all_entries": lambda step, x: step.layer(0).gather_all_entries(),
    "gather_kv": lambda step, x: step.layer(cases.PAGED).gather_kv(),
    "gather_rows": lambda step, x: step.layer(0).gather_rows("tail"),
    "attend": lambda step, x: step.layer(cases.PAGED).attend(x(TOKENS, 2, 16)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_is_read_in_a_trace_is_no_constant_of_it(way: str, right: int) -> None:
    cache = cases.create("jax_pallas")
    with cache.step({cache.admit(): TOKENS}) as step:
        fill(step)
        for name, read in READERS.items():
            with pytest.raises(StepError, match=r"a layer's rows inside a function that JAX traces(.|\n)*cache\.ops"):
                WAYS[way](lambda x, read=read: read(step, x))
            assert read(step, lambda *shape: floats(*shape)) is not None, name
    assert cache.digest() == right
