"""Requests over time, as host integers: slots, blocks, lengths. Knows no arrays.

Everything is all-or-nothing: an error leaves every integer as it was. The table of live requests changes in one
assignment each time; who else holds what follows from it, and ``mend`` works that out anew after an interruption. A
request is a handle with an id that is never reused, and its slot has a generation, so that a stale one is refused
rather than read as its slot's next owner.

Map: what there is (``free_slots``, ``requests`` ...); admission (``reserve``, ``adopt``, ``discard``); the table
(``with_places``, ``become``, ``mend``); what is refused (``check``, ``check_whole``); a step (``read``,
``grow``, ``shrink``, ``after``, ``learn``, ``release_replaced``); its failure (``mark_written``, ``lose``); fewer
tokens (``truncate``, ``release``); what comes from elsewhere (``take_over``, ``fork``).
"""

# pyright: reportPrivateUsage=false

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvcore.counts import as_count
from kvcore.errors import OutOfBlocks, OutOfSlots, RequestError, RollbackError
from kvcore.foreign import shortened
from kvcore.plan import CachePlan
from kvcore.requests.blocks import BlockAllocator
from kvcore.requests.grants import BlockGrant, Opening, shared_columns
from kvcore.requests.request import Conversion, Request, RequestState
from kvcore.requests.table import MAIN, Now, Table, lengthen
from kvcore.requests.tokens import parse_tokens

__all__ = ["BlockGrant", "Manager", "Opening", "Request", "RequestState", "TakenOver"]


class Manager:
    """Slots and blocks of one cache, and who holds them."""

    def __init__(self, plan: CachePlan) -> None:
        self.plan = plan
        # Slots that were given back, and the first of those that never had a request: all from there on are free.
        self._free_slots: list[int] = []
        self._unused_slot = 0
        self.blocks = BlockAllocator(plan.blocks)
        # Of slots that had a request.
        self._generations: dict[int, int] = {}
        self._table = Table(plan)
        # What an open step's requests hold while it is open.
        self._growing: dict[Request, tuple[int, ...]] = {}
        self._next_id = 0
        # Recurrent states that a slot has room for; 0 where no layer is recurrent.
        recurrent = [(layer, role) for layer, role, component in plan.spec.components() if component.recurrent]
        self.states = min((plan.region(*found)[0].rows for found in recurrent), default=0)

    @property
    def _places(self) -> dict[Request, RequestState]:
        """What every live request holds."""
        return self._table.places

    @_places.setter
    def _places(self, places: dict[Request, RequestState]) -> None:
        self._table.now = Now(places)

    @property
    def free_slots(self) -> int:
        """Slots that admission can still give out."""
        return len(self._free_slots) + self.plan.slots - self._unused_slot

    @property
    def free_blocks(self) -> int:
        """Blocks that steps can still take, cached ones that nobody holds included."""
        return self.blocks.available

    @property
    def requests(self) -> tuple[Request, ...]:
        """Live requests in order of admission."""
        return tuple(self._table.now.places)

    def is_live(self, request: Request) -> bool:
        """True between admission and release."""
        return request in self._table.now.places

    def is_lost(self, request: Request) -> bool:
        """True for a live request whose rows could not be put back after a step that failed."""
        return self._table.now.places[request].lost

    def admit(self, salt: str | None = None) -> Request:
        """Give out a slot. Blocks are taken by steps; ``salt`` tells whose prefixes are shared.

        Raises:
            OutOfSlots: none is free.
        """
        request, place = self.reserve(salt)
        self.adopt(request, place)
        return request

    def reserve(self, salt: str | None = None) -> tuple[Request, RequestState]:
        """A request that is not live yet, and its place: ``adopt`` or ``discard`` it.

        Raises:
            OutOfSlots: no slot is free.
        """
        if not self.free_slots:
            raise OutOfSlots(
                got=f"request number {len(self._places) + 1}",
                where="admit",
                allowed=f"{self.plan.slots} requests at once (max_requests)",
                hint="Release a request first.",
            )
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = self._unused_slot
            self._unused_slot = slot + 1
        generation, id = self._generations.get(slot, 0), self._next_id
        self._generations[slot], self._next_id = generation + 1, id + 1
        return Request(id, self), RequestState(slot=slot, generation=generation, salt=salt)

    def adopt(self, request: Request, place: RequestState) -> None:
        """Make a place the request's; a request without one becomes live."""
        self._places[request] = place

    def discard(self, place: RequestState) -> list[int]:
        """Take back what a place has that nobody adopted. Returns the blocks that became free."""
        self._free_slots.append(place.slot)
        return self.blocks.drop(place.blocks[::-1])

    def with_places(self, places: Mapping[Request, RequestState]) -> Now:
        """The table with some places exchanged, for ``become``."""
        return Now({**self._places, **places})

    def with_step(self, opening: Opening, touched: Mapping[str, bool] = MAIN) -> Now | None:
        """The table with a step's tokens as part of its requests, where that is all there is to note; else None."""
        if touched != MAIN or self.states or not opening.may_repeat:
            return None
        self._table.note(opening, None)
        return Now(self._table.now.places, opening)

    def forget_last(self) -> None:
        """Have the next step looked at whole, whatever it repeats."""
        self._table.last = None

    def become(self, table: Now) -> None:
        """Exchange the table: all of a step's requests at once."""
        self._table.now = table

    def is_table(self, table: Now | None) -> bool:
        """Whether that table is the one that holds now."""
        return self._table.now is table

    def mend(self, grants: Mapping[Request, BlockGrant]) -> None:
        """Work out anew what follows from the table, after a verb that did not get to its end.

        Args:
            grants: what requests of the step that is open got for it.
        """
        self._growing = {request: grant.blocks for request, grant in grants.items()}
        self.forget_last()
        places = self._places.values()
        slots = {place.slot for place in places}
        self._free_slots = [slot for slot in range(self._unused_slot - 1, -1, -1) if slot not in slots]
        for place in places:
            if place.tokens is not None:
                del place.tokens[place.length :]
            del place.keys[place.complete // self.plan.block_tokens :]
        held = [block for place in places for block in place.blocks]
        self.blocks.mend([*held, *(block for grant in grants.values() for block in grant.taken)])

    def chosen(self, requests: Iterable[Request] | None, where: str) -> list[Request]:
        """Those that a caller named, in that order, or all live ones for None; whether they live is not looked at."""
        try:
            return list(self.requests if requests is None else requests)
        except TypeError as error:
            allowed = "a sequence of requests, or None for all"
            raise RequestError(got=shortened(requests), where=where, allowed=allowed) from error

    def check(self, request: object, where: str = "request", *, lost: bool = False) -> Request:
        """The request, if it is a live one of this cache, and not a lost one unless ``lost``.

        Raises:
            RequestError: it is something else, foreign, released, or lost.
        """
        if not isinstance(request, Request):
            raise RequestError(got=request, where=where, allowed="a Request from cache.admit()")
        if not request._of(self):
            raise RequestError(
                got=f"request {request.id} of another cache", where=where, allowed="requests of this cache"
            )
        places = self._table.now.places
        if request not in places:
            raise RequestError(
                got=f"request {request.id}, released",
                where=where,
                allowed="a live request",
                hint="Admit a new one: a released request's slot belongs to others.",
            )
        if places[request].lost and not lost:
            raise RequestError(
                got=f"request {request.id}, lost",
                where=where,
                allowed="a request whose rows are whole",
                hint="A step failed and its rows could not be put back. Release it; others are untouched.",
            )
        return request

    def place(self, request: Request) -> RequestState:
        """What a live request holds."""
        return self._places[self.check(request)]

    def place_of(self, request: Request) -> RequestState:
        """The same for requests that were checked, lost ones included."""
        return self._places[request]

    def blocks_of(self, request: Request) -> tuple[int, ...]:
        """What a live request holds, in an open step what it got for it too."""
        place = self.place(request)
        return self._growing.get(request, place.blocks)

    def check_near(self, request: Request) -> None:
        """Refuse a request some of whose rows are still in the host's memory.

        Raises:
            RequestError: they are; or it is stale or foreign.
        """
        if self.place(request).far is not None:
            raise RequestError(
                got=f"request {request.id}, entries of which are in the host's memory",
                where="request",
                allowed="a request whose rows are all there",
                hint="Bring the rest: kvcore.store.bring(cache, request).",
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

    def read(self, given: Mapping[Any, Any]) -> Opening:
        """What a step asks that is opened with ``{request: count or ids}``; nothing is changed.

        Raises:
            RequestError: a request is stale, foreign or lost, or is given other ids than those it has to replay.
            ShapeError: a value is neither a count nor ids. OutOfBlocks: a request would outgrow what one may hold.
        """
        repeated = self._table.repeated(given, self.blocks)
        if repeated is not None:
            return repeated
        opening = Opening(self.blocks.shares)
        requests, counts, all_ids, slots, stored_tokens, all_blocks = (
            opening.requests, opening.counts, opening.ids, opening.slots, opening.stored, opening.blocks)  # fmt: skip
        places, limit, is_alone = self._places, self.plan.longest, self.blocks.is_alone
        size = self.plan.block_tokens if self.plan.blocks else 0
        # Once a step for each request: what most of them need is looked at here, and everything else is a call.
        for named, value in given.items():
            request: Request = named
            place = places.get(request)
            if place is None or place.lost:
                place = places[self.check(request, "step")]
            if type(value) is int and value >= 0:
                count, ids = value, None
            else:
                count, ids = parse_tokens(value, f"step: request {request.id}")
            start, stored, blocks = place.length, place.stored, place.blocks
            if ids is None and place.prompt:
                # A number stands for the prompt's next ids, as far as there are any.
                ids = known_ids(place, count)
            if start < stored:
                check_replay(request, place, ids)
            end = start + count
            if limit is not None and end > limit:
                self._check_limit(request, end)
            if size:
                held = len(blocks)
                if end > held * size:
                    opening.more[len(counts)] = -(-end // size) - held
                # Taken-over rows are not written again.
                first = start if start > stored else stored
                if end > first and first < held * size and not is_alone(blocks[first // size]):
                    opening.contested = True
            requests.append(request)
            opening.places.append(place)
            counts.append(count)
            all_ids.append(ids)
            slots.append(place.slot)
            stored_tokens.append(stored)
            all_blocks.append(blocks)
        return opening

    def grow(self, opening: Opening) -> dict[Request, BlockGrant]:
        """Get each request the blocks that its new tokens need; all of them or none. Returns what changes.

        A block that others read too is replaced by a fresh one if the step writes into it; the caller copies the bytes.

        Raises:
            OutOfBlocks: the free blocks do not suffice.
        """
        more = opening.more
        if not more and not opening.contested:
            return opening.grants
        shared: dict[int, int] = {}
        if opening.contested:
            shared = shared_columns(self.blocks, self.plan.block_tokens, opening.places, opening.counts)
        fresh = iter(self.blocks.take(sum(more.values()) + len(shared)))
        for number in sorted({*more, *shared}):
            grant = _granted(opening.blocks[number], more.get(number, 0), shared.get(number), fresh)
            opening.grants[opening.requests[number]] = grant
            opening.blocks[number] = grant.blocks
        self._growing = {request: grant.blocks for request, grant in opening.grants.items()}
        return opening.grants

    def shrink(self, grants: Mapping[Request, BlockGrant]) -> None:
        """Undo ``grow``."""
        self._growing = {}
        for grant in reversed(list(grants.values())):
            self.blocks.drop(grant.taken)

    def release_replaced(self, grants: Mapping[Request, BlockGrant]) -> list[int]:
        """Let go of the shared blocks that a committed step replaced. Returns those that became free."""
        self._growing = {}
        return [block for grant in grants.values() for _, old in grant.replaced for block in self.blocks.drop([old])]

    def after(
        self, opening: Opening, touched: Mapping[str, bool] = MAIN, *, every: bool = False
    ) -> dict[Request, RequestState]:
        """The requests' places with a step's tokens as part of them, to be put into the table; ids come by ``learn``.

        Args:
            touched: ``main`` and ``draft``, where the step used such layers -> whether all of them got its rows.
            every: recurrent layers got the state after each of its tokens, not after the last alone.
        """
        found: dict[Request, RequestState] = {}
        places = opening.places if not opening.ahead else map(self._places.__getitem__, opening.requests)
        for request, place, new, tokens in zip(opening.requests, places, opening.counts, opening.ids, strict=True):
            found[request] = place = place.copy()
            if not new:
                continue
            start, end = place.length, place.length + new
            lengthen(place, end, touched)
            if tokens is not None and place.prompt:
                expected = place.prompt[start:end]
                if list(tokens[: len(expected)]) != list(expected):
                    # From here on it is another text than the prompt.
                    place.prompt = ()
            if self.states and touched.get("main"):
                first = max(start, end - self.states) if every else end - 1
                self._hold_states(place, (*place.states, *range(first + 1, end + 1)))
        for request, grant in opening.grants.items():
            found[request].blocks = grant.blocks
        return found

    def _hold_states(self, place: RequestState, lengths: Iterable[int]) -> None:
        """Note of which lengths a place's slot holds states: those that later ones did not take the place of."""
        lost = place.high_water - self.states
        place.states = tuple(length for length in lengths if length > lost)

    def learn(
        self, places: Mapping[Request, RequestState], opening: Opening, keys: Mapping[Request, Sequence[bytes]]
    ) -> None:
        """Note ids and keys of a step's new tokens, right before its table of places becomes the one that holds."""
        self._table.note(opening, places)
        for request, more in keys.items():
            places[request].keys += more
        for place, new, tokens in zip(places.values(), opening.counts, opening.ids, strict=True):
            known = tokens or ()
            if len(known) < new:
                place.tokens = None
            elif known and place.tokens is not None:
                place.tokens += known

    def mark_written(self, lengths: Mapping[Request, int]) -> None:
        """Note that rows up to these lengths may have been written although the step did not commit."""
        places = {request: self._places[request].copy() for request in lengths}
        for request, place in places.items():
            place.high_water = max(place.high_water, lengths[request])
            self._hold_states(place, place.states)
        self._places = {**self._places, **places}

    def hide(self) -> None:
        """Let no live request share what it computes, now or later."""
        places = {request: place.copy() for request, place in self._places.items()}
        for place in places.values():
            place.keys, place.shares = [], False
        self._places = places

    def lose(self, requests: Sequence[Request]) -> None:
        """Mark requests whose rows a failed step overwrote and could not put back."""
        places = {request: self._places[request].copy() for request in requests}
        for place in places.values():
            place.lost = True
        self._places = {**self._places, **places}

    def truncate(self, request: Request, length: int) -> list[int]:
        """Shorten a request, or refuse as ``shorter`` does. Returns the blocks that became free."""
        held, place = self._places[request].blocks, self.shorter(request, length)
        self._places[request] = place
        if place.tokens is not None:
            del place.tokens[place.length :]
        return self.blocks.drop(held[len(place.blocks) :][::-1])

    def shorter(self, request: Request, length: int) -> RequestState:
        """The place of a request as ``truncate`` leaves it, exact for every component; nothing is changed.

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
        if self.states and length not in (0, *place.states, place.length):
            raise RollbackError(
                got=length,
                where="truncate",
                allowed=", ".join(map(str, place.states)) + ": lengths whose recurrent state is kept",
                hint="A step keeps the state of its last token; append_state keeps one for each.",
            )
        held, place = place.blocks, place.copy()
        if length == place.length:
            # In the middle of a replay, which goes on, the ids up to ``stored`` are still needed.
            place.prompt = place.prompt[: max(length, place.stored)]
            return place
        place.prompt = place.prompt[:length]
        place.length = length
        place.stored, place.given = min(place.stored, length), min(place.given, length)
        place.written = {group: min(done, length) for group, done in place.written.items()}
        place.blocks = held[: self.plan.blocks_for(length)]
        place.keys = place.keys[: length // self.plan.block_tokens]
        place.states = tuple(kept for kept in place.states if kept <= length)
        place.far = None if place.far is None else place.far.until(length)
        return place

    def deepest_truncation(self, request: Request) -> int:
        """Smallest length that ``truncate`` accepts.

        It is 0 until a ring has wrapped, then D below the highest position ever written; and never below what restored
        rings are complete for.
        """
        return self.deepest_truncations([self._places[request]])[0]

    def deepest_truncations(
        self, places: Sequence[RequestState], some: slice = slice(None), ahead: int = 0
    ) -> list[int]:
        """The same for several places, or some of them, lost ones included; ``ahead`` tokens on."""
        found: list[int] = []
        unwrapped = self.plan.unwrapped
        for place in places[some]:
            length, deepest = place.length + ahead, place.floor
            written = max(place.high_water, length)
            if unwrapped is not None and written > unwrapped:
                deepest = max(deepest, written - self.plan.rollback_tokens)
            found.append(min(length, deepest))
        return found

    def least_whole(self, request: Request) -> int:
        """Smallest length from which on ``truncate`` accepts every one: what goes with a request where it goes."""
        place, deepest = self._places[request], self.deepest_truncation(request)
        if not self.states:
            return deepest
        length = place.length
        while length > deepest and (length == place.length or length in place.states):
            length -= 1
        return length if length in (0, *place.states) else min(length + 1, place.length)

    def release(self, request: Request) -> list[int]:
        """Take back a request's slot and blocks. Returns the blocks that became free."""
        return self.discard(self._places.pop(request))

    def take_over(self, request: Request, place: RequestState, taken: "TakenOver") -> None:
        """Fill a place that is not in the table from shared blocks, plus those of its own that it needs beyond them.

        Raises:
            OutOfBlocks: they are not to be had; nothing was taken.
        """
        length, blocks = taken.length, taken.blocks
        self._check_limit(request, max(length, taken.stored))
        own = self.blocks.hold_and_take(blocks, max(0, self.plan.blocks_for(length) - len(blocks)))
        place.blocks = (*blocks, *own)
        place.length = place.high_water = length
        place.floor, place.stored, place.prompt = taken.floor, taken.stored, taken.prompt
        place.given = max(length, taken.stored)
        place.written = {**place.written, "main": place.given}
        if self.states:
            self._hold_states(place, range(max(taken.floor, 1), length + 1))
        place.tokens = None if taken.tokens is None else list(taken.tokens)
        # Rows that were coded anew are not those that these tokens have here: nobody else gets them.
        place.salt, place.shares = taken.salt, taken.shares and not taken.converted
        place.converted, place.exact = tuple(taken.converted), not taken.approximate

    def fork(self, source: RequestState) -> tuple[Request, RequestState]:
        """A request with the same history, to ``adopt`` or ``discard``: blocks are held by both, the slot is a new one.

        Raises:
            OutOfSlots: none is free.
        """
        request, place = self.reserve(source.salt)
        for block in source.blocks:
            self.blocks.hold(block)
        place.length, place.high_water, place.floor = source.length, source.high_water, source.floor
        place.stored, place.given, place.prompt = source.stored, source.given, source.prompt
        place.seen_from, place.exact = source.seen_from, source.exact
        place.blocks, place.keys, place.shares = source.blocks, list(source.keys), source.shares
        place.tokens = None if source.tokens is None else list(source.tokens)
        place.written, place.states = dict(source.written), source.states
        place.converted = source.converted
        return request, place

    def unseen(self, requests: Sequence[Request]) -> list[int] | None:
        """Positions at each request's start that no query of a window sees, while the tokens of a hit are replayed.

        None where every request of them is past that.
        """
        places = [self.place(request) for request in requests]
        found = [place.seen_from if place.length < place.stored else 0 for place in places]
        return found if any(found) else None

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


class TakenOver(NamedTuple):
    """What a request starts from that did not come through steps of its own.

    Attributes:
        length, floor, stored, prompt, tokens, salt, shares, converted: see ``RequestState``.
        blocks: shared ones, in order of history.
        approximate: not ``exact``.
    """

    length: int
    floor: int
    tokens: Sequence[int] | None
    stored: int = 0
    blocks: Sequence[int] = ()
    prompt: Sequence[int] = ()
    salt: str | None = None
    shares: bool = True
    converted: Sequence[Conversion] = ()
    approximate: bool = False


def _granted(held: tuple[int, ...], added: int, column: int | None, fresh: Iterator[int]) -> BlockGrant:
    """One request's blocks for a step, with those that it gets from ``fresh``."""
    blocks = list(held)
    replaced = () if column is None else ((column, blocks[column]),)
    if column is not None:
        blocks[column] = next(fresh)
    blocks += [next(fresh) for _ in range(added)]
    return BlockGrant(tuple(blocks), added, replaced)


def known_ids(place: RequestState, count: int) -> list[int] | None:
    """Ids of a request's next ``count`` tokens, as far as they were given at admission; None where none was."""
    known = list(place.prompt[place.length : place.length + count])
    return None if place.tokens is None or (count and not known) else known


def check_replay(request: Request, place: RequestState, ids: Sequence[int] | None) -> None:
    """Refuse other tokens than those whose blocks the request took over and now runs through again.

    Raises:
        RequestError: the ids differ from the prompt's.
    """
    if ids is None or place.length >= place.stored:
        return
    expected = list(place.prompt[place.length : min(place.length + len(ids), place.stored)])
    if list(ids[: len(expected)]) != expected:
        raise RequestError(
            got=f"other token ids than the prompt of request {request.id}",
            where="step",
            allowed=f"the prompt's ids up to token {place.stored}, whose blocks were taken over",
            hint="Admit a request with the ids that it will be given.",
        )
