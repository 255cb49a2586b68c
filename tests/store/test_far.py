"""Entries that stay in the host's memory until a step picks them."""

import numpy as np
import pytest

import kvcore
from kvcore import store as stores
from kvcore.errors import RequestError, ShapeError, SpecError, StepError
from kvcore.spec import CacheSpec, Entries, IndexKeys, LayerSpec
from tests.support import far, stories
from tests.support.far import SAVED, SPEC, TOKENS


def test_steps_give_what_they_give_where_all_rows_are_there(backend):
    far.check(backend)


@pytest.fixture
def scene(backend):
    cache = stories.create(SPEC, backend)
    return cache, stores.load(far.saved(), cache, TOKENS[:SAVED], far=True)


def test_nothing_is_read_before_it_came(scene):
    cache, request = scene
    q = np.ones((1, 2, 8), np.float32)
    picks = np.array([[0, 3]])
    with cache.step({request: 1}) as step:
        handle = step.layer(0)
        stories.feed_layer(handle, SPEC.layers[0], 0, [1], kvcore.to_numpy(step.positions))
        for reads in (
            lambda: handle.attend(q, picks),
            lambda: handle.attend(q),
            lambda: handle.gather_entries(picks),
            handle.gather_all_entries,
            handle.entries_view,
            handle.digest,
            lambda: handle.gather_rows("entries"),
            lambda: step.index,
        ):
            with pytest.raises(StepError, match="host's memory"):
                reads()
        handle.fetch(picks)
        with pytest.raises(StepError, match="not fetched"):
            handle.attend(q, picks.copy())
        # Others than were named are not read, whoever changes the array.
        first = kvcore.to_numpy(handle.attend(q, picks).out)
        picks[:] = 17
        assert np.array_equal(first, kvcore.to_numpy(handle.attend(q, picks).out))
        # Index keys and windows are there.
        handle.gather_all_index_keys()
        handle.gather_window()
        step.abort()


def test_what_needs_all_rows_is_refused_until_they_are_there(scene, tmp_path):
    cache, request = scene
    for verb in (
        lambda: cache.digest([request]),
        lambda: cache.export_request(request),
        lambda: cache.save(tmp_path / "cache.kv", requests=[request]),
        lambda: cache.fork(request),
        lambda: stores.save(far.saved(), cache, request, TOKENS),
    ):
        with pytest.raises(RequestError, match="host's memory"):
            verb()
    with pytest.raises(ShapeError):
        stores.bring(cache, request, -1)
    before = stores.bring(cache, request, 0)
    assert stores.bring(cache, request, 1) == before - cache.plan.region(0, "entries")[0].format.row
    assert stores.bring(cache, request) == 0
    assert cache.digest([request]) == stories.retell("reference", SPEC, TOKENS[:SAVED])
    assert (stores.bring(cache, request), cache.fork(request).length) == (0, SAVED)
    cache.release(request)
    with pytest.raises(RequestError):
        stores.bring(cache, request)


def test_rows_of_later_steps_are_not_those_that_were_left_behind(backend):
    entries, keys = Entries(dim=8, ratio=1, format="fp32"), IndexKeys(dim=8, ratio=1, heads=2, topk=4, format="fp32")
    spec = CacheSpec(layers=[LayerSpec(entries=entries, index_keys=keys)], block_tokens=16)
    cache = stories.create(spec, backend)
    request = stores.load(far.saved(spec=spec), cache, TOKENS[:SAVED], far=True)
    cache.truncate(request, 40)
    other = [*TOKENS[:40], *range(60)]
    stories.tell(cache, {request: other[40:]})
    with cache.step({request: 1}) as step:
        coming = step.layer(0).fetch(np.array([[39, 40, 2, 50]]))
        assert coming.rows == 2
        coming.wait()
        step.abort()
    stores.bring(cache, request)
    assert cache.digest([request]) == stories.retell("reference", spec, other)


def test_an_abort_leaves_what_came(scene):
    cache, request = scene
    left = stores.bring(cache, request, 0)
    with cache.step({request: 2}) as step:
        coming = step.layer(0).fetch(np.array([[0, -1], [5, 99]]))
        assert coming.rows == 2
        coming.wait()
        coming.wait()
        late = step.layer(2).fetch(np.array([[1, 2], [0, 5]]))
        step.abort()
    with pytest.raises(StepError, match="ended"):
        late.wait()
    assert left - stores.bring(cache, request, 0) == 2 * cache.plan.region(0, "entries")[0].format.row
    stores.bring(cache, request)
    assert cache.digest([request]) == stories.retell("reference", SPEC, TOKENS[:SAVED])


def test_where_all_rows_are_there_nothing_comes(backend):
    cache = stories.create(SPEC, backend)
    request = stores.load(far.saved(), cache, TOKENS[:SAVED])
    with cache.step({request: 1}) as step:
        assert step.layer(0).fetch(np.array([[0, 3]])).rows == 0
        step.abort()
    # The prefix of such a request is found by nobody before it is whole, nor after.
    shared = stories.create(SPEC, backend, prefix="full")
    stores.load(far.saved(), shared, TOKENS[:SAVED], salt=None, far=True)
    assert shared.admit(TOKENS[:SAVED]).cached_tokens == 0
    watched = kvcore.create_cache(SPEC, backend=backend, max_requests=1, max_tokens=256, canary=True)
    with pytest.raises(SpecError, match="canary"):
        stores.load(far.saved(), watched, TOKENS[:SAVED], far=True)


def test_a_request_none_of_whose_rows_are_selected_is_all_there(backend):
    spec = CacheSpec(layers=[LayerSpec(entries=Entries(dim=8, ratio=1, format="fp32"))], block_tokens=16)
    cache = stories.create(spec, backend)
    request = stores.load(far.saved(spec=spec), cache, TOKENS[:SAVED], far=True)
    assert cache.digest([request]) == stories.retell("reference", spec, TOKENS[:SAVED])
