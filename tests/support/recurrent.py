"""A recurrent model of integers, run on a cache and, beside it, on nothing but each request's own tokens.

A state is what all earlier tokens made of it, so one that is too old, too new or another's is another number; the
convolution's inputs and the keys are the tokens themselves. Every step reads what the cache kept and goes on from it.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

import kvcore
from kvcore.spec import KV, CacheSpec, Conv, LayerSpec, State

HEADS, KEYS, VALUES, CHANNELS, WIDTH, BLOCK = 2, 3, 4, 5, 4, 4
MODULUS = 251
"""States stay below it, so that every format of eight bits of precision holds them exactly."""


def spec(*, state: str = "fp32", conv: str = "fp32") -> CacheSpec:
    """A recurrent layer, full attention, and both in one layer with a state of another shape."""
    layers = (
        LayerSpec(
            state=State(heads=HEADS, key_dim=KEYS, value_dim=VALUES, format=state),
            conv=Conv(dim=CHANNELS, width=WIDTH, format=conv),
        ),
        LayerSpec(kv=KV(key_heads=1, key_dim=2, key_format="fp32")),
        LayerSpec(
            state=State(heads=3, key_dim=2, format=state),
            conv=Conv(heads=2, dim=2, width=2, format=conv),
            kv=KV(key_heads=1, key_dim=2, key_format="fp32", storage="ring", window=3),
        ),
    )
    return CacheSpec(layers=layers, block_tokens=BLOCK, name="recurrent")


def create(backend: str, given: CacheSpec | None = None, **options: Any) -> kvcore.Cache:
    """A cache for a few requests."""
    sizes: dict[str, Any] = {"max_requests": 4, "max_tokens": 256, "max_draft_tokens": 3}
    return kvcore.create_cache(given or spec(), backend=backend, **(sizes | options))


def after(states: np.ndarray, token: int) -> np.ndarray:
    """The state after one more token: every element its own number."""
    places = np.arange(states.size, dtype=np.int64).reshape(states.shape)
    return (states.astype(np.int64) * 3 + token + places) % MODULUS


def state_of(tokens: list[int], shape: tuple[int, ...]) -> np.ndarray:
    """What all tokens make of nothing."""
    found = np.zeros(shape, np.int64)
    for token in tokens:
        found = after(found, token)
    return found


def advance(
    cache: kvcore.Cache, new: dict[Any, tuple[list[int], list[int]]], *, every: bool = False, keys: bool = True
) -> None:
    """One committed step: request -> (its tokens so far, the new ones); all that is read is checked.

    ``every``: the states of all tokens are given, not of the last alone. ``keys``: those are looked at, too.
    """
    with cache.step({request: tokens for request, (_, tokens) in new.items()}) as step:
        run(step, list(new.values()), every=every, keys=keys)


def run(
    step: Any,
    requests: list[tuple[list[int], list[int]]],
    *,
    every: bool = False,
    layers: int | None = None,
    keys: bool = True,
) -> None:
    """All layers of an open step, or the first ``layers``."""
    tokens = [token for _, some in requests for token in some]
    for number, layer in enumerate(step.cache.spec.layers[:layers]):
        handle = step.layer(number)
        if layer.state is not None:
            before = kvcore.to_numpy(handle.read_state())
            states: list[np.ndarray] = []
            for (old, some), found in zip(requests, before, strict=False):
                assert found.astype(np.int64).tolist() == state_of(old, layer.state.shape).tolist()
                states.append(found)
                for token in some:
                    states.append(after(states[-1], token))
            counts = [len(some) + 1 for _, some in requests]
            ends = np.cumsum(counts)
            if every:
                starts = {0, *ends.tolist()}
                given = [state for place, state in enumerate(states) if place not in starts]
                handle.append_state(np.array(given, np.float32).reshape(len(tokens), *layer.state.shape))
            else:
                handle.write_state(np.array([states[end - 1] for end in ends], np.float32))
        if layer.conv is not None:
            for _ in range(2):
                found = kvcore.to_numpy(handle.gather_conv()).astype(np.float32)
                for (old, _), inputs in zip(requests, found, strict=False):
                    padded = [0] * layer.conv.span + old
                    wanted = padded[len(padded) - layer.conv.span :]
                    assert inputs.tolist() == [[token] * layer.conv.channels for token in wanted]
                if "conv" not in handle._writes.own:
                    handle.append_conv(np.repeat(np.array(tokens, np.float32)[:, None], layer.conv.channels, axis=1))
        if layer.kv is not None:
            rows = np.repeat(np.array(tokens, np.float32)[:, None, None], 2, axis=2)
            handle.append_kv(rows, rows)
            if not keys:
                continue
            found, _, positions = (kvcore.to_numpy(array) for array in handle.gather_kv())
            for (old, some), row, places in zip(requests, found, positions, strict=False):
                whole = old + some
                assert [row[n, 0, 0] for n, p in enumerate(places) if p >= 0] == [whole[p] for p in places if p >= 0]


class Lives:
    """Random lives of requests on one cache.

    Attributes:
        model: each request's tokens.
        states: the lengths of each that a step gave a state for.
        high: the most tokens that each ever had.
        floor: the least that each can be cut to, by what it came here with.
        looks: how often what is dear is looked at, too: keys, digests around a step.
        happened: what was done, by name; what there was no room for, or nothing to do it to, is not counted.
    """

    def __init__(self, cache: kvcore.Cache, seed: int, *, prefix: bool = False, looks: float = 0.5) -> None:
        self.cache = cache
        self.prefix = prefix
        self.hits = 0
        self.seen: list[list[int]] = []
        self.rng = random.Random(seed)
        self.model: dict[Any, list[int]] = {}
        self.states: dict[Any, list[int]] = {}
        self.high: dict[Any, int] = {}
        self.floor: dict[Any, int] = {}
        self.happened: Counter[str] = Counter()
        self.looks = looks

    def go_on(self, operations: int) -> None:
        """So many random operations."""
        for _ in range(operations):
            acts = [self.admit] if not self.model else [
                self.step, self.step, self.step, self.step, self.abort, self.truncate, self.truncate, self.fork,
                self.admit, self.admit, self.release, self.release, self.move, self.checkpoint, self.checkpoint,
            ]  # fmt: skip
            self.do(self.rng.choice(acts))

    def do(self, act: Callable[[], bool]) -> bool:
        """One operation, noted if it was done."""
        done = act()
        self.happened[act.__name__] += done
        return done

    def admit(self) -> bool:
        if not self.cache.free_slots:
            return False
        # Prompts that go on where others were.
        seen = self.rng.choice([[], *self.seen[-8:], *self.model.values()])
        prompt = [*seen[: self.rng.randrange(len(seen) // 2, len(seen) + 1)], self.rng.randrange(2)]
        found = self.cache.restorable(prompt, len(prompt) - 1, salt="a")
        full = not self.cache.free_blocks and found.length % self.cache.spec.block_tokens
        request = self.cache.admit(prompt, salt="a")
        # Without room for its last, partial block a request starts from nothing.
        assert (0 if full else found.length, 0, True) == (request.length, found.replay, found.exact)
        # The prefix that was found is the request's; the step after it reads it.
        self.hits += request.length > 0
        self.note(request, prompt[: request.length], [request.length])
        return True

    def step(self) -> bool:
        chosen = self._some()
        new = {request: self._tokens() for request in chosen}
        if not self._fits(new):
            return False
        every = self.rng.random() < 0.4
        told = {request: (self.model[request], new[request]) for request in chosen}
        advance(self.cache, told, every=every, keys=self.rng.random() < 2 * self.looks)
        for request, tokens in new.items():
            start = len(self.model[request])
            self.model[request] = self.model[request] + tokens
            end = len(self.model[request])
            if tokens:
                self.high[request] = max(self.high[request], end)
                self.states[request] += range(start + 1, end + 1) if every else [end]
        return True

    def abort(self) -> bool:
        """A step that is given up, after all of its layers or some; now and then the digest is looked at."""
        chosen = self._some()
        new = {request: self._tokens() for request in chosen}
        if not self._fits(new):
            return False
        before = self.cache.digest() if self.rng.random() < self.looks else None
        step = self.cache.step(new)
        layers = self.rng.randrange(1, len(self.cache.spec.layers) + 1)
        requests = [(self.model[request], new[request]) for request in chosen]
        run(step, requests, every=self.rng.random() < 0.5, layers=layers)
        step.abort()
        assert before is None or self.cache.digest() == before
        return True

    def truncate(self) -> bool:
        request = self.rng.choice(list(self.model))
        tokens = self.model[request]
        length = max(0, len(tokens) - self.rng.randrange(6))
        within = length >= self.deepest(request)
        try:
            self.cache.truncate(request, length)
        except kvcore.RollbackError:
            assert length != len(tokens)
            assert not within or length not in self.states[request]
            return True
        assert length in (0, len(tokens), *self.states[request])
        self.model[request] = tokens[:length]
        self.states[request] = [kept for kept in self.states[request] if kept <= length]
        return True

    def fork(self) -> bool:
        if not self.cache.free_slots:
            return False
        source = self.rng.choice(list(self.model))
        fork = self.cache.fork(source)
        self.note(fork, list(self.model[source]), list(self.states[source]))
        self.high[fork], self.floor[fork] = self.high[source], self.floor[source]
        return True

    def release(self) -> bool:
        request = self.rng.choice(list(self.model))
        self.seen = [*self.seen[-8:], self.model[request]]
        self.cache.release(request)
        for known in (self.model, self.states, self.high, self.floor):
            del known[request]
        return True

    def move(self) -> bool:
        """Out as a blob and in again."""
        request = self.rng.choice(list(self.model))
        if not self.cache.free_slots or not self._fits({request: self.model[request]}):
            return False
        digest = self.cache.digest([request])
        moved = self.cache.import_request(self.cache.export_request(request), salt="a")
        assert self.cache.digest([moved]) == digest
        self.note(moved, list(self.model[request]), self.that_leave(request), self.deepest(request))
        return True

    def checkpoint(self) -> bool:
        request = self.rng.choice(list(self.model))
        if not self.prefix or not request.length:
            return False
        self.cache.checkpoint(request)
        return True

    def that_leave(self, request: Any) -> list[int]:
        """The lengths whose states go with a request: all from the first on that follows without a gap."""
        length, held = len(self.model[request]), self.states[request]
        first = length
        while first - 1 in held:
            first -= 1
        return list(range(first, length + 1))

    def deepest(self, request: Any) -> int:
        """The least length that a request can surely be cut to."""
        return max(self.high[request] - self.cache.plan.max_draft_tokens, self.floor[request])

    def note(self, request: Any, tokens: list[int], states: list[int], floor: int = 0) -> None:
        """A request that came here with these tokens."""
        self.model[request], self.states[request], self.high[request] = tokens, states, len(tokens)
        self.floor[request] = floor

    def _some(self) -> list[Any]:
        live = list(self.model)
        return self.rng.sample(live, self.rng.randrange(1, len(live) + 1))

    def _tokens(self) -> list[int]:
        count = self.rng.choice([0, 1, 1, 1, 2, 3, 4, 5, 9])
        return [self.rng.randrange(2) for _ in range(count)]

    def _fits(self, new: dict[Any, list[int]]) -> bool:
        """Every block may have to be copied, or may be kept by nobody but prefixes."""
        held = sum(-(-(len(self.model[request]) + len(tokens)) // BLOCK) + 1 for request, tokens in new.items())
        return held <= self.cache.free_blocks
