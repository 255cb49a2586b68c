"""Requests over time, as host integers: slots, blocks, lengths. Knows no arrays.

Everything is all-or-nothing: an error leaves every integer as it was. A request is a handle with an id that is never
reused, and its slot has a generation, so that a stale one is refused rather than read as its slot's next owner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcore.blocks import BlockAllocator
from kvcore.counts import is_count
from kvcore.errors import OutOfBlocks, OutOfSlots, RequestError, RollbackError
from kvcore.plan import CachePlan


@dataclass(kw_only=True)
class Place:
    """What a live request holds.

    Attributes:
        slot: holds its windows and tails.
        generation: how often that slot had been taken before.
        length: tokens committed.
        high_water: highest length that any row was ever written for.
        cached_tokens: tokens that admission found already cached.
        stored: tokens whose paged rows were taken over at admission, which replayed tokens do not write again.
        blocks: block numbers in order of history.
        tokens: ids so far, or None once a step gave only a count.
        keys: keys of the full blocks of ``tokens``, as far as they were worked out.
    """

    slot: int
    generation: int
    length: int = 0
    high_water: int = 0
    cached_tokens: int = 0
    stored: int = 0
    blocks: list[int] = field(default_factory=list[int])
    tokens: list[int] | None = field(default_factory=list[int])
    keys: list[bytes] = field(default_factory=list[bytes])


class Growth(NamedTuple):
    """What one request got for a step: blocks added, and shared blocks replaced by copies (place in the list, old one).

    Attributes:
        added: blocks appended to its list.
        replaced: (column, old block) of blocks that others read too and that this step writes into.
    """

    added: int
    replaced: tuple[tuple[int, int], ...]


class Request:
    """One request of a cache, from ``cache.admit()``. Hashable; after ``release`` only ``id`` may be used.

    Attributes:
        id: number that is never reused within a cache.
    """

    __slots__ = ("_manager", "id")

    def __init__(self, id: int, manager: "Manager") -> None:
        self.id = id
        self._manager = manager

    @property
    def slot(self) -> int:
        """The slot that holds the request's windows and tails."""
        return self._manager.place(self).slot

    @property
    def generation(self) -> int:
        """How often the slot had been taken before."""
        return self._manager.place(self).generation

    @property
    def length(self) -> int:
        """Tokens committed."""
        return self._manager.place(self).length

    @property
    def cached_tokens(self) -> int:
        """Tokens that admission found already cached."""
        return self._manager.place(self).cached_tokens

    @property
    def blocks(self) -> tuple[int, ...]:
        """Block numbers, in order of history."""
        return tuple(self._manager.place(self).blocks)

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """Token ids so far, or None if some step gave only a count."""
        known = self._manager.place(self).tokens
        return None if known is None else tuple(known)

    def of(self, manager: "Manager") -> bool:
        """True if this manager admitted the request."""
        return self._manager is manager

    def __repr__(self) -> str:
        if not self._manager.is_live(self):
            return f"Request({self.id}, released)"
        return f"Request({self.id}: {self.length} tokens in slot {self.slot})"


class Manager:
    """Slots and blocks of one cache, and who holds them."""

    def __init__(self, plan: CachePlan) -> None:
        self.plan = plan
        self._free_slots = list(range(plan.slots - 1, -1, -1))
        self.blocks = BlockAllocator(plan.blocks)
        self._generations = [0] * plan.slots
        self._places: dict[Request, Place] = {}
        self._next_id = 0

    @property
    def free_slots(self) -> int:
        """Slots that admission can still give out."""
        return len(self._free_slots)

    @property
    def free_blocks(self) -> int:
        """Blocks that steps can still take, cached ones that nobody holds included."""
        return self.blocks.available

    @property
    def requests(self) -> tuple[Request, ...]:
        """Live requests in order of admission."""
        return tuple(self._places)

    def is_live(self, request: Request) -> bool:
        """True between admission and release."""
        return request in self._places

    def admit(self) -> Request:
        """Give out a slot. Blocks are taken by steps.

        Raises:
            OutOfSlots: none is free.
        """
        if not self._free_slots:
            raise OutOfSlots(
                got=f"request number {len(self._places) + 1}",
                where="admit",
                allowed=f"{self.plan.slots} requests at once (max_requests)",
                hint="Release a request first.",
            )
        slot = self._free_slots.pop()
        request = Request(self._next_id, self)
        self._places[request] = Place(slot=slot, generation=self._generations[slot])
        self._generations[slot] += 1
        self._next_id += 1
        return request

    def check(self, request: object, where: str = "request") -> Request:
        """The request, if it is a live one of this cache.

        Raises:
            RequestError: it is something else, foreign, or released.
        """
        if not isinstance(request, Request):
            raise RequestError(got=request, where=where, allowed="a Request from cache.admit()")
        if not request.of(self):
            raise RequestError(
                got=f"request {request.id} of another cache", where=where, allowed="requests of this cache"
            )
        if request not in self._places:
            raise RequestError(
                got=f"request {request.id}, released",
                where=where,
                allowed="a live request",
                hint="Admit a new one: a released request's slot belongs to others.",
            )
        return request

    def place(self, request: Request) -> Place:
        """What a live request holds."""
        return self._places[self.check(request)]

    def grow(self, requests: Sequence[Request], new: Sequence[int]) -> list[Growth]:
        """Get each request the blocks that its new tokens need; all of them or none.

        A block that others read too is replaced by a fresh one if the step writes into it; the caller copies the bytes.

        Raises:
            OutOfBlocks: the free blocks do not suffice, or a request would outgrow what one may hold.
        """
        places = [self._places[request] for request in requests]
        for request, place, count in zip(requests, places, new, strict=True):
            self._check_limit(request, place.length + count)
        added = [
            max(0, self.plan.blocks_for(place.length + count) - len(place.blocks))
            for place, count in zip(places, new, strict=True)
        ]
        shared = [self._shared_column(place, count) for place, count in zip(places, new, strict=True)]
        fresh = iter(self.blocks.take(sum(added) + sum(column is not None for column in shared)))
        grown: list[Growth] = []
        for place, count, column in zip(places, added, shared, strict=True):
            replaced = () if column is None else ((column, place.blocks[column]),)
            if column is not None:
                place.blocks[column] = next(fresh)
            place.blocks += [next(fresh) for _ in range(count)]
            grown.append(Growth(count, replaced))
        return grown

    def shrink(self, requests: Sequence[Request], grown: Sequence[Growth]) -> None:
        """Undo ``grow``."""
        for request, growth in zip(reversed(requests), reversed(grown), strict=True):
            place = self._places[request]
            self._keep_blocks(place, len(place.blocks) - growth.added)
            for column, old in growth.replaced:
                self.blocks.drop([place.blocks[column]])
                place.blocks[column] = old

    def settle(self, grown: Sequence[Growth]) -> None:
        """Let go of the shared blocks that a committed step replaced."""
        for growth in grown:
            self.blocks.drop([old for _, old in growth.replaced])

    def commit(self, request: Request, new: int, tokens: Sequence[int] | None) -> None:
        """Make a step's tokens part of the request."""
        place = self._places[request]
        place.length += new
        place.high_water = max(place.high_water, place.length)
        if tokens is None and new:
            place.tokens = None
        elif tokens is not None and place.tokens is not None:
            place.tokens += tokens

    def disturb(self, request: Request, length: int) -> None:
        """Note that rows up to ``length`` may have been written although the step did not commit."""
        place = self._places[request]
        place.high_water = max(place.high_water, length)

    def truncate(self, request: Request, length: int) -> list[int]:
        """Shorten a request: exact for every component, or refused. Returns the blocks that became free.

        Raises:
            RollbackError: ``length`` is not between 0 and the request's length, or rings have overwritten rows that the
                shorter request needs.
        """
        place = self._places[request]
        if not is_count(length) or length > place.length:
            raise RollbackError(got=length, where="truncate", allowed=f"0 to {place.length}, the request's length")
        deepest = self.deepest_truncation(request)
        if length < deepest:
            raise RollbackError(
                got=length,
                where="truncate",
                allowed=f"{deepest} to {place.length}",
                hint=f"A ring has wrapped and keeps {self.plan.rollback_tokens} spare tokens (max_draft_tokens).",
            )
        place.length = length
        place.stored = min(place.stored, length)
        if place.tokens is not None:
            del place.tokens[length:]
            del place.keys[length // self.plan.spec.block_tokens :]
        return self._keep_blocks(place, self.plan.blocks_for(length))

    def deepest_truncation(self, request: Request) -> int:
        """Smallest length that ``truncate`` accepts: 0 until a ring has wrapped, then D below the highest position."""
        place = self._places[request]
        if all(place.high_water <= region.rows for region in self.plan.regions if region.growth == "slot"):
            return 0
        return min(place.length, max(0, place.high_water - self.plan.rollback_tokens))

    def release(self, request: Request) -> list[int]:
        """Take back a request's slot and blocks. Returns the blocks that became free."""
        place = self._places.pop(request)
        self._free_slots.append(place.slot)
        return self._keep_blocks(place, 0)

    def take_over(
        self, request: Request, *, length: int, stored: int, blocks: Sequence[int], tokens: Sequence[int] | None
    ) -> None:
        """Start a fresh request from shared blocks, plus one of its own where ``length`` ends inside a block.

        Raises:
            OutOfBlocks: that one block is not to be had; nothing was taken.
        """
        place = self._places[request]
        self._check_limit(request, length)
        for block in blocks:
            self.blocks.hold(block)
        try:
            own = self.blocks.take(max(0, self.plan.blocks_for(length) - len(blocks)))
        except OutOfBlocks:
            self.blocks.drop(blocks)
            raise
        place.blocks = [*blocks, *own]
        place.length = place.high_water = length
        place.stored = stored
        place.tokens = None if tokens is None else list(tokens)

    def fork(self, request: Request) -> Request:
        """A request with the same history: blocks are held by both, the slot is a new one.

        Raises:
            OutOfSlots: none is free.
        """
        source = self._places[request]
        fork = self.admit()
        place = self._places[fork]
        for block in source.blocks:
            self.blocks.hold(block)
        place.length, place.high_water, place.stored = source.length, source.high_water, source.stored
        place.blocks, place.keys = list(source.blocks), list(source.keys)
        place.tokens = None if source.tokens is None else list(source.tokens)
        return fork

    def _check_limit(self, request: Request, length: int) -> None:
        limit = self.plan.max_tokens
        if limit is not None and length > limit:
            raise OutOfBlocks(
                got=f"{length} tokens in request {request.id}",
                where="step",
                allowed=f"{limit} tokens in one request (max_tokens)",
                hint="Create the cache with a larger max_tokens.",
            )

    def _shared_column(self, place: Place, new: int) -> int | None:
        """Column of the block that ``new`` tokens start in, if others read it; taken-over rows are not written."""
        first = max(place.length, place.stored)
        column = first // self.plan.spec.block_tokens
        writes = new > 0 and place.length + new > first and column < len(place.blocks)
        return column if writes and self.blocks.is_shared(place.blocks[column]) else None

    def _keep_blocks(self, place: Place, count: int) -> list[int]:
        dropped = place.blocks[count:]
        del place.blocks[count:]
        return self.blocks.drop(dropped[::-1])
