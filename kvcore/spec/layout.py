"""Where the fields of a block's rows lie: ``packed``, ``planar``, ``tpu_tile`` and ``by_head``.

A layout turns (format, rows per block) into byte buffers, one or more a block, and gives every field a place in one of
them. All are lossless: what one stores, another reads back to the same canonical row. Pads are zeros by
definition, so only ``packed``, which must be byte-exact with the CUDA engines' pages, and its twin store them.

``by_head`` is ``packed`` in which all rows of a head lie together, as attention on a CPU reads them: the same places,
and rows numbered head by head (``Region.steps``). Its buffer has another name, so that nobody takes one for the other.
Rings of keys and values have a row more in it, C = window + D + 1, and those in plain formats lie there twice, one
after the other (``Region.copies``): the row of position p is at p mod C and at C + p mod C, so that any C neighbours
are one run wherever the ring has wrapped.
"""

from functools import cache
from typing import Any

import msgspec

from kvcore.errors import SpecError
from kvcore.spec.codes import CODES
from kvcore.spec.formats import FORMATS, Format

BY_HEAD = "by_head"
LAYOUTS = ("packed", "planar", "tpu_tile", BY_HEAD)
FOREIGN = "foreign"
"""Of rows at steps that somebody else chose: no layout to plan with."""

TILE_BYTES = 512
"""One TPU tile of 8-bit elements: 4 sublanes of 128 lanes. A row that fills whole tiles is moved by one DMA."""

LANES = 128

LINES_ACROSS = (5, 6)
"""Lines of rows that begin anywhere in a tile and end in the next one, whichever row it is."""

WORDS = "words"
"""Buffer of ``tpu_tile`` that holds the scales of rows whose codes lie in another: 32-bit words, a lane each."""


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """How a field is stepped over in a unit that somebody else laid out; all but ``chunk_rows`` are bytes.

    Attributes:
        row: from a row of a chunk to the next.
        head: from a head to the next.
        chunk_rows: rows of a chunk; those of a unit where it has no chunks.
        chunk: from a chunk to the next.
        piece_bytes: of the field that lie side by side: all of them, or a part.
        piece: from such a piece to the next.
    """

    row: int
    head: int
    chunk_rows: int
    chunk: int
    piece_bytes: int
    piece: int

    def start(self, row: Any) -> Any:
        """Bytes from row 0 to a row, or to each of several."""
        return row // self.chunk_rows * self.chunk + row % self.chunk_rows * self.row


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where one field of a block's rows lies.

    Byte k of the field in row r is at ``base + r * stride + k`` of the block's part of ``buffer``, or, where ``split``
    is set (16-bit fields on TPU), low bytes follow high bytes: byte k of element e is at
    ``base + r * stride + (1 - k) * elements + e``.

    Attributes:
        steps: in the stride's place where rows, heads and bytes lie at steps of the field's own; see ``Region.even``.
    """

    field: str
    buffer: str
    base: int
    stride: int
    nbytes: int
    split: bool = False
    steps: Steps | None = None


class BlockLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The places of a format's fields in a block of ``rows`` rows, and the bytes a block takes in each buffer."""

    format: Format
    layout: str
    rows: int
    places: tuple[Place, ...]
    buffers: tuple[tuple[str, int], ...]

    @property
    def supports_views(self) -> bool:
        """True where rows can be read as they lie: they are plain numbers, and the bytes of a number are together."""
        return self.format.is_plain and not any(place.split for place in self.places)

    @property
    def nbytes(self) -> int:
        """Bytes of one block over all its buffers, padding included."""
        return sum(size for _, size in self.buffers)


@cache
def block_layout(format: Format, rows: int, layout: str) -> BlockLayout:
    """Lay out a block of ``rows`` rows of a sized format."""
    if layout not in LAYOUTS:
        raise SpecError(got=layout, where="layout", allowed=", ".join(LAYOUTS))
    if rows < 1:
        raise SpecError(got=rows, where="rows of a block", allowed="1 or more")
    if format.row_bytes is None:
        raise SpecError(got=format.name, where="format", allowed="a sized format", hint="Call for_dim(dim) first.")
    place = {"packed": _packed, "planar": _planar, "tpu_tile": _tpu_tile, BY_HEAD: _by_head}[layout]
    places, buffers = place(format, rows)
    return BlockLayout(format=format, layout=layout, rows=rows, places=tuple(places), buffers=tuple(buffers))


def address(format: str | Format, block_rows: int, block: int, row: int, field: str) -> int:
    """Byte address of a field of one row in a pool of packed pages: ``block * page_bytes + offset in the page``.

    Args:
        format: a format or its name.
        block_rows: rows of a block.
        block: block number, 0 or more.
        row: row in the block, 0 <= row < block_rows.
        field: field name, for example ``codes``.

    Returns:
        A Python int, so that it never wraps however large the pool is.

    Example:
        >>> from kvcore.spec import address
        >>> address("v4_584", 64, block=0, row=1, field="codes")
        576
        >>> address("v4_584", 64, block=1, row=0, field="codes") % 576  # pages are whole multiples of 576 bytes
        0
    """
    if isinstance(format, str):
        format = FORMATS[format]
    if not 0 <= row < block_rows:
        raise SpecError(got=row, where="row", allowed=f"0 to {block_rows - 1}")
    if block < 0:
        raise SpecError(got=block, where="block", allowed="0 or more")
    packed = block_layout(format, block_rows, "packed")
    for place in packed.places:
        if place.field == field:
            return block * packed.nbytes + place.base + row * place.stride
    raise SpecError(got=field, where="field", allowed=", ".join(place.field for place in packed.places))


_Placed = tuple[list[Place], list[tuple[str, int]]]


def _packed(format: Format, rows: int) -> _Placed:
    places: list[Place] = []
    start = 0
    for plane in format.planes:
        stride = sum(format.field(name).nbytes for name in plane)
        offset = start
        for name in plane:
            nbytes = format.field(name).nbytes
            places.append(Place(field=name, buffer="page", base=offset, stride=stride, nbytes=nbytes))
            offset += nbytes
        start += rows * stride
    return places, [("page", _round_up(start, format.page_alignment))]


def _by_head(format: Format, rows: int) -> _Placed:
    places, [(_, size)] = _packed(format, rows)
    return [msgspec.structs.replace(place, buffer="heads") for place in places], [("heads", size)]


def _planar(format: Format, rows: int) -> _Placed:
    fields = [field for field in format.fields if field.name != "pad"]
    places = [
        Place(field=field.name, buffer=field.name, base=0, stride=field.nbytes, nbytes=field.nbytes) for field in fields
    ]
    return places, [(field.name, rows * field.nbytes) for field in fields]


def _tpu_tile(format: Format, rows: int) -> _Placed:
    """16-bit fields get lines of their own, split into byte planes; where fields lie is one of three ways."""
    return _scales_apart(format, rows) or _across_tiles(format, rows) or _tiles(format, rows)


def _scales_apart(format: Format, rows: int) -> _Placed | None:
    """Codes one after another, a power of two of bytes each, and what scales them in words of their own.

    Rows of keys and values are read by blocks, so that scales come as lanes beside the logits that they scale. None for
    rows of engines' pages, which are read one by one: a second DMA for the scales of each would cost more than it
    saves; and for rows over tokens, which are tiles as they are.
    """
    codes, *scales = format.fields
    others = any(field.is_value or field.name == "pad" for field in scales)
    if format.page_alignment > 1 or format.tokens > 1 or others or not scales:
        return None
    stride = 1 << (codes.nbytes - 1).bit_length() if codes.nbytes < TILE_BYTES else _round_up(codes.nbytes, TILE_BYTES)
    places = [Place(field=codes.name, buffer="tile0", base=0, stride=stride, nbytes=codes.nbytes)]
    word = _round_up(sum(field.nbytes for field in scales), 4)
    base = 0
    for field in scales:
        places.append(Place(field=field.name, buffer=WORDS, base=base, stride=word, nbytes=field.nbytes))
        base += field.nbytes
    sizes = {"tile0": rows * stride, WORDS: rows * word}
    return places, [(name, _round_up(size, TILE_BYTES)) for name, size in sizes.items()]


def _across_tiles(format: Format, rows: int) -> _Placed | None:
    """Coded rows of four to six lines, one after another: a tile each, or in two neighbouring ones; one DMA reads it.

    None for others.
    """
    if format.is_plain or format.tokens > 1:
        return None
    places: list[Place] = []
    used = 0
    for field in sorted(format.fields, key=lambda field: CODES[field.code].bits == 16):
        if field.name == "pad":
            continue
        split = CODES[field.code].bits == 16
        used = _round_up(used, LANES) if split else used
        places.append(Place(field=field.name, buffer="tile0", base=used, stride=0, nbytes=field.nbytes, split=split))
        used += field.nbytes
    stride = _round_up(used, LANES)
    if stride // LANES not in (TILE_BYTES // LANES, *LINES_ACROSS):
        return None
    places = [msgspec.structs.replace(place, stride=stride) for place in places]
    return places, [("tile0", _round_up(rows * stride, TILE_BYTES))]


def _tiles(format: Format, rows: int) -> _Placed:
    """16-bit fields in a buffer of their own; the others share tiles while they fit."""
    places: list[Place] = []
    bins: list[tuple[str, int]] = []
    for field in format.fields:
        if field.name == "pad":
            continue
        split = CODES[field.code].bits == 16
        fits = bool(bins) and bins[-1][0].startswith("tile") and bins[-1][1] + field.nbytes <= TILE_BYTES
        if split:
            bins.insert(0, (field.name, field.nbytes))
            name, used = field.name, 0
        elif fits:
            name, used = bins.pop()
            bins.append((name, used + field.nbytes))
        else:
            tiles = sum(buffer.startswith("tile") for buffer, _ in bins)
            name, used = f"tile{tiles}", 0
            bins.append((name, field.nbytes))
        places.append(Place(field=field.name, buffer=name, base=used, stride=0, nbytes=field.nbytes, split=split))
    strides = {name: _tile_row(used) for name, used in bins}
    places = [msgspec.structs.replace(place, stride=strides[place.buffer]) for place in places]
    # A block begins with a tile of its own, so that it can be moved alone.
    return places, [(name, _round_up(rows * stride, TILE_BYTES)) for name, stride in strides.items()]


def _tile_row(nbytes: int) -> int:
    """Row of a tiled buffer: whole tiles, or a lane-wide quarter or half of one."""
    return _round_up(nbytes, LANES) if nbytes <= TILE_BYTES // 2 else _round_up(nbytes, TILE_BYTES)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
