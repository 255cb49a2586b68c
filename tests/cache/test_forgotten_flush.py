"""Entries that close in a step and are never stored: refused under check=True, otherwise NaN, never stale bytes."""

import numpy as np
import pytest

import kvcore
from kvcore.errors import StepError
from kvcore.spec import CacheSpec, Entries, LayerSpec, Tail


def forget(backend: str, *, check: bool) -> kvcore.Cache:
    """A reused block of another request's entries, then a step that appends tail rows and flushes nothing."""
    layer = LayerSpec(tail=Tail(dim=8, ratio=4, overlap=False), entries=Entries(dim=8, ratio=4, format="fp32"))
    cache = kvcore.create_cache(
        CacheSpec(layers=[layer], block_tokens=8), backend=backend, max_requests=1, max_tokens=8, check=check
    )
    other = cache.admit()
    with cache.step({other: 8}) as step:
        step.layer(0).append_tail(np.full((8, 8), 777, np.float32), np.zeros((8, 8), np.float32))
        step.layer(0).flush()
    cache.release(other)
    request = cache.admit()
    with cache.step({request: 6}) as step:
        step.layer(0).append_tail(np.ones((6, 8), np.float32), np.zeros((6, 8), np.float32))
    return cache


def test_forgotten_entries_read_as_nan(backend: str) -> None:
    cache = forget(backend, check=False)
    with cache.step({cache.requests[0]: 0}) as step:
        values = kvcore.to_numpy(step.layer(0).gather_all_entries().values)
    assert values.shape == (1, 1, 8)
    assert np.isnan(values).all()


def test_forgetting_is_refused_under_check(backend: str) -> None:
    with pytest.raises(StepError, match="entries closed but not stored"):
        forget(backend, check=True)


def test_entries_that_wait_are_not_read(backend: str) -> None:
    """What closes in a step is there once it is stored, not before."""
    layer = LayerSpec(tail=Tail(dim=8, ratio=4, overlap=False), entries=Entries(dim=8, ratio=4, format="fp32"))
    cache = kvcore.create_cache(
        CacheSpec(layers=[layer], block_tokens=8), backend=backend, max_requests=1, max_tokens=8
    )
    request = cache.admit()
    with cache.step({request: 4}) as step:
        handle = step.layer(0)
        handle.append_tail(np.ones((4, 8), np.float32), np.zeros((4, 8), np.float32))
        assert kvcore.to_numpy(handle.entries_view().counts).tolist() == [0]
        handle.flush()
        assert kvcore.to_numpy(handle.entries_view().counts).tolist() == [1]
