"""Python's ways to copy an object: refused for what lives in a cache, in words that say which verb copies it."""

import copy
import pickle

import numpy as np
import pytest

from kvcore.errors import RequestError, SnapshotError, StepError
from kvcore.spec import presets

WAYS = [copy.copy, copy.deepcopy, pickle.dumps]


@pytest.mark.parametrize("way", WAYS)
def test_a_cache_and_its_requests_are_copied_by_its_verbs_alone(build, way):
    cache = build(presets.classic(layers=1, key_heads=1, key_dim=8, block_tokens=16), max_requests=2, max_tokens=32)
    request = cache.admit()
    with pytest.raises(SnapshotError, match=r"kvcore\.load"):
        way(cache)
    with pytest.raises(RequestError, match=r"cache\.fork"):
        way(request)
    assert cache.requests == (request,)
    cache.release(cache.fork(request))


@pytest.mark.parametrize("way", WAYS)
def test_a_step_and_its_layers_are_not_copied(build, way):
    cache = build(presets.classic(layers=1, key_heads=1, key_dim=8, block_tokens=16), max_requests=1, max_tokens=16)
    request = cache.admit()
    rows = cache.asarray(np.ones((1, 1, 8), np.float32))
    with cache.step({request: 1}) as step:
        layer = step.layer(0)
        for found in (step, layer):
            with pytest.raises(StepError, match="pickle or copy"):
                way(found)
        layer.append_kv(rows, rows)
    assert request.length == 1
