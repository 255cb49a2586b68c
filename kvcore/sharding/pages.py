"""By page: rows of one request in turn on every shard, a page at a time.

Page c of a request's history lies on shard ``c mod N`` as that shard's page ``c div N``. History grows evenly, the
rows that a query may see are the first ones on every shard too, and a shard finds any row of any other by arithmetic.
All functions take Python integers or integer arrays of any framework.
"""

from typing import Any

import msgspec

Integers = Any
"""A Python int, or an array of integers of any framework."""


class Pages(msgspec.Struct, frozen=True):
    """``shards`` shards, pages of ``rows`` rows."""

    shards: int
    rows: int

    def owner(self, row: Integers) -> Integers:
        """The shard that holds a row."""
        return row // self.rows % self.shards

    def local(self, row: Integers) -> Integers:
        """A row's number among those of its owner."""
        return row // (self.rows * self.shards) * self.rows + row % self.rows

    def canonical(self, shard: Integers, local: Integers) -> Integers:
        """The row that is number ``local`` on ``shard``: the inverse of ``owner`` and ``local``."""
        return local // self.rows * (self.rows * self.shards) + shard * self.rows + local % self.rows

    def held(self, shard: Integers, count: Integers) -> Integers:
        """How many of the first ``count`` rows lie on a shard; they are its first ones."""
        whole = self.rows * self.shards
        return count // whole * self.rows + _clip(count % whole - shard * self.rows, self.rows)


def _clip(value: Integers, high: int) -> Integers:
    """The value, between 0 and ``high``."""
    return value.clip(0, high) if hasattr(value, "clip") else min(max(value, 0), high)
