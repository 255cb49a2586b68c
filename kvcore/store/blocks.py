"""Blocks between an engine's memory and a store, whoever's requests they are: what connectors do."""

# pyright: reportPrivateUsage=false

from collections.abc import Sequence
from typing import Any

from kvcore.cache.cache import Cache
from kvcore.cache.inside import state_of
from kvcore.errors import SpecError
from kvcore.portable.rows import owned
from kvcore.step import StepRequest
from kvcore.store.pages import BlockPages
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
        for layer, role, component in owned(cache.spec):
            if component.growth != "block":
                raise SpecError(
                    got=f"layers[{layer}].{role}",
                    where="Blocks",
                    allowed="components in blocks",
                    hint="Use store.save.",
                )
        self._pages = BlockPages(cache.spec)
        self.page_bytes = self._pages.nbytes

    def save(self, blocks: Sequence[int], keys: Sequence[bytes], about: Sequence[About | None] = ()) -> None:
        """Put full blocks under their keys, those that are not there yet."""
        new = [number for number, key in enumerate(keys) if not self.store.has(key)]
        if not new:
            return
        row = self._row([blocks[number] for number in new])
        read = self.cache.exclusive("save", lambda state: self._pages.read(state.ops, state.pools, row), in_step=True)
        for place, number in enumerate(new):
            self.store.put(keys[number], read[place], about[number] if about else None)

    def load(self, blocks: Sequence[int], keys: Sequence[bytes], about: Sequence[About] = ()) -> list[int]:
        """Fill blocks with the pages of their keys, as far as those verify.

        Returns:
            The blocks that were not filled: that of the first page that is missing or damaged, and all behind it.
        """
        pages: list[memoryview] = []
        known = dict(zip(keys, about, strict=True)) if about else {}
        self.store.fetch(keys, known)
        for key in keys:
            page = self.store.get(key, known.get(key))
            if page is None or len(page) != self.page_bytes:
                break
            pages.append(page)
        if pages:
            row = self._row(blocks[: len(pages)])

            def write(state: Any) -> None:
                state.pools = self._pages.write(state.ops, state.pools, row, pages)

            self.cache.exclusive("load", write, in_step=True)
        return list(blocks[len(pages) :])

    def _row(self, blocks: Sequence[int]) -> StepRequest:
        """The blocks as those of a request, where they lie now."""
        manager: Any = state_of(self.cache).manager
        return StepRequest(0, len(blocks) * self.cache.spec.block_tokens, 0, manager.units(blocks), 0)
