"""What can be found: everything complete that a live request holds and whose ids are known, and nothing else."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvcore
from kvcore.errors import OutOfBlocks, RequestError
from kvcore.spec import CacheSpec
from tests.support import scene, stories
from tests.support.stories import LATENT, MIXED, PAGED

PROMPT = list(range(100, 145))


@pytest.mark.parametrize("pieces", [[45], [16, 16, 13], [1, 30, 14], [45, 3], [48], [7, 41, 2]], ids=str)
@pytest.mark.parametrize("spec", [LATENT, MIXED, PAGED], ids=lambda spec: spec.name)
def test_a_number_stands_for_the_ids_of_the_prompt(backend, spec, pieces):
    cache = stories.create(spec, backend, prefix="full")
    request = cache.admit(PROMPT)
    for count in pieces:
        step_of(cache, {request: count}, [*PROMPT, 7, 8, 9][request.length :])
    boundary = 45 // spec.block_tokens * spec.block_tokens
    assert request.tokens == (tuple(PROMPT) if sum(pieces) == 45 else None)
    assert cache.restorable(PROMPT).length == boundary
    again = cache.admit([*PROMPT, 7])
    assert again.cached_tokens == boundary
    assert cache.digest([again]) == stories.retell(backend, spec, PROMPT[:boundary])


def step_of(cache, new, ids):
    """A step opened by numbers, whose rows follow from ids that the cache is not told."""
    with cache.step(new) as step:
        stories.feed(step, ids[: len(kvcore.to_numpy(step.positions))])


def test_numbers_and_ids_may_take_turns_and_points_can_be_made(backend):
    cache = stories.create(LATENT, backend, prefix=kvcore.Periodic(1000))
    request = cache.admit(PROMPT)
    step_of(cache, {request: 5}, PROMPT)
    stories.tell(cache, {request: PROMPT[5:9]})
    step_of(cache, {request: 4}, PROMPT[9:])
    cache.checkpoint(request)
    assert cache.restorable(PROMPT).length == 13
    stories.tell(cache, {request: [*PROMPT[13:], 7, 8]})
    assert request.tokens == (*PROMPT, 7, 8)


def test_a_replay_may_be_told_by_numbers(backend):
    cache = stories.create(PAGED, backend, prefix="zero")
    first = cache.admit(PROMPT)
    step_of(cache, {first: 45}, PROMPT)
    hit = cache.admit(PROMPT)
    assert hit.length == 40
    step_of(cache, {hit: 5}, PROMPT[40:])
    assert cache.digest([hit]) == cache.digest([first])
    rings = stories.create(MIXED, backend, prefix="zero")
    first = rings.admit(PROMPT)
    step_of(rings, {first: 45}, PROMPT)
    hit = rings.admit(PROMPT)
    assert 0 < hit.length < 40
    rings.truncate(hit, hit.length)  # changes nothing, in the middle of a replay
    with pytest.raises(RequestError, match="other token ids"):
        stories.tell(rings, {hit: [1]})
    step_of(rings, {hit: 45 - hit.length}, PROMPT[hit.length :])
    assert hit.tokens == tuple(PROMPT[:40]) or hit.tokens is None


@pytest.mark.parametrize("how", ["a draft beyond the prompt", "truncated", "truncated at its length", "other ids"])
def test_what_is_not_the_prompt_is_not_published(backend, how):
    """Block 1 is the prompt's, block 2 would be filled with something else under a number."""
    cache = stories.create(PAGED, backend, prefix="full", max_draft_tokens=4)
    prompt = PROMPT[:12] if how == "a draft beyond the prompt" else PROMPT[:20]
    request = cache.admit(prompt)
    step_of(cache, {request: 12}, PROMPT)
    if how == "truncated":
        cache.truncate(request, 10)
        step_of(cache, {request: 2}, [1, 2])
    elif how == "truncated at its length":
        cache.truncate(request, 12)
    elif how == "other ids":
        stories.tell(cache, {request: [9]})
    step_of(cache, {request: 6}, [3, 4, 5, 6, 7, 8])
    assert request.tokens is None
    for tokens in (PROMPT[:20], [*PROMPT[:12], 9, *PROMPT[13:20]]):
        assert cache.restorable(tokens).length == 8


@pytest.mark.sampled
@pytest.mark.parametrize("spec", [LATENT, MIXED, PAGED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("prompt", range(13, 26))
def test_a_number_beyond_the_prompt_publishes_what_lies_within(backend, spec, prompt):
    """Exactly the blocks that are wholly the prompt's, wherever in the step it ends."""
    cache = stories.create(spec, backend, prefix="full")
    request = cache.admit(PROMPT[:prompt])
    step_of(cache, {request: 3}, PROMPT)
    step_of(cache, {request: 27}, PROMPT[3:])
    step_of(cache, {request: 15}, PROMPT[30:])
    assert (request.length, request.tokens) == (45, None)
    boundary = prompt // spec.block_tokens * spec.block_tokens
    # The rows that follow are those of these ids; the cache was not told.
    assert cache.restorable(PROMPT).length == boundary
    assert cache.digest([request]) == stories.retell(backend, spec, PROMPT)
    again = cache.admit([*PROMPT, 7])
    assert again.cached_tokens == boundary
    if boundary:
        assert cache.digest([again]) == stories.retell(backend, spec, PROMPT[:boundary])


def test_what_follows_a_truncation_is_published_by_no_interruption(backend):
    cache = stories.create(PAGED, backend, prefix="full")
    request = cache.admit(PROMPT[:20])
    step_of(cache, {request: 21}, PROMPT)
    cache.truncate(request, 4)
    step_of(cache, {request: 16}, [1] * 16)
    cache._state.under_way = "a verb that was interrupted"
    cache.admit()
    assert [cache._state.manager.blocks.key(block) for block in request.blocks] == [None] * 3


def test_a_failed_step_of_numbers_forgets_nothing(backend):
    cache = stories.create(PAGED, backend, prefix="full")
    request = cache.admit(PROMPT)
    step = cache.step({request: 20})
    stories.feed(step, PROMPT[:20])
    step.abort()
    assert cache.restorable(PROMPT).length == 0
    step_of(cache, {request: 20}, PROMPT)
    assert cache.restorable(PROMPT).length == 16


def test_a_fork_knows_the_prompt_too(backend):
    cache = stories.create(PAGED, backend, prefix="full")
    request = cache.admit(PROMPT)
    step_of(cache, {request: 9}, PROMPT)
    fork = cache.fork(request)
    cache.release(request)
    step_of(cache, {fork: 36}, PROMPT[9:])
    assert cache.restorable(PROMPT).length == 40


@pytest.mark.parametrize("spec", [LATENT, MIXED, PAGED], ids=lambda spec: spec.name)
def test_a_twin_takes_the_place_of_what_was_evicted(backend, spec):
    """Two prompts with an equal beginning, prefilled together; the first is published, ends, and its room is needed."""
    size = spec.block_tokens
    cache = stories.create(spec, backend, prefix="full", max_tokens=9 * size)
    first, second = cache.admit(), cache.admit()
    ours, theirs = [1] * size + [2], [1] * size + [3] * (3 * size)
    stories.tell(cache, {first: ours, second: theirs})
    cache.release(first)
    assert cache.restorable(theirs).length == 4 * size
    # Every other block is taken, so that whatever nobody holds is evicted.
    filler = cache.admit()
    stories.tell(cache, {filler: [9] * (5 * size)})
    assert cache.free_blocks == 0
    assert cache.restorable(theirs).length == 4 * size
    cache.release(filler)
    again = cache.admit([*theirs, 4])
    assert again.cached_tokens == 4 * size
    assert again.blocks == second.blocks
    assert cache.digest([again]) == stories.retell(backend, spec, theirs)


def test_writing_into_a_twin_changes_no_other_requests_prefix(backend):
    cache = stories.create(PAGED, backend, prefix="full")
    first, second = cache.admit(), cache.admit()
    stories.tell(cache, {first: PROMPT[:16], second: PROMPT[:16]})
    cache.release(first)
    cache.truncate(second, 12)
    stories.tell(cache, {second: [1, 2, 3, 4]})
    for tokens in (PROMPT[:16], [*PROMPT[:12], 1, 2, 3, 4]):
        hit = cache.admit([*tokens, 5])
        assert hit.cached_tokens == 16
        assert cache.digest([hit]) == stories.retell(backend, PAGED, tokens)


SMALL = CacheSpec(layers=[scene.classic(heads=1, dim=1)], block_tokens=2)
SLOTS, BLOCKS = 4, 9


class Findable(RuleBasedStateMachine):
    """Lives of requests over two tokens, so that texts meet often, and the texts that each of them was told."""

    def __init__(self):
        super().__init__()
        self.cache = kvcore.create_cache(
            SMALL, backend="reference", max_requests=SLOTS, max_tokens=2 * BLOCKS, prefix="full"
        )
        # Request -> its text, its prompt as far as a number may stand for it, and whether all its ids are known.
        self.texts, self.prompts, self.known = {}, {}, {}
        self.computed = {()}

    def live(self, data):
        return data.draw(st.sampled_from(list(self.texts)))

    def feed(self, new):
        with self.cache.step(new) as step:
            rows = scene.filled([0.0] * len(kvcore.to_numpy(step.positions)), 1, 1)
            step.layer(0).append_kv(rows, scene.filled([0.0] * len(rows), 1, 3))

    @precondition(lambda self: len(self.texts) < SLOTS)
    @rule(prompt=st.lists(st.integers(0, 1), max_size=10))
    def admit(self, prompt):
        request = self.cache.admit(prompt)
        assert tuple(prompt[: request.length]) in self.computed
        self.texts[request], self.known[request] = prompt[: request.length], True
        self.prompts[request] = prompt

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), ids=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=2))
    def step(self, data, ids):
        new, told = {}, {}
        for text in ids:
            request = self.live(data)
            number = data.draw(st.booleans())
            start = len(self.texts[request])
            prompted = self.prompts[request][start : start + len(text)]
            told[request] = prompted if number else text
            new[request] = len(text) if number else text
        try:
            self.feed(new)
        except OutOfBlocks:
            return
        for request, text in told.items():
            before = self.texts[request]
            count = new[request] if isinstance(new[request], int) else len(new[request])
            if not self.known[request]:
                self.texts[request] = before + [None] * count
                continue
            self.known[request] = len(text) == count
            after = before + text
            common = min(len(after), len(self.prompts[request]))
            if after[:common] != self.prompts[request][:common]:
                self.prompts[request] = []
            self.texts[request] = after + [None] * (count - len(text))
            self.computed.update(tuple(after[:length]) for length in range(len(before), len(after) + 1))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def truncate(self, data):
        request = self.live(data)
        length = data.draw(st.integers(0, len(self.texts[request])))
        self.cache.truncate(request, length)
        del self.texts[request][length:]
        self.prompts[request] = self.prompts[request][:length]

    @precondition(lambda self: 0 < len(self.texts) < SLOTS)
    @rule(data=st.data())
    def fork(self, data):
        request = self.live(data)
        fork = self.cache.fork(request)
        self.texts[fork], self.prompts[fork] = list(self.texts[request]), list(self.prompts[request])
        self.known[fork] = self.known[request]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def release(self, data):
        request = self.live(data)
        self.cache.release(request)
        del self.texts[request]

    @invariant()
    def what_is_held_is_found(self):
        for request, text in self.texts.items():
            assert request.tokens == (tuple(text) if self.known[request] else None)
            told = list(itertools.takewhile(lambda one: one is not None, text))
            assert self.cache.restorable(told).length == len(told) // 2 * 2

    @invariant()
    def what_was_never_computed_is_not(self):
        for text in itertools.product((0, 1), repeat=4):
            length = self.cache.restorable(text).length
            assert text[:length] in self.computed

    @invariant()
    def blocks_add_up(self):
        held = {block for request in self.texts for block in request.blocks}
        assert self.cache.free_blocks == BLOCKS - len(held)


TestFindable = Findable.TestCase
TestFindable.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
