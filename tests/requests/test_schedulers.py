"""What a scheduler asks and tells a cache: does this prompt fit, and forget what older weights computed."""

import itertools
from collections import deque

import pytest

import kvcore
from kvcore.errors import OutOfBlocks, OutOfSlots, RequestError, ShapeError, StepError
from kvcore.spec import CacheSpec
from tests.support import scene, stories
from tests.support.stories import LATENT, MIXED, PAGED

PROMPT = list(range(100, 148))


def can(cache, prompt, new):
    """Whether it works, tried; it then takes as many free blocks as the cache said before."""
    free, needed = cache.free_blocks, cache.blocks_needed(prompt, new)
    try:
        request = cache.admit(prompt)
    except OutOfSlots:
        return False
    try:
        step = cache.step({request: len(prompt) + new - request.length})
    except OutOfBlocks:
        return False
    else:
        assert free - cache.free_blocks == needed
        step.abort()
        return True
    finally:
        cache.release(request)


@pytest.mark.parametrize("longest", [None, 29])
@pytest.mark.parametrize("spec", [LATENT, MIXED, PAGED], ids=lambda spec: spec.name)
def test_what_fits_can_be_done_and_what_does_not_cannot(backend, spec, longest):
    size = spec.block_tokens
    cache = stories.create(
        spec, backend, max_requests=3, max_tokens=5 * size, prefix="full", max_request_tokens=longest, check=False
    )
    first, second = cache.admit(), cache.admit()
    stories.tell(cache, {first: PROMPT[: min(28, 2 * size - 2)], second: [5] * size})
    for moment in ("two live", "one idle block", "a slot short"):
        if moment == "one idle block":
            cache.release(first)
        if moment == "a slot short":
            cache.admit()
            cache.admit()
        for prompt, new in itertools.product(
            ([], PROMPT[:1], PROMPT[:size], PROMPT[: size + 1], PROMPT[: 2 * size + 1], [5] * (size + 1)),
            (0, 1, size, 2 * size, 3 * size, 5 * size),
        ):
            assert cache.fits(prompt, new) == can(cache, prompt, new), (moment, prompt, new)
        assert cache.fits(3, new_tokens=2) == can(cache, [9] * 3, 2)
    with cache.step({}):
        assert not cache.fits(1)
        assert cache.blocks_needed(size + 1) == 2


@pytest.mark.parametrize("tokens", [-1, 1.5, True, "ab", None, [1.5]], ids=str)
def test_what_is_no_prompt_does_not_fit_nowhere(backend, tokens):
    cache = stories.create(PAGED, backend)
    for verb, ask in {"fits": cache.fits, "blocks_needed": cache.blocks_needed}.items():
        with pytest.raises(ShapeError, match=f"{verb}: tokens"):
            ask(tokens)
        with pytest.raises(ShapeError, match=f"{verb}: new_tokens"):
            ask(1, new_tokens=-1)
        with pytest.raises(ShapeError, match=f"{verb}: salt"):
            ask(1, salt="")


@pytest.mark.parametrize("policy", ["full", "zero", kvcore.Periodic(8)], ids=str)
@pytest.mark.parametrize("spec", [LATENT, MIXED, PAGED], ids=lambda spec: spec.name)
def test_after_a_reset_nothing_older_is_found(backend, spec, policy):
    cache = stories.create(spec, backend, prefix=policy)
    ended, live, short = (cache.admit(PROMPT) for _ in range(3))
    stories.tell(cache, {ended: PROMPT, live: PROMPT, short: PROMPT[:5]})
    fork = cache.fork(live)
    cache.release(ended)
    digest, blocks = cache.digest(), cache.free_blocks
    assert cache.restorable(PROMPT).length > 0
    cache.reset_prefix_cache()
    assert cache.restorable(PROMPT) == (0, 0, True)
    assert (cache.digest(), cache.free_blocks) == (digest, blocks)
    # Live ones go on, but what they compute follows from what was forgotten.
    stories.tell(cache, {live: [1] * 16, short: PROMPT[5:], fork: [2] * 16})
    for tokens in (PROMPT, [*PROMPT, *[1] * 16], [*PROMPT, *[2] * 16]):
        assert cache.restorable(tokens).length == 0
    with pytest.raises(RequestError, match="reset"):
        cache.checkpoint(short)
    assert cache.digest([live]) == stories.retell(backend, spec, [*PROMPT, *[1] * 16])
    for request in (live, short, fork):
        cache.release(request)
    assert (cache.free_blocks, cache.free_slots) == (cache.plan.blocks, cache.plan.slots)
    # What is admitted from now on is published as before.
    fresh = cache.admit(PROMPT)
    assert fresh.cached_tokens == 0
    stories.tell(cache, {fresh: PROMPT})
    again = cache.admit([*PROMPT, 1])
    assert again.cached_tokens > 0
    assert cache.restorable(PROMPT).length > 0


def test_a_reset_in_a_replay_or_a_step(backend):
    cache = stories.create(MIXED, backend, prefix="zero")
    first = cache.admit(PROMPT)
    stories.tell(cache, {first: PROMPT})
    hit = cache.admit(PROMPT)
    assert 0 < hit.length < 40
    cache.release(first)
    step = cache.step({})
    with pytest.raises(StepError):
        cache.reset_prefix_cache()
    step.abort()
    cache.reset_prefix_cache()
    stories.tell(cache, {hit: PROMPT[hit.length :]})
    assert cache.restorable(PROMPT).length == 0
    off = stories.create(MIXED, backend)
    off.reset_prefix_cache()
    cache.reset_prefix_cache()


def test_layers_come_in_any_sequence():
    layers = [scene.classic(), scene.ring(4)]
    specs = [CacheSpec(layers=kind(layers), draft_layers=kind(layers[:1])) for kind in (list, tuple, deque)]
    assert [spec == specs[0] and spec.layers == tuple(layers) for spec in specs] == [True] * 3


def test_what_a_prompt_takes_over_is_not_there_for_its_rest(backend):
    size = PAGED.block_tokens
    cache = stories.create(PAGED, backend, max_requests=3, max_tokens=5 * size, prefix="full", check=False)
    request, other = cache.admit(), cache.admit()
    stories.tell(cache, {request: PROMPT[: 2 * size], other: [5] * size})
    cache.release(request)
    assert cache.free_blocks == 4
    assert cache.fits(PROMPT[: 2 * size + 1], 2 * size - 1)
    # Two of the four are taken over, and two are left for the other three.
    assert cache.blocks_needed(PROMPT[: 2 * size + 1], 3 * size - 1) == 5
    assert not cache.fits(PROMPT[: 2 * size + 1], 3 * size - 1)


@pytest.mark.parametrize("last", [0, 1, None], ids=["first", "second", "later"])
def test_a_block_whose_twin_was_used_until_now_outlives_one_that_was_not(backend, last):
    size = PAGED.block_tokens
    cache = stories.create(PAGED, backend, max_requests=4, max_tokens=3 * size, prefix="full", check=False)
    same, other = [cache.admit()], cache.admit()
    if last is not None:
        same.append(cache.admit())
    stories.tell(cache, {**dict.fromkeys(same, PROMPT[:size]), other: [5] * size})
    if last is None:
        cache.release(same[0])
        cache.release(other)
        twin = cache.admit()
        stories.tell(cache, {twin: PROMPT[:size]})
        cache.release(twin)
    else:
        for request in (same[1 - last], other, same[last]):
            cache.release(request)
    # One block is free, so one that can be found goes: the one that nobody used for longer.
    stories.tell(cache, {cache.admit(): list(range(300, 300 + 2 * size))})
    assert cache.restorable([*PROMPT[:size], 1], size).length == size
    assert cache.restorable([5] * (size + 1), size).length == 0
