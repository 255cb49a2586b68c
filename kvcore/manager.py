"""Requests over time, as host integers: slots, blocks, lengths. Knows no arrays.

Everything is all-or-nothing: an error leaves every integer as it was. A request is a handle with an id that is never
reused, and its slot has a generation, so that a stale one is refused rather than read as its slot's next owner.
"""

# pyright: reportPrivateUsage=false

from collections.abc import Mapping, Sequence

from kvcore.blocks import BlockAllocator
from kvcore.counts import as_count
from kvcore.errors import OutOfBlocks, OutOfSlots, RequestError, RollbackError
from kvcore.growth import Growth, shared_columns
from kvcore.plan import CachePlan
from kvcore.request import Place, Request

__all__ = ["Growth", "Manager", "Place", "Request"]


class Manager:
    """Slots and blocks of one cache, and who holds them."""

    def __init__(self, plan: CachePlan) -> None:
        self.plan = plan
        self._free_slots = list(range(plan.slots - 1, -1, -1))
        self.blocks = BlockAllocator(plan.blocks)
        self._generations = [0] * plan.slots
        self._places: dict[Request, Place] = {}
        self._next_id = 0
        # Positions that the smallest ring can take before it overwrites any; None where there is no ring.
        self._unwrapped = min((region.rows for region in plan.regions if region.growth == "slot"), default=None)

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

    def admit(self, salt: str | None = None) -> Request:
        """Give out a slot. Blocks are taken by steps; ``salt`` tells whose prefixes are shared.

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
        self._places[request] = Place(slot=slot, generation=self._generations[slot], salt=salt)
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
        if not request._of(self):
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

    def check_replay(self, request: Request, ids: Sequence[int] | None) -> None:
        """Refuse other tokens than those whose blocks the request took over and now runs through again.

        Raises:
            RequestError: the ids differ from the prompt's.
        """
        place = self._places[request]
        if ids is None or place.length >= place.stored:
            return
        expected = list(place.prompt[place.length : place.length + len(ids)])
        if list(ids[: len(expected)]) != expected:
            raise RequestError(
                got=f"other token ids than the prompt of request {request.id}",
                where="step",
                allowed=f"the prompt's ids up to token {place.stored}, whose blocks were taken over",
                hint="Admit a request with the ids that it will be given.",
            )

    def check_whole(self, request: Request, where: str) -> None:
        """Refuse a request that is still running through the tokens of a prefix hit: its rings are not all there.

        Raises:
            RequestError: tokens are left to replay.
        """
        place = self._places[request]
        if place.length < place.stored:
            raise RequestError(
                got=f"request {request.id}, {place.stored - place.length} tokens of its prefix hit not replayed yet",
                where=where,
                allowed="a request whose windows and tails are complete",
                hint=f"Step it through the prompt's ids up to token {place.stored} first.",
            )

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
        shared = shared_columns(self.blocks, self.plan.block_tokens, places, new)
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

    def settle(self, grown: Sequence[Growth]) -> list[int]:
        """Let go of the shared blocks that a committed step replaced. Returns those that became free."""
        return [block for growth in grown for _, old in growth.replaced for block in self.blocks.drop([old])]

    def commit(
        self, request: Request, new: int, tokens: Sequence[int] | None, touched: Mapping[str, bool] | None = None
    ) -> None:
        """Make a step's tokens part of the request.

        Args:
            touched: ``main`` and ``draft``, where the step used such layers -> whether all of them got its rows; None:
                the main layers did.
        """
        place = self._places[request]
        start = place.length
        place.length += new
        place.high_water = max(place.high_water, place.length)
        if tokens is None and new:
            place.tokens = None
        elif tokens is not None and place.tokens is not None:
            place.tokens += tokens
        for group, done in (({"main": True} if touched is None else touched) if new else {}).items():
            before = place.written.setdefault(group, place.given)
            if done and before >= start:
                place.written[group] = max(before, place.length)

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
        count = as_count(length)
        if count is None or count > place.length:
            raise RollbackError(got=length, where="truncate", allowed=f"0 to {place.length}, the request's length")
        length, deepest = count, self.deepest_truncation(request)
        if length < deepest:
            raise RollbackError(
                got=length,
                where="truncate",
                allowed=f"{deepest} to {place.length}",
                hint=f"A ring has wrapped and keeps {self.plan.rollback_tokens} spare tokens (max_draft_tokens).",
            )
        if length == place.length:
            # Also in the middle of a replay, which goes on.
            return []
        place.length = length
        place.stored, place.given = min(place.stored, length), min(place.given, length)
        place.written = {group: min(done, length) for group, done in place.written.items()}
        if place.tokens is not None:
            del place.tokens[length:]
            del place.keys[length // self.plan.block_tokens :]
        return self._keep_blocks(place, self.plan.blocks_for(length))

    def deepest_truncation(self, request: Request) -> int:
        """Smallest length that ``truncate`` accepts.

        It is 0 until a ring has wrapped, then D below the highest position ever written; and never below what restored
        rings are complete for.
        """
        place = self._places[request]
        deepest = place.floor
        if self._unwrapped is not None and place.high_water > self._unwrapped:
            deepest = max(deepest, place.high_water - self.plan.rollback_tokens)
        return min(place.length, deepest)

    def release(self, request: Request) -> list[int]:
        """Take back a request's slot and blocks. Returns the blocks that became free."""
        place = self._places.pop(request)
        self._free_slots.append(place.slot)
        return self._keep_blocks(place, 0)

    def empty(self, request: Request) -> list[int]:
        """Make a live request as fresh as admission did. Returns the blocks that became free."""
        place = self._places[request]
        freed = self._keep_blocks(place, 0)
        self._places[request] = Place(slot=place.slot, generation=place.generation, salt=place.salt)
        return freed

    def take_over(
        self,
        request: Request,
        *,
        length: int,
        floor: int,
        stored: int = 0,
        blocks: Sequence[int] = (),
        tokens: Sequence[int] | None,
        prompt: Sequence[int] = (),
        salt: str | None = None,
    ) -> None:
        """Start a fresh request from shared blocks, plus those of its own that ``length`` needs beyond them.

        Raises:
            OutOfBlocks: they are not to be had; nothing was taken.
        """
        place = self._places[request]
        self._check_limit(request, max(length, stored))
        for block in blocks:
            self.blocks.hold(block)
        try:
            own = self.blocks.take(max(0, self.plan.blocks_for(length) - len(blocks)))
        except OutOfBlocks:
            self.blocks.drop(blocks[::-1])
            raise
        place.blocks = [*blocks, *own]
        place.length = place.high_water = length
        place.floor, place.stored, place.prompt = floor, stored, prompt
        place.given = place.written["main"] = max(length, stored)
        place.tokens = None if tokens is None else list(tokens)
        place.salt = salt

    def fork(self, request: Request) -> Request:
        """A request with the same history: blocks are held by both, the slot is a new one.

        Raises:
            OutOfSlots: none is free.
        """
        source = self._places[request]
        fork = self.admit(source.salt)
        place = self._places[fork]
        for block in source.blocks:
            self.blocks.hold(block)
        place.length, place.high_water, place.floor = source.length, source.high_water, source.floor
        place.stored, place.given, place.prompt = source.stored, source.given, source.prompt
        place.blocks, place.keys = list(source.blocks), list(source.keys)
        place.tokens = None if source.tokens is None else list(source.tokens)
        place.written = dict(source.written)
        return fork

    def _check_limit(self, request: Request, length: int) -> None:
        limit = self.plan.longest
        if limit is not None and length > limit:
            name = "max_request_tokens" if limit == self.plan.max_request_tokens else "max_tokens"
            raise OutOfBlocks(
                got=f"{length} tokens in request {request.id}",
                where="step",
                allowed=f"{limit} tokens in one request ({name})",
                hint=f"Create the cache with a larger {name}.",
            )

    def _keep_blocks(self, place: Place, count: int) -> list[int]:
        dropped = place.blocks[count:]
        del place.blocks[count:]
        return self.blocks.drop(dropped[::-1])
