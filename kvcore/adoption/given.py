"""Requests whose blocks somebody else gives out and takes back: nothing is free here, and nothing becomes free."""

# pyright: reportPrivateUsage=false

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvcore.adoption.maps import Index
from kvcore.adoption.pages import Pages, Table
from kvcore.errors import BackendError, OutOfBlocks, OutOfSlots, RequestError
from kvcore.plan import CachePlan
from kvcore.requests.blocks import BlockAllocator
from kvcore.requests.grants import BlockGrant, Opening
from kvcore.requests.manager import Manager, Request, RequestState, TakenOver


class GivenBlocks(BlockAllocator):
    """Blocks of an engine.

    Attributes:
        coming: those that ``take`` hands on, in order: the engine's, for the requests of a step.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._free = []
        self.coming: list[int] = []

    def take(self, count: int) -> list[int]:
        """The next of those that were given."""
        taken, self.coming = self.coming[:count], self.coming[count:]
        if len(taken) < count:
            raise OutOfBlocks(
                got=f"{len(taken)} blocks that were given and not used yet",
                where="step, import_request",
                allowed=f"{count}, what the tokens need",
                hint="The engine allots blocks: give the request more of them, cache.give(request, blocks).",
            )
        for block in taken:
            self.hold(block)
        return taken

    def hold_and_take(self, blocks: Sequence[int], count: int) -> list[int]:
        """The next of those that were given, beside ``blocks`` that are held once more; both or neither."""
        taken = self.take(count)
        for block in blocks:
            self.hold(block)
        return taken

    def hold(self, block: int) -> None:
        """One more request that was given it."""
        self._holders[block] += 1

    def drop(self, blocks: Sequence[int]) -> list[int]:
        """One less; none becomes free, since none is ours."""
        for block in blocks:
            self._holders[block] -= 1
        return []

    def mend(self, held: Iterable[int]) -> None:
        """Count anew."""
        self._holders = [0] * self.count
        for block in held:
            self._holders[block] += 1


class GivenManager(Manager):
    """Requests of an adopted cache; see ``Manager``.

    Attributes:
        given: blocks of live requests, all that they may use, as the owner numbers them.
        coming, coming_numbers: those of a request that is being admitted: where they lie, and as the owner says.
        pages: which pages they have of windows and tails.
        index: the owner's map of blocks to where they lie; None: a block lies where its number says.
        sealed: nobody writes into the memory.
    """

    def __init__(self, plan: CachePlan, pages: Pages, index: Index | None = None, *, sealed: bool = False) -> None:
        super().__init__(plan)
        self.pages = pages
        self.index = index
        self.sealed = sealed
        self.given: dict[Request, tuple[int, ...]] = {}
        self.coming: tuple[int, ...] = ()
        self.coming_numbers: tuple[int, ...] = ()
        self.wanted: int | None = None
        blocks = GivenBlocks(plan.blocks)
        self.blocks = blocks
        self._given_blocks = blocks

    def reserve(self, salt: str | None = None) -> tuple[Request, RequestState]:
        """In the slot that is wanted, if one is; where rings are looked up by it, one has to be."""
        if self.wanted is None:
            self.pages.check_any_slot()
        else:
            if self.wanted in {place.slot for place in self._places.values()}:
                raise no_such_slot(self.wanted, self.plan.slots)
            # All slots up to the wanted one become known ones, and it is the next.
            self._free_slots += range(self._unused_slot, self.wanted + 1)
            self._unused_slot = max(self._unused_slot, self.wanted + 1)
            self._free_slots.remove(self.wanted)
            self._free_slots.append(self.wanted)
        return super().reserve(salt)

    def blocks_given(self, request: Request) -> tuple[int, ...]:
        """Where all blocks lie that a request may use, in order of history."""
        return self.units(self.given.get(request, ())) or self._places[request].blocks

    def numbers_given(self, request: Request) -> tuple[int, ...]:
        """The same blocks as the owner numbers them, by which maps know tokens."""
        return self.given.get(request, ()) or self._places[request].blocks

    def units(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Where the owner's blocks lie now.

        Raises:
            OutOfBlocks: the map has no place of one. ShapeError: a place that cannot be, or is another block's too.
        """
        if self.index is None or not blocks:
            return tuple(blocks)
        numbers = np.array(blocks, np.int64)
        found = self.index.places(numbers)
        if (found < 0).any():
            raise OutOfBlocks(
                got=f"no place of block {numbers[found < 0][0]} in map {self.index.said.name!r}",
                where="blocks",
                allowed="places of all blocks of a live request",
                hint="Release a request before its blocks are taken back.",
            )
        self.index.check(numbers, found)
        return tuple(found.tolist())

    def look_up(self) -> None:
        """Follow an owner that has moved blocks since, between steps: live requests' are where the map says now."""
        if self.index is None or self._growing:
            return
        moved = False
        for request, place in self._places.items():
            # One that is being admitted has its own when it is.
            units = self.units(self.given[request][: len(place.blocks)]) if request in self.given else place.blocks
            if units != place.blocks:
                place.blocks, moved = units, True
        if moved:
            self.mend({})

    def check(self, request: object, where: str = "request", *, lost: bool = False) -> Request:
        """See ``Manager``; its blocks are where they lie now."""
        found = super().check(request, where, lost=lost)
        self.look_up()
        return found

    def give(self, request: Request, blocks: Sequence[int], pages: Mapping[tuple[int, str], Table]) -> None:
        """More of them, and of pages."""
        self.given[request] = (*(self.given.get(request) or self._places[request].blocks), *blocks)
        self.pages.add(request, pages)

    def check_writable(self, where: str) -> None:
        """Refuse to write into memory of an array that cannot be written to.

        Raises:
            BackendError: it is JAX's.
        """
        if self.sealed:
            raise BackendError(
                got=f"{where} into arrays of JAX",
                where=where,
                allowed="verbs that read: gather, attend without new tokens, digest, export_request",
                hint="A JAX array is given away by whoever writes: import its requests into a cache of backend='jax'.",
            )

    def read(self, given: Mapping[Any, Any]) -> Opening:
        """All of it, for others may have written down what the requests have."""
        self.forget_last()
        self.look_up()
        return super().read(given)

    def grow(self, opening: Opening) -> dict[Request, BlockGrant]:
        """In the blocks that the requests were given.

        Raises:
            RequestError: a step would write into a block that another request has too.
            OutOfBlocks: a request needs more than it was given.
        """
        coming: list[int] = []
        for request, place, count in zip(opening.requests, opening.places, opening.counts, strict=True):
            if count:
                self.check_writable("step")
                held = self.pages.held(request, self.numbers_given(request), place.slot)
                self.pages.check(held, place.length, place.length + count, "step")
                self.pages.check_alone(request, place.length, place.length + count)
        taken: set[int] = set()
        for number, (request, place) in enumerate(zip(opening.requests, opening.places, strict=True)):
            column, held = place.length // self.plan.block_tokens, len(place.blocks)
            if opening.counts[number] and column < held and self.blocks.holders(place.blocks[column]) > 1:
                raise _of_others(request, place.blocks[column], "step")
            more = self.blocks_given(request)[held : held + opening.more.get(number, 0)]
            self._check_alone(request, more, taken, "step")
            coming += more
        self._given_blocks.coming = coming
        return super().grow(opening)

    def _check_alone(self, request: Request, blocks: Sequence[int], taken: set[int], where: str) -> None:
        """Refuse new blocks that somebody has already, or that are ``taken`` on the way; then these are, too.

        Raises:
            RequestError: naming the block.
        """
        for block in blocks:
            if self.blocks.holders(block) or block in taken:
                raise _of_others(request, block, where)
            taken.add(block)

    def take_over(self, request: Request, place: RequestState, taken: TakenOver) -> None:
        """In the blocks that it was given."""
        known = request in self.given
        given = self.blocks_given(request) if known else self.coming
        numbers = self.numbers_given(request) if known else self.coming_numbers
        held, writes = self.pages.held(request, numbers, place.slot), self.pages.coming is None
        self.pages.check(held, 0, taken.length, "import_request", writes=writes)
        if writes:
            self.check_writable("import_request")
        coming = given[len(taken.blocks) :]
        if writes:
            self._check_alone(request, coming[: self.plan.blocks_for(taken.length)], set(), "import_request")
        self._given_blocks.coming = list(coming)
        super().take_over(request, place, taken)

    def fork(self, source: RequestState) -> tuple[Request, RequestState]:
        """See ``Manager``; both have the owner's numbers of their blocks, and each a ring of its own.

        Raises:
            OutOfBlocks: a map has no place of a ring. ShapeError: a place that cannot be.
            BackendError: nobody writes into the memory that rings are in.
        """
        if self.wanted is not None and source.length:
            self.pages.check_slots((source.slot, self.wanted), "fork")
        if self.pages.rings:
            self.check_writable("fork")
        request, place = super().fork(source)
        numbers = next(self.given.get(one, ()) for one, other in self._places.items() if other is source)
        self.given[request] = numbers[: len(place.blocks)]
        return request, place

    def release(self, request: Request) -> list[int]:
        """Forget it; its blocks stay the engine's."""
        self.given.pop(request, None)
        self.pages.forget(request)
        return super().release(request)


def no_such_slot(slot: int, slots: int) -> OutOfSlots:
    """The error of a slot that a live request has, or that there is none of."""
    return OutOfSlots(got=f"slot {slot}", where="slot", allowed=f"one of {slots} that no live request has")


def _of_others(request: Request, block: int, where: str) -> RequestError:
    return RequestError(
        got=f"tokens of request {request.id} in block {block}, which others have too",
        where=where,
        allowed="blocks of its own for what is written",
        hint="Let the engine copy the block and admit the request with the copy.",
    )
