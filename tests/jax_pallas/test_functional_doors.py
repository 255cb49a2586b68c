"""What functional verbs take and refuse on JAX, eagerly and while they are traced."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import sparse

from kvcore.errors import ShapeError
from tests.support import functional_cases as cases
from tests.support import functional_checks

BACKEND = "jax_pallas"
CHECKS = (
    "kinds_of_floats",
    "kinds_of_integers", "no_integers", "units_out_of_range", "taken_out_of_range", "index_of_another_cache",
    "index_by_hand", "pools_of_another_cache", "unsized_formats", "absent_layers", "meaningful_numpy",
)  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("sizes", [(0, 0), (2, 3)], ids=str)
@pytest.mark.parametrize("step", ["no requests", "no tokens", "one of two has some"])
def test_zero_sizes_answer_as_the_reference(step: str, sizes: tuple[int, int]) -> None:
    functional_checks.zero_sizes(BACKEND, (sizes,), step)


@pytest.mark.parametrize("check", CHECKS)
def test_jax_takes_and_refuses_what_the_others_do(check: str) -> None:
    getattr(functional_checks, check)(BACKEND)


def test_an_index_is_a_pytree_of_its_arrays_and_says_whose_it_is_in_a_trace() -> None:
    """One trace for all steps of a cache; the other cache's index is refused while it is traced."""
    cache, other = cases.create(BACKEND), cases.create(BACKEND, block_tokens=8)
    traces = []

    @jax.jit
    def append(pools, index, rows):
        traces.append(index)
        return cache.ops.append_window(pools, cases.PLAIN, index, rows)

    request = cache.admit()
    for _ in range(3):
        with cache.step({request: 2}) as step:
            assert len(jax.tree.leaves(step.index)) == len(step.index.arrays) == 7
            append(cache.ops.allocate(), step.index, cases.floats(2, 16))
            step.abort()
    assert len(traces) == 1
    assert traces[0].paging == step.index.paging
    with other.step({other.admit(): 2}) as step:
        with pytest.raises(ShapeError, match="the cache whose step it is"):
            append(cache.ops.allocate(), step.index, cases.floats(2, 16))
        step.abort()


def test_slots_that_are_traced_are_taken_as_they_are() -> None:
    cache = cases.create(BACKEND)
    copied = jax.jit(cache.ops.copy_slots)(cache.ops.allocate(), jnp.array([0]), jnp.array([1]))
    assert set(copied) == set(cache.pools)


def test_sparse_arrays_are_refused_with_advice_that_works() -> None:
    cache = cases.create(BACKEND)
    values = sparse.BCOO.fromdense(jnp.asarray(cases.floats(2, 16)))
    with cache.step({cache.admit(): 2}) as step:
        with pytest.raises(ShapeError) as refused:
            cache.ops.append_window(cache.ops.allocate(), 0, step.index, values)
        assert "todense" in refused.value.hint
        cache.ops.append_window(cache.ops.allocate(), 0, step.index, values.todense())
        step.abort()
