"""Verbs of a handle that do what several do: every role's rows at once, score and select in one go."""

from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.errors import KvcoreError, NonFiniteError, ShapeError, StepError
from kvcore.spec import CacheSpec
from tests.support import scene

SPEC = CacheSpec(layers=[scene.compressed(4), scene.classic(heads=1)], block_tokens=8)


def rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def latent(tokens: int) -> dict[str, Any]:
    tails = {role: (rows(tokens, 16), rows(tokens, 16)) for role in ("tail", "index_tail")}
    return {"window": rows(tokens, scene.DIM), **tails}


def classic(tokens: int) -> dict[str, Any]:
    keys, values = SPEC.layers[1].kv.parts
    return {"kv": tuple(rows(tokens, 1, part.format.dim) for part in (keys, values))}


def create(backend: str, **options: Any) -> tuple[kvcore.Cache, kvcore.Request]:
    cache = scene.create(SPEC, backend, max_requests=2, max_tokens=128, **options)
    return cache, cache.admit()


def test_all_roles_at_once_are_the_verbs_one_by_one(backend: str) -> None:
    digests = []
    for at_once in (True, False):
        cache, request = create(backend)
        for tokens in (9, 1, 30):
            with cache.step({request: tokens}) as step:
                for number, given in enumerate((latent(tokens), classic(tokens))):
                    layer = step.layer(number)
                    if at_once:
                        layer.append(**given)
                        continue
                    for role, values in given.items():
                        getattr(layer, f"append_{role}")(*values if isinstance(values, tuple) else (values,))
                step.layer(0).flush()
        digests.append(cache.digest())
    assert digests[0] == digests[1]


BAD = {
    "a shape": (
        ShapeError,
        {"index_tail": (rows(3, 16), rows(3, 15))},
        r"append_index_tail: score: got shape \[3, 15\]",
    ),
    "a dtype": (ShapeError, {"tail": (rows(3, 16).astype(np.float64),) * 2}, "append_tail: kv: got dtype float64"),
    "one of two": (ShapeError, {"index_tail": rows(3, 16)}, "append_index_tail: index_tail: got 1 arrays; allowed: 2"),
    "NaN": (NonFiniteError, {"index_tail": (rows(3, 16) * np.nan,) * 2}, "append_index_tail: kv"),
    "no such role": (StepError, {"kv": (rows(3, 1, 4),) * 2}, "role 'kv'"),
    "no rows of a step": (StepError, {"entries": rows(0, 8)}, r"append\(entries=\.\.\.\)"),
}


@pytest.mark.parametrize("what", BAD)
def test_one_that_is_refused_refuses_all(backend: str, what: str) -> None:
    error, bad, text = BAD[what]
    cache, request = create(backend, check=True)
    with cache.step({request: 3}) as step:
        with pytest.raises(error, match=text):
            step.layer(0).append(**{**latent(3), **bad})
        # Nothing was taken, so that all of it can be given again.
        step.layer(0).append(**latent(3))
        step.layer(0).flush()
        step.layer(1).append(**classic(3))
        before = step.layer(0).digest()
        with pytest.raises(StepError, match="a second append to tail"):
            step.layer(0).append(tail=(rows(3, 16), rows(3, 16)))
        assert step.layer(0).digest() == before


def test_what_was_appended_before_is_not_appended_again(backend: str) -> None:
    cache, request = create(backend)
    with cache.step({request: 3}) as step:
        step.layer(0).append_index_tail(*latent(3)["index_tail"])
        with pytest.raises(StepError, match="a second append to index_tail"):
            step.layer(0).append(**latent(3))
        step.layer(0).append_window(rows(3, scene.DIM))
        step.abort()


@pytest.mark.parametrize("k", [None, 1, 3, 40])
def test_score_and_select_in_one_go(backend: str, k: int | None) -> None:
    cache, request = create(backend)
    with cache.step({request: 30}) as step:
        layer = step.layer(0)
        layer.append(**latent(30))
        q, weights = rows(30, 2, scene.DIM), rows(30, 2)
        with pytest.raises(StepError, match="index_select while entries that close in this step are not stored"):
            layer.index_select(q, weights)
        layer.flush()
        step.layer(1).append(**classic(30))
        found = kvcore.to_numpy(layer.index_select(q, weights, k))
        wanted = kvcore.to_numpy(layer.select(layer.index_scores(q, weights), 4 if k is None else k))
        assert found.shape == (30, SPEC.layers[0].index_keys.topk if k is None else k)
        assert np.array_equal(found, wanted)
        assert (found[-1, : min(found.shape[1], 7)] >= 0).all()
        for bad in ({"q": q[:, :, :-1]}, {"weights": weights[:, :1]}, {"k": -1}, {"k": True}):
            with pytest.raises(KvcoreError, match="index_select: "):
                layer.index_select(**{"q": q, "weights": weights, **bad})
