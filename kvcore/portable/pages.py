"""Where a request's rows lie in its pages: blocks outermost, canonical rows, the same for every cache and every way.

Page b holds the rows of block b of every paged component, one component after another in canonical order, so that a
request is as many pieces as it has blocks rather than blocks times layers. What does not grow with history (rings,
tails, slots) follows as one record, and so do the rings of every checkpoint, shortest first: each begins with a page of
its own and is cut into pages of the same size. What is left of the last page of each is zeros.
"""

import sys
from bisect import bisect_left
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.ops import Ops, Strip
from kvcore.pools import Pools
from kvcore.portable.rows import Content, HostRows, kept_rows, least_kept, owned, rings, state_of
from kvcore.spec import CacheSpec, Component
from kvcore.spec.sizes import row_bytes
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


class _Kept(NamedTuple):
    """A pool, and which of a spec's kinds of components its rows are."""

    layer: int
    role: str
    kind: int


class _Kinds(NamedTuple):
    """What of layouts follows from a spec alone: layers are alike, and what they keep is worked out once for a kind.

    Attributes:
        components: that differ.
        row_bytes: of each.
        paged: strips of blocks, without numbers, and the kind of each.
        page_bytes: of those.
        state: what does not grow with history.
        rings: those of it that are overwritten.
    """

    components: tuple[Component, ...]
    row_bytes: tuple[int, ...]
    paged: tuple[tuple[Strip, int], ...]
    page_bytes: int
    state: tuple[_Kept, ...]
    rings: tuple[_Kept, ...]

    def strips(
        self, pools: Sequence[_Kept], numbers: Sequence[range | tuple[int, ...]]
    ) -> tuple[tuple[Strip, ...], int]:
        """The strips of a record that holds rows of these numbers of each kind, and its bytes."""
        found: list[Strip] = []
        size = 0
        steps = [component.tokens_per_row for component in self.components]
        for layer, role, kind in pools:
            held, row = numbers[kind], self.row_bytes[kind]
            if held:
                found.append(Strip(layer, role, size, len(held), row, held, steps[kind]))
                size += len(held) * row
        return tuple(found), size


@lru_cache(maxsize=64)
def _kinds(spec: CacheSpec) -> _Kinds:
    kinds: dict[Component, int] = {}
    paged: list[tuple[Strip, int]] = []
    size = 0
    state: list[_Kept] = []
    for layer, role, component in owned(spec):
        kind, step = kinds.setdefault(component, len(kinds)), component.tokens_per_row
        if component.growth == "block":
            rows = spec.block_tokens // step
            paged.append((Strip(layer, role, size, rows, row_bytes(component), (), step), kind))
            size += paged[-1][0].nbytes
        else:
            state.append(_Kept(layer, role, kind))
    overwritten = tuple(_Kept(layer, role, kinds[component]) for layer, role, component in rings(spec))
    return _Kinds(tuple(kinds), tuple(map(row_bytes, kinds)), tuple(paged), size, tuple(state), overwritten)


def page_layout(spec: CacheSpec, floor: int, length: int, checkpoints: Sequence[int] = ()) -> PageLayout:
    """The pages of a request of ``length`` tokens that can be rolled back to ``floor``, and of its checkpoints."""
    kinds = _kinds(spec)
    kept = [kept_rows(component, floor, length) for component in kinds.components]
    paged = tuple(
        Strip(layer, role, start, rows, size, kept[kind], step)
        for (layer, role, start, rows, size, _, step), kind in kinds.paged
    )
    state, size = kinds.strips(kinds.state, kept)
    # A spec without paged components is one page.
    page_bytes = kinds.page_bytes or max(1, size)
    history = Section(HISTORY, 0, -(-length // spec.block_tokens) if paged else 0, paged)
    record = Section(RECORD, history.pages, -(-size // page_bytes), state)
    past: list[Section] = []
    first = record.first + record.pages
    for at in checkpoints:
        strips, size = kinds.strips(kinds.rings, [component.live(at) for component in kinds.components])
        past.append(Section(f"checkpoint {at}", first, -(-size // page_bytes), strips))
        first += past[-1].pages
    return PageLayout(history, record, tuple(past), tuple(checkpoints), page_bytes)


def least_bytes(spec: CacheSpec, floor: int, length: int) -> int:
    """No more than the pages of a request take, without making lists of what it says it has."""
    kinds = _kinds(spec)
    least = [least_kept(component, floor, length) for component in kinds.components]
    record = sum(least[kind] * kinds.row_bytes[kind] for _, _, kind in kinds.state)
    return kinds.page_bytes * -(-length // spec.block_tokens) + record


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


class Moving(Protocol):
    """Pages on their way between the host and a device; see ``under_way``."""

    def ask(self) -> None:
        """Have lanes of the pages come, before what is left of the pages."""
        ...

    def go_on(self) -> None:
        """With what is left of the pages."""
        ...

    def lanes(self) -> Array | None:
        """Lanes of the pages as they are on the device, [n, 2]; None where rows are no whole words."""
        ...

    def wait(self) -> None:
        """Returns when nothing reads or writes the pages any more."""
        ...


class Moved(NamedTuple):
    """A request's rows, which are in their pages once ``wait`` has returned; or, stored, are where lanes say.

    Attributes:
        parts: of history and of the record, as far as those are still on their way.
        whole: both of them are.
    """

    parts: tuple[Moving, ...] = ()
    whole: bool = False

    def lanes(self) -> list[Array]:
        """Lanes of history's pages and of the record as they were on the device; none where not all are known."""
        for part in self.parts:
            part.ask()
        for part in self.parts:
            part.go_on()
        found = [part.lanes() for part in self.parts] if self.whole else []
        return [] if any(lanes is None for lanes in found) else found

    def wait(self) -> None:
        """Until nothing reads or writes the pages any more."""
        for part in self.parts:
            part.wait()


class _Nothing:
    """The way of no pages."""

    def ask(self) -> None:
        """Nothing."""

    def go_on(self) -> None:
        """Nothing."""

    def lanes(self) -> Array | None:
        return np.zeros((0, 2), np.int64)

    def wait(self) -> None:
        """At once."""


@contextmanager
def under_way(
    ops: Ops,
    pools: Pools,
    row: StepRequest,
    layout: PageLayout,
    pages: Array,
    *,
    store: bool = False,
    digested: bool = False,
    begun: Any = None,
) -> Generator[Moved | None]:
    """Copy a request's rows into its pages, or with ``store`` back; None where some must go component by component.

    What is given may be on its way through a device until the context ends. What is left of the last page of history,
    and of the record, is zeros. Checkpoints are none of it: they are rows already.

    Args:
        digested: the structural digests of history's pages and of the record are wanted as they are on the device.
        begun: with ``store``, what a device's ``begin_pages`` gave of these pages.
    """
    history, record = layout.history.of(pages), layout.record.of(pages)
    parts = ((history, layout.history, row.blocks[: layout.blocks]), (record, layout.record, [row.slot]))
    chunks = isinstance(pages, np.ndarray) and takes_chunks(ops)
    if not store and not chunks:
        _blank(layout, pages)
    moving: list[Moving] = []
    done, last = True, None
    try:
        if store and chunks and begun is not None and len(record):
            # A few bytes, which are there when history is: behind it they would wait for its last rows to be stored.
            last = cast("Any", ops).begin_pages(record)
        for part, section, units in parts:
            if not len(part):
                moving.append(_Nothing())
                continue
            # Those of the record are looked at while history is on its way.
            strips = moved = section.strips if part is history else ranged(section.strips)
            if store and part is record:
                fitting = [
                    _with_room(strip, row.length - ops.plan.region(strip.layer, strip.role)[0].rows) for strip in strips
                ]
                moved = tuple(strip for strip in fitting if strip.numbers)
            at = np.array(units, np.int32)
            if chunks:
                through: Any = cast("Any", ops).through_device
                known = begun if part is history else last
                wanted = strips if digested else None
                one = through(pools, part, moved, at, store=store, digested=wanted, blank=not store, begun=known)
                moving += [one] * (one is not None)
                done = one is not None
            else:
                done = ops.move_strips(pools, part, moved, at, store=store)
            if not done:
                break
        if not done:
            # Nothing may still be written there when rows go another way.
            Moved(tuple(moving)).wait()
            if not store and chunks:
                _blank(layout, pages)
        yield Moved(tuple(moving), whole=chunks) if done else None
    finally:
        Moved((*moving, *([] if last is None else [last]))).wait()


def _blank(layout: PageLayout, pages: Array) -> None:
    """Zeros where rows may leave something of pages that hold anything."""
    pages[max(0, layout.blocks - 1) : layout.blocks] = 0
    layout.record.of(pages)[:, sum(strip.nbytes for strip in layout.record.strips) :] = 0


def _with_room(strip: Strip, first: int) -> Strip:
    """The strip without rows before number ``first``, which a ring has no room for beside later ones."""
    skip = bisect_left(strip.numbers, first)
    start = strip.start + skip * strip.row_bytes
    return strip._replace(start=start, rows=strip.rows - skip, numbers=strip.numbers[skip:])
