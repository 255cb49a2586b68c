"""Calls that go straight to their launches, since their like has passed, are refused as ever where they differ.

The tests are those of ``tests.cache.test_known_calls`` over the verbs of a GPU that is not there, whose launches do
nothing.
"""

from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import numpy as np
import torch
from triton.runtime.jit import KernelInterface

import kvcore
from kvcore.backends import torch_triton
from kvcore.backends.torch_triton import replay, run_triton, triton_ops
from kvcore.kernels.triton.device import DeviceProps
from kvcore.ops.arguments import UNKNOWN
from kvcore.pools import Pools
from tests.cache import test_decode
from tests.cache.test_known_calls import (
    CASES,
    WRONG,
    Functional,
    World,
    arguments,
    opened,
    test_a_step_that_has_ended_takes_nothing,
    test_what_differs_is_refused_as_ever,
    test_what_must_come_first_is_asked_each_time,
)
from tests.support import scene

__all__ = [
    "test_a_step_that_has_ended_takes_nothing",
    "test_what_differs_is_refused_as_ever",
    "test_what_must_come_first_is_asked_each_time",
]


class Gone(NamedTuple):
    """Whether each call went straight to its launches, and what was launched: (kernel, grid)."""

    calls: list
    launched: list


@pytest.fixture(autouse=True)
def gone_on(monkeypatch):
    """Whether calls went straight to their launches, one after the other."""
    props, found, again = DeviceProps(90, 132, 227 << 10), [], replay.Replayed.again
    launched = []

    def compiled(kernel, _):
        def run(width, height, *_):
            launched.append((kernel.fn.__name__, width, height))

        return lambda *_, **__: SimpleNamespace(function=0, packed_metadata=0, run=run)

    stream = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    monkeypatch.setattr(KernelInterface, "__getitem__", compiled)
    monkeypatch.setattr(run_triton, "driver", SimpleNamespace(active=stream))
    monkeypatch.setattr(run_triton, "props_of", lambda _: props)
    monkeypatch.setattr(run_triton, "is_native", lambda _: True)
    monkeypatch.setattr(torch_triton, "ops_for", lambda *_: partial(triton_ops.TritonOps, props=props))

    def counted(self, *given):
        answer = again(self, *given)
        found.append(answer is not UNKNOWN)
        return answer

    monkeypatch.setattr(replay.Replayed, "again", counted)
    with torch.no_grad():
        yield Gone(found, launched)


@pytest.mark.parametrize(("name", "verb"), [case for case in CASES if not case[1].endswith("tail")])
def test_what_is_alike_goes_straight_to_its_launches(gone_on, name, verb):
    world = World(name)
    step = opened(world, name, verb)
    world.call(step, verb)
    if not verb.startswith(("append", "flush")):  # which are called once a step
        world.call(step, verb)
    assert gone_on.calls[-1]
    step.abort()


def test_a_parameter_that_asks_for_gradients_is_alike_where_none_are_recorded(gone_on):
    world = World("classic")
    sink = torch.nn.Parameter(torch.ones(4))
    step = opened(world, "classic", "attend")
    for _ in range(2):
        world.call(step, "attend", sink=sink)
    assert gone_on.calls[-1]
    with torch.enable_grad(), pytest.raises(kvcore.errors.ShapeError, match="gradient"):
        world.call(step, "attend", sink=sink)
    step.abort()


def test_scores_of_other_tokens_are_refused(gone_on):
    world = World("V4")
    step = world.step()
    scores = arguments(world.layer, "select")["scores"]
    with pytest.raises(kvcore.errors.ShapeError, match="scores"):
        step.layer(world.number).select(scores[:-1], 3)
    world.cache.ops.select(scores[:-1], 3)
    world.cache.ops.select(scores[:-1], 3)
    assert gone_on.calls[-1]
    with pytest.raises(kvcore.errors.ShapeError, match="scores"):
        step.layer(world.number).select(scores[:-1], 3)
    step.abort()


def test_functional_verbs_look_at_what_differs_but_gradients(gone_on):
    world = Functional()
    strange = world.other.step({world.other.admit(): 2}).index
    world.call()
    assert gone_on.calls[-1]
    for parameter, values in {
        "k": [change(torch.ones(2, 2, 8)) for change in WRONG.values()],
        "pools": [world.other.pools, Pools(), {}, None],
        "index": [strange, None],
        "layer": [1, -1, "0", None],
    }.items():
        for value in values:
            with pytest.raises(kvcore.errors.ShapeError):
                world.call(**{parameter: value})
    world.call(k=torch.ones(2, 2, 8).requires_grad_())
    assert gone_on.calls[-1]


def test_a_layer_in_one_call_launches_what_its_verbs_do(gone_on):
    random = np.random.default_rng(0)
    spec, launched, calls = test_decode.SPEC, [], []
    for whole in (False, True):
        cache = kvcore.create_cache(spec, backend="torch_triton", device="cpu", max_requests=1, max_tokens=256)
        request = cache.admit()
        for _ in range(7):
            gone_on.launched.clear()
            gone_on.calls.clear()
            with cache.step({request: 1}) as step:
                for layer, of in enumerate(spec.layers):
                    rows = test_decode.tensors(scene.given_to(of, random, 1))
                    if whole:
                        step.layer(layer).decode(**rows, rotate=True, rope=torch.ones(4), sink=torch.ones(2), scale=0.5)
                    else:
                        test_decode.by_verbs(step.layer(layer), **rows, **test_decode.PLAIN)
            launched.append([*gone_on.launched])
            calls.append([*gone_on.calls])
    assert launched[6] == launched[13]
    assert calls[13] == [True] * len(spec.layers)
