"""A request as pages and a manifest, and back: the one thing that a blob, a file of several and a transfer are made of.

The manifest is JSON: the spec, what the request says of itself, where each component's rows lie in the pages, and a
digest of every piece. Its sha256 is the root: whoever has the root can tell every byte of the rest. The form is written
down for others in ``docs/portable_format.md``.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from kvcore.arrays import to_numpy
from kvcore.errors import OutOfBlocks, SnapshotError
from kvcore.foreign import UNREADABLE, shortened
from kvcore.portable.caches import Buffers, CacheInTurn
from kvcore.portable.digests import DEFAULT, SIZES, digests_of
from kvcore.portable.pages import (
    Array,
    PageLayout,
    Section,
    least_bytes,
    page_layout,
    passing_pages,
    put_rows,
    takes_chunks,
    under_way,
)
from kvcore.portable.record import Refusal, RequestRecord, is_coherent, spec_text
from kvcore.portable.rows import Content, owned, read_rows
from kvcore.requests.manager import Request
from kvcore.spec import CacheSpec, Component
from kvcore.spec.sizes import row_bytes
from kvcore.step import StepRequest, build_index

FORM, VERSION = "kvcore.request", 2

ROOT_BYTES = 32
"""Of a sha256."""

LARGEST_MANIFEST = 1 << 27
"""Bytes; ids and digests of ten million tokens take less."""


class FieldTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field of a row, as in ``kvcore.spec.Field``: what decoding needs of it."""

    name: str
    dims: int
    code: str
    group: int | None
    scale: str | None


class PartTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stream of a component's rows: ``heads`` rows of a format, one after another, its fields in order.

    ``global_scale``: of its values alone, where the component has several streams of a format that knows one.
    """

    name: str
    heads: int
    format: str
    hadamard: bool
    fields: list[FieldTable]
    global_scale: float | msgspec.UnsetType = msgspec.UNSET


class ComponentTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one component's rows are.

    Attributes:
        layer, role: the component.
        row_bytes: of a canonical row: its parts, one after another.
        tokens_per_row: positions from one row to the next.
        global_scale: what every value is multiplied by beside its own scale; None where formats know none.
        parts: the streams.
    """

    layer: int
    role: str
    row_bytes: int
    tokens_per_row: int
    global_scale: float | None
    parts: list[PartTable]


class StripTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one component's rows lie in the pages of a section.

    Attributes:
        layer, role: the component.
        start: first byte in every page; of a record, in all of it.
        rows: rows a page; the last page that has any may have fewer.
        numbers: which rows of the request's history they are, as ranges [first, end).
    """

    layer: int
    role: str
    start: int
    rows: int
    numbers: list[tuple[int, int]]


class SectionTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pages that belong together; see ``Section``."""

    name: str
    first: int
    pages: int
    strips: list[StripTable]


class LayoutTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where which rows lie, and what they are: all that a reader needs who does not know the spec's rules."""

    components: list[ComponentTable]
    sections: list[SectionTable]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything of a request that leaves a cache but its pages.

    Attributes:
        form, version: of this and of the page layout.
        spec: as JSON.
        request: what it says of itself.
        page_bytes, pages: of all pages.
        layout: where rows lie in them, and what they are: ``LayoutTable``.
        digest: kind of ``digests``, of ``digests.SIZES``.
        digests: hexadecimal, one for every page of history, then one for each other section.
        export: (exporter, number, generation) of the export that it was made for; None in a file.
    """

    form: Literal["kvcore.request"]
    version: Literal[2]
    spec: msgspec.Raw
    request: RequestRecord
    page_bytes: int
    pages: int
    layout: msgspec.Raw
    digest: str
    digests: list[str]
    export: tuple[str, int, int] | None = None


class Described(NamedTuple):
    """A manifest that was read, of any version; what it says of pages is yet to be held against the spec.

    Attributes:
        layout: as JSON; None in version 1, which leaves it to the spec.
    """

    version: int
    spec: str
    record: RequestRecord
    digest: str
    digests: list[bytes]
    size: tuple[int, int] | None
    layout: bytes | None


class Staged(NamedTuple):
    """A request ready to be moved: its manifest as bytes, its pages, and the manifest's root."""

    manifest: bytes
    pages: Array
    root: bytes


def root_of(manifest: bytes) -> bytes:
    """What vouches for a manifest, and through it for the pages."""
    return hashlib.sha256(manifest).digest()


def empty_pages(
    cache: Buffers, pages: int, page_bytes: int, *, on_device: bool, where: str, passing: bool = False
) -> Array:
    """Pages of any content: on the host, or beside the pools of a torch cache.

    Args:
        passing: as ``passing_pages``, for these pools.

    Raises:
        OutOfBlocks: there is no memory for them.
    """
    like: Any = next(iter(cache.pools.values()), None)
    try:
        if on_device:
            return like.new_empty((pages, page_bytes))
        return passing_pages(like if passing else None, pages, page_bytes)
    except (MemoryError, RuntimeError, ValueError) as error:
        raise OutOfBlocks(
            got=f"{pages} pages of {page_bytes} bytes",
            where=where,
            allowed="what there is memory for",
            hint=(str(error).splitlines() or [""])[0][:200],
        ) from error


class _Said:
    """What manifests say of a spec and of where rows lie, as JSON: worked out once for a layout."""

    def __init__(self, spec: CacheSpec, layout: PageLayout) -> None:
        self._spec = msgspec.Raw(spec_text(spec).encode())
        self._table = msgspec.Raw(_layout_text(spec, layout))
        self._layout = layout

    def manifest(
        self, record: RequestRecord, digest: str, digests: Sequence[bytes], export: tuple[str, int, int] | None = None
    ) -> bytes:
        """The manifest of a request; ``digests`` are of kind ``digest``."""
        manifest = Manifest(
            form=FORM,
            version=VERSION,
            spec=self._spec,
            request=record,
            page_bytes=self._layout.page_bytes,
            pages=self._layout.pages,
            layout=self._table,
            digest=digest,
            digests=[found.hex() for found in digests],
            export=export,
        )
        return msgspec.json.encode(manifest)


def manifest_of(
    spec: CacheSpec, record: RequestRecord, layout: PageLayout, digest: str, digests: Sequence[bytes]
) -> bytes:
    """The manifest, as bytes, of a request whose pages are laid out and digested."""
    return _Said(spec, layout).manifest(record, digest, digests)


class Staging:
    """A request that is about to be copied out of the pools: where its rows will lie is known.

    Attributes:
        layout: of its pages.
        root: of its manifest, once the pages are filled.
    """

    def __init__(
        self,
        cache: CacheInTurn,
        request: Request,
        where: str,
        *,
        export: tuple[str, int, int] | None = None,
        checkpoints: bool = True,
        digest: str = DEFAULT,
    ) -> None:
        """Arguments and errors are those of ``stage``; ``digest``: of ``digests.SIZES``."""
        cache.manager.check_whole(request, where)
        self._cache, self._export, self._digest = cache, export, digest
        self.root = b""
        self._row, self._floor = cache.row(request), cache.least_length(request)
        self._states = cache.kept_states(request) if checkpoints else []
        lengths = [length for length, _ in self._states]
        self.layout = page_layout(cache.spec, self._floor, self._row.length, lengths)
        self._record = RequestRecord(
            length=self._row.length,
            floor=self._floor,
            tokens=None if request.tokens is None else list(request.tokens),
            salt=request.salt,
            checkpoints=list(self.layout.lengths),
            converted=list(request.converted),
            approximate=request.approximate,
        )

    @cached_property
    def _said(self) -> _Said:
        return _Said(self._cache.spec, self.layout)

    def manifest(self, digests: Sequence[bytes] | None = None) -> bytes:
        """With digests, or with others of the same size in their place."""
        digests = [bytes(SIZES[self._digest])] * self.layout.digests if digests is None else digests
        return self._said.manifest(self._record, self._digest, digests, self._export)

    def fill(self, pages: Array) -> bytes:
        """Copy the request into pages of any content; returns the manifest."""
        cache, row, layout = self._cache, self._row, self.layout
        with under_way(cache.ops, cache.pools, row, layout, pages, digested=self._digest == "lanes") as moved:
            if moved is None:
                stage_one_by_one(cache, row, self._floor, layout, pages)
            for section, (_, state) in zip(layout.checkpoints, self._states, strict=True):
                _fill(cache, section, state, pages)
            said, lanes = self._said, list[Array]()
            if moved is not None:
                # The device knows digests before the pages are here.
                lanes = moved.lanes()
                if not lanes:
                    moved.wait()
            digests = digests_of(self._digest, cache.ops, layout, lanes).result(pages)
            manifest = said.manifest(self._record, self._digest, digests, self._export)
            self.root = root_of(manifest)
        return manifest


def stage(
    cache: CacheInTurn,
    request: Request,
    where: str,
    *,
    export: tuple[str, int, int] | None = None,
    checkpoints: bool = True,
    on_device: bool = False,
    digest: str | None = DEFAULT,
) -> Staged:
    """Copy a request out of the pools into pages.

    Args:
        cache: of any backend; a shard of a cache stages the whole request.
        request: a live one.
        where: the verb, for messages.
        export: (exporter, number, generation) for the manifest.
        checkpoints: whether those of its tokens go with it.
        on_device: leave the pages on the device of a torch cache, and digest them there.
        digest: kind of the digests of pages on the host; None: the one that their rows' device works out as they leave.

    Raises:
        RequestError: the request is still replaying the tokens of a prefix hit.
    """
    if on_device or (digest is None and takes_chunks(cache.ops)):
        digest = "lanes"
    digest = DEFAULT if digest is None else digest
    staging = Staging(cache, request, where, export=export, checkpoints=checkpoints, digest=digest)
    layout = staging.layout
    pages = empty_pages(cache, layout.pages, layout.page_bytes, on_device=on_device, where=where, passing=True)
    return Staged(staging.fill(pages), pages, staging.root)


def stage_one_by_one(cache: CacheInTurn, row: StepRequest, floor: int, layout: PageLayout, pages: Array) -> None:
    """Copy rows into pages component by component, on the host or on the device."""
    on_device = not isinstance(pages, np.ndarray)
    index = cache.ops.index(build_index([row], max_blocks=cache.plan.max_blocks))
    for strip in layout.history.strips:
        raw = cache.ops.gather_rows(cache.pools, strip.layer, strip.role, index, columns=len(strip.numbers))
        put_rows(pages, strip, raw.rows[0] if on_device else to_numpy(raw.rows)[0])
    if layout.record.pages:
        _fill(cache, layout.record, read_rows(cache.ops, cache.pools, row, floor, growth="slot"), pages)


def _fill(cache: CacheInTurn, section: Section, held: Content, pages: Array) -> None:
    """Put the rows of a record into its pages."""
    if section.pages:
        record = np.zeros(section.pages * pages.shape[1], np.uint8)
        for strip in section.strips:
            record[strip.start : strip.stop] = held[strip.layer, strip.role].rows.reshape(-1)
        lines = record.reshape(section.pages, pages.shape[1])
        on_host = isinstance(pages, np.ndarray)
        pages[section.first : section.first + section.pages] = lines if on_host else cache.ops.asarray(lines)


def layout_table(spec: CacheSpec, layout: PageLayout) -> LayoutTable:
    """A layout as a manifest says it."""
    return LayoutTable(components=_components(spec), sections=_sections(layout))


def _layout_text(spec: CacheSpec, layout: PageLayout) -> bytes:
    """``layout_table`` as JSON; what it says of the spec is written once."""
    return b'{"components":%b,"sections":%b}' % (_components_text(spec), msgspec.json.encode(_sections(layout)))


def _sections(layout: PageLayout) -> list[SectionTable]:
    return [
        SectionTable(
            name=section.name,
            first=section.first,
            pages=section.pages,
            strips=[
                StripTable(
                    layer=strip.layer,
                    role=strip.role,
                    start=strip.start,
                    rows=strip.rows,
                    numbers=_ranges(strip.numbers),
                )
                for strip in section.strips
            ],
        )
        for section in layout.sections
    ]


def _components(spec: CacheSpec) -> list[ComponentTable]:
    return [_component(layer, role, component) for layer, role, component in owned(spec)]


@lru_cache(maxsize=64)
def _components_text(spec: CacheSpec) -> bytes:
    return msgspec.json.encode(_components(spec))


def _component(layer: int, role: str, component: Component) -> ComponentTable:
    size, tokens, scale, parts = _of_component(component)
    return ComponentTable(
        layer=layer, role=role, row_bytes=size, tokens_per_row=tokens, global_scale=scale, parts=parts
    )


@lru_cache(maxsize=256)
def _of_component(component: Component) -> tuple[int, int, float | None, list[PartTable]]:
    """What a manifest says of a component, whatever layer has it: layers are alike."""
    scale: float | None = getattr(component, "global_scale", None)
    parts = [
        PartTable(
            name=part.name,
            heads=part.heads,
            format=part.format.name,
            hadamard=part.format.hadamard,
            fields=[
                FieldTable(
                    name=field.name,
                    dims=field.size,
                    code=field.code,
                    group=None if field.group is None else field.width,
                    scale=field.scale,
                )
                for field in part.format.fields
            ],
            global_scale=msgspec.UNSET if part.format.global_scale == 1 else part.format.global_scale,
        )
        for part in component.parts
    ]
    scaled = any(part.format.global_scaled for part in component.parts)
    return row_bytes(component), component.tokens_per_row, scale if scaled else None, parts


def _ranges(numbers: range | tuple[int, ...]) -> list[tuple[int, int]]:
    """Ascending numbers as ranges [first, end)."""
    if isinstance(numbers, range):
        return [(numbers.start, numbers.stop)] if numbers else []
    ends = [at + 1 for at, (one, after) in enumerate(pairwise(numbers)) if after != one + 1]
    return [(numbers[first], numbers[end - 1] + 1) for first, end in pairwise([0, *ends, len(numbers)])]


def parse(manifest: bytes | memoryview, where: str, refusal: Refusal) -> Described:
    """A manifest that somebody's root vouches for.

    Raises:
        what ``refusal`` makes: bytes of another form or version, or numbers that do not fit together.
    """
    try:
        found = msgspec.json.decode(manifest, type=Manifest)
        digests = [bytes.fromhex(text) for text in found.digests]
    except UNREADABLE as error:
        raise refusal(got=shortened(str(error)), where=where, allowed=f"{FORM} of version {VERSION}") from error
    if found.digest not in SIZES:
        raise refusal(got=f"digests of kind {shortened(found.digest)}", where=where, allowed=", ".join(SIZES))
    if not is_coherent(found.request):
        got = f"{found.request.length} tokens, rows from {found.request.floor} on"
        raise refusal(got=shortened(got), where=where, allowed="numbers that fit together")
    if {*map(len, digests)} - {SIZES[found.digest]}:
        allowed = f"digests of {SIZES[found.digest]} bytes"
        raise refusal(got="digests of other sizes", where=where, allowed=allowed)
    try:
        spec = bytes(found.spec).decode()
    except UnicodeError as error:
        raise refusal(got=str(error), where=where, allowed="a spec in UTF-8") from error
    size = found.pages, found.page_bytes
    return Described(VERSION, spec, found.request, found.digest, digests, size, bytes(found.layout))


def layout_of(
    spec: CacheSpec,
    described: Described,
    size: tuple[int, int],
    where: str,
    refusal: Refusal,
    *,
    places: bool = True,
) -> PageLayout:
    """Where the rows lie in the pages of a request of a spec.

    Args:
        spec: that of the manifest.
        described: the manifest.
        size: pages and bytes of a page that there are, or are said to be.
        where: for messages.
        refusal: what is raised.
        places: False leaves ``check_places`` to the caller.

    Raises:
        what ``refusal`` makes: the pages or what the manifest says of them are not those of such a request.
    """
    record = described.record
    pages, page_bytes = size
    held = pages * page_bytes
    # Before anything is made that is as large as the request says to be.
    if least_bytes(spec, record.floor, record.length) > held or len(described.digests) < len(record.checkpoints):
        raise refusal(
            got=f"{held} bytes of pages", where=where, allowed=f"the rows of {record.length} tokens from the floor on"
        )
    layout = page_layout(spec, record.floor, record.length, record.checkpoints)
    if (layout.pages, layout.page_bytes) != size or described.size not in (None, size):
        got = f"{pages} pages of {page_bytes} bytes"
        raise refusal(got=got, where=where, allowed=f"{layout.pages} pages of {layout.page_bytes} bytes")
    if len(described.digests) != layout.digests:
        allowed = f"one for each of {layout.blocks} pages, and one for each of {layout.digests - layout.blocks} records"
        raise refusal(got=f"{len(described.digests)} digests", where=where, allowed=allowed)
    if places:
        check_places(spec, described, layout, where, refusal)
    return layout


def check_places(spec: CacheSpec, described: Described, layout: PageLayout, where: str, refusal: Refusal) -> None:
    """Refuse a manifest whose own account of where rows lie is not the right one, however it is written.

    Raises:
        what ``refusal`` makes.
    """
    declared = described.layout
    if declared is None or declared == (text := _layout_text(spec, layout)):
        return
    if len(declared) <= 8 * len(text):
        with contextlib.suppress(*UNREADABLE):
            if msgspec.json.decode(declared, type=LayoutTable) == layout_table(spec, layout):
                return
    raise refusal(got="rows in other places", where=where, allowed="the places that follow from the spec")


def damaged(layout: PageLayout, found: Sequence[bytes], declared: Sequence[bytes]) -> list[str]:
    """Names of the pages, and of the other sections, that do not match their digests."""
    if list(found) == list(declared):
        return []
    names = [f"page {at}" for at in range(layout.blocks)]
    names += ["the record", *(section.name for section in layout.checkpoints)]
    return [name for name, here, there in zip(names, found, declared, strict=True) if here != there]


def refuse_blob(*, got: Any, where: str, allowed: str) -> SnapshotError:
    """What is wrong with a file or a blob."""
    return SnapshotError(got=got, where=where, allowed=allowed)
