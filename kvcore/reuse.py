"""Prefix reuse over time: which checkpoints are kept, and what a new prompt can take over.

Blocks publish themselves under their chain key as soon as they are full. Rings and tails are not in blocks: their live
rows at chosen lengths are kept as checkpoints. The policy says at which lengths, and a hit is only ever offered at a
length for which every component is at hand.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvcore.manager import Manager, Place
from kvcore.ops import RawRows
from kvcore.prefix import Periodic, Policy, chain, point_key, replay_tokens, seed_of
from kvcore.spec import CacheSpec

State = Mapping[tuple[int, str], RawRows]
"""Live rows of one request by (layer, role), [1, n, row_bytes]."""


class Hit(NamedTuple):
    """What a prompt can take over.

    Attributes:
        length: tokens the request starts with.
        stored: tokens whose state is at hand once the tokens from ``length`` up to it were replayed.
        blocks: the full, sealed blocks of those tokens, in order.
        state: rows to restore, or None where there are none.
    """

    length: int
    stored: int
    blocks: tuple[int, ...]
    state: State | None


NO_HIT = Hit(0, 0, (), None)


class PrefixCache:
    """Keys, checkpoints and look-ups of one cache under one policy."""

    def __init__(self, spec: CacheSpec, policy: Policy, manager: Manager) -> None:
        self.policy = policy
        self._spec = spec
        self._manager = manager
        self._seed = seed_of(spec)
        self._replay = replay_tokens(spec)
        self._states: OrderedDict[bytes, tuple[int, State]] = OrderedDict()
        # One state a block is what a full history needs; points come on top.
        self._capacity = 2 * manager.plan.blocks + manager.plan.slots

    @property
    def on(self) -> bool:
        """False under the policy ``off``."""
        return self.policy != "off"

    @property
    def kept_bytes(self) -> int:
        """Bytes of all checkpoints."""
        return sum(raw.rows.nbytes for _, state in self._states.values() for raw in state.values())

    def boundaries(self, start: int, length: int) -> list[int]:
        """Lengths within a step, after ``start`` up to ``length``, at which the policy keeps a checkpoint."""
        size = self._spec.block_tokens
        if self.policy == "full":
            return list(range((start // size + 1) * size, length + 1, size))
        if isinstance(self.policy, Periodic) and length > start and length % self.policy.tokens == 0:
            return [length]
        return []

    def publish(self, place: Place) -> None:
        """Seal the full blocks of a request whose token ids are known."""
        if not self.on or place.tokens is None or not place.blocks:
            return
        size = self._spec.block_tokens
        done = len(place.keys)
        parent = place.keys[-1] if done else self._seed
        new = chain(parent, place.tokens[done * size : place.length], size)
        place.keys += list(new)
        for block, key in zip(place.blocks[done:], place.keys[done:], strict=False):
            self._manager.blocks.seal(block, key)

    def keep(self, tokens: Sequence[int], state: State) -> None:
        """Keep the state of a request whose history is ``tokens``; the oldest one goes where there are too many."""
        size = self._spec.block_tokens
        parent = self._seed
        for parent in chain(self._seed, tokens, size):  # noqa: B007 - the last key of the chain
            pass
        key = point_key(parent, tokens[len(tokens) // size * size :])
        self._states.pop(key, None)
        self._states[key] = (len(tokens), state)
        while len(self._states) > self._capacity:
            self._states.popitem(last=False)

    def find(self, tokens: Sequence[int], *, limit: int) -> Hit:
        """The longest hit of at most ``limit`` tokens of a prompt."""
        if not self.on:
            return NO_HIT
        size = self._spec.block_tokens
        keys = list(chain(self._seed, tokens, size))
        blocks = self._sealed(keys)
        best = self._checkpointed(tokens, keys, blocks, limit)
        if self._replay == 0:
            # Nothing but blocks to restore: every full block within the limit is a hit.
            stored = length = min(len(blocks), limit // size) * size
        elif self.policy == "zero":
            stored = len(blocks) * size
            length = min(stored - self._replay, limit)
        else:
            return best
        return Hit(length, stored, tuple(blocks[: stored // size]), None) if length > best.length else best

    def _checkpointed(self, tokens: Sequence[int], keys: list[bytes], blocks: list[int], limit: int) -> Hit:
        """The longest kept state whose full blocks are all sealed."""
        size = self._spec.block_tokens
        paged = self._manager.plan.blocks > 0
        lengths = {length for length, _ in self._states.values() if 0 < length <= limit}
        for length in sorted(lengths, reverse=True):
            full = length // size
            if paged and full > len(blocks):
                continue
            key = point_key(keys[full - 1] if full else self._seed, tokens[full * size : length])
            if key in self._states:
                self._states.move_to_end(key)
                return Hit(length, length, tuple(blocks[:full]), self._states[key][1])
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
