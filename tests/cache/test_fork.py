"""Forks: the same bits as requests that were never forked, whoever writes first, and nothing shared that one writes."""

import pytest

from kvcore.errors import OutOfBlocks, OutOfSlots, RequestError, StepError
from tests.support import scene, stories
from tests.support.stories import LATENT, MIXED

TOKENS = list(range(300, 345))


def started(spec, backend, count, **sizes):
    cache = stories.create(spec, backend, **sizes)
    request = cache.admit()
    for piece in (TOKENS[:30], TOKENS[30:count]):
        stories.tell(cache, {request: piece})
    return cache, request


@pytest.mark.parametrize("spec", [LATENT, MIXED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("count", [39, 40, 41], ids=lambda count: f"{count} tokens")
def test_siblings_that_write_in_one_step_equal_unforked_runs(backend, spec, count):
    cache, a = started(spec, backend, count)
    b = cache.fork(a)
    c = cache.fork(b)
    assert a.blocks == b.blocks == c.blocks
    assert len({a.slot, b.slot, c.slot}) == 3
    tails = {a: [1, 2, 3], b: [4], c: [5] * 11}
    stories.tell(cache, {b: tails[b], c: tails[c]})
    stories.tell(cache, {a: tails[a], b: [9] * 9})
    tails[b] = [4, *[9] * 9]
    for request, tail in tails.items():
        assert cache.digest([request]) == stories.retell(backend, spec, [*TOKENS[:count], *tail])
    size = spec.block_tokens
    shared = count // size
    assert a.blocks[:shared] == b.blocks[:shared] == c.blocks[:shared]
    own = [set(request.blocks[shared:]) for request in (a, b, c)]
    assert len(set().union(*own)) == sum(len(blocks) for blocks in own)
    for request in (a, b, c):
        cache.release(request)
    assert (cache.free_blocks, cache.free_slots) == (cache.plan.blocks, cache.plan.slots)


def test_a_fork_costs_a_slot_and_no_block(backend):
    cache, a = started(LATENT, backend, 40)
    free, before = cache.free_blocks, scene.raw(cache)
    fork = cache.fork(a)
    assert cache.free_blocks == free
    paged = [
        name for name in scene.changed(before, scene.raw(cache)) if name.split(".")[1] in ("entries", "index_keys")
    ]
    assert paged == []
    # One copy of the partial block where both write; the last one keeps the original.
    stories.tell(cache, {a: [1], fork: [2]})
    assert cache.free_blocks == free - 1


def test_beams_reorder_by_forks_and_releases(backend, rng):
    cache = stories.create(LATENT, backend, max_requests=8)
    beams = [cache.admit() for _ in range(4)]
    histories = [[10 * beam, *TOKENS[:18]] for beam in range(4)]
    stories.tell(cache, dict(zip(beams, histories, strict=True)))
    for turn in range(12):
        chosen = rng.integers(4, size=4).tolist()
        new = [cache.fork(beams[parent]) for parent in chosen]
        for beam in beams:
            cache.release(beam)
        beams, histories = new, [[*histories[parent], 500 + 4 * turn + place] for place, parent in enumerate(chosen)]
        stories.tell(cache, {beam: history[-1:] for beam, history in zip(beams, histories, strict=True)})
    for beam, history in zip(beams, histories, strict=True):
        assert cache.digest([beam]) == stories.retell(backend, LATENT, history)
    for beam in beams:
        cache.release(beam)
    assert cache.free_blocks == cache.plan.blocks


def test_without_room_for_every_copy_nothing_is_taken(backend):
    cache, a = started(MIXED, backend, 41, max_tokens=56)
    b = cache.fork(a)
    c = cache.fork(a)
    assert cache.free_blocks == 1
    before = scene.raw(cache), cache.digest(), [request.blocks for request in (a, b, c)]
    with pytest.raises(OutOfBlocks):
        cache.step({a: [1], b: [2], c: [3]})
    assert (scene.raw(cache), cache.digest(), [request.blocks for request in (a, b, c)]) == before
    assert cache.free_blocks == 1
    # Two of three can be had: one copy, and the third keeps sharing.
    with pytest.raises(OutOfBlocks):
        cache.step({a: [1], b: [2]})
    cache.release(c)
    stories.tell(cache, {a: [1], b: [2]})
    for request, tail in ((a, [1]), (b, [2])):
        assert cache.digest([request]) == stories.retell(backend, MIXED, [*TOKENS[:41], *tail])


@pytest.mark.parametrize("spec", [LATENT, MIXED], ids=lambda spec: spec.name)
def test_a_failed_step_of_siblings_leaves_both_as_they_were(backend, spec):
    cache, a = started(spec, backend, 42, max_draft_tokens=4)
    b = cache.fork(a)
    cache.truncate(a, 39)
    wanted = [stories.retell(backend, spec, TOKENS[:39]), stories.retell(backend, spec, TOKENS[:42])]
    for order in ((a, b), (b, a)):
        free = cache.free_blocks
        # The shorter one must not write over the rows of the longer one, which the rollback brings back.
        stories.fail(cache, {request: [1, 2, 3, 4] for request in order})
        assert [cache.digest([request]) for request in (a, b)] == wanted
        assert cache.free_blocks == free
    stories.tell(cache, {a: [1, 2, 3, 4], b: [5]})
    assert cache.digest([a]) == stories.retell(backend, spec, [*TOKENS[:39], 1, 2, 3, 4])
    assert cache.digest([b]) == stories.retell(backend, spec, [*TOKENS[:42], 5])


def test_a_fork_outlives_its_source(backend):
    cache, a = started(LATENT, backend, 40)
    fork = cache.fork(a)
    cache.release(a)
    scene.poison(cache)
    other = cache.admit()
    stories.tell(cache, {other: [9] * 60, fork: [3]})
    assert cache.digest([fork]) == stories.retell(backend, LATENT, [*TOKENS[:40], 3])


def test_a_fork_rolls_back_as_far_as_its_source(backend):
    cache, a = started(LATENT, backend, 44, max_draft_tokens=4)
    cache.truncate(a, 42)
    fork = cache.fork(a)
    cache.truncate(fork, 40)
    assert cache.digest([fork]) == stories.retell(backend, LATENT, TOKENS[:40])
    with pytest.raises(ValueError, match="40 to 40"):
        cache.truncate(fork, 39)


def test_forks_are_refused_without_a_slot_or_in_a_step(backend):
    cache, a = started(LATENT, backend, 40, max_requests=1)
    with pytest.raises(OutOfSlots):
        cache.fork(a)
    step = cache.step({a: 0})
    with pytest.raises(StepError):
        cache.fork(a)
    step.abort()
    assert cache.digest([a]) == stories.retell(backend, LATENT, TOKENS[:40])
    cache.release(a)
    with pytest.raises(RequestError):
        cache.fork(a)
