"""Attention from encoded rows on Hopper, in Gluon: some warps fetch and decode keys, others multiply what is ready.

One program takes 64 heads of one query over some of its keys, tiles of 64 at a time. Four warps (``produce``) look
entries up two tiles ahead, have the L2 cache fetch rows one tile ahead, load them half a tile ahead and put them,
decoded to bf16, into shared memory, as both products take them from there. Eight warps (``consume``) multiply: logits,
running softmax, sums of 512 channels in registers, the first four warps those of 256. Of a tile's logits each four
warps have half of the keys, and tell each other of the largest. Two tiles fit beside the queries; ``full`` and ``free``
say whose turn it is.

It computes what ``attend.attend_kernel`` does, which is its twin, for rows of 448 codes in e4m3 with a power of two for
every 64 and 64 channels in bf16, queries in bf16, and rows that the pools hold. ``launches.attention`` chooses.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)
from triton.language.extra.cuda import gdc_launch_dependents

from kvcore.kernels.triton.chunks import E4M3_WORD_TIMES_PAIR
from kvcore.kernels.triton.latent import cos_sin


@gluon.constexpr_function
def member(record, field, what):
    """A number of the record, by the names of a field and of what is asked of it."""
    return getattr(record, f"{field}_{what}")


@gluon.jit
def scaled_words(word, scale):
    """Words of four e4m3 codes [n, w] times scales [n, w], two equal bf16 numbers a word -> bf16 [n, 4 w]."""
    a, b, c, d = gl.inline_asm_elementwise(
        E4M3_WORD_TIMES_PAIR, "=h,=h,=h,=h,r,r", [word, scale],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), (word.shape[0], 4 * word.shape[1]))


@gluon.jit
def scale_of(words, GROUP: gl.constexpr):
    """A group's scale out of the row's two words, as two equal bf16 numbers in an int32; 0xFF is NaN."""
    stored = (words[GROUP // 4] >> (8 * (GROUP % 4))) & 0xFF
    return gl.where(stored == 0xFF, 0x7FC0, gl.where(stored == 0, 0x0040, stored << 7)) * 0x10001


@gluon.jit
def side_by_side(left, right):
    """[n, w] and [n, w] -> [n, 2 w]."""
    n: gl.constexpr = left.shape[0]
    w: gl.constexpr = left.shape[1]
    return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), (n, 2 * w))


@gluon.jit
def entries_of(tile, last, windows, query, selection, KEYS: gl.constexpr, ALL: gl.constexpr, L: gl.constexpr):
    """Numbers of a tile's entries as they are given; -1 where none is asked for, as in tiles of the window."""
    token, _, _, _, _, _ = query
    topk, selected_ptr, _, _ = selection
    n = gl.arange(0, KEYS, layout=L) + (tile - windows) * KEYS
    asked = (n >= 0) & (n < (last - windows) * KEYS)
    if ALL:
        entry = gl.where(asked, n, -1)
    else:
        at = selected_ptr + token.to(gl.int64) * topk + n
        entry = gl.load(at, mask=asked & (n < topk), other=-1)
    return entry


@gluon.jit
def units_of(entry, query, selection, E: gl.constexpr):
    """(unit, row) of entries; the unit is -1 where there is none."""
    _, request, _, _, _, visible = query
    _, _, table_ptr, table_columns = selection
    valid = (entry >= 0) & (entry < visible)
    entry = gl.where(valid, entry, 0).to(gl.int32)
    column = entry // E.rows
    at = table_ptr + request.to(gl.int64) * table_columns + column
    return gl.load(at, mask=valid & (column < table_columns), other=-1), entry % E.rows


@gluon.jit
def places_of(
    tile, last, windows, unit, row, query, W: gl.constexpr, KEYS: gl.constexpr, KIND: gl.constexpr, L: gl.constexpr
):
    """Places of a tile's keys as int64, unit above row; -1 where there is no key."""
    _, _, position, count, slot, _ = query
    place = gl.where(unit >= 0, (unit.to(gl.int64) << 32) | row.to(gl.int64), -1)
    if KIND != "entries":
        number = gl.arange(0, KEYS, layout=L) + (position + 1 - count + tile * KEYS)
        valid = (number <= position) & (unit * 0 + slot >= 0) & (unit * 0 + tile < last)
        of_window = (slot.to(gl.int64) << 32) | (gl.maximum(number, 0) % W.rows).to(gl.int64)
        of_window = gl.where(valid, of_window, -1)
        if KIND == "window":
            place = of_window
        else:
            place = gl.where(unit * 0 + tile < windows, of_window, place)
    return place


@gluon.jit
def field_at(
    of_window, unit, row, ptr, entry_ptr, W: gl.constexpr, E: gl.constexpr, FIELD: gl.constexpr, KIND: gl.constexpr
):
    """Byte pointers [n] to a field of rows of W, or of E where not ``of_window`` (a scalar)."""
    if KIND == "both":
        stride = gl.where(of_window, member(W, FIELD, "unit"), member(E, FIELD, "unit")).to(gl.int64)
        step = gl.where(of_window, member(W, FIELD, "stride"), member(E, FIELD, "stride")).to(gl.int64)
        base = gl.where(of_window, member(W, FIELD, "base"), member(E, FIELD, "base")).to(gl.int64)
        at = gl.where(of_window, ptr, entry_ptr) + (unit * stride + row * step + base)
    elif KIND == "window":
        at = ptr + (unit * member(W, FIELD, "unit") + row * member(W, FIELD, "stride") + member(W, FIELD, "base"))
    else:
        at = entry_ptr + (unit * member(E, FIELD, "unit") + row * member(E, FIELD, "stride") + member(E, FIELD, "base"))
    return at


@gluon.jit
def ask_for_rows(
    of_window, place, pools, entry_pools, W: gl.constexpr, E: gl.constexpr, KIND: gl.constexpr, L: gl.constexpr
):
    """Have the L2 cache fetch rows at places [n], which lie as a column of L, [n, 2], does.

    A thread asks for three lines: half of a row's codes, or the rest of them, its channels in bf16 and its scales.
    """
    codes_ptr, scales_ptr, plain_ptr = pools
    entry_codes_ptr, entry_scales_ptr, entry_plain_ptr = entry_pools
    here = gl.maximum(place, 0)
    unit, row = here >> 32, here & 0x7FFFFFFF
    codes_at = field_at(of_window, unit, row, codes_ptr, entry_codes_ptr, W, E, "codes", KIND).to(gl.int64)[:, None]
    scales_at = field_at(of_window, unit, row, scales_ptr, entry_scales_ptr, W, E, "scales", KIND).to(gl.int64)[:, None]
    plain_at = field_at(of_window, unit, row, plain_ptr, entry_plain_ptr, W, E, "plain", KIND).to(gl.int64)[:, None]
    first = (gl.arange(0, 2, layout=gl.SliceLayout(0, L)) == 0)[None, :]
    valid = (place >= 0).to(gl.int32)[:, None]
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        setp.ne.s32 p, $4, 0;
        @p prefetch.global.L2 [$1];
        @p prefetch.global.L2 [$2];
        @p prefetch.global.L2 [$3];
        mov.b32 $0, 0;
        }
        """,
        "=r,l,l,l,r",
        [
            gl.where(first, codes_at, codes_at + 384),
            gl.where(first, codes_at + 128, plain_at + 64),
            gl.where(first, codes_at + 256, scales_at),
            gl.where(first, valid, valid),
        ],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_rows(
    of_window, place, pools, entry_pools, W: gl.constexpr, E: gl.constexpr, KIND: gl.constexpr, LC: gl.constexpr,
    LR: gl.constexpr,
):  # fmt: skip
    """(words of codes group by group, channels in bf16, two words of scales, whether there is a key) of rows."""
    codes_ptr, scales_ptr, plain_ptr = pools
    entry_codes_ptr, entry_scales_ptr, entry_plain_ptr = entry_pools
    GROUPS: gl.constexpr = W.quant // 64
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, LC))[None, :]
    channel = gl.arange(0, 64, layout=gl.SliceLayout(0, LR))[None, :]
    valid = place >= 0
    here = gl.maximum(place, 0)
    unit, row = here >> 32, here & 0x7FFFFFFF
    codes_at = field_at(of_window, unit, row, codes_ptr, entry_codes_ptr, W, E, "codes", KIND)
    scales_at = field_at(of_window, unit, row, scales_ptr, entry_scales_ptr, W, E, "scales", KIND)
    plain_at = field_at(of_window, unit, row, plain_ptr, entry_plain_ptr, W, E, "plain", KIND)
    raw = ()
    for c in gl.static_range(GROUPS):
        at = codes_at.to(gl.pointer_type(gl.int32))[:, None] + (c * 16 + word)
        raw = raw + (gl.load(at, mask=valid[:, None], other=0),)
    at = gl.convert_layout(plain_at, gl.SliceLayout(1, LR)).to(gl.pointer_type(gl.bfloat16))[:, None] + channel
    inside = gl.convert_layout(valid, gl.SliceLayout(1, LR))[:, None]
    plain = gl.load(at, mask=inside, other=0.0)
    scales = ()
    for w in gl.static_range(2):
        scales = scales + (gl.load(scales_at.to(gl.pointer_type(gl.int32)) + w, mask=valid, other=0),)
    return raw, plain, scales, valid


@gluon.jit
def produce(
    first, last, windows, query, selection, pools, entry_pools, k_smem, bias_smem, place_smem, full, free,
    W: gl.constexpr, E: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, ALL: gl.constexpr, KIND: gl.constexpr,
    WARPS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Put keys of tiles first .. last - 1 where the products take them, ROWS at a time.

    ``bias_smem`` says which are there, as 0 and -inf. Stores of one part of a tile are few, as there is a barrier
    between any two.
    """
    SPREAD: gl.constexpr = 32 * WARPS // ROWS
    LC: gl.constexpr = gl.BlockedLayout([1, 16 // SPREAD], [32 // SPREAD, SPREAD], [WARPS, 1], [1, 0])
    LR: gl.constexpr = gl.BlockedLayout([1, 64 // SPREAD], [32 // SPREAD, SPREAD], [WARPS, 1], [1, 0])
    L: gl.constexpr = gl.SliceLayout(1, LC)
    # A key is two threads', which ask for its row together.
    L2: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [WARPS // 2, 2], [0, 1])
    LP: gl.constexpr = gl.SliceLayout(1, L2)
    PARTS: gl.constexpr = KEYS // ROWS
    GROUPS: gl.constexpr = W.quant // 64
    # Each of the loads that lead to a row is under way for as long as a tile takes.
    entry0 = entries_of(first, last, windows, query, selection, KEYS, ALL, LP)
    entry1 = entries_of(first + 1, last, windows, query, selection, KEYS, ALL, LP)
    entry = entries_of(first + 2, last, windows, query, selection, KEYS, ALL, LP)
    unit0, row0 = units_of(entry0, query, selection, E)
    unit, row = units_of(entry1, query, selection, E)
    place = places_of(first, last, windows, unit0, row0, query, W, KEYS, KIND, LP)
    place_smem.index(0).store(place)
    ask_for_rows(first < windows, place, pools, entry_pools, W, E, KIND, L2)
    place = place_smem.index(0).slice(0, ROWS).load(L)
    raw, plain, scales, valid = load_rows(first < windows, place, pools, entry_pools, W, E, KIND, LC, LR)
    for tile in range(first, last):
        step = tile - first
        stage = step % STAGES
        place = places_of(tile + 1, last, windows, unit, row, query, W, KEYS, KIND, LP)
        place_smem.index((step + 1) & 1).store(place)
        ask_for_rows(tile + 1 < windows, place, pools, entry_pools, W, E, KIND, L2)
        unit, row = units_of(entry, query, selection, E)
        entry = entries_of(tile + 3, last, windows, query, selection, KEYS, ALL, LP)
        mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
        for part in gl.static_range(PARTS):
            place = place_smem.index((step + (part + 1) // PARTS) & 1).slice((part + 1) % PARTS * ROWS, ROWS).load(L)
            of_window = tile + (part + 1) // PARTS < windows
            following = load_rows(of_window, place, pools, entry_pools, W, E, KIND, LC, LR)
            keys = ()
            for c in gl.static_range(GROUPS):
                scale, _ = gl.broadcast(scale_of(scales, c)[:, None], raw[c])
                keys = keys + (scaled_words(raw[c], scale),)
            keys = keys + (gl.convert_layout(plain, keys[0].type.layout),)
            pairs = ()
            for c in gl.static_range(4):
                pairs = pairs + (side_by_side(keys[2 * c], keys[2 * c + 1]),)
            rows = k_smem.index(stage).slice(part * ROWS, ROWS, dim=0)
            rows.slice(0, 256, dim=1).store(side_by_side(pairs[0], pairs[1]))
            rows.slice(256, 256, dim=1).store(side_by_side(pairs[2], pairs[3]))
            bias_smem.index(stage).slice(part * ROWS, ROWS).store(gl.where(valid, 0.0, float("-inf")))
            fence_async_shared()
            mbarrier.arrive(full.index(stage), count=1)
            raw, plain, scales, valid = following


@gluon.jit
def softmax(logit, bias, scale, largest, total, most_smem, p_smem):
    """Weights of a tile's logits into ``p_smem``: (largest, total, what is kept of the sums before), to the base 2."""
    n: gl.constexpr = logit.shape[1]
    LH: gl.constexpr = gl.SliceLayout(1, logit.type.layout)
    logit = gl.where(bias[None, :] == 0.0, logit * scale, float("-inf"))
    most = gl.max(gl.reshape(logit, (64, 2, n // 2)), axis=2)
    most_smem.store(gl.reshape(gl.permute(most, (1, 0)), (128,)))
    above = gl.maximum(most_smem.slice(0, 64).load(LH), most_smem.slice(64, 64).load(LH))
    above = gl.maximum(largest, above)
    finite = gl.where(above == float("-inf"), 0.0, above)
    weight = gl.exp2(logit - finite[:, None])
    kept = gl.exp2(largest - finite)
    p_smem.store(weight.to(gl.bfloat16))
    fence_async_shared()
    # Of the sum of weights a thread keeps its own columns; lanes and warps are put together at the end.
    part = gl.sum(gl.reshape(weight, (64, 2, n // 16, 8)), axis=2)
    share = gl.convert_layout(kept, gl.SliceLayout(1, gl.SliceLayout(2, total.type.layout)))
    total = total * share[:, None, None] + gl.convert_layout(part, total.type.layout)
    return above, total, kept


@gluon.jit
def consume(
    q_at, first_head, heads, first, last, q, k_smem, p_smem, bias_smem, most_smem, full, free, scale,
    KEYS: gl.constexpr, STAGES: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Attend from queries at ``q_at`` to tiles first .. last - 1: (largest, total, out) of 64 heads.

    ``largest`` and ``total`` are in a layout of logits, ``out`` in one of sums.
    """
    LQ: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DIM // 2, 16])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LQ))
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, LQ))
    inside = (first_head + row < heads)[:, None]
    q.store(gl.load(q_at + row[:, None] * DIM + channel[None, :], mask=inside, other=0.0))
    fence_async_shared()
    out = gl.zeros([64, DIM], gl.float32, LO)
    largest = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, LS))
    none = gl.zeros([64, KEYS], gl.float32, LS)
    total = gl.sum(gl.reshape(none, (64, 2, KEYS // 16, 8)), axis=2)
    for tile in range(first, last):
        step = tile - first
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        k = k_smem.index(stage)
        logit = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False)
        bias = bias_smem.index(stage).load(gl.SliceLayout(0, LS))
        largest, total, kept = softmax(logit, bias, scale, largest, total, most_smem, p_smem)
        out = out * gl.convert_layout(kept, gl.SliceLayout(1, LO))[:, None]
        out = warpgroup_mma(p_smem, k, out)
        mbarrier.arrive(free.index(stage), count=1)
    total = gl.sum(gl.sum(total, axis=2), axis=1)
    return largest, gl.convert_layout(total, gl.SliceLayout(1, LS)), out


@gluon.jit
def inverse_rotate(tail, position, frequencies_ptr, PAIRS: gl.constexpr):
    """Rotate the last PAIRS pairs of the 64 channels in ``tail``, bf16 in shared memory, by minus ``position``."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    even, odd = gl.split(gl.reshape(tail.load(L).to(gl.float32), (64, 32, 2)))
    pair = gl.arange(0, 32, layout=gl.SliceLayout(0, even.type.layout)) - (32 - PAIRS)
    frequency = gl.load(frequencies_ptr + pair, mask=pair >= 0, other=0.0)
    cos, sin = cos_sin(position.to(gl.float32) * frequency)
    cos, sin, turned = cos[None, :], sin[None, :], (pair >= 0)[None, :]
    new_even = gl.where(turned, even * cos + odd * sin, even)
    new_odd = gl.where(turned, odd * cos - even * sin, odd)
    tail.store(gl.convert_layout(gl.reshape(gl.join(new_even, new_odd), (64, 64)), L).to(gl.bfloat16))


@gluon.jit(do_not_specialize=["tokens", "topk", "table_columns", "splits"])
def attend_hopper_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, q_ptr, sink_ptr, selected_ptr,
    codes_ptr, scales_ptr, plain_ptr, entry_codes_ptr, entry_scales_ptr, entry_plain_ptr, own_ptr,
    positions_ptr, request_ptr, slots_ptr, starts_ptr, table_ptr, frequencies_ptr,
    tokens, heads, topk, table_columns, splits, scale,
    W: gl.constexpr, E: gl.constexpr, WINDOW: gl.constexpr, RATIO: gl.constexpr, ALL: gl.constexpr,
    SINK: gl.constexpr, SPLIT: gl.constexpr, PAIRS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    PRODUCERS: gl.constexpr, ROWS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Arguments are those of ``attend.attend_kernel``, whose own rows are never given.

    PRODUCERS: warps that decode, with REGISTERS registers a thread, ROWS rows at a time.
    """
    DIM: gl.constexpr = W.dim
    KIND: gl.constexpr = "both" if WINDOW and RATIO else "window" if WINDOW else "entries"
    if SPLIT:
        gdc_launch_dependents()
    program = gl.program_id(0)
    blocks = (heads + 63) // 64
    token = program // (blocks * splits)
    split = program // blocks % splits
    first_head = program % blocks * 64
    request = gl.load(request_ptr + token)
    position = gl.where(request >= 0, gl.load(positions_ptr + token), -1)
    request = gl.maximum(request, 0)
    slot = gl.load(slots_ptr + request)
    windows = position * 0
    count = position * 0
    if WINDOW:
        count = gl.minimum(position + 1, WINDOW)
        windows = (count + KEYS - 1) // KEYS
    visible = position * 0
    tiles = windows
    if RATIO:
        visible = (position + 1) // RATIO
        # Without a visible entry the selection need not be read.
        wanted = visible if ALL else gl.where(visible > 0, topk, 0)
        tiles += (wanted + KEYS - 1) // KEYS
    each = (tiles + splits - 1) // splits
    first = split * each
    last = gl.minimum(first + each, tiles)
    empty = first >= last

    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [64, DIM], SWIZZLED)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, DIM], SWIZZLED)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [64, KEYS], SWIZZLED)
    bias_smem = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], FLAT)
    place_smem = gl.allocate_shared_memory(gl.int64, [2, KEYS], FLAT)
    most_smem = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=KEYS // ROWS)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    query = (token, request, position, count, slot, visible)
    selection = (topk, selected_ptr, table_ptr, table_columns)
    pools = (codes_ptr, scales_ptr, plain_ptr)
    entry_pools = (entry_codes_ptr, entry_scales_ptr, entry_plain_ptr)
    q_at = q_ptr + (token.to(gl.int64) * heads + first_head) * DIM
    largest, total, out = gl.warp_specialize(
        [
            (
                consume,
                (q_at, first_head, heads, first, last, q_smem, k_smem, p_smem, bias_smem, most_smem, full, free, scale,
                 KEYS, STAGES, DIM),
            ),
            (
                produce,
                (first, last, windows, query, selection, pools, entry_pools, k_smem, bias_smem, place_smem, full, free,
                 W, E, KEYS, STAGES, ALL, KIND, PRODUCERS, ROWS),
            ),
        ],
        [PRODUCERS],
        [REGISTERS],
    )  # fmt: skip

    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DIM // 2, 16])
    LH: gl.constexpr = gl.SliceLayout(1, LO)
    total = gl.convert_layout(total, LH)
    largest = gl.convert_layout(largest, LH)
    some = 1.0 / gl.where(total == 0.0, 1.0, total)
    lse = largest + gl.log2(gl.where(total == 0.0, 1.0, total))
    head = first_head + gl.arange(0, 64, layout=LH)
    inside = head < heads
    if SPLIT:
        channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, LO))
        line = (token.to(gl.int64) * splits + split) * heads + head
        gl.store(partial_lse_ptr + line, lse, mask=inside)
        written = inside & (head * 0 + empty.to(gl.int32) == 0)
        gl.store(partial_ptr + line[:, None] * DIM + channel[None, :], out * some[:, None], mask=written[:, None])
    else:
        line = token.to(gl.int64) * heads + head
        gl.store(lse_ptr + line, lse * 0.6931471805599453, mask=inside)
        if SINK:
            # A query without keys keeps its zeros.
            sink = gl.load(sink_ptr + head, mask=inside, other=0.0).to(gl.float32)
            share = 1.0 / (1.0 + gl.exp2(sink * 1.4426950408889634 - lse))
            some *= gl.where(lse == float("-inf"), 0.0, share)
        # Through shared memory, where the queries were, for stores of whole lines.
        LQ: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
        q_smem.store((out * some[:, None]).to(gl.bfloat16))
        if PAIRS:
            inverse_rotate(q_smem.slice(DIM - 64, 64, dim=1), position, frequencies_ptr, PAIRS)
        row = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, LQ))
        channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, LQ))
        at = out_ptr + (token.to(gl.int64) * heads + row)[:, None] * DIM + channel[None, :]
        gl.store(at, q_smem.load(LQ), mask=(row < heads)[:, None])
