"""A layer's step in one call stores and answers what its verbs do one by one."""

import numpy as np
import pytest
import torch

import kvcore
from kvcore.errors import ShapeError, StepError
from kvcore.spec import Rope, presets
from tests.support import scene
from tests.support.backends_under_test import BACKENDS

SPEC = presets.deepseek_v4_flash_tiny(draft=False)
ROPE = Rope(dim=8, theta=160000.0)
STEPS = 3, 1, 1, 2, 1, 1, 1


@pytest.fixture(autouse=True)
def recording_nothing():
    with torch.no_grad():
        yield


def tensors(found):
    """The same as tensors."""
    one = torch.from_numpy
    return {name: tuple(map(one, each)) if isinstance(each, tuple) else one(each) for name, each in found.items()}


PLAIN = {"rotate": True, "window_norm_weight": None, "norm_weight": None, "index_norm_weight": None}


def by_verbs(handle, q, window, tail=None, index_tail=None, index=None, *, rotate, rope=ROPE, **norms):
    handle.append_window(window, **({"rope": rope, "norm_weight": norms["window_norm_weight"]} if rotate else {}))
    if tail is not None:
        handle.append_tail(*tail)
    if index_tail is not None:
        handle.append_index_tail(*index_tail)
    if tail is not None:
        handle.flush(norms["norm_weight"], 1e-6, rope, norms["index_norm_weight"])
    selected = None if index is None else handle.index_select(*index)
    return handle.attend(q, selected, np.ones(2, np.float32), 0.5, rope=rope)


@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_in_one_call_is_its_verbs(backend, rotate, drafts):
    caches = [
        kvcore.create_cache(SPEC, backend=backend, max_requests=2, max_tokens=128, max_draft_tokens=drafts)
        for _ in range(2)
    ]
    held = [(cache.admit(), cache.admit()) for cache in caches]
    random = np.random.default_rng(0)
    for number, new in enumerate(STEPS):
        before = cache_digests(caches, held)
        steps = [cache.step({first: new, second: 1}) for cache, (first, second) in zip(caches, held, strict=True)]
        for layer, spec in enumerate(SPEC.layers):
            rows = scene.given_to(spec, random, new + 1)
            norms = {
                "window_norm_weight": np.ones(spec.window.dim, np.float32) if rotate else None,
                "norm_weight": np.ones(spec.entries.dim, np.float32) if spec.tail else None,
                "index_norm_weight": np.ones(spec.index_keys.dim, np.float32) if spec.index_tail else None,
            }
            want = by_verbs(steps[0].layer(layer), **rows, rotate=rotate, **norms)
            how = {"rope": ROPE, "sink": np.ones(2, np.float32), "scale": 0.5}
            got = steps[1].layer(layer).decode(**rows, rotate=rotate, **norms, **how)
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(kvcore.to_numpy(one), kvcore.to_numpy(other))
        for step in steps:
            step.abort() if number == 3 else step.commit()
        after = cache_digests(caches, held)
        assert after[0] == after[1]
        assert (after == before) == (number == 3)


def cache_digests(caches, held):
    return [cache.digest(requests) for cache, requests in zip(caches, held, strict=True)]


def test_what_the_verbs_refuse_is_refused():
    cache = kvcore.create_cache(SPEC, backend="reference", max_requests=1, max_tokens=64)
    rows = scene.given_to(SPEC.layers[0], np.random.default_rng(0), 1)
    with cache.step({cache.admit(): 1}) as step:
        handle = step.layer(0)
        with pytest.raises(ShapeError, match="decode: rotate"):
            handle.decode(**rows, rotate=True)
        with pytest.raises(StepError, match="tail"):
            handle.decode(**rows, tail=(rows["window"], rows["window"]))
        with pytest.raises(StepError, match="second append"):
            handle.decode(**rows)
        step.abort()
    with pytest.raises(StepError, match="ended"):
        handle.decode(**rows)
