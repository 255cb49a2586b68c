"""How attention is cut into programs: by the records of its rows and the chip, without a framework of arrays."""

from functools import cache
from typing import Any, NamedTuple

from kvcore.kernels.triton.device import INTERPRETED, LARGE, Chip
from kvcore.kernels.triton.record import RowRecord, ceil_div, power_of_two
from kvcore.ops.choices import Declined
from kvcore.spec import Format

LOG2_E = 1.4426950408889634
MOST_SPLITS = 64


class Parts(NamedTuple):
    """How a row of keys is cut for the products.

    Attributes:
        dim: channels of a row.
        chunk: channels taken at a time, a power of two; ``chunks`` of them make a row.
        panels: chunks that are multiplied at a time, powers of two.
        full: keys, queries and weights are fp32 and products IEEE; else they are bf16 and sums fp32.
        narrow: keys and queries are bf16 numbers, whatever they are held in, and weights are rounded to bf16.
        apart: a row's only scale is not part of the keys.
    """

    dim: int
    chunk: int
    chunks: int
    panels: tuple[int, ...]
    full: bool
    narrow: bool
    apart: bool = False

    @property
    def whole(self) -> bool:
        """Rows decoded to bf16 could be taken whole: they are of a power of two of channels."""
        return self.narrow and self.panels == (self.chunks,) and self.dim == self.chunk * self.chunks


class Cut(NamedTuple):
    """What a program takes: heads, keys a tile; its warps; the depth of the pipeline that loads rows."""

    heads: int
    keys: int
    warps: int
    stages: int


FULL = Cut(heads=16, keys=16, warps=4, stages=1)
TENSOR = {80: Cut(64, 32, 8, 2), 90: Cut(64, 64, 8, 3), 100: Cut(64, 64, 8, 3)}
"""By compute capability: the newest that is not above the device's."""
WHOLE = {80: Cut(64, 16, 8, 2), 90: Cut(64, 64, 8, 2), 100: Cut(64, 64, 8, 2)}
"""The same where rows are taken whole."""
FEW = Cut(heads=32, keys=32, warps=4, stages=3)
"""For so little work that every program has a multiprocessor of its own."""
SMALL = Cut(heads=32, keys=16, warps=4, stages=2)
"""For GPUs whose blocks have less than LARGE bytes of shared memory."""


@cache
def parts_of(window: RowRecord | None, entries: RowRecord | None, *, bf16: bool) -> Parts | None:
    """How keys of both kinds are cut, for queries in bf16 or not; None where ``attended`` declines."""
    found = attended(window, entries, bf16=bf16)
    return None if isinstance(found, Declined) else found


@cache
def attended(window: RowRecord | None, entries: RowRecord | None, *, bf16: bool) -> Parts | Declined:
    """How keys of both kinds are cut, for queries in bf16 or not, or why the kernel does not cover them."""
    records = [record for record in (window, entries) if record is not None]
    dim = records[0].dim
    chunk = min(64, power_of_two(dim))
    if chunk < 16:
        return Declined(f"attention needs rows of more than 8 channels, these have {dim}")
    for record in records:
        if not _whole(record, chunk):
            return Declined(f"a chunk of {chunk} channels would lie in two fields, or in parts of two groups")
        if record.hadamard or record.global_scale != 1.0 or record.heads != 1:
            return Declined("attention covers rows of one head that are neither rotated nor under a global scale")
    narrow = bf16 and all(record.exact for record in records)
    if narrow and not any(record.quant for record in records) and dim == power_of_two(dim):
        # Rows that are as the products take them go there whole, not through registers.
        chunk = dim
    # The interpreter has no products of bf16 numbers: there they are fp32 numbers with the same values.
    chunks = ceil_div(dim, chunk)
    # fp32 products keep their operands in registers, where a whole row does not fit.
    wide = tuple(1 << bit for bit in reversed(range(chunks.bit_length())) if chunks >> bit & 1)
    panels = wide if narrow else (1,) * chunks
    return Parts(dim, chunk, chunks, panels, INTERPRETED or not narrow, narrow)


@cache
def parts_of_each(window: RowRecord | None, entries: RowRecord | None, own: RowRecord | None, *, bf16: bool):
    """How keys of each kind are cut: alike, but where most are taken whole; absent ones as all."""
    every = parts_of(window, entries, bf16=bf16)
    if every is None or not takes_whole(window, entries, every):
        return every, every, every
    whole = (record is not None and not record.quant for record in (window, entries, own))
    alone = every._replace(chunk=every.dim, chunks=1, panels=(1,))
    return tuple(alone if one else every for one in whole)


def _whole(record: RowRecord, chunk: int) -> bool:
    """A chunk must not lie in two fields, nor in parts of two groups."""
    return record.quant % chunk == 0 and (record.width % chunk == 0 or chunk % record.width == 0)


PLACES = tuple(f"{field}_{what}" for field in ("codes", "scales", "plain") for what in ("unit", "base", "stride"))


@cache
def alike(window: RowRecord, entries: RowRecord) -> bool:
    """Rows of both decode alike: they differ in where they lie alone."""
    elsewhere = {"rows": 0, "paged": False, **dict.fromkeys(PLACES, 0)}
    one, other = (record._replace(**elsewhere) for record in (window, entries))
    # Packing in words depends on where rows lie.
    return one == other and all(getattr(window, place) % 4 == getattr(entries, place) % 4 == 0 for place in PLACES[:6])


def plain_record(record: RowRecord) -> RowRecord:
    """The record of the same rows decoded to bf16, one unit behind the other."""
    row = 2 * record.dim
    return record._replace(
        quant=0, width=power_of_two(record.dim), tiles=1, code="", rule="", scale="", groups=0, pad=0, inverse=1.0,
        largest=0.0, code_words=False, scale_words=False, plain="bf16", apart=False, **dict.fromkeys(PLACES, 0),
    )._replace(plain_unit=record.rows * row, plain_stride=row)  # fmt: skip


def own_record(record: RowRecord, format: Format) -> RowRecord:
    """The record of canonical rows [rows, row_bytes] of the same format, row r of the only block."""

    def base(*names: str) -> int:
        return next((format.byte_range(f.name)[0] for f in format.fields if f.name in names), 0)

    values = [field.name for field in format.fields if field.is_value]
    row = format.row
    return record._replace(
        rows=1 << 30, paged=True,
        codes_unit=0, codes_base=base(values[0]), codes_stride=row,
        scales_unit=0, scales_base=base("scales"), scales_stride=row,
        plain_unit=0, plain_base=base(values[-1]), plain_stride=row,
    )  # fmt: skip


def takes_whole(window: RowRecord | None, entries: RowRecord | None, parts: Parts) -> bool:
    """Most keys are taken whole: entries, or rows of a window without."""
    some = entries or window
    return parts.whole and some is not None and not some.quant


def cut_for(chip: Chip, tokens: int, heads: int, keys: int, full: bool, whole: bool) -> Cut:
    """The cut for queries of ``heads`` heads and at most ``keys`` keys.

    Args:
        whole: entries, or else rows of the window, are taken whole.
    """
    if full:
        cut = FULL
    elif tokens * ceil_div(heads, FEW.heads) * ceil_div(keys, FEW.keys) <= chip.multiprocessors:
        cut = FEW
    elif chip.shared < LARGE:
        cut = SMALL
    else:
        cut = (WHOLE if whole else TENSOR)[max([80, *(known for known in TENSOR if known <= chip.capability)])]
    return cut._replace(heads=max(16, min(cut.heads, power_of_two(heads))))


def attend_cut(
    chip: Chip, tokens: int, heads: int, keys: int, parts: Parts, window: RowRecord | None, entries: RowRecord | None,
    *, picked: bool,
) -> Cut:  # fmt: skip
    """The cut of a call whose entries are ``picked``, or all that is visible."""
    whole = takes_whole(window, entries, parts)
    cut = cut_for(chip, tokens, heads, keys, parts.full, whole)
    if not picked and not whole:
        # Only the block table decides where these rows lie: it is looked up ahead, which takes two stages.
        cut = cut._replace(stages=min(cut.stages, 2))
    return cut


def splits_for(chip: Chip, tokens: int, heads: int, keys: int, cut: Cut) -> int:
    """Programs that share a query's keys, of which there are at most ``keys``: enough that all of them fill the GPU."""
    programs = max(1, tokens * ceil_div(heads, cut.heads))
    return max(1, min(chip.multiprocessors // programs, ceil_div(keys, cut.keys), MOST_SPLITS))


def attend_constants(
    cut: Cut, window: RowRecord | None, entries: RowRecord | None, own: RowRecord | None, *, bf16: bool
) -> dict[str, Any]:
    """``constexpr`` arguments of the attention kernel that follow from its cut and its records."""
    some = window or entries
    parts, entry_parts, own_parts = parts_of_each(window, entries, own, bf16=bf16)
    return {
        "W": window or some,
        "E": entries or some,
        "CHUNK": own or some,
        "S": parts,
        "ENTRY_S": entry_parts,
        "CHUNK_S": own_parts,
        "OWN": own is not None,
        "HEADS": cut.heads,
        "KEYS": cut.keys,
        "ALIKE": window is not None and entries is not None and alike(window, entries),
        "STAGES": cut.stages,
        "SPREAD": max(1, 32 * cut.warps // cut.keys),
    }


def merge_constants(dim: int, splits: int) -> dict[str, Any]:
    """``constexpr`` arguments of the kernel that puts ``splits`` parts of a query together."""
    return {
        "DIM": dim,
        "WIDTH": power_of_two(dim),
        "PARTS": min(8, power_of_two(splits)),
        "SPLITS": power_of_two(splits),
    }
