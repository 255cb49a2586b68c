"""Where a request's rows lie in its exported pages: blocks outermost, canonical rows, the same for every cache.

Page b holds the rows of block b of every paged component, one component after another in canonical order, so that a
request is as many pieces as it has blocks rather than blocks times layers. What does not grow with history (rings,
tails, slots) follows as one record, cut into pages of the same size; the last page of either is padded with zeros.
"""

from typing import NamedTuple

from kvcore.content import kept_positions, owned
from kvcore.plan import row_bytes
from kvcore.spec import CacheSpec, Component


class Strip(NamedTuple):
    """One component's rows: in each page (paged), or in the record. ``start`` and ``rows`` of ``row_bytes`` bytes."""

    layer: int
    role: str
    start: int
    rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all its rows."""
        return self.rows * self.row_bytes

    @property
    def stop(self) -> int:
        """First byte after it."""
        return self.start + self.nbytes


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


def page_layout(spec: CacheSpec, floor: int, length: int) -> PageLayout:
    """The pages of a request of ``length`` tokens that can be rolled back to ``floor``."""
    paged, state = _Strips(), _Strips()
    # Layers are alike, and what they keep is worked out once for each kind.
    kept: dict[Component, int] = {}
    for layer, role, component in owned(spec):
        if component.growth == "block":
            paged.add(layer, role, spec.block_tokens // component.tokens_per_row, row_bytes(component))
        else:
            if component not in kept:
                kept[component] = len(kept_positions(component, floor, length))
            state.add(layer, role, kept[component], row_bytes(component))
    # A spec without paged components is one page.
    page_bytes = paged.size or max(1, state.size)
    return PageLayout(
        paged=tuple(paged.found),
        state=tuple(state.found),
        page_bytes=page_bytes,
        blocks=-(-length // spec.block_tokens) if paged.found else 0,
        state_pages=-(-state.size // page_bytes),
    )


class _Strips:
    def __init__(self) -> None:
        self.found: list[Strip] = []
        self.size = 0

    def add(self, layer: int, role: str, rows: int, row: int) -> None:
        self.found.append(Strip(layer, role, self.size, rows, row))
        self.size += rows * row
