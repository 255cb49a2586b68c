"""What shards tell one another, as one small Protocol; ``torch`` and ``jax`` beside it have it."""

from typing import Protocol

from kvcore.ops import Array, Attention
from kvcore.spec import Rope


class Exchange(Protocol):
    """The collectives of one group of context shards. Every shard calls the same ones in the same order.

    Attributes:
        shards: shards of the group.
        shard: which of them this is: an int, or a traced scalar where one program serves all.
        mine: [shards] int32 on the device, 1 at this shard and 0 elsewhere.
    """

    shards: int
    shard: Array
    mine: Array

    def where(self, condition: Array, values: Array) -> Array:
        """The values where the condition holds, zeros of no sign elsewhere; it has their leading axes."""
        ...

    def from_owner(self, values: Array) -> Array:
        """Bit for bit the values of the one shard that has them; all others give zeros."""
        ...

    def spread(self, scores: Array, rows: int, columns: int) -> Array:
        """Scores [T, n] of this shard's entries -> [T, columns] by canonical entry, -inf where others hold it.

        ``rows`` are the entries of a page.
        """
        ...

    def top(self, scores: Array, selected: Array, entries: Array) -> Array:
        """Merge every shard's best k: scores [T, n], selected [T, k] of their columns, and those in canonical numbers.

        -> [T, k] int32: highest first, ties to the lowest entry, -1 where there is none.
        """
        ...

    def merge(self, parts: Attention, once: Attention | None, sink: Array | None, like: Array) -> Attention:
        """Attention over all shards' parts, and over what every shard holds, counted once; then the sink, once.

        They come without a sink; the result has the dtype of ``like``.
        """
        ...

    def inverse_rope(self, out: Array, positions: Array, rope: Rope | Array) -> Array:
        """Merged outputs [T, H, d] with their last channels turned back by positions [T], as ``Ops.attend`` does."""
        ...

    def widen(self, q: Array) -> Array:
        """The query in fp32, so that partial results are not rounded; as it is where kernels are made for its dtype."""
        ...
