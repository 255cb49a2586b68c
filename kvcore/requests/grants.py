"""What a step asks and what it takes from the block pool, and copy on write: which blocks it must not write into."""

from collections.abc import Sequence
from operator import le
from typing import NamedTuple

from kvcore.requests.blocks import BlockAllocator
from kvcore.requests.request import Request, RequestState


class BlockGrant(NamedTuple):
    """What one request gets for a step: blocks added, and shared blocks replaced by copies.

    Attributes:
        blocks: its list once the step is committed; until then the request keeps its own.
        added: how many of the last ones are new.
        replaced: (column, old block) of blocks that others read too and that this step writes into.
    """

    blocks: tuple[int, ...]
    added: int
    replaced: tuple[tuple[int, int], ...]

    @property
    def new(self) -> tuple[int, ...]:
        """The blocks that were added."""
        return self.blocks[len(self.blocks) - self.added :]

    @property
    def taken(self) -> tuple[int, ...]:
        """All that were taken from the free ones, those to give back first in front."""
        return (*self.new[::-1], *(self.blocks[column] for column, _ in self.replaced))


class Opening:
    """The requests of a step, in mapping order, as lists with one element for each; see ``Manager.read``.

    Attributes:
        requests: those that were named.
        places: what each held ``ahead`` tokens ago.
        ahead: how many tokens more they have, each of them; 0 but where a step repeats others.
        counts: new tokens of each.
        ids: their ids, as far as they are known; None where none is.
        slots, stored: of the places, for the step's index.
        blocks: the blocks that each has while the step is open; ``Manager.grow`` adds those that it gets.
        more: request's number -> blocks that it lacks, where it lacks some.
        contested: whether one of them may write into a block that others read too.
        grants: what those get that get something.
        shares: as of the allocator when the requests' blocks were looked at.
        follows: the opening of the step that this one repeats, a token on; None: all of it was looked at.
        repeats: what those that repeat it need not look at again; None: not known yet.
        steps: how many of them there were.
    """

    __slots__ = (
        "ahead", "blocks", "contested", "counts", "follows", "grants", "ids", "more", "places", "repeats", "requests",
        "shares", "slots", "steps", "stored",
    )  # fmt: skip

    def __init__(self, shares: int) -> None:
        self.requests: list[Request] = []
        self.places: list[RequestState] = []
        self.ahead = 0
        self.counts: list[int] = []
        self.ids: list[list[int] | None] = []
        self.slots: list[int] = []
        self.stored: list[int] = []
        self.blocks: list[tuple[int, ...]] = []
        self.more: dict[int, int] = {}
        self.contested = False
        self.grants: dict[Request, BlockGrant] = {}
        self.shares = shares
        self.follows: Opening | None = None
        self.repeats: Repeats | None = None
        self.steps = 0

    @property
    def starts(self) -> list[int]:
        """Lengths before the step."""
        ahead = self.ahead
        return [place.length + ahead for place in self.places]

    @property
    def may_repeat(self) -> bool:
        """Whether it brings each request one token of no known id, into blocks of its own."""
        if self.repeats is not None:
            return True
        count = len(self.requests)
        if self.contested or self.counts.count(1) < count or self.ids.count(None) < count:
            return False
        return all(map(le, self.stored, self.starts))

    def repeated(self, places: list[RequestState], ahead: int, more: dict[int, int]) -> "Opening":
        """The opening of a step that brings the same another token each; see ``Table.repeated``."""
        found = Opening(self.shares)
        self.follows = None
        found.follows, found.repeats, found.steps = self, self.repeats, self.steps + 1
        found.requests, found.places, found.ahead, found.more = self.requests, places, ahead, more
        found.counts, found.ids, found.slots, found.stored = self.counts, self.ids, self.slots, self.stored
        # A list that is given out again says that nothing in it changed.
        found.blocks = list(self.blocks) if more else self.blocks
        return found

    def shorten(self, counts: list[int]) -> None:
        """Have the step bring the first tokens alone."""
        self.ids = [None if some is None else some[:count] for some, count in zip(self.ids, counts, strict=True)]
        self.counts = counts
        # It got more blocks than its requests keep.
        self.contested, self.repeats = True, None


class Repeats:
    """What steps need not look at that repeat one.

    Attributes:
        most: how many there may be before a request is as long as one may be; None: any number.
        due: number of such a step, modulo a block's tokens -> the requests' numbers whose tokens begin a block in it.
    """

    __slots__ = ("due", "most")

    def __init__(self, starts: list[int], block_tokens: int, limit: int | None) -> None:
        self.most = None if limit is None else limit - 1 - max(starts, default=0)
        self.due: dict[int, list[int]] = {}
        for number, start in enumerate(starts if block_tokens else ()):
            self.due.setdefault(-start % block_tokens, []).append(number)


def shared_columns(
    blocks: BlockAllocator, block_tokens: int, places: Sequence[RequestState], new: Sequence[int]
) -> dict[int, int]:
    """Request's number -> the column of the block that it writes into although others read it, where there is one.

    Only the block that a request's next row falls into can be shared: those before it are full, those after it its own.
    The last holder that writes keeps the block itself, unless a rollback would bring back a longer one, whose rows it
    would have overwritten.
    """
    # Block -> (holders that take a copy, length of the longest of them).
    leaving: dict[int, tuple[int, int]] = {}
    columns: dict[int, int] = {}
    for number, (place, count) in enumerate(zip(places, new, strict=True)):
        # Taken-over rows are not written again.
        first = max(place.length, place.stored)
        column = first // block_tokens
        if place.length + count <= first or column >= len(place.blocks):
            continue
        block = place.blocks[column]
        copies, longest = leaving.get(block, (0, 0))
        if not blocks.is_shared(block, copies if longest <= place.length else 0):
            continue
        leaving[block] = copies + 1, max(longest, place.length)
        columns[number] = column
    return columns
