"""What a step asks and what it takes from the block pool, and copy on write: which blocks it must not write into."""

from collections.abc import Sequence
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
        places: what each holds.
        counts: new tokens of each.
        ids: their ids, as far as they are known; None where none is.
        starts, slots, stored: of the places, for the step's index.
        blocks: the blocks that each has while the step is open; ``Manager.grow`` adds those that it gets.
        more: request's number -> blocks that it lacks, where it lacks some.
        contested: whether one of them may write into a block that others read too.
        grants: what those get that get something.
    """

    __slots__ = (
        "blocks", "contested", "counts", "grants", "ids", "more", "places", "requests", "slots", "starts", "stored",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.places: list[RequestState] = []
        self.counts: list[int] = []
        self.ids: list[list[int] | None] = []
        self.starts: list[int] = []
        self.slots: list[int] = []
        self.stored: list[int] = []
        self.blocks: list[Sequence[int]] = []
        self.more: dict[int, int] = {}
        self.contested = False
        self.grants: dict[Request, BlockGrant] = {}


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
