"""Where every field of every row lies in memory that belongs to someone else, as a value that can be sent and kept.

Nothing in it is worked out from shapes: a row's field is at ``offset + b · block + r · token + h · head`` of a tensor's
bytes, for block b, row r in the block and head h. Where rows of a block lie in chunks, or bytes of a field apart, lines
say so. Where an engine looks b and r up in a tensor of its own, an index map says how. ``check`` refuses what cannot be
right: rows that lie on one another or beyond the tensor, two components in one place, a component or a map that is
missing.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from kvcore.errors import SpecError
from kvcore.foreign import UNREADABLE, shortened
from kvcore.plan import CachePlan, Region, plan_cache
from kvcore.spec import CacheSpec
from kvcore.spec.layout import Steps

FORM, VERSION = "kvcore.descriptor", 1

LARGEST = 1 << 62


class IndexMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How places are read from a tensor of integers of the owner's, which changes as it gives out and takes back.

    Place n of a map of tokens is in page ``n div page``, at row ``n mod page`` modulo the lines' ``rows``: pages of
    fewer rows keep the newest ones, as rings do. A map of pages has those of a page of tokens at once: its places are
    that many from ``page`` times what the map has on. A map of slots has numbers of rings, one of blocks where those
    lie.

    Attributes:
        name: which lines name it by, and under which the tensor is given.
        of: what is looked up: ``token``, row r of block b as b · block_tokens + r; ``page``, of that token, which is
            token div ``page``; ``slot``, a request's; or ``block``.
        count: numbers that can be looked up.
        page: places of a page; 1 of slots and blocks.
        first: the least place. What is less says that there is none.
        aligned: a token's place in its page is its row in the block, modulo ``page``, as in every map of pages.
    """

    name: str
    of: Literal["token", "page", "slot", "block"]
    count: int
    page: int = 1
    first: int = 0
    aligned: bool = False

    @property
    def of_tokens(self) -> bool:
        """Whether tokens have places in it, each or page by page."""
        return self.of in ("token", "page")


class Lines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where one field of one part of a component's rows lies. All numbers but ``units`` and ``rows`` are bytes.

    Rows lie in units: history in the descriptor's blocks; what grows with requests in a ring for each slot, position p
    at row p mod ``rows``, or in pages, position p in page p div ``rows`` of a table of its own, or where a map says.

    Attributes:
        layer, role: the component.
        part: ``key``, ``value``, or empty where there is one.
        field: of the part's format.
        tensor: name of the tensor.
        offset: of block 0, row 0, head 0.
        block: from a unit to the next.
        token: from a row to the next one of its unit.
        head: from a head to the next.
        kind: ``block``, ``ring`` or ``page``.
        units: rings or pages; 0 for blocks.
        rows: of a ring or page; 0 for blocks.
        map: name of the map that pages (of tokens), rings (of slots) or blocks are looked up in; empty without one.
        chunk_rows: rows of a chunk, where those of a block lie in chunks: row r is row r mod ``chunk_rows`` of chunk
            r div ``chunk_rows``; 0 where they do not.
        chunk: from a chunk to the next.
        piece_bytes: of the field that lie side by side, where not all of it does; 0: it does.
        piece: from such a piece to the next.
        shifted: a ring that its owner shifts along: the newest position is in its last row, p of L tokens in row
            ``rows`` - L + p; what would be before the first token is zeros.
    """

    layer: int
    role: str
    part: str
    field: str
    tensor: str
    offset: int
    block: int
    token: int
    head: int
    kind: Literal["block", "ring", "page"] = "block"
    units: int = 0
    rows: int = 0
    map: str = ""
    chunk_rows: int = 0
    chunk: int = 0
    piece_bytes: int = 0
    piece: int = 0
    shifted: bool = False

    @property
    def in_place(self) -> bool:
        """Whether a slot, or where a block lies, is a number of units, with no rows to look up."""
        return self.kind == "block" or (self.kind == "ring" and not self.map)


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the rows of a spec lie in somebody's tensors.

    Attributes:
        form, version: of this.
        block_tokens: tokens of a block, the spec's.
        blocks: how many there are; with a map of them, places for them.
        lines: one for every field of every part of every component that is not shared.
        maps: that lines name; not written where there are none.
    """

    form: Literal["kvcore.descriptor"] = FORM
    version: Literal[1] = VERSION
    block_tokens: int
    blocks: int
    lines: list[Lines]
    maps: list[IndexMap] | msgspec.UnsetType = msgspec.UNSET

    @property
    def maps_by_name(self) -> dict[str, IndexMap]:
        """The maps."""
        return {one.name: one for one in self.maps or ()}


def to_json(descriptor: Descriptor) -> str:
    """As JSON."""
    return msgspec.json.encode(descriptor).decode()


def from_json(text: str | bytes) -> Descriptor:
    """The inverse.

    Raises:
        SpecError: not a descriptor.
    """
    try:
        return msgspec.json.decode(text, type=Descriptor)
    except UNREADABLE as error:
        raise SpecError(
            got=shortened(str(error)), where="descriptor", allowed=f"{FORM} of version {VERSION}"
        ) from error


def json_schema() -> dict[str, Any]:
    """The JSON Schema of descriptors."""
    return msgspec.json.schema(Descriptor)


class Stretch(NamedTuple):
    """A field's place, and how much of it there is.

    Attributes:
        lines: the place.
        region: whose field it is.
        nbytes: of the field of one row.
        rows: of a unit.
        units: how many there are.
    """

    lines: Lines
    region: Region
    nbytes: int
    rows: int
    units: int

    @property
    def name(self) -> str:
        """For messages."""
        lines = self.lines
        return f"layers[{lines.layer}].{lines.role} {lines.part} {lines.field}".replace("  ", " ")

    @property
    def steps(self) -> Steps:
        """How it is stepped over in a unit."""
        lines = self.lines
        rows = min(lines.chunk_rows or self.rows, self.rows)
        # What is never stepped over may have been said as anything.
        return Steps(
            row=lines.token if rows > 1 else 0,
            head=lines.head if self.region.heads > 1 else 0,
            chunk_rows=rows,
            chunk=lines.chunk if rows < self.rows else 0,
            piece_bytes=min(lines.piece_bytes or self.nbytes, self.nbytes),
            piece=lines.piece if 0 < lines.piece_bytes < self.nbytes else 0,
        )

    @property
    def grain(self) -> int:
        """Bytes of it that lie side by side."""
        return self.steps.piece_bytes

    @property
    def axes(self) -> tuple[tuple[int, int, str], ...]:
        """(bytes from one to the next, how many, of what) of everything that is stepped over in a unit."""
        steps = self.steps
        return (
            (steps.chunk, self.rows // steps.chunk_rows, "chunk"),
            (steps.row, steps.chunk_rows, "token"),
            (steps.head, self.region.heads, "head"),
            (steps.piece, self.nbytes // steps.piece_bytes, "piece"),
        )

    @property
    def uneven(self) -> bool:
        """Whether its rows lie in chunks, or its bytes apart."""
        (_, chunks, _), *_, (_, pieces, _) = self.axes
        return chunks > 1 or pieces > 1

    @property
    def span(self) -> int:
        """Bytes from the first to behind the last of a unit."""
        return sum(step * (count - 1) for step, count, _ in self.axes) + self.grain

    @property
    def end(self) -> int:
        """Behind the last byte."""
        return self.lines.offset + (self.units - 1) * self.lines.block + self.span


def fields_of(plan: CachePlan) -> Iterator[tuple[Region, str, int]]:
    """(region, field, bytes of it in a row) of everything that a descriptor says a place of."""
    for region in plan.regions:
        for field in region.format.fields:
            if field.name != "pad":
                yield region, field.name, field.nbytes


def check(plan: CachePlan, descriptor: Descriptor, sizes: Mapping[str, int]) -> dict[tuple[Any, ...], Stretch]:
    """The stretches of a descriptor by (layer, role, part, field), if they can be right.

    Args:
        plan: one of the spec, with the descriptor's number of blocks.
        descriptor: what somebody says.
        sizes: bytes of every tensor.

    Raises:
        SpecError: naming what cannot be.
    """
    if descriptor.block_tokens != plan.spec.block_tokens:
        raise SpecError(
            got=f"blocks of {descriptor.block_tokens} tokens",
            where="descriptor",
            allowed=f"{plan.spec.block_tokens}, the spec's block_tokens",
            hint="Give the spec the engine's: msgspec.structs.replace(spec, block_tokens=...).",
        )
    maps = _checked_maps(plan, descriptor)
    told: dict[tuple[Any, ...], Lines] = {}
    for lines in descriptor.lines:
        key = lines.layer, lines.role, lines.part, lines.field
        if key in told:
            raise SpecError(got=f"{key} twice", where="descriptor", allowed="each field once")
        told[key] = lines
    found: dict[tuple[Any, ...], Stretch] = {}
    looked_up = {lines.map for lines in descriptor.lines if lines.kind == "block"}
    if len(looked_up) > 1:
        raise SpecError(
            got=f"blocks by maps {sorted(looked_up)}", where="descriptor", allowed="one map, or none, for all"
        )
    idle = [one.name for one in maps.values() if one.of == "block" and one.name not in looked_up]
    if idle:
        allowed = "one that the lines of history name"
        raise SpecError(got=f"a map of blocks {idle[0]!r} that none does", where="descriptor: maps", allowed=allowed)
    for region, field, nbytes in fields_of(plan):
        key = region.layer, region.role, region.part, field
        if key not in told:
            raise SpecError(
                got=f"no place of {key}", where="descriptor", allowed="a place for every field of every row"
            )
        found[key] = _stretch(told[key], region, nbytes, plan, maps)
    if len(told) != len(found):
        odd = next(key for key in told if key not in found)
        raise SpecError(got=f"a place of {odd}", where="descriptor", allowed="fields of the spec's rows")
    for stretch in found.values():
        _check_alone(stretch, sizes)
    by_tensor: dict[str, list[Stretch]] = {}
    for stretch in found.values():
        by_tensor.setdefault(stretch.lines.tensor, []).append(stretch)
    for stretches in by_tensor.values():
        for one, other in combinations(stretches, 2):
            _check_apart(one, other)
    return found


def _checked_maps(plan: CachePlan, descriptor: Descriptor) -> dict[str, IndexMap]:
    """The maps by name, if all that may be looked up is in them.

    Raises:
        SpecError: two of a name, numbers that none can have, or fewer than there are tokens or slots.
    """
    maps = descriptor.maps_by_name
    if len(maps) < len(descriptor.maps or ()):
        raise SpecError(got=[one.name for one in descriptor.maps or ()], where="descriptor: maps", allowed="each once")
    # Tokens are numbered by blocks as the owner numbers these.
    blocks = max([descriptor.blocks, *(one.count for one in maps.values() if one.of == "block")])
    tokens = blocks * descriptor.block_tokens
    for one in maps.values():
        where = f"descriptor: map {one.name!r}"
        least = {"token": tokens, "page": -(-tokens // max(1, one.page)), "slot": plan.slots, "block": 1}[one.of]
        if not least <= one.count <= LARGEST:
            raise SpecError(got=f"{one.count} numbers", where=where, allowed=f"{least} or more, one for each {one.of}")
        if not 1 <= one.page <= (LARGEST if one.of_tokens else 1):
            raise SpecError(got=f"pages of {one.page} places", where=where, allowed="1 or more; 1 of slots and blocks")
        if not 0 <= one.first <= LARGEST:
            raise SpecError(got=f"first place {one.first}", where=where, allowed="0 or more")
        if one.of == "block" and one.aligned:
            raise SpecError(got="an aligned map of blocks", where=where, allowed="one of whole blocks")
        if one.of == "page" and not one.aligned:
            raise SpecError(got="a map of pages that is not aligned", where=where, allowed="an aligned one")
        if one.aligned and descriptor.block_tokens % one.page:
            allowed = f"pages of which {descriptor.block_tokens} tokens, a block, are a multiple"
            raise SpecError(got=f"aligned pages of {one.page} places", where=where, allowed=allowed)
        if one.of_tokens and not any(region.growth == "block" for region in plan.regions):
            allowed = "history in blocks, by which tokens are numbered"
            raise SpecError(got=f"a map of {one.of}s", where=where, allowed=allowed)
    return maps


def _stretch(lines: Lines, region: Region, nbytes: int, plan: CachePlan, maps: Mapping[str, IndexMap]) -> Stretch:
    """A field's place with its numbers, which must go with how the region grows.

    Raises:
        SpecError: a kind of place that the component does not have, a map that is none or another's, or fewer units
            and rows than it needs.
    """
    one = Stretch(lines, region, nbytes, region.rows, plan.blocks)
    if region.growth == "block":
        if (lines.kind, lines.units, lines.rows) != ("block", 0, 0):
            raise SpecError(got=f"{lines.kind}s", where=one.name, allowed="the descriptor's blocks")
        _check_chunks(one)
        if lines.map and (lines.map not in maps or maps[lines.map].of != "block"):
            raise SpecError(got=f"map {lines.map!r}", where=one.name, allowed="a map of blocks, or none")
        return one
    if lines.kind == "block":
        raise SpecError(got="blocks", where=one.name, allowed="rings or pages: it grows with requests")
    if (lines.chunk_rows, lines.chunk) != (0, 0):
        raise SpecError(got=f"chunks in {lines.kind}s", where=one.name, allowed="rows of rings and pages at even steps")
    _check_pieces(one)
    units, rows = (plan.slots, region.rows) if lines.kind == "ring" else (1, 1)
    if lines.shifted:
        # They are copied out of it, and back: as many as are needed at once.
        rows = plan.layers[region.layer].component(region.role).span
        if lines.rows != rows:
            raise SpecError(got=f"shifted rings of {lines.rows} rows", where=one.name, allowed=f"{rows}")
    if lines.map:
        units = 1
        looked_up = {"page": ("token", "page"), "ring": ("slot",)}[lines.kind]
        index = maps.get(lines.map)
        if index is None or index.of not in looked_up:
            known = [name for name, other in maps.items() if other.of in looked_up]
            raise SpecError(
                got=f"map {lines.map!r}",
                where=one.name,
                allowed=f"a map of {'s or '.join(looked_up)}s: {known}",
                hint="A descriptor has an IndexMap for every name that its lines look places up by.",
            )
        if lines.kind == "page" and lines.rows != index.page:
            rows = region.rows
            if lines.rows < 1 or index.page % lines.rows or not index.aligned:
                allowed = f"a divisor of {index.page}, a page of map {lines.map!r}, which is aligned"
                raise SpecError(got=f"{lines.rows} rows of a page", where=one.name, allowed=allowed)
    if not (units <= lines.units <= LARGEST and rows <= lines.rows <= LARGEST):
        raise SpecError(
            got=f"{lines.units} {lines.kind}s of {lines.rows} rows",
            where=one.name,
            allowed=f"{units} or more, of {rows} rows or more each",
            hint="A ring holds the window and as many drafts as can be undone: max_requests and max_draft_tokens.",
        )
    return one._replace(rows=lines.rows, units=lines.units)


def _check_chunks(stretch: Stretch) -> None:
    """Refuse chunks that rows of a block do not fill, or none that are stepped over.

    Raises:
        SpecError: naming the field.
    """
    lines = stretch.lines
    whole = lines.chunk_rows > 0 and stretch.rows % lines.chunk_rows == 0
    if not whole and (lines.chunk_rows, lines.chunk) != (0, 0):
        got, allowed = f"chunks of {lines.chunk_rows} rows", f"chunks that {stretch.rows} rows, those of a block, fill"
        raise SpecError(got=got, where=stretch.name, allowed=allowed)
    _check_pieces(stretch)


def _check_pieces(stretch: Stretch) -> None:
    """Refuse pieces that are no parts of the field, or of what nobody looks up, and shifted rows of that.

    Raises:
        SpecError: naming the field.
    """
    lines = stretch.lines
    given = lines.piece_bytes, lines.piece
    if given != (0, 0) and not (lines.piece_bytes > 0 and stretch.nbytes % lines.piece_bytes == 0):
        got, allowed = f"pieces of {lines.piece_bytes} bytes", f"parts of {stretch.nbytes}, those of the field"
        raise SpecError(got=got, where=stretch.name, allowed=allowed)
    looked_up = lines.kind == "ring" and lines.map
    if (lines.shifted and not looked_up) or (given != (0, 0) and not (looked_up or lines.kind == "block")):
        got = f"{'shifted rows' if lines.shifted else 'pieces'} in {lines.kind}s"
        raise SpecError(got=got, where=stretch.name, allowed="those of rings that a map of slots has")


def _check_alone(stretch: Stretch, sizes: Mapping[str, int]) -> None:
    """Refuse rows beyond the tensor, and rows that lie on one another."""
    lines = stretch.lines
    if lines.tensor not in sizes:
        raise SpecError(got=f"tensor {lines.tensor!r}", where=stretch.name, allowed=f"one of {sorted(sizes)}")
    axes = ((lines.block, stretch.units, lines.kind), *stretch.axes)
    steps = sorted(axis for axis in axes if axis[1] > 1)
    used = stretch.grain
    for step, count, name in steps:
        if not used <= step <= LARGEST:
            raise SpecError(
                got=f"{step} bytes from a {name} to the next",
                where=stretch.name,
                allowed=f"{used} or more: less lies on what is between them",
            )
        used += (count - 1) * step
    if lines.offset < 0 or lines.offset + used > sizes[lines.tensor]:
        raise SpecError(
            got=f"bytes {lines.offset} to {lines.offset + used} of tensor {lines.tensor!r}",
            where=stretch.name,
            allowed=f"0 to {sizes[lines.tensor]}",
        )


def _check_apart(one: Stretch, other: Stretch) -> None:
    """Refuse two fields of which a byte may be the same."""
    if one.end <= other.lines.offset or other.end <= one.lines.offset:
        return
    step = one.lines.block
    apart = other.lines.block == step
    if apart:
        # Both go on from block to block alike: they meet if they do on a circle of that many bytes.
        places = [_starts(stretch) % step for stretch in (one, other)]
        starts = np.concatenate(places)
        sizes = np.repeat([one.grain, other.grain], [len(some) for some in places])
        order = np.argsort(starts, kind="stable")
        starts, sizes = starts[order], sizes[order]
        apart = bool((np.diff(np.append(starts, starts[0] + step)) >= sizes).all())
    if not apart and not _alike_and_apart(one, other):
        raise SpecError(
            got=f"{one.name} and {other.name} in the same bytes of tensor {one.lines.tensor!r}",
            where="descriptor",
            allowed="a place of its own for every field",
        )


def _alike_and_apart(one: Stretch, other: Stretch) -> bool:
    """Whether two fields that step alike meet nowhere: blocks may be stepped over within heads, or within rows."""
    first, second = one.lines, other.lines
    if (first.block, one.steps, one.rows) != (second.block, other.steps, other.rows):
        return False
    axes = [(first.block, max(one.units, other.units))]
    axes += [(step, max(here, there)) for (step, here, _), (_, there, _) in zip(one.axes, other.axes, strict=True)]
    steps = sorted(((step, count) for step, count in axes if count > 1), reverse=True)
    return not _meet(second.offset - first.offset, steps, one.grain, other.grain)


def _meet(apart: int, steps: list[tuple[int, int]], before: int, after: int) -> bool:
    """Whether so many bytes and some steps, each fewer than its count, are less than a field.

    Steps are given from the largest: what is left over is made up for by smaller ones, which do not reach the next.
    """
    if not steps:
        return -after < apart < before
    (step, count), *rest = steps
    near = -apart // step
    return any(
        _meet(apart + number * step, rest, before, after) for number in range(near - 1, near + 3) if abs(number) < count
    )


def _starts(stretch: Stretch) -> np.ndarray[Any, Any]:
    """First bytes of all that lies side by side in block 0."""
    starts = np.array([stretch.lines.offset], np.int64)
    for step, count, _ in stretch.axes:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    return starts


def region_plan(spec: CacheSpec, blocks: int, requests: int, drafts: int = 0) -> CachePlan:
    """A plan of that many blocks, before anybody says where they lie.

    Raises:
        SpecError: a component that lies neither in blocks nor in rings.
    """
    for layer, role, component in spec.components():
        if component.growth != "block" and component.span is None:
            raise SpecError(
                got=f"layers[{layer}].{role}, which lies in slots and is no ring",
                where="adopt",
                allowed="keys and values with storage='paged' or a window, entries, index keys, windows, tails, states",
            )
    paged = any(component.growth == "block" for _, _, component in spec.components())
    tokens = blocks * spec.block_tokens if paged else None
    return plan_cache(spec, max_requests=requests, max_tokens=tokens, max_draft_tokens=drafts)
