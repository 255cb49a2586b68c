"""Integers are whatever ``operator.index`` takes; booleans, floats and text are not. Specs keep plain ones."""

import numpy as np
import pytest
import torch

import kvcore
from kvcore.counts import as_integer
from kvcore.errors import RollbackError, ShapeError, SpecError
from kvcore.plan import logical_bytes, plan_cache
from kvcore.requests.manager import Manager
from kvcore.spec import KV, CacheSpec, Entries, LayerSpec, Rope, Window, to_json
from tests.support import stories
from tests.support.stories import MIXED


class Index:
    """An integer by protocol only."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


KINDS = [int, np.int64, np.uint8, np.array, torch.tensor, Index]
NO_INTEGERS = [True, np.True_, np.array(True), torch.tensor(True), 1.0, np.float32(1), "1", None, [1], np.array([1])]
NO_INTEGERS += [torch.tensor([1]), torch.tensor(1.0), torch.tensor(1, device="meta")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_integer_is_taken_and_kept_plain(kind):
    found = as_integer(kind(3))
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize("value", NO_INTEGERS, ids=lambda value: f"{type(value).__name__} {value}")
def test_what_only_looks_like_an_integer_is_not(value):
    assert as_integer(value) is None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_spec_of_any_integers_is_the_same_spec(kind):
    layers = [
        LayerSpec(
            window=Window(dim=kind(8), window=kind(4), format="fp32", rows=kind(6)),
            entries=Entries(dim=kind(8), ratio=kind(2), format="fp32"),
        ),
        LayerSpec(
            entries=Entries(dim=kind(8), ratio=kind(2), format="fp32", share=kind(0)),
            kv=KV(key_heads=kind(2), key_dim=kind(8), value_heads=kind(1), value_dim=kind(4), window=kind(3)),
        ),
    ]
    spec = CacheSpec(layers=layers, block_tokens=kind(4))
    plain = CacheSpec(
        layers=[
            LayerSpec(
                window=Window(dim=8, window=4, format="fp32", rows=6), entries=Entries(dim=8, ratio=2, format="fp32")
            ),
            LayerSpec(
                entries=Entries(dim=8, ratio=2, format="fp32", share=0),
                kv=KV(key_heads=2, key_dim=8, value_heads=1, value_dim=4, window=3),
            ),
        ],
        block_tokens=4,
    )
    assert (spec, spec.digest, to_json(spec)) == (plain, plain.digest, to_json(plain))
    sizes = {"max_requests": 2, "max_tokens": 16, "max_draft_tokens": 1, "max_request_tokens": 9}
    assert plan_cache(spec, **{name: kind(size) for name, size in sizes.items()}) == plan_cache(plain, **sizes)
    assert logical_bytes(spec, kind(5)) == logical_bytes(plain, 5)
    assert Rope(dim=kind(4), theta=10000.0) == Rope(dim=4, theta=10000.0)
    assert kvcore.Periodic(kind(4)) == kvcore.Periodic(4)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_verb_takes_any_integer(backend, kind):
    cache = stories.create(MIXED, backend, prefix="full", max_draft_tokens=2)
    prompt = list(range(1, 20))
    request, other = cache.admit([kind(token) for token in prompt]), cache.admit()
    with cache.step({request: kind(0), other: kind(3)}, pad_tokens=kind(4), pad_requests=kind(3)) as step:
        stories.feed(step, prompt[:3])
        rows = np.zeros((4, 2), np.float32)
        assert step.layer(kind(1)) is step.layer(1)
        assert tuple(step.to_batch(rows, kind(5)).shape) == (3, 5, 2)
    cache.truncate(other, kind(2))
    assert other.length == 2
    stories.tell(cache, {request: [kind(token) for token in prompt]})
    assert cache.restorable(prompt, kind(17)).length == 16


def test_ids_may_be_an_array(backend):
    cache = stories.create(MIXED, backend, prefix="full")
    for ids in (np.arange(17, dtype=np.int32), torch.arange(50, 67), np.array([5])):
        request = cache.admit(ids)
        with cache.step({request: ids}) as step:
            stories.feed(step, ids.tolist())
        assert request.tokens == tuple(ids.tolist())
        cache.release(request)
    assert [cache.restorable(range(first, first + 17)).length for first in (0, 50)] == [16, 16]


@pytest.mark.parametrize("value", [v for v in NO_INTEGERS if v is not None], ids=str)
def test_no_verb_takes_what_is_none(backend, value):
    cache = stories.create(MIXED, backend, prefix="full", max_draft_tokens=2)
    request = cache.admit()
    stories.tell(cache, {request: [1, 2, 3]})
    with pytest.raises(RollbackError):
        cache.truncate(request, value)
    with pytest.raises(ShapeError):
        cache.restorable([1, 2, 3], value)
    with pytest.raises(ShapeError):
        cache.admit([value])
    with pytest.raises(ShapeError):
        cache.step({request: [value]})
    with pytest.raises(ShapeError):
        cache.step({request: 1}, pad_tokens=value)
    with pytest.raises(SpecError):
        CacheSpec(layers=MIXED.layers, block_tokens=value)
    with pytest.raises(SpecError):
        plan_cache(MIXED, max_requests=value, max_tokens=8)
    with cache.step({request: 0}) as step, pytest.raises(ShapeError):
        step.layer(value)
    assert (cache.requests, request.length) == ((request,), 3)


@pytest.mark.parametrize("token", [-1, 2**64, 2**70], ids=str)
def test_an_id_is_64_bits(backend, token):
    cache = stories.create(MIXED, backend, prefix="full")
    request, other = cache.admit(), cache.admit()
    with pytest.raises(ShapeError):
        cache.step({request: [1, 2], other: [3, token]})
    with pytest.raises(ShapeError):
        cache.admit([token])
    assert (request.length, other.length, len(cache.requests)) == (0, 0, 2)
    with cache.step({request: [2**64 - 1] * 8, other: [1]}) as step:
        stories.feed(step, [0] * 9)
    assert request.tokens == (2**64 - 1,) * 8


def test_what_is_said_of_text_and_numbers_leads_somewhere():
    with pytest.raises(SpecError, match="got '3'; allowed: an integer, 1 or more"):
        plan_cache(MIXED, max_requests="3", max_tokens=64)
    cache = stories.create(MIXED, "reference")
    for given in (3, "3"):
        for ask in (cache.admit, cache.restorable):
            with pytest.raises(ShapeError, match=r"tokens: got 3; allowed: a sequence of token ids"):
                ask(given)
    with pytest.raises(ShapeError, match="allowed: an integer, 0 or more, or a sequence of token ids"):
        cache.step({cache.admit(): "3"})


UNREADABLE = {
    "MaskedArray with a mask": np.ma.masked_array([1, 2, 3], [False, True, False]),
    "Tensor with places": torch.tensor([1, 2, 3]).to_sparse(),
    "Tensor with no data, on meta": torch.zeros(3, dtype=torch.int64, device="meta"),
    "NestedTensor with lengths": torch.nested.nested_tensor([torch.arange(1), torch.arange(2)], layout=torch.jagged),
}


@pytest.mark.parametrize("got", UNREADABLE)
def test_ids_that_are_not_all_there_are_refused_as_what_they_are(got):
    cache = stories.create(MIXED, "reference")
    request = cache.admit()
    asked = (cache.admit, cache.restorable, cache.fits, lambda ids: cache.step({request: ids}))
    for ask in asked:
        with pytest.raises(ShapeError, match=rf": got {got}; allowed: "):
            ask(UNREADABLE[got])
    assert cache.requests == (request,)


def test_slots_cost_nothing_until_they_are_used():
    plan = plan_cache(stories.PAGED, max_requests=2**31 - 1, max_tokens=64)
    manager = Manager(plan)
    first, second = manager.admit(), manager.admit()
    manager.release(first)
    assert manager.free_slots == 2**31 - 2
    # What was given back is used again before what never was.
    assert [manager.place(manager.admit()).slot for _ in range(2)] == [0, 2]
    manager.mend({})
    assert (manager.free_slots, manager.place(second).slot) == (2**31 - 4, 1)
