"""What a page of a store holds: a block's rows of all components in blocks, one after the other in the spec's order."""

from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from kvcore.ops import Ops, Strip
from kvcore.pools import Pools
from kvcore.portable.pages import passing_pages, takes_chunks
from kvcore.portable.rows import Content, HostRows, owned, read_rows, write_rows
from kvcore.spec import CacheSpec
from kvcore.spec.sizes import row_bytes
from kvcore.step import StepRequest

Key = tuple[int, str]

AT_ONCE = 1 << 22
"""Bytes of pages that are moved at a time."""

IN_CHUNKS = 1 << 27
"""The same to and from a device that takes them chunk by chunk."""


class BlockPages:
    """Pages of a spec's blocks, from rows and back.

    Attributes:
        keys: (layer, role) of what is in them.
        nbytes: of a page.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self._parts: list[tuple[Key, int, int, int]] = []
        for layer, role, component in owned(spec):
            if component.growth == "block":
                step = component.tokens_per_row
                self._parts.append(((layer, role), spec.block_tokens // step, row_bytes(component), step))
        self.keys = tuple(key for key, *_ in self._parts)
        self.nbytes = sum(rows * size for _, rows, size, _ in self._parts)

    def page(self, content: Content, number: int) -> bytes:
        """The page of a block, of rows that begin with block 0."""
        return b"".join(
            content[key].rows[number * rows : (number + 1) * rows].tobytes() for key, rows, _, _ in self._parts
        )

    def read(self, ops: Ops, pools: Pools, row: StepRequest) -> list[Any]:
        """The pages of a request's blocks, all of which are full: at once where the pools lie in the host's memory."""
        pages = passing_pages(next(iter(pools.values()), None), len(row.blocks), self.nbytes)
        for first in range(0, len(pages), step := self._at_once(ops)):
            some, units = pages[first : first + step], np.array(row.blocks[first : first + step], np.int32)
            if not ops.move_strips(pools, some, self._strips(len(some)), units):
                content = read_rows(ops, pools, row, row.start, growth="block")
                return [self.page(content, number) for number in range(len(pages))]
        return [page.data for page in pages]

    def write(
        self, ops: Ops, pools: Pools, row: StepRequest, pages: Sequence[memoryview], without: Container[Key] = ()
    ) -> Pools:
        """Pools with pages in a request's first blocks, some components left out: at once where that can be."""
        step = min(self._at_once(ops), max(1, len(pages)))
        room = passing_pages(next(iter(pools.values()), None), step, self.nbytes)
        for first in range(0, len(pages), step):
            some = pages[first : first + step]
            held = room[: len(some)]
            for place, page in enumerate(some):
                held[place] = np.frombuffer(page, np.uint8)
            units = np.array(row.blocks[first : first + step], np.int32)
            if not ops.move_strips(pools, held, self._strips(len(some), without), units, store=True):
                return write_rows(ops, pools, row, self.rows(pages, without))
        return pools

    def _at_once(self, ops: Ops) -> int:
        """Pages that are moved at a time."""
        return max(1, (IN_CHUNKS if takes_chunks(ops) else AT_ONCE) // max(1, self.nbytes))

    def _strips(self, pages: int, without: Container[Key] = ()) -> tuple[Strip, ...]:
        """Where the rows of so many pages lie in them."""
        found: list[Strip] = []
        first = 0
        for key, rows, size, step in self._parts:
            if key not in without:
                found.append(Strip(*key, first, rows, size, range(pages * rows), step))
            first += rows * size
        return tuple(found)

    def rows(self, pages: Sequence[memoryview], without: Container[Key] = ()) -> dict[Key, HostRows]:
        """Rows of the components of some blocks, from position 0 on."""
        content: dict[Key, HostRows] = {}
        first = 0
        for key, rows, size, step in self._parts:
            if key in without:
                first += rows * size
                continue
            parts = [np.frombuffer(page, np.uint8, rows * size, first).reshape(rows, size) for page in pages]
            whole = np.concatenate(parts) if parts else np.empty((0, size), np.uint8)
            content[key] = HostRows(whole, range(0, len(whole) * step, step))
            first += rows * size
        return content
