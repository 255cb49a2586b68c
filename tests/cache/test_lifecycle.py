"""Requests over time against a small model: admit, step, abort, truncate, release, in any order.

The model knows nothing of pools. A request is its list of values; beside it a ring is a list of rows, each remembering
which writing of which position it holds. From the latter it is plain which truncations are exact, and so it is proved
by brute force that every accepted one is, and that every refused one would be wrong or is deeper than was declared.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvcore
from kvcore.errors import RequestError, RollbackError
from kvcore.testing.lives import RandomLife
from tests.support import scene
from tests.support.backends_under_test import BACKENDS

SLOTS, TOKENS, BLOCK = 3, 48, 8
WINDOW, SLIDING, CHUNK, RATIO = 5, 4, 6, 4

LAYERS = [
    scene.compressed(RATIO, window=WINDOW),
    scene.compressed(RATIO, overlap=False, window=2, indexer=False),
    scene.classic(heads=1),
    scene.classic("slot", heads=1),
    scene.classic("ring", heads=1, window=SLIDING),
    scene.classic("ring", heads=1, chunk=CHUNK),
]


def last(count: int):
    """First of the last ``count`` positions."""
    return lambda length: max(0, length - count)


def chunk(length: int) -> int:
    """First position of the chunk of the last query."""
    return (length - 1) // CHUNK * CHUNK if length else 0


def pending(groups: int):
    """First position of the unfinished group, or of the ``groups - 1`` before it."""
    return lambda length: max(0, length // RATIO - (groups - 1)) * RATIO


class Ring(NamedTuple):
    """One ring: where, how many rows for D drafts, and the first position that is needed at a length."""

    layer: int
    role: str
    rows: Any
    first: Any


RINGS = [
    Ring(0, "window", lambda d: WINDOW + d, last(WINDOW)),
    Ring(0, "tail", lambda d: 2 * RATIO - 1 + max(d, 1), pending(2)),
    Ring(0, "index_tail", lambda d: 2 * RATIO - 1 + max(d, 1), pending(2)),
    Ring(1, "window", lambda d: 2 + d, last(2)),
    Ring(1, "tail", lambda d: RATIO - 1 + max(d, 1), pending(1)),
    Ring(4, "kv", lambda d: SLIDING + d, last(SLIDING)),
    Ring(5, "kv", lambda d: CHUNK + d, chunk),
]


def entry(values: list[float], number: int, *, overlap: bool) -> float:
    """Mean over a group, and with overlap over the carry halves of the group before."""
    rows = values[number * RATIO : (number + 1) * RATIO]
    if overlap and number:
        rows = [value + scene.CARRY for value in values[(number - 1) * RATIO : number * RATIO]] + rows
    return sum(rows) / len(rows)


class Modelled:
    """What the rings of one request should hold."""

    def __init__(self, drafts: int) -> None:
        self.values: list[float] = []
        self.highest = 0
        # Row of a ring -> the position and the value that it holds.
        self.rings = [[None] * ring.rows(drafts) for ring in RINGS]

    def write(self, values: list[float]) -> None:
        for value in values:
            position = len(self.values)
            self.values.append(value)
            for ring in self.rings:
                ring[position % len(ring)] = (position, value)
        self.highest = max(self.highest, len(self.values))

    def exact(self, length: int) -> bool:
        """True if every ring still holds all that a request of ``length`` tokens needs."""
        return all(
            rows[position % len(rows)] == (position, self.values[position])
            for ring, rows in zip(RINGS, self.rings, strict=True)
            for position in range(ring.first(length), length)
        )


class Lifecycle(RuleBasedStateMachine):
    """One cache and the model of its requests, and beside them what each ring holds."""

    backend: str

    @initialize(drafts=st.sampled_from((0, 1, 3)), prompts=st.lists(st.integers(0, 15), max_size=SLOTS))
    def create(self, drafts: int, prompts: list[int]) -> None:
        self.drafts = drafts
        sizes = {"max_requests": SLOTS, "max_tokens": TOKENS, "max_draft_tokens": drafts}
        self.cache = scene.create(LAYERS, self.backend, block_tokens=BLOCK, **sizes)
        self.life = RandomLife(self.cache, fill=lambda step, new: scene.fill(step, list(itertools.chain(*new))))
        self.rings: dict[int, Modelled] = {}
        self.values = itertools.count(1)
        for ring in RINGS:
            assert self.cache.plan.region(ring.layer, ring.role)[0].rows == ring.rows(drafts)
        for number, prompt in enumerate(prompts):
            self.admit()
            self.step({number: prompt}, 0)

    @rule()
    def admit(self) -> None:
        scene.poison(self.cache)
        id = self.life.admit()
        if id is not None:
            self.rings[id] = Modelled(self.drafts)

    def draw(self, counts: dict[int, int]) -> dict[int, list[int]]:
        """New values for some requests, each value used once."""
        return {self.life.request_of(n): [next(self.values) for _ in range(new)] for n, new in counts.items()}

    COUNTS = st.dictionaries(
        st.integers(0, SLOTS - 1), st.one_of(st.integers(0, 4), st.integers(0, 20)), min_size=1, max_size=SLOTS
    )

    @precondition(lambda self: self.rings)
    @rule(counts=COUNTS, padding=st.integers(0, 3))
    def step(self, counts: dict[int, int], padding: int) -> None:
        tokens = self.draw(counts)
        padded = {"pad_tokens": sum(map(len, tokens.values())) + padding} if padding else {}
        before = scene.raw(self.cache), self.cache.digest()
        if not self.life.step(tokens, **padded):
            assert (scene.raw(self.cache), self.cache.digest()) == before
            return
        for id, new in tokens.items():
            self.rings[id].write([float(value) for value in new])

    @precondition(lambda self: self.rings)
    @rule(counts=COUNTS, layers=st.integers(0, len(LAYERS)), by=st.sampled_from(("exception", "abort", "commit")))
    def abort(self, counts: dict[int, int], layers: int, by: str) -> None:
        """A step that got as far as some of the layers."""
        tokens = self.draw(counts)
        before = self.cache.digest()
        values = list(itertools.chain(*tokens.values()))
        step = self.life.open(tokens)
        if step is None:
            return
        taken = self.life.taken(tokens)
        for number in range(layers):
            scene.fill_layer(step.layer(number), LAYERS[number], np.array(values, np.float32))
        if by == "abort" or not values or layers == len(LAYERS):
            step.abort()
        elif by == "commit":
            with pytest.raises(kvcore.errors.StepError):
                step.commit()
        else:
            with pytest.raises(InterruptedError), step:
                raise InterruptedError
        self.life.aborted(taken)
        assert self.cache.digest() == before

    @precondition(lambda self: self.rings)
    @rule(number=st.integers(0, SLOTS - 1), by=st.one_of(st.integers(0, 5), st.integers(0, 30)))
    def truncate(self, number: int, by: int) -> None:
        id = self.life.request_of(number)
        rings = self.rings[id]
        length = len(rings.values) - by
        before = self.cache.digest()
        wrapped = any(rings.highest > len(rows) for rows in rings.rings)
        if not self.life.truncate(id, length):
            assert self.cache.digest() == before
            assert length < 0 or (wrapped and length < min(len(rings.values), rings.highest - self.drafts))
            return
        assert length >= 0
        assert not wrapped or length >= min(len(rings.values), rings.highest - self.drafts)
        assert rings.exact(length), "accepted although rows that are needed were overwritten"
        del rings.values[length:]

    @precondition(lambda self: self.rings)
    @rule(number=st.integers(0, SLOTS - 1))
    def release(self, number: int) -> None:
        id = self.life.request_of(number)
        del self.rings[id]
        request = self.life.release(id)
        with pytest.raises(RequestError):
            self.cache.release(request)

    @invariant()
    def slots_and_blocks_are_conserved(self) -> None:
        if not hasattr(self, "life"):
            return
        self.life.compare()
        held = [block for request in self.cache.requests for block in request.blocks]
        assert len(held) == len(set(held))
        assert set(held) <= set(range(TOKENS // BLOCK))
        for id, rings in self.rings.items():
            assert self.life.tokens(id) == rings.values

    @invariant()
    def every_row_is_the_right_one(self) -> None:
        if not getattr(self, "rings", None):
            return
        models = list(self.rings.values())

        def rows(first: Any) -> list[dict[int, float]]:
            return [
                {position: model.values[position] for position in range(first(len(model.values)), len(model.values))}
                for model in models
            ]

        with scene.at_rest(self.cache, *self.life.requests.values()) as step:
            for ring in RINGS:
                assert all(model.exact(len(model.values)) for model in models)
                read = {"window": scene.window_of, "kv": scene.kv_of}.get(ring.role)
                found = read(step, ring.layer) if read else scene.tail_of(step, ring.layer, role=ring.role)
                assert found == rows(ring.first), ring
            for layer in (2, 3):
                assert scene.kv_of(step, layer) == rows(last(TOKENS))
            for layer, overlap in ((0, True), (1, False)):
                expected = [
                    [entry(model.values, n, overlap=overlap) for n in range(len(model.values) // RATIO)]
                    for model in models
                ]
                assert scene.entries_of(step, layer) == expected
            assert scene.keys_of(step, 0) == [
                [entry(model.values, n, overlap=True) for n in range(len(model.values) // RATIO)] for model in models
            ]


@pytest.mark.parametrize("name", BACKENDS)
def test_lifecycle(name: str) -> None:
    machine = type("Machine", (Lifecycle,), {"backend": name})
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run = settings(max_examples=30, stateful_step_count=25, suppress_health_check=slow)
    scene_machine = machine.TestCase
    scene_machine.settings = run
    scene_machine().runTest()


@pytest.mark.sampled
@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
@pytest.mark.parametrize("written", [4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 21, 30])
def test_every_truncation_is_exact_or_beyond_the_bound(backend, drafts, written):
    """All lengths that a request of ``written`` tokens could be cut to, one cache each."""
    for length in range(written + 1):
        cache = scene.create(LAYERS, backend, block_tokens=BLOCK, max_tokens=TOKENS, max_draft_tokens=drafts)
        request, model = cache.admit(), Modelled(drafts)
        values = [float(value) for value in range(written)]
        scene.write(cache, {request: values})
        model.write(values)
        wrapped = any(written > len(rows) for rows in model.rings)
        allowed = not wrapped or length >= written - drafts
        # Where a ring has wrapped, one token deeper than the bound is wrong for some ring at some length.
        assert model.exact(length) or not allowed
        if not allowed:
            with pytest.raises(RollbackError):
                cache.truncate(request, length)
            continue
        cache.truncate(request, length)
        again = [1000.0 + value for value in range(7)]
        scene.write(cache, {request: again})
        fresh = scene.create(LAYERS, backend, block_tokens=BLOCK, max_tokens=TOKENS, max_draft_tokens=drafts)
        twin = fresh.admit()
        scene.write(fresh, {twin: values[:length] + again})
        assert cache.digest() == fresh.digest()


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("written", [0, 3, 5, 8, 9, 13, 20])
def test_an_aborted_step_leaves_every_row(backend, drafts, written):
    """Steps of every size, given up after every layer got its rows; then one that counts."""
    cache = scene.create(LAYERS, backend, block_tokens=BLOCK, max_tokens=TOKENS, max_draft_tokens=drafts)
    first, second = cache.admit(), cache.admit()
    scene.write(cache, {first: range(written), second: range(100, 107)})
    before, free = cache.digest(), cache.free_blocks
    for new in range(12):
        step = cache.step({second: new // 2, first: new})
        scene.fill(step, [999.0] * (new // 2 + new))
        step.abort()
        assert (cache.digest(), cache.free_blocks) == (before, free)
    scene.write(cache, {first: range(written, written + 3)})
    fresh = scene.create(LAYERS, backend, block_tokens=BLOCK, max_tokens=TOKENS, max_draft_tokens=drafts)
    twins = fresh.admit(), fresh.admit()
    scene.write(fresh, {twins[0]: range(written + 3), twins[1]: range(100, 107)})
    assert cache.digest() == fresh.digest()
    # Nor does an aborted step deepen the bound on truncation.
    cache.truncate(first, max(0, written + 3 - drafts))


def test_one_token_deeper_would_be_wrong():
    """The declared bound is the largest: for every D some ring loses a row that D + 1 would need."""
    for drafts in range(4):
        losses = set()
        for written in range(1, 40):
            model = Modelled(drafts)
            model.write([float(value) for value in range(written)])
            for length in range(max(0, written - drafts), written + 1):
                assert model.exact(length)
            if written > drafts and not model.exact(written - drafts - 1):
                losses.add(written)
        assert losses


def test_padding_rows_may_hold_anything_under_check(backend: str) -> None:
    cache = scene.create([scene.ring(4), scene.compressed(4), scene.classic()], backend, check=True)
    request = cache.admit()
    scene.write(cache, {request: range(5)}, pad_tokens=9, filler=np.nan)
    with scene.at_rest(cache, request) as step:
        assert scene.window_of(step) == [scene.numbered(1, 4)]
        assert scene.kv_of(step, 2) == [scene.numbered(0, 4)]
    # The step's own rows are checked as ever.
    with pytest.raises(kvcore.errors.NonFiniteError):
        scene.write(cache, {request: [5, np.nan]}, pad_tokens=9)
    assert request.length == 5
