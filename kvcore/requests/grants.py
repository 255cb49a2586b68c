"""What a step takes from the block pool, and copy on write: which shared blocks it must not write into."""

from collections.abc import Sequence
from typing import NamedTuple

from kvcore.requests.blocks import BlockAllocator
from kvcore.requests.request import RequestState


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


def shared_columns(
    blocks: BlockAllocator, block_tokens: int, places: Sequence[RequestState], new: Sequence[int]
) -> list[int | None]:
    """For each request, the column of the block that it writes into although others read it, or None.

    Only the block that a request's next row falls into can be shared: those before it are full, those after it its own.
    The last holder that writes keeps the block itself, unless a rollback would bring back a longer one, whose rows it
    would have overwritten.
    """
    # Block -> (holders that take a copy, length of the longest of them).
    leaving: dict[int, tuple[int, int]] = {}
    columns: list[int | None] = []
    for place, count in zip(places, new, strict=True):
        # Taken-over rows are not written again.
        first = max(place.length, place.stored)
        column = first // block_tokens
        if place.length + count <= first or column >= len(place.blocks):
            columns.append(None)
            continue
        block = place.blocks[column]
        copies, longest = leaving.get(block, (0, 0))
        if not blocks.is_shared(block, copies if longest <= place.length else 0):
            columns.append(None)
            continue
        leaving[block] = copies + 1, max(longest, place.length)
        columns.append(column)
    return columns
