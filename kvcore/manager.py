"""Requests over time, as host integers: slots, blocks, lengths. Knows no arrays.

Everything is all-or-nothing: an error leaves every integer as it was. A request is an (index, generation) handle, so that
a stale one is refused rather than read as its slot's next owner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcore.errors import OutOfBlocks, OutOfSlots, RequestError, RollbackError
from kvcore.plan import CachePlan


@dataclass(eq=False, kw_only=True)
class Request:
    """One request's place in a cache. Hashable by identity; after ``release`` only ``id`` may be used.

    Attributes:
        id: number that is never reused within a cache.
    """

    id: int
    _slot: int
    _generation: int
    _manager: "Manager" = field(repr=False)
    _length: int = 0
    _high_water: int = 0
    _cached_tokens: int = 0
    _blocks: list[int] = field(default_factory=list, repr=False)
    _tokens: list[int] | None = field(default_factory=list, repr=False)
    _released: bool = False

    @property
    def slot(self) -> int:
        """The slot that holds the request's windows and tails."""
        return self._live()._slot

    @property
    def generation(self) -> int:
        """How often the slot had been taken before."""
        return self._live()._generation

    @property
    def length(self) -> int:
        """Tokens committed."""
        return self._live()._length

    @property
    def cached_tokens(self) -> int:
        """Tokens that admission found already cached."""
        return self._live()._cached_tokens

    @property
    def blocks(self) -> tuple[int, ...]:
        """Block numbers, in order of history."""
        return tuple(self._live()._blocks)

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """Token ids so far, or None if some step gave only a count."""
        known = self._live()._tokens
        return None if known is None else tuple(known)

    def _live(self) -> "Request":
        if self._released:
            raise RequestError(
                got=f"request {self.id}, released",
                where="request",
                allowed="a live request",
                hint="Admit a new one; a released request's slot belongs to others.",
            )
        return self


class Manager:
    """Slots and blocks of one cache, and who holds them."""

    def __init__(self, plan: CachePlan) -> None:
        self.plan = plan
        self._free_slots = list(range(plan.slots - 1, -1, -1))
        self._free_blocks = list(range(plan.blocks - 1, -1, -1))
        self._generations = [0] * plan.slots
        self._requests: dict[int, Request] = {}
        self._next_id = 0

    @property
    def free_slots(self) -> int:
        """Slots that admission can still give out."""
        return len(self._free_slots)

    @property
    def free_blocks(self) -> int:
        """Blocks that steps can still take."""
        return len(self._free_blocks)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Live requests in order of admission."""
        return tuple(self._requests.values())

    def admit(self) -> Request:
        """Give out a slot. Blocks are taken by steps.

        Raises:
            OutOfSlots: none is free.
        """
        if not self._free_slots:
            raise OutOfSlots(
                got=f"request number {len(self._requests) + 1}",
                where="admit",
                allowed=f"{self.plan.slots} requests at once (max_requests)",
                hint="Release a request first.",
            )
        slot = self._free_slots.pop()
        request = Request(id=self._next_id, _slot=slot, _generation=self._generations[slot], _manager=self)
        self._generations[slot] += 1
        self._next_id += 1
        self._requests[request.id] = request
        return request

    def check(self, request: object, where: str = "request") -> Request:
        """The request, if it is a live one of this cache.

        Raises:
            RequestError: it is something else, foreign, or released.
        """
        if not isinstance(request, Request):
            raise RequestError(got=request, where=where, allowed="a Request from cache.admit()")
        if request._manager is not self:
            raise RequestError(got=f"request {request.id} of another cache", where=where, allowed="this cache's requests")
        return request._live()

    def take_blocks(self, requests: Sequence[Request], new: Sequence[int]) -> list[int]:
        """Extend each request's blocks for its new tokens; all of them or none.

        Returns:
            How many blocks each request got, for ``give_back_blocks``.

        Raises:
            OutOfBlocks: the free blocks do not suffice, or a request would outgrow what one may hold.
        """
        limit = self.plan.max_tokens
        for request, count in zip(requests, new, strict=True):
            if limit is not None and request._length + count > limit:
                raise OutOfBlocks(
                    got=f"{request._length + count} tokens in request {request.id}",
                    where="step",
                    allowed=f"{limit} tokens in one request (max_tokens)",
                    hint="Create the cache with a larger max_tokens.",
                )
        needs = [
            max(0, self.plan.blocks_for(request._length + count) - len(request._blocks))
            for request, count in zip(requests, new, strict=True)
        ]
        if sum(needs) > len(self._free_blocks):
            raise OutOfBlocks(
                got=f"{sum(needs)} more blocks",
                where="step",
                allowed=f"{len(self._free_blocks)} free blocks of {self.plan.blocks}",
                hint="Release or truncate requests, or bring fewer tokens in this step.",
            )
        for request, need in zip(requests, needs, strict=True):
            request._blocks += [self._free_blocks.pop() for _ in range(need)]
        return needs

    def give_back_blocks(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Undo ``take_blocks``."""
        for request, count in zip(requests, counts, strict=True):
            self._keep_blocks(request, len(request._blocks) - count)

    def commit(self, request: Request, new: int, tokens: Sequence[int] | None) -> None:
        """Make a step's tokens part of the request."""
        request._length += new
        request._high_water = max(request._high_water, request._length)
        if tokens is None and new:
            request._tokens = None
        elif tokens is not None and request._tokens is not None:
            request._tokens += tokens

    def disturb(self, request: Request, length: int) -> None:
        """Note that rows up to ``length`` were written although the step did not commit."""
        request._high_water = max(request._high_water, length)

    def truncate(self, request: Request, length: int) -> None:
        """Shorten a request: exact for every component, or refused.

        Raises:
            RollbackError: ``length`` is not between 0 and the request's length, or rings have overwritten rows that the
                shorter request needs.
        """
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= request._length:
            raise RollbackError(got=length, where="truncate", allowed=f"0 to {request._length}, the request's length")
        deepest = self.deepest_truncation(request)
        if length < deepest:
            raise RollbackError(
                got=length,
                where="truncate",
                allowed=f"{deepest} to {request._length}",
                hint=f"A ring has wrapped and keeps {self.plan.rollback_tokens} spare tokens (max_draft_tokens).",
            )
        request._length = length
        self._keep_blocks(request, self.plan.blocks_for(length))
        if request._tokens is not None:
            del request._tokens[length:]

    def deepest_truncation(self, request: Request) -> int:
        """Smallest length that ``truncate`` accepts: 0 until a ring has wrapped, then D below the highest position."""
        rings = [region.rows for region in self.plan.regions if region.growth == "slot"]
        if all(request._high_water <= rows for rows in rings):
            return 0
        return min(request._length, max(0, request._high_water - self.plan.rollback_tokens))

    def release(self, request: Request) -> None:
        """Take back a request's slot and blocks."""
        self._keep_blocks(request, 0)
        del self._requests[request.id]
        self._free_slots.append(request._slot)
        request._released = True

    def _keep_blocks(self, request: Request, count: int) -> None:
        while len(request._blocks) > count:
            self._free_blocks.append(request._blocks.pop())
