"""Prefix reuse over time: which checkpoints are kept, and what a new prompt can take over.

Blocks publish themselves under their chain key as soon as they are full. Rings and tails are not in blocks: their live
rows at chosen lengths are kept, on the host, as checkpoints. The policy says at which lengths, and a hit is only ever
offered at a length for which every component is at hand. A checkpoint goes when the last full block before it does.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvcore.portable.rows import Content
from kvcore.requests.manager import Manager, RequestState
from kvcore.requests.prefix import Periodic, Policy, chain, point_key, replay_tokens, seed_of, window_tokens
from kvcore.spec import CacheSpec


class Hit(NamedTuple):
    """What a prompt can take over.

    Attributes:
        length: tokens the request starts with.
        stored: tokens whose state is at hand once the tokens from ``length`` up to it were replayed.
        blocks: the full, sealed blocks of those tokens, in order.
        state: rows to restore, or None where there are none.
        exact: what is then held is what an uninterrupted run holds.
    """

    length: int
    stored: int
    blocks: tuple[int, ...]
    state: Content | None
    exact: bool = True


class Kept(NamedTuple):
    """One checkpoint: its length, the key of its last full block (the seed if none), its rows, if they are exact."""

    length: int
    parent: bytes
    state: Content
    exact: bool


NO_HIT = Hit(0, 0, (), None)


class PrefixCache:
    """Keys, checkpoints and look-ups of one cache under one policy."""

    def __init__(self, spec: CacheSpec, policy: Policy, manager: Manager) -> None:
        self.policy = policy
        self._block_tokens = manager.plan.block_tokens
        self._manager = manager
        self._spec = spec
        self._resets = 0
        self._seed = seed_of(spec)
        self._replay = window_tokens(spec) if policy == "approximate" else replay_tokens(spec)
        self._states: OrderedDict[bytes, Kept] = OrderedDict()
        # Last full block's key -> {key of a checkpoint: how many tokens beyond that block it lies}.
        self._beyond: dict[bytes, dict[bytes, int]] = {}
        # One state a block is what a full history needs; points come on top. Without blocks every slot may have one.
        plan = manager.plan
        blocks = plan.blocks or plan.slots * (-(-plan.longest // plan.block_tokens) if plan.longest else 0)
        self.capacity = 2 * blocks + plan.slots
        manager.blocks.on_evict = self._forget_beyond

    @property
    def on(self) -> bool:
        """False under the policy ``off``."""
        return self.policy != "off"

    @property
    def checkpoints(self) -> int:
        """Checkpoints that are kept."""
        return len(self._states)

    @property
    def kept_bytes(self) -> int:
        """Bytes of all checkpoints, on the host."""
        return sum(held.rows.nbytes for kept in self._states.values() for held in kept.state.values())

    def boundaries(self, start: int, length: int) -> list[int]:
        """Lengths within a step, after ``start`` up to ``length``, at which the policy keeps a checkpoint.

        At the end of a block there is nothing to keep where blocks are all that there is to restore.
        """
        size, blocks_say_all = self._block_tokens, self._replay == 0
        if self.policy == "full":
            return [] if blocks_say_all else list(range((start // size + 1) * size, length + 1, size))
        if isinstance(self.policy, Periodic) and length > start and length % self.policy.tokens == 0:
            return [] if blocks_say_all and length % size == 0 else [length]
        return []

    def extend(self, place: RequestState) -> None:
        """Work out the keys of a place that is not in the table yet."""
        place.keys = [*place.keys, *self.keys_after(place)]

    def keys_after(self, place: RequestState, tokens: Sequence[int] = ()) -> Sequence[bytes]:
        """The keys that a place lacks, with ``tokens`` after those that it knows."""
        size, done = self._block_tokens, len(place.keys)
        if not self.on or not place.shares or place.tokens is None or place.complete // size <= done:
            return ()
        parent = place.keys[-1] if done else self._seed
        known = [*place.tokens[done * size :], *tokens][: place.complete - done * size]
        return list(chain(parent, known, size, None if done else place.salt))

    def publish(self, place: RequestState, done: int = 0) -> None:
        """Seal a request's full blocks whose keys are known, the first ``done`` of which are sealed already."""
        if self.on and len(place.keys) > done:
            for block, key in zip(place.blocks[done:], place.keys[done:], strict=False):
                self._manager.blocks.seal(block, key)

    def mend(self, places: Iterable[RequestState]) -> None:
        """Work out anew what follows from blocks and checkpoints, after a verb that did not get to its end."""
        for place in places if self.on else ():
            self.publish(place)
        self._beyond = {}
        for key, kept in self._states.items():
            self._beyond.setdefault(kept.parent, {})[key] = kept.length % self._block_tokens
        find = self._manager.blocks.find_quietly
        for parent in list(self._beyond) if self._manager.plan.blocks else ():
            if parent != self._seed and find(parent) is None:
                self._forget_beyond(parent)

    def reset(self) -> list[int]:
        """Find nothing of what was published so far; one assignment, the rest is tidying. Returns freed blocks.

        Requests that are live do not share from here on: what they compute follows from what is forgotten.
        """
        self._manager.hide()
        self._resets += 1
        self._seed = seed_of(self._spec, self._resets)
        self._states, self._beyond = OrderedDict(), {}
        return self._manager.blocks.forget()

    def keep(self, place: RequestState, length: int, state: Content) -> None:
        """Keep the state of a published request at ``length`` tokens; the oldest one goes where there are too many."""
        full = length // self._block_tokens
        parent = place.keys[full - 1] if full else self._seed
        # At the end of a block its key says all; beyond it the tokens are known, or nobody could ask for the state.
        rest = place.tokens[full * self._block_tokens : length] if place.tokens is not None else []
        key = point_key(parent, rest, place.salt)
        if key in self._states and (self._states[key].exact or not place.exact):
            self._states.move_to_end(key)
            return
        self._states[key] = Kept(length, parent, state, place.exact)
        self._beyond.setdefault(parent, {})[key] = len(rest)
        while len(self._states) > self.capacity:
            self._forget(next(iter(self._states)))

    def kept(self, place: RequestState) -> list[tuple[int, Content]]:
        """(length, state) of every checkpoint of a request's own tokens, shortest first; an exact one has such."""
        if place.tokens is None or not place.shares:
            return []
        size, found = self._block_tokens, list[tuple[int, Content]]()
        for full, parent in enumerate([self._seed, *place.keys]):
            for key, rest in self._beyond.get(parent, {}).items():
                length = full * size + rest
                own = place.tokens[full * size : length]
                known = self._states[key]
                if length > place.length or key != point_key(parent, own, place.salt):
                    continue
                if known.exact or not place.exact:
                    found.append((length, known.state))
        return sorted(found, key=lambda one: one[0])

    def find(self, tokens: Sequence[int], *, limit: int, salt: str | None = None) -> Hit:
        """The longest hit of at most ``limit`` tokens of a prompt, among histories of the same salt."""
        if not self.on:
            return NO_HIT
        size = self._block_tokens
        keys = list(chain(self._seed, tokens, size, salt))
        blocks = self._sealed(keys)
        best = self._checkpointed(tokens, keys, blocks, limit, salt)
        if self._replay == 0:
            # Nothing but blocks to restore: every full block within the limit is a hit.
            stored = length = min(len(blocks), limit // size) * size
        elif self.policy in ("zero", "approximate") and self._replay is not None:
            stored = len(blocks) * size
            length = min(stored - self._replay, limit)
        else:
            return best
        exact = self.policy != "approximate" or self._replay == 0
        return Hit(length, stored, tuple(blocks[: stored // size]), None, exact) if length > best.length else best

    def _checkpointed(
        self, tokens: Sequence[int], keys: list[bytes], blocks: list[int], limit: int, salt: str | None
    ) -> Hit:
        """The longest kept state whose full blocks are all sealed."""
        size = self._block_tokens
        within = min(limit // size, len(blocks) if self._manager.plan.blocks else len(keys))
        for full in range(max(0, within), -1, -1):
            parent = keys[full - 1] if full else self._seed
            for rest in sorted(set(self._beyond.get(parent, {}).values()), reverse=True):
                length = full * size + rest
                key = point_key(parent, tokens[full * size : length], salt)
                if 0 < length <= limit and key in self._states:
                    self._states.move_to_end(key)
                    kept = self._states[key]
                    return Hit(length, length, tuple(blocks[:full]), kept.state, kept.exact)
        return NO_HIT

    def _sealed(self, keys: list[bytes]) -> list[int]:
        """Sealed blocks of a chain from its start, up to the first that is not there."""
        found: list[int] = []
        for key in keys if self._manager.plan.blocks else []:
            block = self._manager.blocks.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def _forget(self, key: bytes) -> None:
        kept = self._states.pop(key)
        beyond = self._beyond[kept.parent]
        del beyond[key]
        if not beyond:
            del self._beyond[kept.parent]

    def _forget_beyond(self, parent: bytes) -> None:
        """A sealed block is gone: nobody can take over what came after it."""
        for key in list(self._beyond.get(parent, ())):
            self._forget(key)
