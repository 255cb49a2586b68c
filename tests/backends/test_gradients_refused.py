"""Tensors that require gradients: refused where they are stored or attended with, since the cache would lose them."""

import pytest
import torch

from kvcore.errors import ShapeError
from tests.support import functional_cases as cases

TOKENS = 4
REFUSED = "a tensor that requires gradients; allowed: arrays that no gradient is asked of"
NOTHING_TO_RECORD = ("closed", "select", "mask", "visible_rows", "gather_rows", "store_rows", "digest_rows")


def leaf(array):
    return torch.from_numpy(array).requires_grad_()


def recorded(*shape):
    """What a model's layer returns: part of a graph."""
    return leaf(cases.floats(*shape)) * 1


def plain(*shape):
    return torch.from_numpy(cases.floats(*shape))


@pytest.fixture
def world():
    cache = cases.create("torch_triton")
    return cache, cache.admit()


def functional_verbs():
    cache = cases.create("torch_triton")
    calls = cases.calls(cache.ops, TOKENS)
    stored = ("gather_window, stored", "gather_all_entries")
    return [
        name for name in calls if name.split(",")[0].split(" of")[0] not in NOTHING_TO_RECORD and name not in stored
    ]


@pytest.mark.parametrize("name", functional_verbs())
def test_a_functional_verb_refuses_and_changes_nothing(world, name):
    cache, request = world
    step = cache.step({request: TOKENS})
    call = cases.calls(cache.ops, TOKENS, put=leaf)[name]
    before = {name: pool.clone() for name, pool in cache.pools.items()}
    with pytest.raises(ShapeError, match=REFUSED) as refused:
        call(cache.pools, step.index)
    assert "torch.no_grad()" in refused.value.hint
    assert all(torch.equal(pool, before[name]) for name, pool in cache.pools.items())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            call(cache.pools, step.index)
    step.abort()


HANDLE = {
    "append_window: rows": lambda step, made: step.layer(0).append_window(made(TOKENS, 16)),
    "append_tail: kv": lambda step, made: step.layer(0).append_tail(made(TOKENS, 32), plain(TOKENS, 32)),
    "append_tail: score": lambda step, made: step.layer(0).append_tail(plain(TOKENS, 32), made(TOKENS, 32)),
    "append_index_tail: score": lambda step, made: step.layer(0).append_index_tail(plain(TOKENS, 64), made(TOKENS, 64)),
    "store_entries: entries": lambda step, made: step.layer(0).store_entries(made(2, 16), plain(2, 32)),
    "store_entries: index_keys": lambda step, made: step.layer(0).store_entries(plain(2, 16), made(2, 32)),
    "append_kv: key": lambda step, made: step.layer(1).append_kv(made(TOKENS, 2, 16), plain(TOKENS, 2, 16)),
    "append_kv: value": lambda step, made: step.layer(2).append_kv_view(plain(TOKENS, 2, 16), made(TOKENS, 2, 16)),
    "from_batch": lambda step, made: step.from_batch(made(1, TOKENS, 3)),
    "to_batch": lambda step, made: step.to_batch(made(TOKENS, 3)),
}
READS = {
    "index_scores: q": lambda step, made: step.layer(0).index_scores(made(TOKENS, 2, 32), plain(TOKENS, 2)),
    "index_scores: weights": lambda step, made: step.layer(0).index_scores(plain(TOKENS, 2, 32), made(TOKENS, 2)),
    "attend: q": lambda step, made: step.layer(0).attend(made(TOKENS, 2, 16)),
    "attend: sink": lambda step, made: step.layer(0).attend(plain(TOKENS, 2, 16), sink=made(2)),
    "attend: q, classic": lambda step, made: step.layer(1).attend(made(TOKENS, 2, 16)),
    "attend: sink, classic": lambda step, made: step.layer(1).attend(plain(TOKENS, 2, 16), sink=made(2)),
}


def fill(step):
    """All that the step is to store."""
    step.layer(0).append_window(plain(TOKENS, 16))
    step.layer(0).append_tail(plain(TOKENS, 32), plain(TOKENS, 32))
    step.layer(0).append_index_tail(plain(TOKENS, 64), plain(TOKENS, 64))
    step.layer(0).flush()
    for layer in (cases.PAGED, cases.RING, cases.SLOT):
        step.layer(layer).append_kv(plain(TOKENS, 2, 16), plain(TOKENS, 2, 16))
    step.layer(cases.PLAIN).append_window(plain(TOKENS, 16))


@pytest.mark.parametrize("where", [*HANDLE, *READS])
def test_a_handle_refuses_and_takes_the_right_rows_then(world, where):
    cache, request = world
    with cache.step({request: TOKENS}) as step:
        if where in READS:
            fill(step)
        with pytest.raises(ShapeError, match=REFUSED) as refused:
            {**HANDLE, **READS}[where](step, recorded)
        assert refused.value.where == where.split(",")[0]
        if where in HANDLE:
            fill(step)
    other = cases.create("torch_triton")
    with other.step({other.admit(): TOKENS}) as step:
        fill(step)
    assert cache.digest() == other.digest()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_where_nothing_is_recorded_nothing_is_refused(world, mode):
    cache, request = world
    made = {shape: recorded(*shape) for shape in [(TOKENS, 2, 16), (TOKENS, 2, 32), (TOKENS, 2), (2,)]}
    with mode(), cache.step({request: TOKENS}) as step:
        fill(step)
        for read in READS.values():
            read(step, lambda *shape: made[shape])
    assert request.length == TOKENS


def test_a_models_parameters_are_taken(world):
    """They require gradients whatever the model is run for."""
    cache, request = world
    weight, index_weight = (torch.nn.Parameter(plain(size)) for size in (16, 32))
    rope = torch.nn.Parameter(torch.tensor([1.0, 0.1]))
    with cache.step({request: TOKENS}) as step:
        step.layer(0).append_tail(plain(TOKENS, 32), plain(TOKENS, 32))
        step.layer(0).append_index_tail(plain(TOKENS, 64), plain(TOKENS, 64))
        latents = step.layer(0).compress(norm_weight=weight)
        step.layer(0).flush(norm_weight=weight, rope=rope, index_norm_weight=index_weight)
        found = step.layer(0).gather_all_entries().values
        cache.ops.append_rotated_window(
            cache.ops.allocate(), 0, step.index, plain(TOKENS, 16), rope=rope, norm_weight=weight
        )
        picked = step.layer(0).select(recorded(TOKENS, 3), 2)
        step.abort()
    assert not any(answer.requires_grad for answer in (latents, found, picked))
