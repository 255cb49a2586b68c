"""Launches of attention: how a query's work is cut up, and the two kernels that do it."""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kvcore.backends.torch_triton.kernels import attend, merge
from kvcore.backends.torch_triton.kernels.bound import BOUND, INTERPRETED, Bound, is_native, registered
from kvcore.backends.torch_triton.kernels.record import RowRecord, power_of_two
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
        """Rows decoded to bf16 could be taken whole."""
        return self.narrow and self.panels == (self.chunks,)


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
LARGE = 160 << 10


@cache
def parts_of(window: RowRecord | None, entries: RowRecord | None, *, bf16: bool) -> Parts | None:
    """How keys of both kinds are cut, for queries in bf16 or not; None where the kernel does not cover them."""
    records = [record for record in (window, entries) if record is not None]
    dim = records[0].dim
    chunk = min(64, power_of_two(dim))
    if chunk < 16 or not all(_covered(record, chunk) for record in records):
        return None
    narrow = bf16 and all(record.exact for record in records)
    if narrow and not any(record.quant for record in records) and dim == power_of_two(dim):
        # Rows that are as the products take them go there whole, not through registers.
        chunk = dim
    # The interpreter has no products of bf16 numbers: there they are fp32 numbers with the same values.
    chunks = triton.cdiv(dim, chunk)
    # fp32 products keep their operands in registers, where a whole row does not fit.
    wide = tuple(1 << bit for bit in reversed(range(chunks.bit_length())) if chunks >> bit & 1)
    panels = wide if narrow else (1,) * chunks
    return Parts(dim, chunk, chunks, panels, INTERPRETED or not narrow, narrow)


@cache
def parts_of_each(window: RowRecord | None, entries: RowRecord | None, own: RowRecord | None, *, bf16: bool):
    """How keys of each kind are cut: alike, but where most are taken whole; absent ones as all."""
    every = parts_of(window, entries, bf16=bf16)
    if every is None or not whole_rows(window, entries, every):
        return every, every, every
    whole = (record is not None and not record.quant for record in (window, entries, own))
    alone = every._replace(chunk=every.dim, chunks=1, panels=(1,))
    return tuple(alone if one else every for one in whole)


def _covered(record: RowRecord, chunk: int) -> bool:
    """A chunk must not lie in two fields, nor in parts of two groups."""
    whole = record.quant % chunk == 0 and (record.width % chunk == 0 or chunk % record.width == 0)
    return whole and not record.hadamard and record.heads == 1 and record.global_scale == 1.0


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


def whole_rows(window: RowRecord | None, entries: RowRecord | None, parts: Parts) -> bool:
    """Most keys are taken whole: entries, or rows of a window without."""
    some = entries or window
    return parts.whole and some is not None and not some.quant


@cache
def multiprocessors(device: torch.device) -> int:
    """Programs that run at once; under the interpreter a number that makes small cases split."""
    return 5 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _cut(device: torch.device, whole: bool) -> Cut:
    """The cut for many heads and keys in bf16."""
    if not INTERPRETED and torch.cuda.get_device_properties(device).shared_memory_per_block_optin < LARGE:
        return SMALL
    capability = 90 if INTERPRETED else 10 * torch.cuda.get_device_capability(device)[0]
    return (WHOLE if whole else TENSOR)[max([80, *(known for known in TENSOR if known <= capability)])]


def cut_for(device: torch.device, tokens: int, heads: int, keys: int, full: bool, whole: bool) -> Cut:
    """The cut for queries of ``heads`` heads and at most ``keys`` keys.

    Args:
        whole: entries, or else rows of the window, are taken whole.
    """
    if full:
        cut = FULL
    elif tokens * triton.cdiv(heads, FEW.heads) * triton.cdiv(keys, FEW.keys) <= multiprocessors(device):
        cut = FEW
    else:
        cut = _cut(device, whole)
    return cut._replace(heads=max(16, min(cut.heads, power_of_two(heads))))


def splits_for(device: torch.device, tokens: int, heads: int, keys: int, cut: Cut) -> int:
    """Programs that share a query's keys, of which there are at most ``keys``: enough that all of them fill the GPU."""
    programs = max(1, tokens * triton.cdiv(heads, cut.heads))
    return max(1, min(multiprocessors(device) // programs, triton.cdiv(keys, cut.keys), MOST_SPLITS))


def _attend_out(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


@registered(("workspace",), _attend_out)
def attend_rows(
    q: Tensor,
    selected: Tensor | None,
    sink: Tensor | None,
    own: Tensor | None,
    positions: Tensor,
    request_index: Tensor,
    slots: Tensor,
    starts: Tensor,
    block_table: Tensor,
    window: list[Tensor],
    entries: list[Tensor],
    workspace: Tensor,
    records: list[int],
    sizes: list[int],
    scale: float,
    bf16: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of q [tokens, heads, dim], contiguous: out like q and lse [tokens, heads].

    Args:
        selected: [tokens, picks] entries, contiguous; None: every visible one.
        own: [tokens, row_bytes] canonical rows of the step where the ring does not hold them yet.
        window, entries: the pools' buffers, empty where the layer lacks them.
        workspace: fp32, for ``splits`` · tokens · heads · (dim + 1) numbers where ``splits`` > 1.
        records: of the window, the entries, the own rows; -1 where there are none.
        sizes: window, ratio (0 without), splits, most keys of a query.
        bf16: keys and queries may be multiplied in bf16.
    """
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    tokens, heads, dim = q.shape
    if not q.numel():
        return out, lse
    w, e, o = (BOUND[number] if number >= 0 else None for number in records)
    parts, entry_parts, own_parts = parts_of_each(*(bound.record if bound else None for bound in (w, e, o)), bf16=bf16)
    assert parts is not None
    span, ratio, splits, keys = sizes
    some = w or e
    assert some is not None
    whole = whole_rows(w.record if w else None, e.record if e else None, parts)
    cut = cut_for(q.device, tokens, heads, keys, parts.full, whole)
    if selected is None and not whole:
        # Only the block table decides where these rows lie: it is looked up ahead, which takes two stages.
        cut = cut._replace(stages=min(cut.stages, 2))
    rows = [(bound or some).record for bound in (w, e, o)]
    partial = workspace if splits > 1 else out
    sums = workspace[splits * tokens * heads * dim :] if splits > 1 else lse
    attend.attend_kernel[(tokens * triton.cdiv(heads, cut.heads) * splits,)](
        out, lse, partial, sums, q,
        lse if sink is None else sink, positions if selected is None else selected,
        *_three(w, window, positions), *_three(e, entries, positions), positions if own is None else own,
        positions, request_index, slots, starts, block_table,
        tokens, heads, 0 if selected is None else selected.shape[1], block_table.shape[1], splits, scale * LOG2_E,
        *rows, parts, entry_parts, own_parts, span if w else 0, ratio if e else 0,
        selected is None, sink is not None, o is not None, splits > 1, cut.heads, cut.keys,
        w is not None and e is not None and alike(w.record, e.record), cut.stages,
        max(1, 32 * cut.warps // cut.keys), is_native(q.device),
        num_warps=cut.warps,
    )  # fmt: skip
    if splits > 1:
        merge.merge_kernel[(tokens * heads,)](
            out, lse, partial, sums, lse if sink is None else sink, heads, splits,
            dim, power_of_two(dim), min(8, power_of_two(splits)), power_of_two(splits), sink is not None,
            is_native(q.device), num_warps=4,
        )  # fmt: skip
    return out, lse


def _three(bound: Bound | None, buffers: list[Tensor], absent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Buffers of codes, scales and plain channels; any tensor stands in for one that is never read."""
    if bound is None:
        return absent, absent, absent
    return buffers[bound.codes], buffers[bound.scales], buffers[bound.plain]
