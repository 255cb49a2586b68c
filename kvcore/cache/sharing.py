"""The verbs of a cache that let requests share what they hold: forks, checkpoints, prefix reuse."""

from collections.abc import Callable, Sequence
from typing import SupportsIndex

from kvcore.cache.base import CacheBase
from kvcore.cache.reuse import Hit
from kvcore.cache.turns import exclusive
from kvcore.counts import as_count, check_count
from kvcore.errors import OutOfBlocks, RequestError, ShapeError, SpecError
from kvcore.portable.rows import Content, Own, owned, state_at, write_rows
from kvcore.requests.manager import Place, Request, TakenOver
from kvcore.requests.prefix import Restorable
from kvcore.requests.tokens import TokenIds, Tokens, check_salt, parse_tokens, token_ids
from kvcore.step import Row


class SharingVerbs(CacheBase):
    """Blocks are shared by reference count and copied on write; slots are copied."""

    @exclusive("fork")
    def fork(self, request: Request) -> Request:
        """A second request with the same history: blocks are shared until one of them writes, the slot is copied.

        Raises:
            OutOfSlots: none is free. RequestError: stale or foreign. StepError: a step is open.
        """
        source = self._manager.place(request)
        fork, place = self._manager.fork(source)
        try:
            slots = [self._integers([slot]) for slot in (source.slot, place.slot)]
            self._pools = self._verbs.copy_slots(self._pools, *slots)
        except BaseException:
            self._manager.discard(place)
            raise
        self._manager.adopt(fork, place)
        return fork

    @exclusive("checkpoint")
    def checkpoint(self, request: Request) -> None:
        """Make the request's present length a semantic point: later prompts that start with its tokens can begin there.

        Raises:
            RequestError: stale, foreign, its token ids are not known, or a layer did not get all of its tokens.
            StepError: a step is open. SpecError: the cache was created with ``prefix="off"``.
        """
        place = self._manager.place(request)
        if not self._prefix.on:
            raise SpecError(got="prefix='off'", where="checkpoint", allowed="'full', 'zero' or Periodic(n)")
        if place.tokens is None:
            raise RequestError(
                got=f"request {request.id}, token ids unknown",
                where="checkpoint",
                allowed="a request whose ids were given to admit or to its steps",
                hint="Give the prompt's ids to admit; beyond it, open steps with {request: ids}, not numbers.",
            )
        if not place.shares:
            raise RequestError(
                got=f"request {request.id}, which was imported under no salt or is older than a reset",
                where="checkpoint",
                allowed="a request whose prefixes may be found",
                hint="Say salt= to import_request.",
            )
        if max(place.length, place.stored) > place.complete:
            raise RequestError(
                got=f"request {request.id}, {place.complete} tokens in every layer and {place.length} in some",
                where="checkpoint",
                allowed="a request whose layers got all of its tokens",
            )
        if place.length:
            state = state_at(self._verbs, self._pools, self._row(request), place.length, {})
            self._prefix.keep(place, place.length, state)

    def restorable(self, tokens: TokenIds, n: SupportsIndex | None = None, *, salt: str | None = None) -> Restorable:
        """How much of a prompt's first ``n`` tokens (None: all) can be taken over: (length, replay, exact).

        Args:
            salt: as for ``admit``.

        Raises:
            ShapeError: tokens are not ids, n is out of range, or the salt is no text.
        """
        ids = token_ids(tokens, "restorable: tokens")
        salt = check_salt(salt, "restorable: salt")
        most = len(ids) if n is None else as_count(n)
        if most is None or most > len(ids):
            raise ShapeError(got=n, where="restorable: n", allowed=f"0 to {len(ids)}, or None")
        return self._restorable(ids[:most], salt)

    @exclusive("restorable", in_step=True)
    def _restorable(self, ids: list[int], salt: str | None) -> Restorable:
        hit = self._prefix.find(ids, limit=len(ids), salt=salt)
        return Restorable(hit.stored, max(0, hit.stored - hit.length), True)

    def fits(self, tokens: Tokens, new_tokens: SupportsIndex = 0, *, salt: str | None = None) -> bool:
        """Whether a prompt could be admitted and stepped through now: a slot is free, and as many blocks as it needs.

        Args:
            tokens: the prompt's ids, whose blocks are not needed where prefix reuse has them; or how many there are.
            new_tokens: tokens to be generated after it.
            salt: as for ``admit``.

        ``cache.plan.blocks_for(n)`` says how many blocks n tokens take.

        Raises:
            ShapeError: tokens are neither ids nor a count, ``new_tokens`` is no count, or the salt is no text.
        """
        count, ids = parse_tokens(tokens, "fits: tokens")
        count += check_count(ShapeError, "fits: new_tokens", new_tokens, 0)
        return self._fits(ids or [], count, check_salt(salt, "fits: salt"))

    @exclusive("fits", in_step=True)
    def _fits(self, ids: list[int], length: int, salt: str | None) -> bool:
        longest = self.plan.longest
        if not self.free_slots or (longest is not None and length > longest):
            return False
        hit = self._prefix.find(ids, limit=len(ids) - 1, salt=salt)
        blocks = hit.blocks if hit.length else ()
        # Blocks that are taken over are no longer there for others.
        there = self.free_blocks - self._manager.blocks.idle_among(blocks)
        return self.plan.blocks_for(length) - len(blocks) <= there

    @exclusive("reset_prefix_cache")
    def reset_prefix_cache(self) -> None:
        """Forget every published prefix and checkpoint, as after an update of the model's weights.

        Live requests go on, but what they hold was computed before: neither it nor what follows from it is found again.
        What is admitted from now on is published as before.

        Raises:
            StepError: a step is open.
        """
        self._poison([], self._prefix.reset())

    def _boundary_states(
        self, request: Request, row: Row, ids: Sequence[int], own: Callable[[int], Own], *, written: bool
    ) -> list[tuple[int, Content]]:
        """(length, state) of every checkpoint that the policy wants of a step that is about to commit.

        Args:
            own: length -> the step's rows of this request that the rings do not hold yet, up to that length.
            written: outside code put the step's rows into the pools, so only the end of the step is known.
        """
        place = self._manager.place(request)
        if place.tokens is None or not place.shares:
            return []
        lengths = self._prefix.boundaries(row.start, row.length)
        return [
            (length, state_at(self._verbs, self._pools, row, length, own(length)))
            for length in lengths
            # Beyond the ids that are known no prompt can ask for it.
            if length <= row.start + len(ids) and (not written or length == row.length)
        ]

    def _take_over(self, request: Request, place: Place, hit: Hit, ids: list[int]) -> None:
        """Fill a fresh place from a prefix hit; without room for its last, partial block it starts from nothing."""
        stored = hit.stored if self.plan.blocks else 0
        floor = self._floor(max(hit.length, hit.stored))
        taken = TakenOver(hit.length, floor, ids[: hit.length], stored, hit.blocks, ids, place.salt)
        try:
            self._manager.take_over(request, place, taken)
        except OutOfBlocks:
            return
        place.cached_tokens = hit.length
        if hit.state is not None:
            self._pools = write_rows(self._verbs, self._pools, self._row_of(place), hit.state)
        self._prefix.extend(place)

    def _floor(self, length: int) -> int:
        """Smallest length that a request restored at ``length`` can go back to: 0 if nothing had left its rings."""
        rings = [component for _, _, component in owned(self.spec) if component.in_checkpoint]
        return 0 if all(component.live(length).start == 0 for component in rings) else length
