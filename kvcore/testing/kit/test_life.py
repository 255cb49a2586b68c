"""Requests over time: any way to the same tokens leaves the same content, and no request sees another's.

The content of a request is compared through its digest: with what the same backend holds when the same tokens come in
one step, and, where nothing is computed, with the reference.
"""

from collections.abc import Sequence
from functools import lru_cache

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import kvcore
from kvcore.testing.lives import RandomLife
from kvcore.testing.tagged_rows import LIMIT, feed, fill, life_spec, stored_spec, written

SLOTS = 3
DRAFTS = 2
TOKENS = 2 * LIMIT

COUNTS = (1, 1 + DRAFTS, 0, 2, 7, 17)
"""New tokens of a step: 1 + DRAFTS is the most that is written at once and so must be undone if the step fails."""

REPEATABLE = settings(
    derandomize=True,
    deadline=None,
    database=None,
    # Shrinking runs the cache thousands of times, and a life of 20 steps can be read as it is.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def make(backend: str, device: str | None, spec: kvcore.CacheSpec) -> kvcore.Cache:
    """A small cache on the backend under test; the reference always runs on the CPU."""
    return kvcore.create_cache(
        spec,
        backend=backend,
        device=None if backend == "reference" else device,
        max_requests=SLOTS,
        max_tokens=TOKENS,
        max_draft_tokens=DRAFTS,
    )


@settings(REPEATABLE, max_examples=25)
@given(chunks=st.lists(st.integers(0, 17), min_size=1, max_size=8), beside=st.integers(0, 9))
def test_chunks_do_not_matter(kv_backend: str, kv_device: str | None, chunks: Sequence[int], beside: int) -> None:
    """However tokens are split into steps, and whatever shares the steps, the same bytes are stored."""
    length = min(sum(chunks), LIMIT)
    split, whole = make(kv_backend, kv_device, life_spec()), make(kv_backend, kv_device, life_spec())
    other, request = split.admit(), split.admit()
    feed(split, {other: [2] * beside})
    for chunk in chunks:
        feed(split, {request: [1] * min(chunk, length - request.length), other: [2] * (other.length < 20)})
    assert split.digest([request]) == whole.digest([written(whole, [1] * length)])
    assert split.digest([other]) == whole.digest([written(whole, [2] * other.length)])


@pytest.mark.parametrize("length", [0, 1, 3, 8, 29, 64])
def test_stored_bytes_are_the_reference(kv_backend: str, kv_device: str | None, length: int) -> None:
    """Where nothing is computed, a cache holds what the reference holds."""
    digests = []
    for backend in (kv_backend, "reference"):
        cache = make(backend, kv_device, stored_spec())
        digests.append(cache.digest([written(cache, [5] * length)]))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("length", [0, 1, 7, 23, 40])
@pytest.mark.parametrize("outward", [True, False], ids=["to the reference", "from the reference"])
def test_exchange_with_the_reference(kv_backend: str, kv_device: str | None, length: int, outward: bool) -> None:
    """A request moves between backends in mid-generation, computed rows and all, and goes on there."""
    here, there = make(kv_backend, kv_device, life_spec()), make("reference", None, life_spec())
    source, target = (here, there) if outward else (there, here)
    request = written(source, [3] * length)
    moved = target.import_request(source.export_request(request))
    assert moved.length == length
    assert target.digest([moved]) == source.digest([request])
    feed(source, {request: [4] * 5})
    feed(target, {moved: [4] * 5})
    if source.backend.name == target.backend.name:
        assert target.digest([moved]) == source.digest([request])
    assert moved.length == request.length == length + 5


@pytest.mark.parametrize("count", [1, 2, 9])
def test_buffers_are_reused(kv_backend: str, kv_device: str | None, count: int) -> None:
    """What was given is what is stored, whatever its owner writes into its arrays before the step is committed."""
    kept, reused = make(kv_backend, kv_device, life_spec()), make(kv_backend, kv_device, life_spec())
    requests = [written(cache, [6] * 11) for cache in (kept, reused)]
    feed(kept, {requests[0]: [7] * count})
    feed(reused, {requests[1]: [7] * count}, reused=True)
    assert reused.digest([requests[1]]) == kept.digest([requests[0]])


class Life(RuleBasedStateMachine):
    """Random lives of a few requests beside the model; a request's tokens are who wrote each of them."""

    def __init__(self, backend: str, device: str | None) -> None:
        super().__init__()
        self.life = RandomLife(make(backend, device, life_spec()), fill=fill)
        self.expected = lru_cache(lambda keys: _digest_of(backend, device, keys))
        self.key = 0

    def next_key(self) -> int:
        """A writer that never wrote before."""
        self.key += 1
        return self.key

    @initialize(third=st.sampled_from(["a fork", "a copy", "nobody"]))
    def begin_in_the_middle(self, third: str) -> None:
        """Two requests whose rings have wrapped, and perhaps one with the past of the first: where mistakes show."""
        for length in (19, 10):
            request = self.life.admit()
            assert request is not None
            self.life.step({request: [self.next_key()] * length})
        if third == "a fork":
            self.fork(0)
        elif third == "a copy":
            self.copy_through_a_blob(0)
        self._step([2, 1, 3], fails=True)
        self._step([2, 1, 3], fails=False)

    @rule()
    def admit(self) -> None:
        """Admission succeeds while a slot is free, and changes nothing otherwise."""
        self.life.admit()

    @precondition(lambda self: self.life.requests)
    @rule(counts=st.lists(st.sampled_from(COUNTS), min_size=1, max_size=SLOTS))
    def step(self, counts: list[int]) -> None:
        """A ragged step of some requests, the last admitted first."""
        self._step(counts, fails=False)

    @precondition(lambda self: self.life.requests)
    @rule(counts=st.lists(st.sampled_from(COUNTS), min_size=1, max_size=SLOTS))
    def failed_step(self, counts: list[int]) -> None:
        """A ragged step that fails at its end and leaves no trace."""
        self._step(counts, fails=True)

    def _step(self, counts: list[int], *, fails: bool) -> None:
        new = {
            request: [self.next_key()] * min(count, LIMIT - len(self.life.tokens(request)))
            for request, count in zip(list(self.life.requests)[::-1], counts, strict=False)
        }
        self.life.step(new, commit=not fails)

    @precondition(lambda self: self.life.requests)
    @rule(number=st.integers(0, 9), back=st.integers(0, DRAFTS + 1))
    def truncate(self, number: int, back: int) -> None:
        """Down to as many tokens below the highest position ever written as there are drafts, or one too deep."""
        request = self.life.request_of(number)
        assert request is not None
        length = max(0, self.life.model.live[request].highest - back)
        if length <= len(self.life.tokens(request)):
            self.life.truncate(request, length)

    @precondition(lambda self: self.life.requests)
    @rule(number=st.integers(0, 9))
    def release(self, number: int) -> None:
        """The slot and the blocks become someone else's."""
        request = self.life.request_of(number)
        assert request is not None
        self.life.release(request)

    @precondition(lambda self: 0 < len(self.life.requests) < SLOTS)
    @rule(number=st.integers(0, 9))
    def fork(self, number: int) -> None:
        """Both go on from the same content, apart."""
        request = self.life.request_of(number)
        assert request is not None
        self.life.fork(request)

    @precondition(lambda self: 0 < len(self.life.requests) < SLOTS)
    @rule(number=st.integers(0, 9))
    def copy_through_a_blob(self, number: int) -> None:
        """Exported, and imported beside the original."""
        request = self.life.request_of(number)
        assert request is not None
        exported = self.life.export(request)
        assert exported is not None
        self.life.take_in(*exported)

    @invariant()
    def every_request_holds_what_was_written(self) -> None:
        """And nothing else: a digest is equal only if every live row is."""
        for id, request in self.life.requests.items():
            assert self.life.cache.digest([request]) == self.expected(tuple(self.life.tokens(id)))

    @invariant()
    def every_slot_and_block_is_held_or_free(self) -> None:
        """Requests hold the blocks that the model says, and all others can be taken."""
        self.life.compare()


def _digest_of(backend: str, device: str | None, keys: Sequence[int]) -> int:
    """What a request holds whose tokens all came in one step, into a fresh cache."""
    cache = make(backend, device, life_spec())
    return cache.digest([written(cache, keys)])


def test_life_cycle(kv_backend: str, kv_device: str | None) -> None:
    """Admission, steps, failures, rollback, forks, copies and reuse in any order."""
    run_state_machine_as_test(
        lambda: Life(kv_backend, kv_device),  # type: ignore[arg-type]  # a factory will do
        settings=settings(REPEATABLE, max_examples=12, stateful_step_count=20),
    )
