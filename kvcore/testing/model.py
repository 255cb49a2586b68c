"""An independent model of a cache's requests: sets and lists, no code of the library.

It knows what every request was told, which blocks hold which tokens, and how many units are free. It is told which
slots and blocks the cache chose (any free one is right) and checks everything that follows from that.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcore.plan import CachePlan


class Divergence(AssertionError):
    """The cache did something that the model does not allow; raised without ``assert``, so under ``python -O`` too."""


def require(condition: bool, what: str) -> None:
    """Raise unless the condition holds, also under ``python -O``."""
    if not condition:
        raise Divergence(what)


@dataclass
class KnownRequest:
    """What one request was told: its tokens, its slot, and blocks as the cache named them."""

    slot: int
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    highest: int = 0
    floor: int = 0
    published: int = 0
    stored: int = 0
    shares: bool = True
    exact: bool = True


class Left(NamedTuple):
    """What a request that left its cache holds: its tokens, the smallest length that it can go back to, and of what."""

    tokens: list[int]
    floor: int
    exact: bool


class Model:
    """Requests by id; ``sealed`` maps a block to the tokens (from the start) that it was published for.

    Several may be published for the same tokens while they are held; one of them is kept afterwards. ``points`` are the
    beginnings of which an exact request may have left a checkpoint; what else is found is ``approximate``, if anything.
    """

    def __init__(self, plan: CachePlan, *, publishes: bool, approximate: bool = False) -> None:
        self.slots, self.blocks, self.block_tokens = plan.slots, plan.blocks, plan.spec.block_tokens
        self.ring = min(region.rows for region in plan.regions if region.growth == "slot")
        self.window = max(component.span or 0 for _, _, component in plan.spec.components())
        self.drafts, self.limit = plan.rollback_tokens, plan.longest
        self.publishes, self.approximate = publishes, approximate
        self.points: set[tuple[int, ...]] = set()
        self.live: dict[int, KnownRequest] = {}
        self.sealed: dict[int, tuple[int, ...]] = {}
        self.holders: Counter[int] = Counter()

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.live)

    @property
    def free_blocks(self) -> int:
        """Everything that nobody holds can be had: free or cached."""
        return self.blocks - len(self.holders)

    def holds(self, known: KnownRequest, blocks: list[int]) -> None:
        """From now on the request holds these blocks."""
        self.holders.update(blocks)
        for block in known.blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]
                if list(self.sealed.values()).count(self.sealed.get(block, ())) > 1:
                    del self.sealed[block]
        known.blocks = list(blocks)

    def admitted(self, id: int, slot: int) -> None:
        require(self.free_slots > 0, "admitted without a free slot")
        require(slot not in {known.slot for known in self.live.values()}, f"slot {slot} given out twice")
        self.live[id] = KnownRequest(slot)

    def took_over(self, id: int, prompt: list[int], length: int, stored: int, blocks: list[int], exact: bool) -> None:
        """A prefix hit: full blocks hold exactly the prompt's tokens, also those whose tokens are still replayed.

        ``exact`` is the cache's word: it has to be true, and to be said of what is no approximate replay at least.
        """
        known = self.live[id]
        size = self.block_tokens
        require(length < len(prompt), "no token left to compute")
        require(length <= stored <= len(prompt), "more is stored than the prompt has")
        full = stored // size
        for column, block in enumerate(blocks[:full]):
            wanted = tuple(prompt[: (column + 1) * size])
            require(self.sealed.get(block) == wanted, f"block {block} is no block of this prompt")
        own = blocks[full:]
        require(not any(block in self.holders for block in own), "a partial block that somebody holds")
        require(len(own) == (1 if full * size < length else 0), "blocks do not cover the hit")
        self.took(own)
        self.holds(known, blocks)
        known.tokens, known.highest = prompt[:length], length
        known.stored = stored
        known.exact = exact
        if self.approximate:
            # A checkpoint of an exact request may be gone, and another's have come in its place.
            may_be = length == stored and tuple(prompt[:length]) in self.points
            require(may_be or not exact, "an approximate replay is taken for an exact one")
        else:
            require(exact, "an exact hit is taken for an approximate replay")
        # Nothing had left the window yet: then any shorter request can be had.
        known.floor = 0 if known.stored <= self.window else known.stored
        self._publish(known)

    def needs(self, new: dict[int, int]) -> tuple[int, bool]:
        """(blocks that a step must take, whether a request outgrows the limit)."""
        count, leaving, over = 0, {}, False
        for id, tokens in new.items():
            known = self.live[id]
            length = len(known.tokens)
            over |= self.limit is not None and length + tokens > self.limit
            count += max(0, -(-(length + tokens) // self.block_tokens) - len(known.blocks))
            count += self._copies(known, tokens, leaving)
        return count, over

    def stepped(self, new: dict[int, list[int]], blocks: dict[int, list[int]]) -> None:
        """A committed step, and every request's blocks after it."""
        before = {id: self.live[id].blocks for id in new}
        leaving: dict[int, list[int]] = {}
        fresh: list[int] = []
        for id, tokens in new.items():
            known = self.live[id]
            column = max(known.stored, len(known.tokens)) // self.block_tokens
            copied = self._copies(known, len(tokens), leaving)
            for place, block in enumerate(blocks[id]):
                kept = place < len(before[id]) and not (copied and place == column)
                if kept:
                    require(block == before[id][place], "a block changed that nobody else wrote")
                else:
                    fresh.append(block)
            wanted = max(known.stored, len(known.tokens) + len(tokens))
            require(len(blocks[id]) == -(-wanted // self.block_tokens), "wrong block count")
        require(len(set(fresh)) == len(fresh), "a block given out twice in one step")
        require(not any(block in self.holders for block in fresh), "a held block given out")
        self.took(fresh)
        for id, tokens in new.items():
            known = self.live[id]
            known.tokens += tokens
            self.holds(known, blocks[id])
            known.highest = max(known.highest, len(known.tokens))
        for id in new:
            self._publish(self.live[id])

    def deepest(self, id: int) -> int:
        """Smallest length that a truncation may go to."""
        known = self.live[id]
        deepest = known.floor
        if known.highest > self.ring:
            deepest = max(deepest, known.highest - self.drafts)
        return min(deepest, len(known.tokens))

    def truncated(self, id: int, length: int) -> None:
        known = self.live[id]
        require(self.deepest(id) <= length <= len(known.tokens), "truncated beyond the bound")
        if length == len(known.tokens):
            return
        del known.tokens[length:]
        known.stored = min(known.stored, length)
        self.holds(known, known.blocks[: -(-length // self.block_tokens)])
        known.published = min(known.published, length // self.block_tokens)

    def forked(self, source: int, id: int, slot: int) -> None:
        self.admitted(id, slot)
        known, fork = self.live[source], self.live[id]
        self.holds(fork, known.blocks)
        fork.tokens = list(known.tokens)
        fork.highest, fork.floor = known.highest, known.floor
        fork.published, fork.stored, fork.shares = known.published, known.stored, known.shares
        fork.exact = known.exact

    def replays(self, id: int) -> bool:
        """Whether the request is still running through tokens whose blocks it took over."""
        known = self.live[id]
        return len(known.tokens) < known.stored

    def left(self, id: int) -> Left:
        """What an export or a snapshot of the request holds."""
        return Left(list(self.live[id].tokens), self.deepest(id), self.live[id].exact)

    def imported(self, id: int, left: Left, blocks: list[int], *, shares: bool) -> None:
        """An empty request got what left another one; ``shares``: others may find it."""
        known = self.live[id]
        require(not known.tokens, "imported over tokens")
        require(len(blocks) == -(-len(left.tokens) // self.block_tokens), "wrong block count after an import")
        require(len(set(blocks)) == len(blocks), "a block given out twice in one import")
        require(not any(block in self.holders for block in blocks), "a held block given to an import")
        self.took(blocks)
        self.holds(known, blocks)
        known.tokens, known.floor, known.highest = list(left.tokens), left.floor, len(left.tokens)
        known.stored = known.published = 0
        known.shares, known.exact = shares, left.exact
        if shares and left.exact:
            self.points.update(tuple(left.tokens[: n + 1]) for n in range(len(left.tokens)))
        self._publish(known)

    def pointed(self, id: int) -> None:
        """A checkpoint of the request was kept."""
        if self.live[id].exact:
            self.points.add(tuple(self.live[id].tokens))

    def released(self, id: int) -> None:
        require(id in self.live, "released twice")
        self.holds(self.live.pop(id), [])

    def took(self, blocks: list[int]) -> None:
        """Blocks were given out: what they were published for is gone."""
        for block in blocks:
            self.sealed.pop(block, None)

    def _publish(self, known: KnownRequest) -> None:
        """Seal the blocks that became full."""
        size = self.block_tokens
        full = len(known.tokens) // size if self.publishes and known.shares else 0
        for column in range(known.published, full):
            history = tuple(known.tokens[: (column + 1) * size])
            self.sealed.setdefault(known.blocks[column], history)
        known.published = max(known.published, full)

    def _copies(self, known: KnownRequest, new: int, leaving: dict[int, list[int]]) -> int:
        """1 if writing needs a copy: others hold the block, or it is published; the last holder may keep it."""
        first = max(known.stored, len(known.tokens))
        column = first // self.block_tokens
        if len(known.tokens) + new <= first or column >= len(known.blocks):
            return 0
        block = known.blocks[column]
        gone = leaving.setdefault(block, [])
        left = self.holders[block] - (len(gone) if max(gone, default=0) <= len(known.tokens) else 0)
        if left > 1 or block in self.sealed:
            gone.append(len(known.tokens))
            return 1
        return 0
