"""Layer views are donated leaf by leaf and written in place: no buffer twice, and no pool copied by a compiled step."""

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvcore.interop.jax import inspect_in_place
from kvcore.interop.jax.views import CacheViews, init_views
from kvcore.spec import CacheSpec
from tests.jax_pallas import view_kinds
from tests.jax_pallas.view_kinds import BATCH, KINDS, appended, classic, copied, given, made, step

RINGS = [kind for kind, layer in KINDS.items() if layer.kv is not None and layer.kv.storage == "ring"]
STEPS = [(kind, 1) for kind in KINDS] + [(kind, 20) for kind in ("full, paged", *RINGS)]


def pools_of(views: CacheViews) -> list[jax.Array]:
    return [pool for view in views for pool in view.pools.values()]


def pointers(views: CacheViews) -> list[int]:
    return [pool.unsafe_buffer_pointer() for pool in pools_of(views)]


def scanned(steps: int, views: CacheViews, arrays: tuple[jax.Array, ...]) -> tuple[CacheViews, jax.Array]:
    return jax.lax.scan(lambda carry, _: step(carry, arrays), views, None, length=steps)


@pytest.mark.parametrize("kind", KINDS)
def test_every_leaf_is_a_buffer_of_its_own_that_a_step_reuses(kind: str) -> None:
    views, twin, new = made(kind, starts=[0, 1]), made(kind, starts=[0, 1]), given(kind, 3)
    run = jax.jit(step, donate_argnums=0)
    for _ in range(2):
        before, leaves = pointers(views), jax.tree.leaves(views)
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
        views, outs = run(views, new)
        assert all(leaf.is_deleted() for leaf in leaves)
        assert pointers(views) == before
        twin, wanted = step(twin, new)
        np.testing.assert_allclose(np.asarray(outs), np.asarray(wanted), rtol=1e-5, atol=1e-5)
    for one, other in zip(jax.tree.leaves(views), jax.tree.leaves(twin), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


def by_insert(views: CacheViews) -> CacheViews:
    return views.insert(views, 0)


def by_pure_form(views: CacheViews) -> CacheViews:
    arrays, metadata = views.to_pure()
    return CacheViews.from_pure(arrays, json.loads(json.dumps(metadata)))


WAYS = {
    "made": lambda views: views,
    "made inside jit": lambda _: jax.jit(lambda: made("sliding", starts=[0, 1]))(),
    "inserted": by_insert,
    "other starts": lambda views: views.insert_starts([0, 0], 0),
    "shorter": lambda views: views.insert_index([2, 2], 0),
    "out of a pure form": by_pure_form,
}


@pytest.mark.parametrize("way", WAYS)
def test_views_are_donated_however_they_came_to_be(way: str) -> None:
    views = step(made("sliding"), given("sliding", 3))[0]
    kept = jax.tree.map(np.array, views)
    found = WAYS[way](views)
    leaves = jax.tree.leaves(found)
    wanted = [np.array(leaf) for leaf in leaves]
    passed = jax.jit(lambda views: jax.tree.map(lambda leaf: leaf + 0, views), donate_argnums=0)(found)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert all(np.array_equal(a, b) for a, b in zip(wanted, jax.tree.leaves(passed), strict=True))
    jax.jit(lambda views: views, donate_argnums=0)(passed)
    if way in ("inserted", "out of a pure form"):
        # Where arrays are new ones, those that they were made of live on.
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(views), strict=True))


def test_the_callers_starts_are_not_donated_with_the_views() -> None:
    starts = jnp.asarray([0, 1], jnp.int32)
    jax.jit(step, donate_argnums=0)(made("full, paged", starts=starts), given("full, paged", 1))
    assert starts.tolist() == [0, 1]


@pytest.mark.sampled
@pytest.mark.parametrize("steps", [1, 3], ids=["a step", "scan"])
@pytest.mark.parametrize(("kind", "new"), STEPS)
def test_a_compiled_step_copies_no_pool(kind: str, new: int, steps: int) -> None:
    """Append, read and attend. A prompt of 20 columns outgrows the rings, which are read before they are written."""
    views = made(kind)
    run = step if steps == 1 else partial(scanned, steps)
    compiled = jax.jit(run, donate_argnums=0).lower(views, given(kind, new)).compile()
    assert not copied(compiled, pools_of(views))
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(pool.nbytes for pool in pools_of(views))


@pytest.mark.parametrize("new", [1, 2], ids=["a token", "more than the ring has to spare"])
def test_an_append_whose_rows_nobody_asks_for_brings_none_together(new: int) -> None:
    spec = CacheSpec(layers=(classic(storage="ring", window=1024),))
    view = init_views(spec, batch=BATCH, max_length=4096)[0]
    pool = min(pool.nbytes for pool in view.pools.values())

    def temporaries(step: Any) -> int:
        return inspect_in_place(step, view, *given("sliding", new)).temporary_bytes

    assert temporaries(lambda view, *rows: view.append(*rows).view) < pool // 4
    assert temporaries(lambda view, *rows: (view.append(*rows).view, jnp.sum(view.append(*rows).keys))) > pool


def test_a_pool_that_is_read_as_it_was_is_seen_to_be_copied() -> None:
    views = made("full, paged")

    def reads_first(views, new):
        found = appended(views[0], new)
        old = jnp.sum(views[0].pools["0.kv.key_heads"].astype(jnp.float32)[:, ::7], axis=1)
        return found.view, view_kinds.attended(found, new[0]), jnp.sort(old)

    compiled = jax.jit(reads_first, donate_argnums=0).lower(views, given("full, paged", 1)).compile()
    assert copied(compiled, views[0].pools)


@pytest.mark.parametrize("kind", RINGS)
def test_prompts_longer_than_a_ring_show_what_short_steps_do(kind: str) -> None:
    """Pieces of every size against one column at a time: outs, rows and masks, on rings that have wrapped."""
    columns = 75
    rows = given(kind, columns)
    run, outs = jax.jit(step), {}
    for size in (1, 5, 25):
        views, found = made(kind), []
        for first in range(0, columns, size):
            views, some = run(views, tuple(array[:, first : first + size] for array in rows))
            found.append(np.asarray(some))
        outs[size] = np.concatenate(found, axis=1)
        assert views[0].lengths.tolist() == [columns] * 2
    for size, out in outs.items():
        np.testing.assert_allclose(out, outs[1], rtol=2e-5, atol=2e-5, err_msg=f"{size} columns at once")


def test_one_trace_serves_three_hundred_steps() -> None:
    traces = []

    @partial(jax.jit, donate_argnums=0)
    def traced(views, new):
        traces.append(views)
        return step(views, new)

    views = made("sliding")
    new, before = given("sliding", 1), pointers(views)
    for _ in range(300):
        views, _ = traced(views, new)
    assert len(traces) == 1
    assert pointers(views) == before
    assert views[0].overflowed.tolist() == [True, True]
