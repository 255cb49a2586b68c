"""What a page of a store holds: a block's rows of all components in blocks, one after the other in the spec's order."""

from collections.abc import Sequence

import numpy as np

from kvcore.plan import row_bytes
from kvcore.portable.rows import Content, HostRows, owned
from kvcore.spec import CacheSpec

Key = tuple[int, str]


class BlockPages:
    """Pages of a spec's blocks, from rows and back.

    Attributes:
        nbytes: of a page.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self._parts: list[tuple[Key, int, int, int]] = []
        for layer, role, component in owned(spec):
            if component.growth == "block":
                step = component.tokens_per_row
                self._parts.append(((layer, role), spec.block_tokens // step, row_bytes(component), step))
        self.nbytes = sum(rows * size for _, rows, size, _ in self._parts)

    def page(self, content: Content, number: int) -> bytes:
        """The page of a block, of rows that begin with block 0."""
        return b"".join(
            content[key].rows[number * rows : (number + 1) * rows].tobytes() for key, rows, _, _ in self._parts
        )

    def rows(self, pages: Sequence[memoryview]) -> dict[Key, HostRows]:
        """Rows of all components of some blocks, from position 0 on."""
        content: dict[Key, HostRows] = {}
        first = 0
        for key, rows, size, step in self._parts:
            parts = [np.frombuffer(page, np.uint8, rows * size, first).reshape(rows, size) for page in pages]
            whole = np.concatenate(parts) if parts else np.empty((0, size), np.uint8)
            content[key] = HostRows(whole, range(0, len(whole) * step, step))
            first += rows * size
        return content
