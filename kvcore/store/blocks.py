"""Blocks between an engine's memory and a store, whoever's requests they are: what connectors do."""

# pyright: reportPrivateUsage=false

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcore.cache.cache import Cache
from kvcore.errors import SpecError
from kvcore.plan import row_bytes
from kvcore.portable.rows import HostRows, owned, read_rows, write_rows
from kvcore.step import StepRequest
from kvcore.store.store import About, BlockStore


class Blocks:
    """Saves and loads blocks by number.

    Args:
        cache: an adopted one, all of whose components lie in blocks.
        store: of pages.

    Raises:
        SpecError: windows or tails, which belong to requests and not to blocks.
    """

    def __init__(self, cache: Cache, store: BlockStore) -> None:
        self.cache = cache
        self.store = store
        self._parts: list[tuple[tuple[int, str], int, int, int]] = []
        for layer, role, component in owned(cache.spec):
            if component.growth != "block":
                raise SpecError(
                    got=f"layers[{layer}].{role}",
                    where="Blocks",
                    allowed="components in blocks",
                    hint="Use store.save.",
                )
            rows, step = cache.spec.block_tokens // component.tokens_per_row, component.tokens_per_row
            self._parts.append(((layer, role), rows, row_bytes(component), step))
        self.page_bytes = sum(rows * size for _, rows, size, _ in self._parts)

    def save(self, blocks: Sequence[int], keys: Sequence[bytes], about: Sequence[About | None] = ()) -> None:
        """Put full blocks under their keys, those that are not there yet."""
        new = [number for number, key in enumerate(keys) if not self.store.has(key)]
        if not new:
            return
        row = self._row([blocks[number] for number in new])
        read = self.cache.exclusive(
            "save", lambda state: read_rows(state.ops, state.pools, row, row.start), in_step=True
        )
        for place, number in enumerate(new):
            page = b"".join(
                read[key].rows[place * rows : (place + 1) * rows].tobytes() for key, rows, _, _ in self._parts
            )
            self.store.put(keys[number], page, about[number] if about else None)

    def load(self, blocks: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """Fill blocks with the pages of their keys, as far as those verify.

        Returns:
            The blocks that were not filled: that of the first page that is missing or damaged, and all behind it.
        """
        pages: list[memoryview] = []
        for key in keys:
            page = self.store.get(key)
            if page is None or len(page) != self.page_bytes:
                break
            pages.append(page)
        if pages:
            row, content, first = self._row(blocks[: len(pages)]), {}, 0
            for key, rows, size, step in self._parts:
                parts = [np.frombuffer(page, np.uint8, rows * size, first).reshape(rows, size) for page in pages]
                whole = np.concatenate(parts)
                content[key] = HostRows(whole, range(0, len(whole) * step, step))
                first += rows * size

            def write(state: Any) -> None:
                state.pools = write_rows(state.ops, state.pools, row, content)

            self.cache.exclusive("load", write, in_step=True)
        return list(blocks[len(pages) :])

    def _row(self, blocks: Sequence[int]) -> StepRequest:
        """The blocks as those of a request."""
        return StepRequest(0, len(blocks) * self.cache.spec.block_tokens, 0, tuple(blocks), 0)
