"""A cache and the independent model of its requests, side by side: every verb is done on both, and compared.

What is admitted, refused, given out and forgotten must be what the model says; which rows a step gets and what is then
read is for whoever tells the life.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcore.cache import Cache, Step
from kvcore.cache.inside import state_of
from kvcore.errors import OutOfBlocks, OutOfSlots, RequestError, RollbackError
from kvcore.requests.manager import Request
from kvcore.testing.model import Left, Model, require

NEW = Mapping[int, Sequence[int]]
"""Tokens of a step, by the request's id."""


class RandomLife:
    """Requests by id, in a cache and in its model.

    Args:
        cache: without requests.
        publishes: full blocks can be found by prompts that begin alike.
        approximate: and the policy is the one of that name.
        ids: steps tell the cache the tokens' ids; otherwise how many there are.
        fill: gives an open step its rows, if it must have any; takes the step and the tokens of each request.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        publishes: bool = False,
        approximate: bool = False,
        ids: bool = False,
        fill: Callable[[Step, list[Sequence[int]]], object] | None = None,
    ) -> None:
        self.cache, self.model = cache, Model(cache.plan, publishes=publishes, approximate=approximate)
        self.ids, self.fill = ids, fill
        self.requests: dict[int, Request] = {}
        self.happened: Counter[str] = Counter()

    def request_of(self, number: int) -> int | None:
        """One of the live requests, by any number; None if there is none."""
        known = list(self.requests)
        return known[number % len(known)] if known else None

    def tokens(self, id: int) -> list[int]:
        """What the request was told so far."""
        return self.model.live[id].tokens

    def compare(self) -> None:
        """Whatever can be counted is as the model says."""
        cache, model = self.cache, self.model
        require(cache.free_slots == model.free_slots, f"{cache.free_slots} free slots, not {model.free_slots}")
        require(cache.free_blocks == model.free_blocks, f"{cache.free_blocks} free blocks, not {model.free_blocks}")
        require(list(cache.requests) == list(self.requests.values()), "other live requests")
        for id, request in self.requests.items():
            told = model.live[id]
            require(request.length == len(told.tokens), f"{request.length} tokens, not {len(told.tokens)}")
            require(list(request.blocks) == told.blocks, "other blocks")
            require(
                request.approximate is not told.exact, f"request {id} says that it is approximate, or that it is not"
            )

    def admit(self, prompt: Sequence[int] | None = None) -> int | None:
        """One more request, perhaps with tokens that were computed before; None if no slot is free."""
        try:
            request = self.cache.admit(prompt)
        except OutOfSlots:
            require(self.model.free_slots == 0, "refused with a free slot")
            self.happened["out of slots"] += 1
            return None
        self._joined(request)
        if request.length:
            self.happened["hit"] += 1
            stored = state_of(self.cache).row(request).stored
            self.model.took_over(
                request.id, list(prompt or ()), request.length, stored, list(request.blocks), not request.approximate
            )
        return request.id

    def open(self, new: NEW, **padding: Any) -> Step | None:
        """A step, not yet filled; None if there are too few blocks, which nobody may then miss."""
        needed, over = self.model.needs({id: len(tokens) for id, tokens in new.items()})
        told = {self.requests[id]: list(tokens) if self.ids else len(tokens) for id, tokens in new.items()}
        try:
            step = self.cache.step(told, **padding)
        except OutOfBlocks:
            require(over or needed > self.model.free_blocks, f"{needed} blocks were to be had")
            self.happened["out of blocks"] += 1
            return None
        require(not over and needed <= self.model.free_blocks, "more blocks than there are")
        return step

    def committed(self, new: NEW) -> None:
        """A step has ended well."""
        self.model.stepped(
            {id: list(tokens) for id, tokens in new.items()}, {id: list(self.requests[id].blocks) for id in new}
        )

    def aborted(self, taken: set[int]) -> None:
        """A step was undone; ``taken``: what it had held that nobody held before may have been another's prefix."""
        self.model.took(list(taken))
        for id, request in self.requests.items():
            require(list(request.blocks) == self.model.live[id].blocks, "blocks after a rollback")

    def taken(self, new: NEW) -> set[int]:
        """Blocks that an open step has taken."""
        return {block for id in new for block in self.requests[id].blocks} - set(self.model.holders)

    def step(self, new: NEW, *, commit: bool = True, **padding: Any) -> bool:
        """One step that gets all its rows; False if there were too few blocks."""
        step = self.open(new, **padding)
        if step is None:
            return False
        if self.fill is not None:
            self.fill(step, list(new.values()))
        if commit:
            step.commit()
            self.committed(new)
        else:
            taken = self.taken(new)
            step.abort()
            self.aborted(taken)
        return True

    def fork(self, id: int) -> int | None:
        """A second request with the same past; None if no slot is free."""
        try:
            fork = self.cache.fork(self.requests[id])
        except OutOfSlots:
            require(self.model.free_slots == 0, "a fork was refused with a free slot")
            return None
        self.model.forked(id, fork.id, fork.slot)
        self.requests[fork.id] = fork
        require(fork.blocks == self.requests[id].blocks, "a fork with other blocks")
        return fork.id

    def truncate(self, id: int, length: int) -> bool:
        """Forget the last tokens; False if that was deeper than rings go back."""
        try:
            self.cache.truncate(self.requests[id], length)
        except RollbackError:
            require(length < self.model.deepest(id) or length > len(self.tokens(id)), f"{length} was refused")
            self.happened["too deep"] += 1
            return False
        self.model.truncated(id, length)
        return True

    def release(self, id: int) -> Request:
        """Slot and blocks are somebody else's; what is returned is no request any more."""
        request = self.requests.pop(id)
        self.cache.release(request)
        self.model.released(id)
        return request

    def export(self, id: int) -> tuple[bytes, Left] | None:
        """The request as a blob, and what that holds; None while it replays tokens whose blocks it took over."""
        try:
            blob = self.cache.export_request(self.requests[id])
        except RequestError:
            require(self.model.replays(id), "an export was refused")
            self.happened["exports refused in a replay"] += 1
            return None
        require(not self.model.replays(id), "an export in the middle of a replay")
        return blob, self.model.left(id)

    def take_in(self, blob: bytes, left: Left, *, into: int | None = None) -> int | None:
        """An exported request comes back; None if there is no room for it.

        Args:
            into: a request without tokens that becomes it.
        """
        blocks = -(-len(left.tokens) // self.model.block_tokens)
        try:
            request = self.cache.import_request(blob, into=None if into is None else self.requests[into])
        except OutOfSlots:
            require(into is None and self.model.free_slots == 0, "an import was refused with a free slot")
            return None
        except OutOfBlocks:
            require(blocks > self.model.free_blocks, "an import was refused with free blocks")
            return None
        if into is None:
            self._joined(request)
        # No salt was said: nobody may find it.
        self.model.imported(request.id, left, list(request.blocks), shares=False)
        return request.id

    def drain(self) -> None:
        """Release everything: then everything is free."""
        for id in list(self.requests):
            self.release(id)
        plan = self.cache.plan
        free = self.cache.free_slots, self.cache.free_blocks
        require(free == (plan.slots, plan.blocks), f"after a drain {free} are free")

    def _joined(self, request: Request) -> None:
        self.model.admitted(request.id, request.slot)
        self.requests[request.id] = request
