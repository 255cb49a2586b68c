"""Calls whose like has passed are not checked again; what differs from it in anything that is checked, is."""

import numpy as np
import pytest
import torch

import kvcore
from kvcore.errors import ShapeError, StepError
from kvcore.pools import Pools
from kvcore.spec import presets

LAYERS = {
    "V4": presets.deepseek_v4_flash_tiny(draft=False),
    "classic": presets.classic(layers=1, key_heads=2, key_dim=8),
}
TOKENS = 2


class World:
    """A cache with a request, and an open step in which every verb was called once."""

    def __init__(self, name):
        self.spec = LAYERS[name]
        self.number = next(n for n, layer in enumerate(self.spec.layers) if layer.index_keys or layer.kv)
        self.layer = self.spec.layers[self.number]
        self.cache = kvcore.create_cache(
            self.spec, backend="torch_triton", device="cpu", max_requests=2, max_tokens=512, max_draft_tokens=1
        )
        self.request = self.cache.admit()
        with self.step() as step:
            for verb in VERBS[name]:
                self.call(step, verb)
            self.cache.pools = self.cache.pools  # other layers get nothing

    def step(self):
        return self.cache.step({self.request: TOKENS})

    def call(self, step, verb, **others):
        given = arguments(self.layer, verb) | others
        return getattr(step.layer(self.number), verb)(**given)


def some(*shape):
    return torch.ones(TOKENS, *shape)


def arguments(layer, verb):
    if verb == "append_kv":
        return {"k": some(2, 8), "v": some(2, 8)}
    if verb == "attend":
        return {"q": some(4, layer.kv.key_dim if layer.kv else layer.window.dim), "sink": torch.ones(4), "scale": 0.5}
    if verb == "append_window":
        return {"rows": some(layer.window.dim)}
    if verb in ("append_tail", "append_index_tail"):
        width = getattr(layer, verb.removeprefix("append_")).width
        return {"kv": some(width), "score": some(width)}
    if verb == "flush":
        return {"norm_weight": torch.ones(layer.entries.dim), "eps": 1e-6, "rope": torch.ones(4)}
    if verb == "index_scores":
        return {"q": some(4, layer.index_keys.dim), "weights": some(4)}
    return {"scores": some(8), "k": 3}


VERBS = {
    "V4": ("append_window", "append_tail", "append_index_tail", "flush", "index_scores", "select", "attend"),
    "classic": ("append_kv", "attend"),
}
BEFORE = {
    "flush": ("append_window", "append_tail", "append_index_tail"),
    "index_scores": ("append_window", "append_tail", "append_index_tail", "flush"),
}
BEFORE["attend"] = BEFORE["index_scores"]
CASES = [(name, verb) for name, verbs in VERBS.items() for verb in verbs]
WRONG = {
    "another dtype": lambda array: array.double(),
    "another shape": lambda array: array[..., :-1],
    "another rank": lambda array: array[None],
    "no data": lambda array: array.to("meta"),
    "places": lambda array: array.to_sparse(),
    "no array": lambda array: array.tolist(),
}


def opened(world, name, verb):
    step = world.step()
    for before in () if name == "classic" and verb == "append_kv" else BEFORE.get(verb, ()):
        if before in VERBS[name]:
            world.call(step, before)
    if name == "classic" and verb == "attend":
        world.call(step, "append_kv")
    return step


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("name", "verb"), CASES, ids=[f"{name} {verb}" for name, verb in CASES])
def test_what_differs_is_refused_as_ever(name, verb, wrong):
    world = World(name)
    assert world.cache._state.passed
    given = arguments(world.layer, verb)
    for parameter, value in given.items():
        if not isinstance(value, torch.Tensor) or (verb, parameter, wrong) == ("select", "scores", "another shape"):
            continue
        if (verb, parameter, wrong) == ("flush", "rope", "another shape"):
            continue
        step = opened(world, name, verb)
        with pytest.raises(ShapeError, match=parameter.replace("_", ".")):
            world.call(step, verb, **{parameter: WRONG[wrong](value)})
        step.abort()


@pytest.mark.parametrize(("name", "verb"), CASES, ids=[f"{name} {verb}" for name, verb in CASES])
def test_a_gradient_is_refused_as_ever(name, verb):
    world = World(name)
    for parameter, value in arguments(world.layer, verb).items():
        if not isinstance(value, torch.Tensor) or verb in ("select", "flush"):
            continue
        step = opened(world, name, verb)
        with pytest.raises(ShapeError, match="gradient"):
            world.call(step, verb, **{parameter: value.requires_grad_()})
        step.abort()


@pytest.mark.parametrize("scale", [0.25, "0.5", float("nan"), True], ids=str)
def test_numbers_are_told_by_their_value(scale):
    world = World("classic")
    step = opened(world, "classic", "attend")
    if scale != 0.25:
        with pytest.raises(ShapeError, match="scale"):
            world.call(step, "attend", scale=scale)
    else:
        assert not torch.equal(world.call(step, "attend", scale=scale)[1], world.call(step, "attend")[1])
    step.abort()


def test_numpy_arrays_are_taken_over_each_time():
    world = World("classic")
    rows = np.ones((TOKENS, 2, 8), np.float32)
    for _ in range(2):
        with world.step() as step:
            step.layer(0).append_kv(rows, rows)
            assert step.layer(0).gather_kv()[0][0, -1, 0, 0] == rows[0, 0, 0]
            rows += 1


def test_a_tensor_that_stands_for_its_negative_is_made_plain():
    world = World("classic")
    negative = torch.complex(some(2, 8), some(2, 8)).conj().imag
    assert negative.is_neg()
    with world.step() as step:
        step.layer(0).append_kv(negative, some(2, 8))
        assert float(step.layer(0).gather_kv()[0][0, -1, 0, 0]) == -1
        assert not any(array.is_neg() for array in step._state._layers[0].own["kv"])


@pytest.mark.parametrize("verb", ["index_scores", "attend"])
def test_what_must_come_first_is_asked_each_time(verb):
    world = World("V4")
    for last in BEFORE[verb]:
        step = world.step()
        for before in BEFORE[verb]:
            if before == last:
                break
            world.call(step, before)
        closes = (
            world.request.length // world.layer.entries.ratio
            < (world.request.length + TOKENS) // world.layer.entries.ratio
        )
        if closes or (verb == "attend" and last == "append_window"):
            with pytest.raises(StepError):
                world.call(step, verb)
        step.abort()


def test_a_step_that_has_ended_takes_nothing():
    world = World("classic")
    step = world.step()
    handle = step.layer(0)
    step.abort()
    for verb in VERBS["classic"]:
        with pytest.raises(StepError, match="ended"):
            getattr(handle, verb)(**arguments(world.layer, verb))


def test_under_check_values_are_looked_at_each_time():
    spec = LAYERS["classic"]
    cache = kvcore.create_cache(spec, backend="torch_triton", device="cpu", max_requests=1, max_tokens=64, check=True)
    request = cache.admit()
    with cache.step({request: TOKENS}) as step:
        step.layer(0).append_kv(some(2, 8), some(2, 8))
    step = cache.step({request: TOKENS})
    with pytest.raises(kvcore.errors.NonFiniteError):
        step.layer(0).append_kv(some(2, 8), some(2, 8) * torch.nan)
    step.abort()


class Functional:
    """Functional calls of one verb that has passed."""

    def __init__(self):
        self.cache, self.other = (
            kvcore.create_cache(
                LAYERS["classic"], backend="torch_triton", device="cpu", max_requests=n, max_tokens=512 * n
            )
            for n in (1, 2)
        )
        self.step = self.cache.step({self.cache.admit(): TOKENS})
        self.call()
        assert self.cache.ops.passed

    def call(self, **others):
        given = {"pools": self.cache.pools, "layer": 0, "index": self.step.index, "k": some(2, 8), "v": some(2, 8)}
        given |= others
        return self.cache.ops.append_kv(*given.values())


def test_functional_verbs_look_at_what_differs():
    world = Functional()
    strange = world.other.step({world.other.admit(): TOKENS}).index
    wrong = {
        "k": [change(some(2, 8)) for change in WRONG.values()] + [some(2, 8).requires_grad_()],
        "pools": [world.other.pools, Pools(), {}, None],
        "index": [strange, None],
        "layer": [1, -1, "0", None],
    }
    for parameter, values in wrong.items():
        for value in values:
            with pytest.raises(ShapeError):
                world.call(**{parameter: value})
    world.call()


def test_functional_verbs_look_at_other_tokens():
    world = Functional()
    world.step.abort()
    index = world.cache.step({world.cache.requests[0]: 3}).index
    with pytest.raises(ShapeError):
        world.call(index=index)
