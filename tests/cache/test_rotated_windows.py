"""Window rows that are normed and rotated on their way into the ring, in steps of any length."""

from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.errors import KvcoreError, ShapeError
from kvcore.spec import CacheSpec, Rope
from tests.support import scene

SPEC = CacheSpec(layers=[scene.ring(5), scene.ring(5, format="bf16")], block_tokens=8)
ROPE = Rope(dim=4, theta=1e4)
RANDOM = np.random.default_rng(3)
ROWS = RANDOM.standard_normal((2, 40, scene.DIM)).astype(np.float32)
QUERIES = RANDOM.standard_normal((40, 2, scene.DIM)).astype(np.float32)
WEIGHT = np.linspace(0.5, 2, scene.DIM, dtype=np.float32)
NORMS: dict[str, dict[str, Any]] = {"rotated": {}, "normed": {"norm_weight": WEIGHT, "eps": 0.03}}


def told(backend: str, splits: tuple[int, ...], norm: dict[str, Any], *, by_hand: bool) -> list[Any]:
    """What a request reads of itself as it is written step by step: outputs of all queries, rows at the end."""
    cache = scene.create(SPEC, backend, max_requests=1, max_tokens=64, max_draft_tokens=1)
    request, outs = cache.admit(), [[], []]
    for new in splits:
        start = request.length
        with cache.step({request: new}) as step:
            for layer in (0, 1):
                rows = ROWS[layer, start : start + new]
                if by_hand:
                    rotated = cache.ops.rotated_rows(layer, step.index, rows, rope=ROPE, **norm)
                    step.layer(layer).append_window(rotated)
                else:
                    step.layer(layer).append_window(rows, rope=ROPE, **norm)
                outs[layer].append(kvcore.to_numpy(step.layer(layer).attend(QUERIES[start : start + new]).out))
    with cache.step({request: 0}) as step:
        rows = [kvcore.to_numpy(step.layer(layer).gather_rows("window").rows).tolist() for layer in (0, 1)]
    return [np.concatenate(out) for out in outs] + [rows, cache.digest()]


@pytest.mark.parametrize("how", NORMS)
@pytest.mark.parametrize("splits", [(1,) * 7, (17, 1, 2, 1), (3, 2, 9)], ids=["decode", "a prefill first", "both"])
def test_rotating_on_the_way_is_rotating_before(backend: str, splits: tuple[int, ...], how: str) -> None:
    found, wanted = (told(backend, splits, NORMS[how], by_hand=by_hand) for by_hand in (False, True))
    assert found[2:] == wanted[2:]
    for out, want in zip(found[:2], wanted[:2], strict=True):
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", NORMS)
def test_splits_do_not_matter(backend: str, how: str) -> None:
    once = told(backend, (21,), NORMS[how], by_hand=False)
    for splits in ((1,) * 21, (2,) * 10 + (1,), (9, 12)):
        assert told(backend, splits, NORMS[how], by_hand=False)[2:] == once[2:]


def test_an_abort_puts_back_what_was_there(backend: str) -> None:
    cache = scene.create(SPEC, backend, max_requests=1, max_tokens=64, max_draft_tokens=1)
    request = cache.admit()
    for new in (11, 1):
        with cache.step({request: new}) as step:
            for layer in (0, 1):
                step.layer(layer).append_window(ROWS[layer, :new], rope=ROPE)
    before = cache.digest()
    for new in (1, 9):
        step = cache.step({request: new})
        for layer in (0, 1):
            step.layer(layer).append_window(ROWS[layer, :new], rope=ROPE)
        step.abort()
        assert cache.digest() == before


def test_what_is_refused(backend: str) -> None:
    cache = scene.create(SPEC, backend, max_requests=1, max_tokens=64)
    with cache.step({cache.admit(): 2}) as step:
        layer = step.layer(0)
        with pytest.raises(ShapeError, match="append_window: norm_weight: got a norm without a rotation"):
            layer.append_window(ROWS[0, :2], norm_weight=WEIGHT)
        for bad in (
            {"rope": Rope(dim=16, theta=1e4)},
            {"rope": ROPE, "norm_weight": WEIGHT[:3]},
            {"rope": ROPE, "norm_weight": WEIGHT, "eps": float("nan")},
            {"rope": "yes"},
        ):
            with pytest.raises(KvcoreError, match="append_window: "):
                layer.append_window(ROWS[0, :2], **bad)
        layer.append_window(ROWS[0, :2], rope=ROPE)
        step.abort()
