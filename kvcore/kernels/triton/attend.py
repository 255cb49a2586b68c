"""Attention from encoded rows: one program takes some heads of one query over some of its keys.

A tile of keys is decoded once, in the products' precision, and used for both products. Rows are taken in chunks of
channels, each of which lies in one field (``chunks``), so that registers hold few decoded numbers at a time and no
field is loaded where the other lies. Exponentials are to the base 2.
Queries without a key and tiles without one are safe: weights are then zeros, never quotients of zeros.

Map:
    ``Parts`` .. ``merge_constants``: how a call is cut into programs, by the records of its rows and the chip.
    ``inverse_rope``, ``inverse_rope_kernel``: RoPE by minus the position, on outputs that were written and rounded
        before. Rows are read again by the program that wrote them, a few kilobytes of its own cache. Rounded numbers
        are what DeepSeek-V4's published inference code rotates, and the sums in registers can be given up first.
    ``decode_panel`` .. ``attend_kernel``: keys, places, the running softmax.
    ``merge_kernel``: parts over different keys put together, each weighted by its share of the sum of exponentials.
"""

from functools import cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvcore.kernels.triton.address import begin
from kvcore.kernels.triton.chunks import decode_chunk, load_row, row_pointers, side_by_side
from kvcore.kernels.triton.codes import round_bf16
from kvcore.kernels.triton.device import INTERPRETED, LARGE, DeviceProps
from kvcore.kernels.triton.latent import rotate, turns
from kvcore.kernels.triton.record import PLACES, RowRecord, ceil_div, power_of_two
from kvcore.kernels.triton.softmax import beside_sink, weigh
from kvcore.ops.choices import Declined

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


class TileConfig(NamedTuple):
    """What a program takes: heads, keys a tile; its warps; stages of loading rows; how many a multiprocessor holds."""

    heads: int
    keys: int
    warps: int
    stages: int
    resident: int = 1


FULL = TileConfig(heads=16, keys=16, warps=4, stages=1)
TENSOR = {80: TileConfig(64, 32, 8, 2), 90: TileConfig(64, 64, 8, 3), 100: TileConfig(64, 64, 8, 3)}
"""By compute capability: the newest that is not above the device's."""
WHOLE = {80: TileConfig(64, 16, 8, 2), 90: TileConfig(64, 64, 8, 2), 100: TileConfig(64, 64, 8, 2)}
"""The same where rows are taken whole."""
FEW = TileConfig(heads=32, keys=32, warps=4, stages=3)
"""For so little work that every program has a multiprocessor of its own."""
SMALL = TileConfig(heads=32, keys=16, warps=4, stages=2)
"""For GPUs whose blocks have less than LARGE bytes of shared memory."""
WIDEST = 512
"""Channels of the rows that cuts are made for; of wider ones, MLA's, fewer heads' sums fit into Ampere's registers."""
LEAN = TileConfig(heads=16, keys=32, warps=4, stages=2, resident=2)
"""For few heads and wide rows, from Hopper on: one program decodes rows while another multiplies."""


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


@cache
def alike(window: RowRecord, entries: RowRecord) -> bool:
    """Rows of both decode alike: they differ in where they lie alone."""
    elsewhere = {"rows": 0, "paged": False, **dict.fromkeys(PLACES, 0)}
    one, other = (record._replace(**elsewhere) for record in (window, entries))
    # Packing in words depends on where rows lie.
    return one == other and all(getattr(window, place) % 4 == getattr(entries, place) % 4 == 0 for place in PLACES[:6])


def takes_whole(window: RowRecord | None, entries: RowRecord | None, parts: Parts) -> bool:
    """Most keys are taken whole: entries, or rows of a window without."""
    some = entries or window
    return parts.whole and some is not None and not some.quant


def config_for(props: DeviceProps, tokens: int, heads: int, keys: int, full: bool, whole: bool) -> TileConfig:
    """The cut for queries of ``heads`` heads and at most ``keys`` keys.

    Args:
        whole: entries, or else rows of the window, are taken whole.
    """
    if full:
        config = FULL
    elif tokens * ceil_div(heads, FEW.heads) * ceil_div(keys, FEW.keys) <= props.multiprocessors:
        config = FEW
    elif props.shared < LARGE:
        config = SMALL
    else:
        config = (WHOLE if whole else TENSOR)[max([80, *(known for known in TENSOR if known <= props.capability)])]
    return config._replace(heads=max(16, min(config.heads, power_of_two(heads))))


def attend_config(
    props: DeviceProps, tokens: int, heads: int, keys: int, parts: Parts, window: RowRecord | None,
    entries: RowRecord | None, *, selected: bool,
) -> TileConfig:  # fmt: skip
    """The cut of a call whose entries are ``selected``, or all that is visible."""
    whole = takes_whole(window, entries, parts)
    config = config_for(props, tokens, heads, keys, parts.full, whole)
    wide, some = parts.dim > WIDEST, entries or window
    if wide and props.capability < 90:
        config = config._replace(heads=min(config.heads, FEW.heads))
    elif wide and heads <= LEAN.heads and not parts.full and config.warps > LEAN.warps:
        config = LEAN
    if (not selected and not whole) or (wide and some is not None and not some.quant):
        # Only the block table decides where these rows lie: it is looked up ahead, which takes two stages. Or a third
        # tile of wide plain rows would have no room.
        config = config._replace(stages=min(config.stages, 2))
    return config


def splits_for(props: DeviceProps, tokens: int, heads: int, keys: int, config: TileConfig) -> int:
    """Programs that share a query's keys, of which there are at most ``keys``: enough that all of them fill the GPU."""
    programs = max(1, tokens * ceil_div(heads, config.heads))
    return max(1, min(props.multiprocessors * config.resident // programs, ceil_div(keys, config.keys), MOST_SPLITS))


def attend_constants(
    config: TileConfig, window: RowRecord | None, entries: RowRecord | None, own: RowRecord | None, *, bf16: bool
) -> dict[str, Any]:
    """``constexpr`` arguments of the attention kernel that follow from its cut and its records."""
    some = window or entries
    parts, entry_parts, own_parts = parts_of_each(window, entries, own, bf16=bf16)
    return {
        "W": window or some, "E": entries or some, "CHUNK": own or some, "S": parts, "ENTRY_S": entry_parts,
        "CHUNK_S": own_parts, "OWN": own is not None, "HEADS": config.heads, "KEYS": config.keys,
        "ALIKE": window is not None and entries is not None and alike(window, entries), "STAGES": config.stages,
        "SPREAD": max(1, 32 * config.warps // config.keys),
    }  # fmt: skip


def merge_constants(dim: int, splits: int) -> dict[str, Any]:
    """``constexpr`` arguments of the kernel that puts ``splits`` parts of a query together."""
    width, splits = power_of_two(dim), power_of_two(splits)
    return {"DIM": dim, "WIDTH": width, "PARTS": min(8, max(1, 2048 // width), splits), "SPLITS": splits}


TURN_HEADS = 16
"""Heads of a program of ``inverse_rope_kernel``."""


@triton.constexpr_function
def channels_of(pairs):
    """Channels of a tile that holds ``pairs`` pairs, 1 or more: a power of two."""
    return 2 << (pairs - 1).bit_length()


@triton.jit
def inverse_rope(at, inside, position, frequencies_ptr, DIM: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr):
    """Rotate the last PAIRS pairs of rows of DIM channels at pointers ``at`` [n] by minus ``position``, in place."""
    size: tl.constexpr = channels_of(PAIRS)
    channel = tl.arange(0, size)[None, :]
    here = inside[:, None] & (channel < 2 * PAIRS)
    row = at[:, None] + (DIM - 2 * PAIRS) + channel
    x = tl.load(row, mask=here, other=0.0).to(tl.float32)
    cos, sin = turns(tl.zeros([1], tl.int32) + position, frequencies_ptr, size, 2 * PAIRS, PAIRS)
    x = rotate(x, cos, -sin, 2 * PAIRS, PAIRS)
    if at.dtype.element_ty == tl.bfloat16 and not NATIVE:
        x = round_bf16(x, NATIVE)
    tl.store(row, x.to(at.dtype.element_ty), mask=here)


@triton.jit
def inverse_rope_kernel(
    out_ptr, lse_ptr, positions_ptr, frequencies_ptr, heads,
    DIM: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, LSE: tl.constexpr, AHEAD: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Out [tokens, heads, DIM], HEADS heads of one token. LSE: +inf in lse [tokens, heads] becomes -inf."""
    begin(AHEAD)
    blocks = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)
    if LSE:
        at = lse_ptr + token * heads + head
        lse = tl.load(at, mask=head < heads, other=0.0)
        tl.store(at, tl.where(lse == float("inf"), float("-inf"), lse), mask=head < heads)
    if PAIRS:
        at = out_ptr + (token * heads + head) * DIM
        inverse_rope(at, head < heads, tl.load(positions_ptr + token), frequencies_ptr, DIM, PAIRS, NATIVE)


@triton.jit
def decode_panel(
    raw, scales, valid, FIRST: tl.constexpr, SIZE: tl.constexpr, R: tl.constexpr, S: tl.constexpr, NATIVE: tl.constexpr
):
    """SIZE chunks from chunk FIRST on as keys [n, SIZE * chunk]; SIZE is a power of two."""
    row = ()
    for c in tl.static_range(SIZE):
        row = row + (decode_chunk(raw[FIRST + c], scales, valid, (FIRST + c) * S.chunk, R, S, NATIVE),)
    for level in tl.static_range(SIZE.bit_length() - 1):
        pairs = ()
        for c in tl.static_range(SIZE >> (level + 1)):
            pairs = pairs + (side_by_side(row[2 * c], row[2 * c + 1]),)
        row = pairs
    return row[0]


@triton.jit
def decode_row(raw, scales, valid, R: tl.constexpr, S: tl.constexpr, NATIVE: tl.constexpr):
    """Keys as a tuple of panels."""
    k = ()
    panels: tl.constexpr = len(S.panels)
    for p in tl.static_range(panels):
        k = k + (decode_panel(raw, scales, valid, sum_before(S.panels, p), S.panels[p], R, S, NATIVE),)
    return k


@triton.constexpr_function
def sum_before(numbers, place):
    """Sum of the numbers before a place."""
    return sum(numbers[:place])


@triton.jit
def absorb(q, k, valid, scale, largest, total, out, S: tl.constexpr, NATIVE: tl.constexpr):
    """Take keys [n] into the running softmax: (largest, total, out), logits to the base 2.

    ``q``, ``k`` and ``out`` are tuples of panels.
    """
    n: tl.constexpr = valid.shape[0]
    panels: tl.constexpr = len(S.panels)
    logit = tl.zeros([q[0].shape[0], n], tl.float32)
    for p in tl.static_range(panels):
        logit = tl.dot(q[p], tl.trans(k[p]), logit, input_precision="ieee")
    logit = tl.where(valid[None, :], logit * scale, float("-inf"))
    largest, total, weight, kept = weigh(logit, largest, total)
    # Where keys are bf16 numbers, so are the weights; their sum is of what they were before.
    weight = round_bf16(weight, NATIVE) if S.narrow and S.full else weight.to(q[0].dtype)
    summed = ()
    for p in tl.static_range(panels):
        summed = summed + (tl.dot(weight, k[p], out[p] * kept[:, None], input_precision="ieee"),)
    return largest, total, summed


@triton.jit
def place_of(
    tile, windows, query, selection, W: tl.constexpr, E: tl.constexpr, KEYS: tl.constexpr, ALL: tl.constexpr,
    FRESH: tl.constexpr, KIND: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Places [KEYS] of a tile's keys as int64, unit above row; -1 where there is no key.

    The window's tiles come first, ``windows`` of them, then the entries'. KIND: "window" or "entries" where all tiles
    are of that kind, else "both". FRESH 1: of the window, the step's own rows; -1: only older ones, from the ring; 0:
    all, from the ring. Every place is found SPREAD times, by as many threads, and then handed around: else the compiler
    would look it up anew for every layout that it is used in. ``query`` and ``selection`` are as
    in ``attend_kernel``.
    """
    token, request, position, count, start, slot, visible = query
    topk, selected_ptr, table_ptr, table_columns = selection
    n = tl.arange(0, KEYS)[:, None] + tl.zeros([1, SPREAD], tl.int32)
    if KIND != "entries":
        number = position + 1 - count + tile * KEYS + n
        valid = number <= position
        if FRESH == 1:
            valid = valid & (number >= start)
            place = (token - position + number).to(tl.int64)
        else:
            if FRESH == -1:
                valid = valid & (number < start)
            valid = valid & (tl.zeros_like(n) + slot >= 0)
            place = (slot.to(tl.int64) << 32) | (tl.maximum(number, 0) % W.rows).to(tl.int64)
        place = tl.where(valid, place, -1)
        of_window = place
    if KIND != "window":
        n += (tile - windows) * KEYS
        asked = n >= 0
        if ALL:
            entry = n
        else:
            at = selected_ptr + token.to(tl.int64) * topk + n
            entry = tl.load(at, mask=asked & (n < topk), other=-1)
        valid = asked & (entry >= 0) & (entry < visible)
        entry = tl.where(valid, entry, 0).to(tl.int32)
        column = entry // E.rows
        at = table_ptr + request.to(tl.int64) * table_columns + column
        unit = tl.load(at, mask=valid & (column < table_columns), other=-1)
        place = tl.where(unit >= 0, (unit.to(tl.int64) << 32) | (entry % E.rows).to(tl.int64), -1)
        if KIND == "both":
            place = tl.where(tl.zeros_like(n) + tile < windows, of_window, place)
    return tl.max(place, axis=1)


@triton.jit
def field_at(of_window, unit, row, ptr, entry_ptr, W: tl.constexpr, E: tl.constexpr, FIELD: tl.constexpr):
    """Byte pointers [n] to a field of rows of W, or of E where not ``of_window`` (a scalar)."""
    stride = tl.where(of_window, member(W, FIELD, "unit"), member(E, FIELD, "unit")).to(tl.int64)
    step = tl.where(of_window, member(W, FIELD, "stride"), member(E, FIELD, "stride")).to(tl.int64)
    base = tl.where(of_window, member(W, FIELD, "base"), member(E, FIELD, "base")).to(tl.int64)
    return tl.where(of_window, ptr, entry_ptr) + (unit * stride + row * step + base)


@triton.constexpr_function
def member(record, field, what):
    """A number of the record, by the names of a field and of what is asked of it."""
    return getattr(record, f"{field}_{what}")


@triton.jit
def pointers_of(tile, windows, place, pools, entry_pools, W: tl.constexpr, E: tl.constexpr, KIND: tl.constexpr):
    """Pointers to codes, scales and plain channels of the keys at ``place``."""
    codes_ptr, scales_ptr, plain_ptr = pools
    entry_codes_ptr, entry_scales_ptr, entry_plain_ptr = entry_pools
    place = tl.maximum(place, 0)
    unit, row = place >> 32, place & 0x7FFFFFFF
    if KIND == "both":
        of_window = tile < windows
        codes_at = field_at(of_window, unit, row, codes_ptr, entry_codes_ptr, W, E, "codes")
        scales_at = field_at(of_window, unit, row, scales_ptr, entry_scales_ptr, W, E, "scales")
        plain_at = field_at(of_window, unit, row, plain_ptr, entry_plain_ptr, W, E, "plain")
    else:
        codes_at, scales_at, plain_at = row_pointers(unit, row, codes_ptr, scales_ptr, plain_ptr, W)
    return codes_at, scales_at, plain_at


@triton.jit
def attend_tiles(
    first, last, windows, q, scale, largest, total, out, query, selection, pools, entry_pools,
    W: tl.constexpr, E: tl.constexpr, S: tl.constexpr, KEYS: tl.constexpr, ALL: tl.constexpr, FRESH: tl.constexpr,
    KIND: tl.constexpr, STAGES: tl.constexpr, SPREAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Take tiles first .. last - 1 into the running softmax; with more than one stage, rows are loaded ahead."""
    ahead: tl.constexpr = ALL and STAGES == 2 and W.quant > 0
    if ahead:
        place = place_of(first, windows, query, selection, W, E, KEYS, ALL, FRESH, KIND, SPREAD)
    for tile in tl.range(first, last, num_stages=STAGES):
        # The next tile's places are found while this one's keys are multiplied; those of selected entries would not be
        # in time.
        ahead_by: tl.constexpr = 1 if ahead else 0
        following = place_of(tile + ahead_by, windows, query, selection, W, E, KEYS, ALL, FRESH, KIND, SPREAD)
        if not ahead:
            place = following
        valid = place >= 0
        at = pointers_of(tile, windows, place, pools, entry_pools, W, E, KIND)
        raw, scales = load_row(at, valid, W, S)
        k = decode_row(raw, scales, valid, W, S, NATIVE)
        largest, total, out = absorb(q, k, valid, scale, largest, total, out, S, NATIVE)
        if ahead:
            place = following
    return largest, total, out


@triton.jit
def load_panel(at, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr):
    """Channels FIRST .. FIRST + WIDTH of queries at pointers ``at`` [heads]."""
    channel = FIRST + tl.arange(0, WIDTH)[None, :]
    return tl.load(at[:, None] + channel, mask=inside[:, None] & (channel < S.dim), other=0.0)


@triton.jit
def store_heads(at, out, some, inside, S: tl.constexpr, NATIVE: tl.constexpr):
    """Store panels ``out`` of [heads, channels], times ``some`` [heads], at pointers ``at`` [heads]."""
    panels: tl.constexpr = len(S.panels)
    for p in tl.static_range(panels):
        channel = sum_before(S.panels, p) * S.chunk + tl.arange(0, S.panels[p] * S.chunk)[None, :]
        x = out[p] * some[:, None]
        if at.dtype.element_ty == tl.bfloat16 and not NATIVE:
            x = round_bf16(x, NATIVE)
        tl.store(at[:, None] + channel, x.to(at.dtype.element_ty), mask=inside[:, None] & (channel < S.dim))


@triton.jit(do_not_specialize=["tokens", "topk", "table_columns", "splits"])
def attend_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, q_ptr, sink_ptr, selected_ptr,
    codes_ptr, scales_ptr, plain_ptr, entry_codes_ptr, entry_scales_ptr, entry_plain_ptr, own_ptr,
    positions_ptr, request_ptr, slots_ptr, starts_ptr, table_ptr, frequencies_ptr,
    tokens, heads, topk, table_columns, splits, scale,
    W: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr, S: tl.constexpr, ENTRY_S: tl.constexpr,
    CHUNK_S: tl.constexpr, WINDOW: tl.constexpr, RATIO: tl.constexpr,
    ALL: tl.constexpr, SINK: tl.constexpr, OWN: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, ALIKE: tl.constexpr, STAGES: tl.constexpr, SPREAD: tl.constexpr, PAIRS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Q [tokens, heads, dim] -> out like it and lse [tokens, heads], or parts of them for ``merge_kernel``.

    WINDOW or RATIO 0: there is no window, or no entries. ALIKE: W and E decode alike. OWN: the step's own rows are not
    in the ring yet; CHUNK is their record. Each kind of rows is cut in its own way, into panels of the same widths.
    ``scale`` is that of the logits times log2(e). With SPLIT a query's tiles are shared out among ``splits`` programs,
    which write normalised outputs [tokens, splits, heads, dim] and base-2 logarithms of their sums [tokens, splits,
    heads]. PAIRS: of the last channels, that outputs have turned back; of parts, ``merge_kernel`` does so.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(heads, HEADS)
    token = program // (blocks * splits)
    split = program // blocks % splits
    head = program % blocks * HEADS + tl.arange(0, HEADS)
    inside = head < heads
    request = tl.load(request_ptr + token)
    position = tl.where(request >= 0, tl.load(positions_ptr + token), -1)
    request = tl.maximum(request, 0)
    slot = tl.load(slots_ptr + request)
    start = 0

    windows = 0
    count = 0
    if WINDOW:
        count = tl.minimum(position + 1, WINDOW)
        windows = tl.cdiv(count, KEYS)
    visible = 0
    tiles = windows
    if RATIO:
        visible = (position + 1) // RATIO
        # Without a visible entry the selection need not be read.
        wanted = visible if ALL else tl.where(visible > 0, topk, 0)
        tiles += tl.cdiv(wanted, KEYS)
    each = tl.cdiv(tiles, splits)
    first = split * each
    last = tl.minimum(first + each, tiles)
    empty = first >= last

    dtype: tl.constexpr = tl.float32 if S.full else tl.bfloat16
    q_at = q_ptr + (token.to(tl.int64) * heads + head) * S.dim
    q = ()
    out = ()
    panels: tl.constexpr = len(S.panels)
    for p in tl.static_range(panels):
        q = q + (load_panel(q_at, inside, sum_before(S.panels, p) * S.chunk, S.panels[p] * S.chunk, S).to(dtype),)
        out = out + (tl.zeros([HEADS, S.panels[p] * S.chunk], tl.float32),)
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    selection = topk, selected_ptr, table_ptr, table_columns
    pools, own_pools = (codes_ptr, scales_ptr, plain_ptr), (own_ptr, own_ptr, own_ptr)
    entry_pools = entry_codes_ptr, entry_scales_ptr, entry_plain_ptr
    if OWN:
        start = tl.load(starts_ptr + request)
        largest, total, out = attend_tiles(
            first, tl.minimum(last, windows), windows, q, scale, largest, total, out,
            (token, request, position, count, start, slot, visible), selection, own_pools, own_pools,
            CHUNK, CHUNK, CHUNK_S, KEYS, ALL, 1, "window", STAGES, SPREAD, NATIVE,
        )  # fmt: skip
        # The ring has nothing to add where the whole window is the step's own.
        first = tl.where(position + 1 - count < start, first, tl.maximum(first, windows))
    fresh: tl.constexpr = -1 if OWN else 0
    query = token, request, position, count, start, slot, visible
    if WINDOW and RATIO and ALIKE:
        largest, total, out = attend_tiles(
            first, last, windows, q, scale, largest, total, out, query, selection, pools, entry_pools,
            W, E, S, KEYS, ALL, fresh, "both", STAGES, SPREAD, NATIVE,
        )  # fmt: skip
    else:
        if WINDOW:
            largest, total, out = attend_tiles(
                first, tl.minimum(last, windows), windows, q, scale, largest, total, out, query, selection, pools,
                pools, W, W, S, KEYS, ALL, fresh, "window", STAGES, SPREAD, NATIVE,
            )  # fmt: skip
        if RATIO:
            largest, total, out = attend_tiles(
                tl.maximum(first, windows), last, windows, q, scale, largest, total, out, query, selection, entry_pools,
                entry_pools, E, E, ENTRY_S, KEYS, ALL, 0, "entries", STAGES, SPREAD, NATIVE,
            )  # fmt: skip

    some = 1.0 / tl.where(total == 0.0, 1.0, total)
    lse = largest + tl.log2(tl.where(total == 0.0, 1.0, total))
    if SPLIT:
        line = (token.to(tl.int64) * splits + split) * heads + head
        tl.store(partial_lse_ptr + line, lse, mask=inside)
        written = inside & (tl.zeros_like(head) + empty == 0)
        store_heads(partial_ptr + line * S.dim, out, some, written, S, NATIVE)
    else:
        line = token.to(tl.int64) * heads + head
        tl.store(lse_ptr + line, lse * 0.6931471805599453, mask=inside)
        if SINK:
            some *= beside_sink(sink_ptr, head, inside, lse)
        store_heads(out_ptr + line * S.dim, out, some, inside, S, NATIVE)
        if PAIRS:
            tl.debug_barrier()
            inverse_rope(out_ptr + line * S.dim, inside, position, frequencies_ptr, S.dim, PAIRS, NATIVE)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, sink_ptr, positions_ptr, frequencies_ptr, heads, splits,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, SINK: tl.constexpr,
    PAIRS: tl.constexpr, NATIVE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Parts [tokens, splits, heads, DIM] and base-2 sums [tokens, splits, heads] -> one query's out and lse of a head.

    The sink counts once, here, and PAIRS of the last channels are turned back. Parts are taken PARTS at a time in a
    fixed order; what lies where one has no key is anything, and is read not to wait for that. AHEAD: it starts before
    the kernel that writes them ends.
    """
    begin(AHEAD)
    token, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    every = tl.arange(0, SPLITS)
    sums = tl.load(partial_lse_ptr + (token * splits + every) * heads + head, mask=every < splits, other=float("-inf"))
    largest = tl.max(sums, axis=0)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(sums - finite), axis=0)
    channel = tl.arange(0, WIDTH)
    out = tl.zeros([WIDTH], tl.float32)
    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        line = (token * splits + part) * heads + head
        some = tl.load(partial_lse_ptr + line, mask=part < splits, other=float("-inf"))
        weight = tl.exp2(some - finite)
        inside = (part < splits)[:, None] & (channel < DIM)[None, :]
        x = tl.load(partial_ptr + line[:, None] * DIM + channel[None, :], mask=inside, other=0.0)
        out += tl.sum(tl.where(some[:, None] == float("-inf"), 0.0, x * weight[:, None]), axis=0)
    lse = largest + tl.log2(tl.where(total == 0.0, 1.0, total))
    out = out / tl.where(total == 0.0, 1.0, total)
    if SINK:
        out *= beside_sink(sink_ptr, head, True, lse)
    if out_ptr.dtype.element_ty == tl.bfloat16 and not NATIVE:
        out = round_bf16(out, NATIVE)
    line = token * heads + head
    tl.store(lse_ptr + line, lse * 0.6931471805599453)
    tl.store(out_ptr + line * DIM + channel, out.to(out_ptr.dtype.element_ty), mask=channel < DIM)
    if PAIRS:
        tl.debug_barrier()
        at = out_ptr + line * DIM + tl.zeros([1], tl.int32)
        position = tl.load(positions_ptr + token)
        inverse_rope(at, tl.full([1], True, tl.int1), position, frequencies_ptr, DIM, PAIRS, NATIVE)
