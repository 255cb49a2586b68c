"""A step's index as one context shard needs it: to write, with the pages of others masked; to read, by its own count.

The block table of a step lists blocks of one page for every shard, so it is at the same time each shard's own table of
pages. Everything follows from it by arithmetic, on the device.
"""

from kvcore.ops import Array, StepIndex
from kvcore.sharding.pages import Pages


def to_write(index: StepIndex, mine: Array) -> StepIndex:
    """The index with a table of all pages, -1 where the page is another shard's: its rows go, and come from, nowhere.

    Args:
        mine: [shards] int32, 1 at this shard.
    """
    table = index.block_table
    pages = (table[:, :, None] + 1) * mine[None, None] - 1
    return index._replace(block_table=pages.reshape(table.shape[0], table.shape[1] * len(mine)))


def to_read(index: StepIndex, pages: Pages, ratio: int, shard: Array) -> StepIndex:
    """The index of the shard's own rows of one ratio, counted as if they were a whole history.

    A length becomes the tokens that the shard's rows would take, and a position the last one that sees just the rows
    that the query sees here. ``lengths - starts`` stays the number of new tokens.
    """
    lengths = pages.held(shard, index.lengths // ratio) * ratio
    left = index.left_padding
    return index._replace(
        left_padding=None if left is None else pages.held(shard, left // ratio) * ratio,
        positions=pages.held(shard, (index.positions + 1) // ratio) * ratio - 1,
        starts=lengths - (index.lengths - index.starts),
        lengths=lengths,
    )
