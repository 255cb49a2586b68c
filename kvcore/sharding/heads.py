"""By head: the K-V heads of a classic layer, in contiguous groups; replicated where they do not divide."""

import msgspec


class Heads(msgspec.Struct, frozen=True):
    """``heads`` heads over ``shards`` shards.

    ``heads`` a multiple of ``shards``: every shard holds as many, in order. ``shards`` a multiple of ``heads``: every
    shard holds one head, and neighbours are replicas. Neither: every shard holds all of them. Query heads are always
    split in order, so a shard has the K-V heads that its query heads need.
    """

    heads: int
    shards: int

    @property
    def per_shard(self) -> int:
        """Heads that one shard holds."""
        if self.heads % self.shards == 0:
            return self.heads // self.shards
        return 1 if self.shards % self.heads == 0 else self.heads

    @property
    def replicas(self) -> int:
        """Shards that hold the same head."""
        return self.shards * self.per_shard // self.heads

    def on(self, shard: int) -> range:
        """The heads that a shard holds, in order."""
        first = shard // self.replicas * self.per_shard
        return range(first, first + self.per_shard)

    def holders(self, head: int) -> range:
        """The shards that hold a head; the first of them owns it: it writes it out where one copy is wanted."""
        first = head // self.per_shard * self.replicas
        return range(first, first + self.replicas)

    def owner(self, head: int) -> int:
        """The first holder of a head."""
        return self.holders(head).start

    def local(self, head: int) -> int:
        """A head's number among those of any of its holders."""
        return head % self.per_shard

    def canonical(self, shard: int, local: int) -> int:
        """The head that is number ``local`` on ``shard``."""
        return self.on(shard)[local]
