"""Truncation: exact for every component down to the bound, refused below it; drafts leave no trace."""

import itertools

import numpy as np
import pytest

import kvcore
from kvcore.errors import RequestError, RollbackError
from kvcore.spec import KV, CacheSpec, KVTail, LayerSpec, State, Tail, Window
from tests.support import scene, stories
from tests.support.stories import LATENT, MIXED

TOKENS = list(range(700, 760))


def rings():
    """Ring components of many shapes."""
    for window in (1, 2, 3, 5, 8):
        yield Window(dim=4, window=window, format="fp32")
    for ratio, overlap in itertools.product((1, 2, 3, 4, 8), (True, False)):
        if overlap or ratio > 1:
            yield Tail(dim=4, ratio=ratio, overlap=overlap)
    for ratio in (2, 8):
        yield KVTail(key_heads=1, key_dim=4, value_heads=1, value_dim=4, ratio=ratio)
    for fields in ({"window": 1}, {"window": 5}, {"chunk": 1}, {"chunk": 2}, {"chunk": 5}):
        yield KV(key_heads=1, key_dim=4, storage="ring", **fields)


@pytest.mark.parametrize("component", list(rings()), ids=str)
def test_the_bound_by_brute_force(component):
    """Write positions into a ring one by one: every length down to the bound finds its rows; one row less would not."""
    for drafts in range(6):
        rows = component.ring_rows(drafts)
        missed = 0
        for high_water in range(60):
            held, fewer = {}, {}
            for position in range(high_water):
                held[position % rows] = position
                fewer[position % max(1, rows - 1)] = position
            for length in range(max(0, high_water - drafts), high_water + 1):
                for position in component.live(length):
                    assert held[position % rows] == position, (drafts, high_water, length)
                    missed += fewer[position % max(1, rows - 1)] != position
        # Tails keep a row for the next token even without drafts.
        if drafts > isinstance(component, Tail | KVTail) and rows > 1:
            assert missed, f"a row less would do for {drafts} drafts"


@pytest.mark.sampled
@pytest.mark.parametrize("spec", [LATENT, MIXED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_every_truncation_is_exact_or_refused(backend, spec, drafts):
    for high in (3, 8, 17, 33, 40):
        for length in range(high, max(-1, high - drafts - 3), -1):
            cache = stories.create(spec, backend, max_requests=2, max_draft_tokens=drafts)
            cache.release(cache.admit())
            request = cache.admit()
            for piece in (TOKENS[: high // 2], TOKENS[high // 2 : high]):
                stories.tell(cache, {request: piece})
            try:
                cache.truncate(request, length)
            except RollbackError:
                assert high - length > drafts
                assert cache.digest([request]) == stories.retell(backend, spec, TOKENS[:high])
                continue
            assert cache.digest([request]) == stories.retell(backend, spec, TOKENS[:length])
            assert len(request.blocks) == cache.plan.blocks_for(length)
            assert request.tokens == tuple(TOKENS[:length])
            stories.tell(cache, {request: TOKENS[50:59]})
            assert cache.digest([request]) == stories.retell(backend, spec, [*TOKENS[:length], *TOKENS[50:59]])


def test_before_any_ring_has_wrapped_a_request_may_go_back_to_nothing(backend):
    cache = stories.create(MIXED, backend, max_draft_tokens=3)
    request = cache.admit()
    # The smallest ring, five rows and three spare ones.
    stories.tell(cache, {request: TOKENS[:8]})
    cache.truncate(request, 0)
    assert request.blocks == ()
    stories.tell(cache, {request: TOKENS[20:40]})
    assert cache.digest([request]) == stories.retell(backend, MIXED, TOKENS[20:40])


@pytest.mark.sampled
@pytest.mark.parametrize("spec", [LATENT, MIXED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("drafts", [1, 2, 5])
@pytest.mark.parametrize("prefix", ["off", "full"])
def test_drafts_that_are_accepted_or_rejected_leave_the_bits_of_a_run_without_them(backend, spec, drafts, prefix, rng):
    cache = stories.create(spec, backend, max_draft_tokens=drafts, prefix=prefix, max_requests=3)
    plain = stories.create(spec, backend, max_requests=3)
    histories = [[5], [6]]
    pairs = [(cache.admit(), plain.admit()) for _ in histories]
    for turn in range(25):
        # Two requests of a batch propose in one step, each has some of its drafts accepted.
        proposed, accepted = {}, []
        for number, history in enumerate(histories):
            count = int(rng.integers(1, drafts + 2)) if turn else 21 + number
            kept = int(rng.integers(0, count)) if turn else count - 1
            new = rng.integers(0, 50, size=count).tolist()
            proposed[pairs[number][0]] = new
            accepted.append(new[: kept + 1])
            history += new[: kept + 1]
        stories.tell(cache, proposed)
        for (request, _), new in zip(pairs, accepted, strict=True):
            cache.truncate(request, request.length - len(proposed[request]) + len(new))
        stories.tell(plain, {request: new for (_, request), new in zip(pairs, accepted, strict=True)})
        assert cache.digest() == plain.digest(), turn
    for (request, _), history in zip(pairs, histories, strict=True):
        assert cache.digest([request]) == stories.retell(backend, spec, history[1:])


def test_an_aborted_token_behind_a_first_one_leaves_the_only_row_of_a_ring(backend):
    """Of steps that repeat one another the first was of requests without tokens: the next ones have some to lose."""
    layer = LayerSpec(window=Window(dim=4, window=1, format="fp32"), state=State(heads=1, key_dim=4))
    cache = stories.create(CacheSpec(layers=[layer]), backend, max_requests=2, max_draft_tokens=0)
    requests = [cache.admit(), cache.admit()]

    def row(value):
        with cache.step(dict.fromkeys(requests, 1)) as step:
            found = kvcore.to_numpy(step.layer(0).read_state())
            rows = np.full((2, 4), value, np.float32)
            step.layer(0).append_window(rows)
            step.layer(0).append_state(rows[:, None])
            if value < 0:
                step.abort()
        return found.reshape(2, 4)[:, 0].tolist()

    assert [row(value) for value in (1, -2, 3, -4, 5, 6)] == [[0, 0], [1, 1], [1, 1], [3, 3], [3, 3], [5, 5]]


def test_the_pools_are_the_same_to_the_byte_after_drafts_are_rejected_by_a_failed_step(backend):
    cache = stories.create(LATENT, backend, max_draft_tokens=3)
    request = cache.admit()
    stories.tell(cache, {request: TOKENS[:37]})
    live = cache.digest()
    for count in (1, 4, 20):
        step = cache.step({request: count})
        stories.feed(step, [1] * count)
        step.abort()
        assert cache.digest() == live
    cache.truncate(request, 35)
    assert cache.digest() == stories.retell(backend, LATENT, TOKENS[:35])


@pytest.mark.parametrize("length", [-1, 11, 2.0, True, None, "3"])
def test_odd_lengths_are_refused(backend, length):
    cache = stories.create(LATENT, backend)
    request = cache.admit()
    stories.tell(cache, {request: TOKENS[:10]})
    with pytest.raises(RollbackError):
        cache.truncate(request, length)
    assert request.length == 10


def test_a_rollback_refused_by_one_layer_moves_none(backend):
    layers = [scene.classic(), LayerSpec(window=Window(dim=8, window=8, rows=8, format="fp32")), scene.compressed(4)]
    cache = stories.create(CacheSpec(layers=layers, block_tokens=8), backend)
    request = cache.admit()
    stories.tell(cache, {request: TOKENS[:12]})
    before = cache.digest(), scene.raw(cache)
    with pytest.raises(RollbackError, match="12 to 12"):
        cache.truncate(request, 10)
    assert (cache.digest(), scene.raw(cache), request.length) == (*before, 12)


def test_what_was_taken_over_is_written_again_below_a_truncation(backend):
    cache = stories.create(stories.PAGED, backend, prefix="full")
    stories.tell(cache, {cache.admit(): TOKENS[:40]})
    request = cache.admit(TOKENS[:41])
    assert request.length == 40
    cache.truncate(request, 20)
    others = [1, 2, 3, 4, 5, 6]
    stories.tell(cache, {request: others})
    assert cache.digest([request]) == stories.retell(backend, stories.PAGED, [*TOKENS[:20], *others])


def test_rows_that_wait_for_the_end_of_a_step_are_no_longer_the_callers(backend):
    cache = scene.create(CacheSpec(layers=[scene.ring(4), scene.ring(4)]), backend, max_requests=1, max_tokens=32)
    request = cache.admit()
    buffer = np.empty((9, scene.DIM), np.float32)
    with cache.step({request: 9}) as step:
        for layer in range(2):
            buffer[:] = 100 * layer + np.arange(9)[:, None]
            step.layer(layer).append_window(buffer)
        buffer[:] = -1
    with cache.step({request: 0}) as step:
        for layer in range(2):
            assert scene.window_of(step, layer) == [scene.numbered(5, 8, 100.0 * layer)]


def test_a_slots_generation_tells_its_requests_apart(backend):
    cache = stories.create(stories.PAGED, backend, max_requests=1)
    generations = []
    for _ in range(3):
        request = cache.admit()
        generations.append((request.slot, request.generation))
        cache.release(request)
    assert generations == [(0, 0), (0, 1), (0, 2)]


def test_a_request_of_another_cache_is_told_from_a_released_one(backend):
    here, there = (stories.create(stories.PAGED, backend) for _ in range(2))
    with pytest.raises(RequestError, match="of another cache"):
        here.release(there.admit())
