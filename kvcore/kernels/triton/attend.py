"""Attention from encoded rows: one program takes some heads of one query over some of its keys.

A tile of keys is decoded once, in the products' precision, and used for both products. Rows are taken in chunks of
channels, each of which lies in one field, so that registers hold few decoded numbers at a time and no field is loaded
where the other lies. Exponentials are to the base 2.
Queries without a key and tiles without one are safe: weights are then zeros, never quotients of zeros.
"""

import triton
import triton.language as tl

from kvcore.kernels.triton.chunks import (
    decode_chunk,
    load_row,
    row_pointers,
    side_by_side,
)
from kvcore.kernels.triton.codes import round_bf16
from kvcore.kernels.triton.turn import turn_back


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
    above = tl.maximum(largest, tl.max(logit, axis=1))
    finite = tl.where(above == float("-inf"), 0.0, above)
    weight = tl.exp2(logit - finite[:, None])
    kept = tl.exp2(largest - finite)
    total = total * kept + tl.sum(weight, axis=1)
    # Where keys are bf16 numbers, so are the weights; their sum is of what they were before.
    weight = round_bf16(weight, NATIVE) if S.narrow and S.full else weight.to(q[0].dtype)
    summed = ()
    for p in tl.static_range(panels):
        summed = summed + (tl.dot(weight, k[p], out[p] * kept[:, None], input_precision="ieee"),)
    return above, total, summed


@triton.jit
def place_of(
    tile, windows, token, request, position, count, start, slot, visible, picks, selected_ptr, table_ptr,
    table_columns, W: tl.constexpr, E: tl.constexpr, KEYS: tl.constexpr, ALL: tl.constexpr, FRESH: tl.constexpr,
    KIND: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Places [KEYS] of a tile's keys as int64, unit above row; -1 where there is no key.

    The window's tiles come first, ``windows`` of them, then the entries'. KIND: "window" or "entries" where all tiles
    are of that kind, else "both". FRESH 1: of the window, the step's own rows; -1: only older ones, from the ring; 0:
    all, from the ring. Every place is found SPREAD times, by as many threads, and then handed around: else the compiler
    would look it up anew for every layout that it is used in.
    """
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
            at = selected_ptr + token.to(tl.int64) * picks + n
            entry = tl.load(at, mask=asked & (n < picks), other=-1)
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
def pointers_of(
    tile, windows, place, codes_ptr, scales_ptr, plain_ptr, entry_codes_ptr, entry_scales_ptr, entry_plain_ptr,
    W: tl.constexpr, E: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Pointers to codes, scales and plain channels of the keys at ``place``."""
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
    first, last, windows, q, scale, largest, total, out,
    token, request, position, count, start, slot, visible, picks, selected_ptr, table_ptr, table_columns,
    codes_ptr, scales_ptr, plain_ptr, entry_codes_ptr, entry_scales_ptr, entry_plain_ptr,
    W: tl.constexpr, E: tl.constexpr, S: tl.constexpr, KEYS: tl.constexpr, ALL: tl.constexpr, FRESH: tl.constexpr,
    KIND: tl.constexpr, STAGES: tl.constexpr, SPREAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Take tiles first .. last - 1 into the running softmax; with more than one stage, rows are loaded ahead."""
    ahead: tl.constexpr = ALL and STAGES == 2 and W.quant > 0
    if ahead:
        place = place_of(
            first, windows, token, request, position, count, start, slot, visible, picks, selected_ptr, table_ptr,
            table_columns, W, E, KEYS, ALL, FRESH, KIND, SPREAD,
        )  # fmt: skip
    for tile in tl.range(first, last, num_stages=STAGES):
        # The next tile's places are found while this one's keys are multiplied; with picks they would not be in time.
        following = place_of(
            tile + (1 if ahead else 0), windows, token, request, position, count, start, slot, visible, picks,
            selected_ptr, table_ptr, table_columns, W, E, KEYS, ALL, FRESH, KIND, SPREAD,
        )  # fmt: skip
        if not ahead:
            place = following
        valid = place >= 0
        at = pointers_of(
            tile, windows, place, codes_ptr, scales_ptr, plain_ptr, entry_codes_ptr, entry_scales_ptr,
            entry_plain_ptr, W, E, KIND,
        )  # fmt: skip
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


@triton.jit(do_not_specialize=["tokens", "picks", "table_columns", "splits"])
def attend_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, q_ptr, sink_ptr, selected_ptr,
    codes_ptr, scales_ptr, plain_ptr, entry_codes_ptr, entry_scales_ptr, entry_plain_ptr, own_ptr,
    positions_ptr, request_ptr, slots_ptr, starts_ptr, table_ptr, frequencies_ptr,
    tokens, heads, picks, table_columns, splits, scale,
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
        wanted = visible if ALL else tl.where(visible > 0, picks, 0)
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
    if OWN:
        start = tl.load(starts_ptr + request)
        largest, total, out = attend_tiles(
            first, tl.minimum(last, windows), windows, q, scale, largest, total, out,
            token, request, position, count, start, slot, visible, picks, selected_ptr, table_ptr, table_columns,
            own_ptr, own_ptr, own_ptr, own_ptr, own_ptr, own_ptr, CHUNK, CHUNK, CHUNK_S, KEYS, ALL, 1, "window", STAGES,
            SPREAD, NATIVE,
        )  # fmt: skip
        # The ring has nothing to add where the whole window is the step's own.
        first = tl.where(position + 1 - count < start, first, tl.maximum(first, windows))
    fresh: tl.constexpr = -1 if OWN else 0
    if WINDOW and RATIO and ALIKE:
        largest, total, out = attend_tiles(
            first, last, windows, q, scale, largest, total, out,
            token, request, position, count, start, slot, visible, picks, selected_ptr, table_ptr, table_columns,
            codes_ptr, scales_ptr, plain_ptr, entry_codes_ptr, entry_scales_ptr, entry_plain_ptr,
            W, E, S, KEYS, ALL, fresh, "both", STAGES, SPREAD, NATIVE,
        )  # fmt: skip
    else:
        if WINDOW:
            largest, total, out = attend_tiles(
                first, tl.minimum(last, windows), windows, q, scale, largest, total, out,
                token, request, position, count, start, slot, visible, picks, selected_ptr, table_ptr,
                table_columns, codes_ptr, scales_ptr, plain_ptr, codes_ptr, scales_ptr, plain_ptr,
                W, W, S, KEYS, ALL, fresh, "window", STAGES, SPREAD, NATIVE,
            )  # fmt: skip
        if RATIO:
            largest, total, out = attend_tiles(
                tl.maximum(first, windows), last, windows, q, scale, largest, total, out,
                token, request, position, count, start, slot, visible, picks, selected_ptr, table_ptr,
                table_columns, entry_codes_ptr, entry_scales_ptr, entry_plain_ptr, entry_codes_ptr, entry_scales_ptr,
                entry_plain_ptr, E, E, ENTRY_S, KEYS, ALL, 0, "entries", STAGES, SPREAD, NATIVE,
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
            turn_back(out_ptr + line * S.dim, inside, position, frequencies_ptr, S.dim, PAIRS, NATIVE)


@triton.jit
def beside_sink(sink_ptr, head, inside, lse):
    """Share of the weight that is left beside the sink, for base-2 ``lse``; a query without keys keeps its zeros."""
    sink = tl.load(sink_ptr + head, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp2(sink * 1.4426950408889634 - lse))
    return tl.where(lse == float("-inf"), 0.0, share)
