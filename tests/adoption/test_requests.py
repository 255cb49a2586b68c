"""Requests in blocks that somebody else gives out."""

import numpy as np
import pytest

import kvcore
from kvcore.errors import OutOfBlocks, OutOfSlots, RequestError, ShapeError
from tests.support.engine import BLOCKS, HEADS, LAYERS, SPEC, Engine

LAYOUT = "NL_X_NB_TWO_BS_NH_HS"


@pytest.fixture
def cache():
    return kvcore.adopt(SPEC, Engine(LAYOUT).tensors, layout=LAYOUT, max_requests=3)


def tell(cache, request, count):
    rows = np.ones((count, HEADS, 8), np.float32)
    with cache.step({request: count}) as step:
        for layer in range(LAYERS):
            step.layer(layer).append_kv(rows, rows)


def test_blocks_are_those_that_were_given(cache):
    request = cache.admit(blocks=[4, 2], length=10)
    assert (request.blocks, cache.free_blocks) == ((4,), 0)
    tell(cache, request, 10)
    assert request.blocks == (4, 2)
    with pytest.raises(OutOfBlocks, match=r"cache.give"):
        tell(cache, request, 20)
    assert (request.length, request.blocks) == (20, (4, 2))
    cache.give(request, [9])
    tell(cache, request, 20)
    assert (request.length, request.blocks) == (40, (4, 2, 9))
    # What a rollback lets go is still the request's.
    cache.truncate(request, 5)
    assert request.blocks == (4,)
    tell(cache, request, 30)
    assert request.blocks == (4, 2, 9)
    cache.release(request)
    assert cache._manager.given == {}
    again = cache.admit(blocks=[9, 4], length=32)
    assert again.blocks == (9, 4)


def test_a_request_that_lacks_blocks_takes_none_of_another_s(cache):
    first, second = cache.admit(blocks=[1], length=16), cache.admit(blocks=[2, 3, 4], length=16)
    with pytest.raises(OutOfBlocks), cache.step({first: 1, second: 17}):
        pass
    assert (first.blocks, second.blocks) == ((1,), (2,))


def test_blocks_that_two_requests_have_are_read_by_both_and_written_by_none(cache):
    first = cache.admit(blocks=[1, 2], length=20)
    second = cache.admit(blocks=[1, 3], length=20)
    tell(cache, first, 3)
    tell(cache, second, 3)
    third = cache.admit(blocks=[1, 2], length=18)
    with pytest.raises(RequestError, match="which others have too"):
        tell(cache, third, 1)
    assert third.length == 18
    cache.release(first)
    tell(cache, third, 1)


def test_blocks_that_are_given_and_another_s_are_not_written(cache):
    first = cache.admit(blocks=[1, 2], length=20)
    second = cache.admit(blocks=[3, 2], length=10)
    before = cache.digest([first])
    with pytest.raises(RequestError, match="block 2, which others have too"):
        tell(cache, second, 16)
    other = cache.admit(blocks=[4, 2])
    with pytest.raises(RequestError, match="block 2, which others have too"):
        cache.import_request(cache.export_request(first), into=other)
    assert (second.length, cache.digest([first])) == (10, before)
    tell(cache, second, 6)
    cache.release(first)
    tell(cache, second, 10)
    # One block in two places of a history, or in two requests of a step.
    cache.give(second, [3])
    with pytest.raises(RequestError, match="block 3, which others have too"):
        tell(cache, second, 10)
    cache.release(second)
    one = cache.admit(blocks=[5])
    cache.give(other, [5])
    cache.give(one, [6])
    cache.give(one, [6])
    with pytest.raises(RequestError, match="block 6, which others have too"):
        tell(cache, one, 40)
    assert (one.length, one.blocks) == (0, ())
    with pytest.raises(RequestError, match="block 5, which others have too"), cache.step({one: 16, other: 33}):
        pass
    tell(cache, one, 16)


def test_a_fork_reads_and_does_not_write(cache):
    request = cache.admit(blocks=[1, 2], length=20)
    fork = cache.fork(request)
    assert cache.digest([fork]) == cache.digest([request])
    for one in (request, fork):
        with pytest.raises(RequestError, match="which others have too"):
            tell(cache, one, 1)
    cache.release(request)
    tell(cache, fork, 1)


def test_slots_that_are_asked_for(cache):
    request = cache.admit(slot=2)
    assert request.slot == 2
    for slot in (2, 3):
        with pytest.raises(OutOfSlots, match=f"slot {slot}"):
            cache.admit(slot=slot)
    assert {cache.admit().slot, cache.admit().slot} == {0, 1}
    with pytest.raises(OutOfSlots):
        cache.admit()
    cache.release(request)
    assert cache.admit(slot=2).slot == 2


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"blocks": [BLOCKS]}, "numbers below 10"),
        ({"blocks": [-1]}, "numbers below 10"),
        ({"blocks": [1, 1]}, "each once"),
        ({"blocks": [1.5]}, "numbers below 10"),
        ({"blocks": [1], "length": 17}, "0 to 16"),
        ({"length": 1}, "0 to 0"),
        ({"length": "1"}, "admit: length"),
        ({"slot": -1}, "admit: slot"),
        ({"tokens": [1, 2]}, "the owner's prefixes"),
    ],
)
def test_what_cannot_be_admitted(cache, options, match):
    with pytest.raises(ShapeError, match=match):
        cache.admit(**options)
    assert (cache.requests, cache.free_slots) == ((), 3)


def test_an_import_needs_blocks(cache):
    blob = cache.export_request(cache.admit(blocks=[1, 2], length=20))
    with pytest.raises(OutOfBlocks, match=r"cache\.give"):
        cache.import_request(blob)
    into = cache.admit(blocks=[5, 6])
    cache.import_request(blob, into=into)
    assert into.blocks == (5, 6)


def test_nothing_of_the_owner_s_is_poisoned_or_cleared():
    engine = Engine(LAYOUT)
    for tensor in engine.tensors:
        tensor[:] = 3
    cache = kvcore.adopt(SPEC, engine.tensors, layout=LAYOUT, check_rows=True)
    request = cache.admit(blocks=[1, 2, 3], length=20)
    tell(cache, request, 20)
    cache.truncate(request, 1)
    cache.release(request)
    assert all(set(np.unique(tensor)) <= {1, 3} for tensor in engine.tensors)
    assert (engine.at(0, 0, 3, 8) == 3).all()
