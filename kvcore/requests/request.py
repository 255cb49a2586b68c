"""A request as its cache sees it: the handle that callers hold, and the integers behind it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import msgspec

from kvcore.errors import RequestError


class Conversion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """That a request's rows were coded anew on their way from a cache of other formats.

    Attributes:
        spec: digest of that cache's spec.
        formats: (role, part, format before, format now) of all that changed.
        exact: whether every row that was coded anew reads as the one it was made of.
    """

    spec: str
    formats: list[tuple[str, str, str, str]]
    exact: bool


LONGEST_NAME = 128
"""Characters of what a conversion names."""

MOST_NAMES = 256


def is_short(conversion: Conversion) -> bool:
    """Whether one that somebody else wrote down is no longer than those that are made here."""
    names = [conversion.spec, *(name for change in conversion.formats for name in change)]
    return len(conversion.formats) <= MOST_NAMES and max(map(len, names)) <= LONGEST_NAME


class RequestState(msgspec.Struct, kw_only=True):
    """What a live request holds.

    One that is in the manager's table is never changed, only replaced, so that a change has happened or has not. Its
    tokens and keys alone may run ahead of its length while a verb is under way.

    Attributes:
        slot: holds its windows and tails.
        generation: how often that slot had been taken before.
        length: tokens committed.
        high_water: highest length that any row was ever written for.
        floor: lowest length that rings which were restored rather than written are complete for.
        cached_tokens: tokens that admission found already cached.
        seen_from: the first position that a window has, where it is replayed from less than it needs to be exact.
        exact: nothing that it holds comes of such a replay.
        stored: tokens whose paged rows were taken over at admission, which replayed tokens do not write again.
        given: tokens that did not come through steps of this request but from a prefix, a snapshot or an import.
        blocks: block numbers in order of history.
        tokens: ids so far, or None once a step gave only a count.
        salt: text that its prefix must share to be found, or None.
        prompt: ids given at admission, as far as the request's tokens are those.
        keys: keys of the full blocks of ``tokens``, as far as they were worked out.
        written: for ``main`` layers, and for ``draft`` layers once they are used: tokens up to which they got all rows.
        shares: whether what it computes may be found by others; not what came from elsewhere under no salt.
        states: lengths above 0, ascending, of which a slot holds the state of recurrent layers; empty without such.
        lost: a step overwrote some of its rows, and they could not be put back.
        converted: what its rows, or those it goes on from, were converted from; then others never find them.
        far: its entries in the host's memory that come as steps pick them (``kvcore.cache.far.Far``); None: all rows
            are in the pools.
    """

    slot: int
    generation: int
    length: int = 0
    high_water: int = 0
    floor: int = 0
    cached_tokens: int = 0
    seen_from: int = 0
    exact: bool = True
    stored: int = 0
    given: int = 0
    blocks: tuple[int, ...] = ()
    tokens: list[int] | None = msgspec.field(default_factory=list[int])
    salt: str | None = None
    prompt: Sequence[int] = ()
    keys: list[bytes] = msgspec.field(default_factory=list[bytes])
    written: dict[str, int] = msgspec.field(default_factory=lambda: {"main": 0})
    shares: bool = True
    states: tuple[int, ...] = ()
    lost: bool = False
    converted: tuple[Conversion, ...] = ()
    far: Any = None

    def copy(self) -> "RequestState":
        """A place to change and put in this one's stead; lists are shared, and not changed below ``length``."""
        return self.__copy__()

    if TYPE_CHECKING:

        def __copy__(self) -> "RequestState": ...

    @property
    def complete(self) -> int:
        """Tokens that every layer in use has got: what may be shared with other requests."""
        return min(self.length, *self.written.values())


class RequestStates(Protocol):
    """Whoever knows what requests hold: the manager that admitted them."""

    def place(self, request: "Request") -> RequestState:
        """What a live request holds."""
        ...

    def blocks_of(self, request: "Request") -> tuple[int, ...]:
        """What a live request holds, in an open step what it got for it too."""
        ...

    def is_live(self, request: "Request") -> bool:
        """True between admission and release."""
        ...

    def is_lost(self, request: "Request") -> bool:
        """True for a live request whose rows could not be put back after a step that failed."""
        ...


class Request:
    """One request of a cache, from ``cache.admit()``. Hashable; after ``release`` only ``id`` may be used.

    Attributes:
        id: number that is never reused within a cache.

    Example:
        >>> import kvcore
        >>> spec = kvcore.spec.presets.classic(layers=1, key_heads=1, key_dim=4)
        >>> cache = kvcore.create_cache(spec, backend="reference", max_requests=2, max_tokens=512)
        >>> request = cache.admit([5, 6, 7])
        >>> request.length, request.slot, request.blocks, request.tokens
        (0, 0, (), ())
        >>> cache.release(request)
    """

    __slots__ = ("_manager", "id")

    def __init__(self, id: int, manager: RequestStates) -> None:
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
        return self._manager.blocks_of(self)

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """Token ids so far, or None if some step gave only a number beyond the prompt."""
        place = self._manager.place(self)
        return None if place.tokens is None else tuple(place.tokens[: place.length])

    @property
    def salt(self) -> str | None:
        """What the request was admitted with: only requests of the same salt share prefixes."""
        return self._manager.place(self).salt

    @property
    def converted(self) -> tuple[Conversion, ...]:
        """From which formats its rows were coded anew on their way here, first to last; empty for most."""
        return self._manager.place(self).converted

    @property
    def approximate(self) -> bool:
        """Whether some of its rows come of a replay under the policy ``approximate``, here or where it came from."""
        return not self._manager.place(self).exact

    def _of(self, manager: RequestStates) -> bool:
        """True if this manager admitted the request."""
        return self._manager is manager

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused, to ``pickle`` and ``copy``: a request is a place in one cache, and a copy would be none."""
        raise RequestError(
            got=f"pickle or copy of request {self.id}",
            where="request",
            allowed="cache.fork(request), or export_request and import_request",
        )

    def __repr__(self) -> str:
        if not self._manager.is_live(self):
            return f"Request({self.id}, released)"
        if self._manager.is_lost(self):
            return f"Request({self.id}, lost)"
        return f"Request({self.id}: {self.length} tokens in slot {self.slot})"
