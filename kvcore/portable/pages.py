"""Where a request's rows lie in its pages: blocks outermost, canonical rows, the same for every cache and every way.

Page b holds the rows of block b of every paged component, one component after another in canonical order, so that a
request is as many pieces as it has blocks rather than blocks times layers. What does not grow with history (rings,
tails, slots) follows as one record, and so do the rings of every checkpoint, shortest first: each begins with a page of
its own and is cut into pages of the same size. What is left of the last page of each is zeros.
"""

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.ops import Ops, Strip
from kvcore.plan import row_bytes
from kvcore.pools import Pools
from kvcore.portable.rows import Content, HostRows, kept_rows, least_kept, owned, rings, state_of
from kvcore.spec import CacheSpec, Component
from kvcore.step import StepRequest

Array = Any
"""uint8 [pages, page_bytes]: NumPy, or a torch tensor on any device."""

HISTORY, RECORD = "history", "record"


class Section(NamedTuple):
    """Pages that belong together: those of history, each of its own, or one record over several pages.

    Attributes:
        name: ``history``, ``record``, or ``checkpoint N``.
        first: its first page.
        pages: how many.
        strips: what lies in every page of history, or in the record.
    """

    name: str
    first: int
    pages: int
    strips: tuple[Strip, ...]

    def of(self, pages: Array) -> Array:
        """Its bytes: pages of history, or the record as one page (none if it is empty)."""
        found = pages[self.first : self.first + self.pages]
        return found if self.name == HISTORY else found.reshape(min(1, self.pages), self.pages * pages.shape[1])


class PageLayout(NamedTuple):
    """Pages of one request at one length.

    Attributes:
        history: rows of blocks.
        record: what does not grow with history.
        checkpoints: the rings of past states, shortest first.
        lengths: of those states.
        page_bytes: of every page.
    """

    history: Section
    record: Section
    checkpoints: tuple[Section, ...]
    lengths: tuple[int, ...]
    page_bytes: int

    @property
    def blocks(self) -> int:
        """Pages of history."""
        return self.history.pages

    @property
    def pages(self) -> int:
        """All pages."""
        last = self.checkpoints[-1] if self.checkpoints else self.record
        return last.first + last.pages

    @property
    def sections(self) -> tuple[Section, ...]:
        """In order of their pages."""
        return self.history, self.record, *self.checkpoints

    @property
    def digests(self) -> int:
        """One for every page of history, then one for each other section."""
        return self.blocks + 1 + len(self.checkpoints)

    def latest(self, count: int) -> "PageLayout":
        """The same with the last ``count`` checkpoints only, their pages after the record."""
        first = len(self.checkpoints) - count
        if first <= 0:
            return self
        kept = self.checkpoints[first:]
        skipped = (kept[0].first if kept else self.pages) - self.record.first - self.record.pages
        moved = tuple(section._replace(first=section.first - skipped) for section in kept)
        return self._replace(checkpoints=moved, lengths=self.lengths[first:])


def page_layout(spec: CacheSpec, floor: int, length: int, checkpoints: Sequence[int] = ()) -> PageLayout:
    """The pages of a request of ``length`` tokens that can be rolled back to ``floor``, and of its checkpoints."""
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
    history = Section(HISTORY, 0, -(-length // spec.block_tokens) if paged.found else 0, tuple(paged.found))
    record = Section(RECORD, history.pages, -(-state.size // page_bytes), tuple(state.found))
    past: list[Section] = []
    first, overwritten = record.first + record.pages, list(rings(spec))
    for at in checkpoints:
        strips = _Strips()
        live = {component: component.live(at) for component in {component for _, _, component in overwritten}}
        for layer, role, component in overwritten:
            if live[component]:
                strips.add(layer, role, component, len(live[component]), live[component])
        past.append(Section(f"checkpoint {at}", first, -(-strips.size // page_bytes), tuple(strips.found)))
        first += past[-1].pages
    return PageLayout(history, record, tuple(past), tuple(checkpoints), page_bytes)


def least_bytes(spec: CacheSpec, floor: int, length: int) -> int:
    """No more than the pages of a request take, without making lists of what it says it has."""
    block, least = 0, 0
    for _, _, component in owned(spec):
        if component.growth == "block":
            block += spec.block_tokens // component.tokens_per_row * row_bytes(component)
        else:
            least += least_kept(component, floor, length) * row_bytes(component)
    return block * -(-length // spec.block_tokens) + least


class _Strips:
    def __init__(self) -> None:
        self.found: list[Strip] = []
        self.size = 0

    def add(self, layer: int, role: str, component: Component, rows: int, numbers: range | tuple[int, ...]) -> None:
        self.found.append(Strip(layer, role, self.size, rows, row_bytes(component), numbers, component.tokens_per_row))
        self.size += self.found[-1].nbytes


def content_of(layout: PageLayout, pages: Array) -> dict[tuple[int, str], HostRows]:
    """The rows of everything in the pages but checkpoints, by (layer, role)."""
    return content_in((layout.history, layout.record), pages)


def states_of(ops: Ops, layout: PageLayout, pages: Array, content: Content) -> list[tuple[int, Content]]:
    """(length, state) of the checkpoints in the pages, of a request whose other rows are ``content``."""
    spec, found = ops.plan.spec, list[tuple[int, Content]]()
    for length, section in zip(layout.lengths, layout.checkpoints, strict=True):
        held = content_in((section,), pages)
        # They outlive the pages, which may be many times as large.
        brought = {
            (layer, role): HostRows(held[layer, role].rows.copy(), held[layer, role].positions)
            if (layer, role) in held
            else HostRows(np.zeros((0, row_bytes(component)), np.uint8), [])
            for layer, role, component in rings(spec)
        }
        found.append((length, state_of(ops, content, brought, length)))
    return found


def content_in(sections: Iterable[Section], pages: Array) -> dict[tuple[int, str], HostRows]:
    """The rows of everything in some sections, by (layer, role)."""
    # One array for all layers of a ratio: a long request has many, and lists of them cost more than the rows.
    places: dict[Any, Any] = {}
    content: dict[tuple[int, str], HostRows] = {}
    for section in sections:
        part = section.of(pages)
        if section.name != HISTORY and not isinstance(part, np.ndarray):
            part = to_numpy(part)
        for strip in section.strips:
            kind = strip.numbers, strip.tokens_per_row
            if kind not in places:
                places[kind] = positions_of(strip)
            content[strip.layer, strip.role] = HostRows(rows_of(part, strip), places[kind])
    return content


def put_rows(part: Array, strip: Strip, rows: Array) -> None:
    """Put a strip's rows [n, row_bytes] into pages of history, or into a record as one page."""
    full, rest = divmod(len(rows), strip.rows)
    part[:full, strip.start : strip.stop] = rows[: full * strip.rows].reshape(full, strip.nbytes)
    if rest:
        part[full, strip.start : strip.start + rest * strip.row_bytes] = rows[full * strip.rows :].reshape(-1)


def rows_of(part: Array, strip: Strip) -> Array:
    """A strip's rows [n, row_bytes]."""
    rows = part[:, strip.start : strip.stop].reshape(len(part) * strip.rows, strip.row_bytes)
    return rows[: len(strip.numbers)]


def positions_of(strip: Strip) -> Any:
    """Their positions: NumPy integers [n]."""
    numbers = strip.numbers
    found = np.arange(numbers.start, numbers.stop) if isinstance(numbers, range) else np.array(numbers)
    return found * strip.tokens_per_row


def ranged(strips: Sequence[Strip]) -> tuple[Strip, ...]:
    """Strips of a record whose rows are all neighbours: those of one with gaps lie side by side, too."""
    found: list[Strip] = []
    for strip in strips:
        if isinstance(strip.numbers, range):
            found.append(strip)
            continue
        ends = [at + 1 for at, (one, after) in enumerate(pairwise(strip.numbers)) if after != one + 1]
        for first, end in pairwise([0, *ends, len(strip.numbers)]):
            numbers = range(strip.numbers[first], strip.numbers[end - 1] + 1)
            found.append(strip._replace(start=strip.start + first * strip.row_bytes, rows=end - first, numbers=numbers))
    return tuple(found)


def takes_chunks(ops: Ops) -> bool:
    """Whether pools lie on a device that takes pages out of the host's memory chunk by chunk, and gives them."""
    device: Any = getattr(ops, "torch_device", None)
    return device is not None and device.type == "cuda" and hasattr(ops, "through_device")


def passing_pages(like: Any, pages: int, page_bytes: int) -> np.ndarray[Any, Any]:
    """Pages of the host of any content, needed for a while.

    Where they go to or come from a GPU (``like``: a pool), they are memory that it copies by itself, which torch keeps
    for the next who asks.
    """
    if getattr(getattr(like, "device", None), "type", "") == "cuda":
        return sys.modules["torch"].empty((pages, page_bytes), dtype=like.dtype, pin_memory=True).numpy()
    return np.empty((pages, page_bytes), np.uint8)


def move_at_once(
    ops: Ops,
    pools: Pools,
    row: StepRequest,
    layout: PageLayout,
    pages: Array,
    *,
    store: bool = False,
    lanes: "list[Array] | None" = None,
    meanwhile: Callable[[], object] = bool,
) -> bool:
    """Copy a request's rows into its pages, or with ``store`` back; False where some must go component by component.

    Checkpoints are none of it: they are rows already.

    Args:
        lanes: given the structural digests of history's pages and of the record as they were on the device; it stays
            empty where pages and pools lie side by side, and where rows are no whole words.
        meanwhile: called while pages are on their way through a device.
    """
    history, record = layout.history.of(pages), layout.record.of(pages)
    parts = (
        (history, layout.history.strips, row.blocks[: layout.blocks]),
        (record, ranged(layout.record.strips), [row.slot]),
    )
    found: list[Array] = []
    moving: list[Any] = []
    for part, strips, units in parts:
        if not len(part):
            found.append(np.zeros((0, 2), np.int64))
            continue
        moved = strips
        if store and part is record:
            fitting = [
                _with_room(strip, row.length - ops.plan.region(strip.layer, strip.role)[0].rows) for strip in strips
            ]
            moved = tuple(strip for strip in fitting if strip.numbers)
        at = np.array(units, np.int32)
        if isinstance(part, np.ndarray) and takes_chunks(ops):
            through: Any = cast("Any", ops).through_device
            one = through(pools, part, moved, at, store=store, digested=None if lanes is None else strips)
            if one is None:
                break
            moving.append(one)
            found += [] if one.lanes is None else [one.lanes]
        elif not ops.move_strips(pools, part, moved, at, store=store):
            break
    else:
        meanwhile()
        for one in moving:
            one.wait()
        if lanes is not None:
            lanes += found if len(found) == len(parts) else []
        return True
    for one in moving:
        one.wait()
    return False


def _with_room(strip: Strip, first: int) -> Strip:
    """The strip without rows before number ``first``, which a ring has no room for beside later ones."""
    skip = bisect_left(strip.numbers, first)
    start = strip.start + skip * strip.row_bytes
    return strip._replace(start=start, rows=strip.rows - skip, numbers=strip.numbers[skip:])
