"""What live requests hold, in one table that changes in one assignment each time.

Most decode steps bring the requests of the step before another token each. Such a step needs little that was not
looked at for the one before (``Table.repeated``), and its commit says no more than that they are a token longer
(``Now.ahead``): what each request holds is written down once somebody asks, or does something else.
"""

from collections.abc import Mapping
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple

from kvcore.plan import CachePlan
from kvcore.requests.blocks import BlockAllocator
from kvcore.requests.grants import Opening, Repeats
from kvcore.requests.request import Request, RequestState

MAIN: Mapping[str, bool] = MappingProxyType({"main": True})
"""A step that brings every main layer its rows, and no draft layer: groups of layers -> whether all got them."""


class Now(NamedTuple):
    """What holds at one time.

    Attributes:
        places: request -> what it holds, in order of admission.
        ahead: a committed step whose tokens are not in them yet; None: there is none.
    """

    places: dict[Request, RequestState]
    ahead: Opening | None = None


class Table:
    """The places of a cache's live requests.

    Attributes:
        now: what holds; exchanged, never changed by whoever reads it.
        last: the step that was committed last, if others may repeat it; None: the next one is read whole.
    """

    def __init__(self, plan: CachePlan) -> None:
        self.now = Now({})
        self.last: Opening | None = None
        # What the requests of ``last`` held after it, unless it is ``ahead`` of what is written down.
        self._left: list[RequestState] = []
        self._block_tokens = plan.block_tokens if plan.blocks else 0
        self._limit = plan.longest

    @property
    def places(self) -> dict[Request, RequestState]:
        """Request -> what it holds."""
        places, ahead = self.now
        return places if ahead is None else self._written(places, ahead)

    def _written(self, places: dict[Request, RequestState], ahead: Opening) -> dict[Request, RequestState]:
        """The places with the tokens of a step, and of those that it repeats, in them."""
        count = ahead.ahead + 1
        left: list[RequestState] = []
        for place, blocks in zip(ahead.places, ahead.blocks, strict=True):
            left.append(place := place.copy())
            lengthen(place, place.length + count)
            place.tokens, place.blocks = None, blocks
        places = {**places, **dict(zip(ahead.requests, left, strict=True))}
        self._left = left
        self.now = Now(places)
        return places

    def note(self, opening: Opening, places: Mapping[Request, RequestState] | None) -> None:
        """Remember a step that is about to be committed; what its requests hold then, unless they are ``ahead``."""
        self.last = opening if opening.may_repeat else None
        self._left = [] if places is None or self.last is None else [*places.values()]

    def repeated(self, given: Mapping[Any, Any], blocks: BlockAllocator) -> Opening | None:
        """What a step asks that repeats the last one; None: it does not, or all of it must be looked at.

        It gives the same requests, which nobody changed since, another token each of no known id.
        """
        last = self.last
        if last is None or given.__class__ is not dict or last.shares != blocks.shares:
            return None
        requests, places, tokens = last.requests, last.places, last.ahead + 1
        if len(given) != len(requests) or not all(map(is_, given, requests)):
            return None
        if not all(map(is_, given.values(), last.counts)):
            return None
        if self.now.ahead is not last:
            # Somebody looked since, and may have changed what a request holds.
            places, tokens = self._left, 0
            if len(places) != len(requests) or not all(map(is_, map(self.now.places.get, requests), places)):
                return None
        size, steps = self._block_tokens, last.steps + 1
        if last.repeats is None:
            last.repeats = Repeats([place.length - 1 + tokens for place in places], size, self._limit)
        repeats = last.repeats
        if repeats.most is not None and steps > repeats.most:
            return None
        more: dict[int, int] = {}
        for number in repeats.due.get(steps % size, ()) if size else ():
            column, held = (places[number].length + tokens) // size, last.blocks[number]
            if column == len(held):
                more[number] = 1
            elif not blocks.is_alone(held[column]):
                return None
        return last.repeated(places, tokens, more)


def lengthen(place: RequestState, end: int, touched: Mapping[str, bool] = MAIN) -> None:
    """Have a place that is not in the table yet hold a step's tokens up to a length, or those of several alike."""
    start, place.length = place.length, end
    if end > place.high_water:
        place.high_water = end
    written = place.written
    if len(written) == 1 and written["main"] == start and touched == MAIN:
        place.written = {"main": end}
        return
    place.written = written = written.copy()
    for group, done in touched.items():
        before = written.setdefault(group, place.given)
        if done and start <= before < end:
            written[group] = end
