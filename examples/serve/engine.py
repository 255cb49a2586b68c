"""A serving engine on kvcore, for any decoder of transformers with classic attention.

Requests come and go between steps. A step takes whatever is to be computed, up to ``budget`` tokens: the next token of
every request that generates, drafts after it, and chunks of prompts. Prompts begin where an earlier one with the same
beginning has been; one whose beginning is being computed waits for it. When blocks run out the youngest request makes
room and comes back later, to find most of its blocks still there. What is generated depends on none of this.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcore import Cache, OutOfBlocks, Request, RequestError, ShapeError
from kvcore.interop.transformers import PackedModel
from kvcore.interop.transformers.spec import Formats
from kvcore.requests.tokens import check_salt, token_ids


@dataclass(eq=False)
class Ask:
    """One request for tokens.

    Attributes:
        prompt: ids, one at least.
        new: most tokens to generate.
        stop: ids after which generation ends; they are part of the answer.
        temperature: 0 takes the best token; else tokens are drawn, the same ones for the same seed.
        lane: which of the engine's caches.
        salt: prefixes are shared among requests of one salt only.
        tell: called with every token, and with None at the end, in the thread of ``Engine.step``.
        known: the prompt and what was generated so far.
        reason: why it ended: ``stop``, ``length``, ``cancelled`` or ``error``; None before.
        times: when every token was there, by ``time.perf_counter``.
    """

    prompt: Sequence[int]
    new: int = 64
    stop: frozenset[int] = frozenset()
    temperature: float = 0.0
    seed: int = 0
    lane: str = "default"
    salt: str | None = None
    tell: Callable[[int | None], Any] = lambda _: None
    known: list[int] = field(default_factory=list[int], init=False)
    reason: str | None = field(default=None, init=False)
    times: list[float] = field(default_factory=list[float], init=False)
    cancelled: bool = field(default=False, init=False)
    request: Request | None = field(default=None, init=False)
    after: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int], init=False)
    seen: int = field(default=1, init=False)
    trust: int = field(default=1, init=False)

    @property
    def answer(self) -> list[int]:
        """What was generated so far."""
        return self.known[len(self.prompt) :]

    def pending(self) -> list[int]:
        """Ids that the cache does not have yet."""
        return self.known[self.request.length if self.request else 0 :]

    def drafts(self, count: int) -> list[int]:
        """What followed the last two tokens when they last came, as far as ``count`` tokens."""
        for end in range(self.seen, len(self.known) - 1):
            self.after[self.known[end - 1], self.known[end]] = end + 1
        self.seen = max(self.seen, len(self.known) - 1)
        at = self.after.get((self.known[-2], self.known[-1]), len(self.known)) if len(self.known) > 1 else 1
        return self.known[at : at + count]


class Lane:
    """The requests of one cache."""

    def __init__(self, model: PackedModel, cache: Cache, budget: int, drafts: int, *, shares: bool) -> None:
        self.model, self.cache, self.budget, self.drafts, self.shares = model, cache, budget, drafts, shares
        self.waiting: deque[Ask] = deque()
        self.running: list[Ask] = []
        self.reused = self.preemptions = self.drafted = self.accepted = 0

    def step(self) -> None:
        """Run one step of what there is."""
        for ask in [ask for ask in (*self.running, *self.waiting) if ask.cancelled]:
            self.end(ask, "cancelled")
        self._admit()
        while self.running:
            given = self._given()
            last = [self._wanted(ask, ids, drafts) for ask, (ids, drafts) in given.items()]
            batch = {ask.request: [*ids, *drafts] for ask, (ids, drafts) in given.items() if ask.request}
            try:
                logits = self.model.logits(self.cache, batch, last)
            except OutOfBlocks:  # nothing has changed
                if len(self.running) == 1:
                    raise
                self._preempt(self.running.pop())
            else:
                self._take(given, last, logits)
                return

    def end(self, ask: Ask, reason: str) -> None:
        """Give back what a request has, and say why."""
        if ask.request is not None:
            self.cache.release(ask.request)
            ask.request = None
            self.running.remove(ask)
        elif ask in self.waiting:
            self.waiting.remove(ask)
        ask.reason = reason
        ask.tell(None)

    def _admit(self) -> None:
        """Admit who waits, while there are slots, and blocks for what is known and for those that run to grow."""
        while self.waiting and self.cache.free_slots and not self._is_coming(ask := self.waiting[0]):
            if self.cache.blocks_needed(ask.known, 1, salt=ask.salt) + len(self.running) > self.cache.free_blocks:
                return
            ask.request = self.cache.admit(ask.known, salt=ask.salt)
            self.reused += ask.request.cached_tokens
            self.running.append(self.waiting.popleft())

    def _is_coming(self, ask: Ask) -> bool:
        """Whether a prompt that is being computed will soon leave blocks that ``ask`` begins with."""
        size = self.cache.plan.block_tokens
        for other in self.running if self.shares else ():
            if other.salt == ask.salt and len(other.pending()) > 1 and other.request:
                pairs = enumerate(zip(other.known, ask.known[:-1], strict=False))
                same = next((at for at, (one, two) in pairs if one != two), min(len(other.known), len(ask.known) - 1))
                if same // size > other.request.length // size:
                    return True
        return False

    def _given(self) -> dict[Ask, tuple[list[int], list[int]]]:
        """(ids, drafts after them) for everyone who gets something: who generates first, then prompts."""
        room, given = self.budget, dict[Ask, tuple[list[int], list[int]]]()
        for ask in sorted(self.running, key=lambda ask: len(ask.pending()) > 1):
            pending = ask.pending()
            ids = pending[:room]
            left = len(ask.prompt) + ask.new - len(ask.known) - 1
            most = min(self.drafts, ask.trust, left, room - 1) if len(pending) == 1 else 0
            drafts = ask.drafts(most) if most > 0 else []
            if ids:
                given[ask] = ids, drafts
                room -= len(ids) + len(drafts)
        return given

    def _wanted(self, ask: Ask, ids: list[int], drafts: list[int]) -> int:
        """Of how many of its last tokens logits are wanted: none in the middle of a prompt."""
        return 1 + len(drafts) if len(ids) == len(ask.pending()) else 0

    def _preempt(self, ask: Ask) -> None:
        if ask.request is not None:
            self.cache.release(ask.request)
        ask.request = None
        self.waiting.appendleft(ask)
        self.preemptions += 1

    def _take(self, given: dict[Ask, tuple[list[int], list[int]]], last: list[int], logits: torch.Tensor) -> None:
        """Choose tokens, keep the drafts that were right, and take back the others."""
        best, end = logits.argmax(dim=1).tolist() if len(logits) else [], 0
        for (ask, (_, drafts)), wanted in zip(given.items(), last, strict=True):
            before = self.accepted
            for at in range(wanted):
                token = best[end + at] if ask.temperature <= 0 else drawn(ask, logits[end + at])
                self._tell(ask, token)
                if ask.reason or at == len(drafts) or token != drafts[at]:
                    break
                self.accepted += 1
            right = self.accepted - before
            self.drafted += len(drafts)
            # A wrong draft costs a row of every product; one more is tried where all were right.
            ask.trust = 2 * len(drafts) if drafts and right == len(drafts) else max(1, right) if drafts else ask.trust
            end += wanted
            if ask.request is not None and ask.request.length >= len(ask.known):
                self.cache.truncate(ask.request, len(ask.known) - 1)

    def _tell(self, ask: Ask, token: int) -> None:
        ask.known.append(token)
        ask.times.append(time.perf_counter())
        ask.tell(token)
        if token in ask.stop or len(ask.answer) == ask.new:
            self.end(ask, "stop" if token in ask.stop else "length")


def drawn(ask: Ask, logits: torch.Tensor) -> int:
    """A token by its probability; the draw depends on the seed and the position alone, not on who runs beside it."""
    shares = (logits.double() / ask.temperature).softmax(0).cumsum(0).cpu()
    at = random.Random(f"{ask.seed} {len(ask.known)}").random() * shares[-1]
    return min(int(torch.searchsorted(shares, at, right=True)), len(shares) - 1)


class Engine:
    """Lanes of requests, each on a cache in formats of its own, and one model for all."""

    def __init__(
        self, model: PackedModel, *, lanes: dict[str, Formats | None] | None = None, budget: int = 256, drafts: int = 0,
        block_tokens: int = 32, prefix: Any = "full", **options: Any,
    ) -> None:  # fmt: skip
        """Make a cache for every lane; ``lanes``: name -> formats; ``options``: of ``create_cache``, for each."""
        self.lanes: dict[str, Lane] = {}
        self.vocabulary: int = model.model.get_input_embeddings().num_embeddings
        for name, formats in (lanes or {"default": None}).items():
            cache = model.create_cache(
                formats, block_tokens=block_tokens, prefix=prefix, max_draft_tokens=drafts, **options
            )
            self.lanes[name] = Lane(model, cache, budget, drafts, shares=prefix != "off")

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return any(lane.waiting or lane.running for lane in self.lanes.values())

    def submit(self, ask: Ask) -> Ask:
        """Queue a request; from any thread. One that could never fit is an ``OutOfBlocks``."""
        if ask.lane not in self.lanes or ask.known:
            raise RequestError(got=ask.lane, where="submit", allowed=f"a new request for {', '.join(self.lanes)}")
        if not ask.prompt or ask.new < 1:
            raise ShapeError(got=[len(ask.prompt), ask.new], where="submit", allowed="a prompt, and new tokens")
        longest, wanted = self.lanes[ask.lane].cache.plan.longest, len(ask.prompt) + ask.new
        if longest is not None and wanted > longest:
            raise OutOfBlocks(got=f"{wanted} tokens", where="submit", allowed=f"{longest} tokens in one request")
        # A step that fails is everybody's, so what its cache would refuse is refused here.
        check_salt(ask.salt, "submit: salt")
        ids = token_ids(ask.prompt, "submit: prompt")
        if max(ids) >= self.vocabulary:
            raise ShapeError(got=max(ids), where="submit: prompt", allowed=f"ids below {self.vocabulary}")
        ask.known = ids
        self.lanes[ask.lane].waiting.append(ask)
        return ask

    def cancel(self, ask: Ask) -> None:
        """End a request at the next step; from any thread."""
        ask.cancelled = True

    def step(self) -> None:
        """One step of every lane that has something to do. After an error nothing has changed; call it again, or end.

        Not from two threads at once.
        """
        for lane in self.lanes.values():
            lane.step()

    def give_up(self) -> None:
        """End everybody, as after an error of the model that comes again."""
        for lane in self.lanes.values():
            for ask in (*lane.running, *lane.waiting):
                lane.end(ask, "error")

    def run(self) -> None:
        """Step until everyone has an answer."""
        while self.busy:
            self.step()

    def stream(self, ask: Ask) -> Iterator[int]:
        """Submit, and step while tokens come, yielding each."""
        self.submit(ask)
        given = 0
        while ask.reason is None or given < len(ask.answer):
            yield from ask.answer[given : (given := len(ask.answer))]
            if ask.reason is None:
                self.step()
