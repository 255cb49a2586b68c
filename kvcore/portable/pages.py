"""Where a request's rows lie in its exported pages: blocks outermost, canonical rows, the same for every cache.

Page b holds the rows of block b of every paged component, one component after another in canonical order, so that a
request is as many pieces as it has blocks rather than blocks times layers. What does not grow with history (rings,
tails, slots) follows as one record, cut into pages of the same size; the last page of either is padded with zeros.
"""

from typing import Any, NamedTuple

import numpy as np

from kvcore.ops import Strip
from kvcore.plan import row_bytes
from kvcore.portable.rows import kept_rows, owned
from kvcore.spec import CacheSpec, Component

Array = Any
"""uint8 [pages, page_bytes]: NumPy, or a torch tensor on any device."""


class PageLayout(NamedTuple):
    """Pages of one request at one length.

    Attributes:
        paged: strips of every page of history.
        state: strips of the record.
        page_bytes: of every page.
        blocks: pages of history.
        state_pages: pages of the record, which come after them.
    """

    paged: tuple[Strip, ...]
    state: tuple[Strip, ...]
    page_bytes: int
    blocks: int
    state_pages: int

    @property
    def pages(self) -> int:
        """All pages."""
        return self.blocks + self.state_pages

    def parts(self, pages: Array) -> tuple[tuple[Array, tuple[Strip, ...]], tuple[Array, tuple[Strip, ...]]]:
        """Pages of history, and the record as one page (none if it is empty), each with the strips that lie in it."""
        record = pages[self.blocks :].reshape(min(1, self.state_pages), self.state_pages * self.page_bytes)
        return (pages[: self.blocks], self.paged), (record, self.state)


def page_layout(spec: CacheSpec, floor: int, length: int) -> PageLayout:
    """The pages of a request of ``length`` tokens that can be rolled back to ``floor``."""
    paged, state = _Strips(), _Strips()
    # Layers are alike, and what they keep is worked out once for each kind.
    kept: dict[Component, range | tuple[int, ...]] = {}
    for layer, role, component in owned(spec):
        if component not in kept:
            kept[component] = kept_rows(component, floor, length)
        if component.growth == "block":
            paged.add(layer, role, component, spec.block_tokens // component.tokens_per_row, kept[component])
        elif kept[component]:
            state.add(layer, role, component, len(kept[component]), kept[component])
    # A spec without paged components is one page.
    page_bytes = paged.size or max(1, state.size)
    return PageLayout(
        paged=tuple(paged.found),
        state=tuple(state.found),
        page_bytes=page_bytes,
        blocks=-(-length // spec.block_tokens) if paged.found else 0,
        state_pages=-(-state.size // page_bytes),
    )


def at_once(part: Array, strips: tuple[Strip, ...]) -> bool:
    """Whether a backend can be asked for all strips at once: pages on its device, rows that are neighbours.

    A tail that could be rolled back over a window's end has rows of two windows.
    """
    return not isinstance(part, np.ndarray) and all(isinstance(strip.numbers, range) for strip in strips)


class _Strips:
    def __init__(self) -> None:
        self.found: list[Strip] = []
        self.size = 0

    def add(self, layer: int, role: str, component: Component, rows: int, numbers: range | tuple[int, ...]) -> None:
        self.found.append(Strip(layer, role, self.size, rows, row_bytes(component), numbers, component.tokens_per_row))
        self.size += self.found[-1].nbytes
