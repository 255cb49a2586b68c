"""Attention to int4 keys over tokens and int4 values over channels, from codes as they are: ``attend_groups`` in Gluon.

A program is one warp and takes up to eight query heads of one token. Groups come to shared memory some iterations ahead
of their use, and leave it in the registers that the tensor cores want: two numbers of 16 bits, of neighbouring channels
of keys or neighbouring tokens of values, side by side, each of four codes. Keys, then channels of values, are the rows
of the products, and heads the columns. Codes are the bits of subnormal bf16 numbers and take no arithmetic; what they
are multiplied with is raised by as much.

Keys' scales are multiplied into the queries once a group: a product of two bf16 numbers is the sum of two, which are
multiplied one after the other, so logits are as exact as in fp32. Their offsets are one number a query and group.
Values' scales are multiplied into the weights, and rounded to bf16 as these are; offsets have sums of their own.

The tokens of a group are taken in the order in which four products have them: place p is token p mod n · 4 + p div n,
where n is a quarter of the group. Channels of a group of values likewise.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""By Triton's newer names or its older ones: from pointers to shared memory, and a program's threads together."""
STAGES = {32: 3, 64: 2}
"""Groups of so many tokens in shared memory: one in use, the others on their way."""

CODES = gl.constexpr(
    "{ .reg .b32 x; and.b32 $0, $4, 0x000f000f; and.b32 $1, $4, 0x00f000f0;\n"
    "shr.u32 x, $4, 8; and.b32 $2, x, 0x000f000f; and.b32 $3, x, 0x00f000f0; }"
)
"""Two halfwords of four codes, side by side, to four pairs, code n of both, as bf16 numbers.

The bits of a code are a subnormal number, 2^-133 times the code; those of codes 1 and 3 are sixteen times as much.
"""
RAISED = gl.constexpr(90)
"""The power of two that the other operand is multiplied by, so that products are normal numbers: of queries beyond 2^21
some may overflow."""
UNIT = gl.constexpr(2.0**43)
"""What a product of codes 0 and 2 is to be multiplied by."""
LARGE = gl.constexpr(0x4780)
"""The bits of 2^16: of scales from there on products would overflow."""
LOWERED = gl.constexpr(120)
"""The power of two that the other operand is divided by in a group with such a scale, and its codes multiplied by."""
SCALED = gl.constexpr(
    "{ .reg .b32 y, z; mov.b32 z, 0x80008000;\n"
    "fma.rn.bf16x2 $0, $2, $3, z; xor.b32 y, $0, z; fma.rn.bf16x2 $1, $2, $3, y; }"
)
"""The products of two pairs, and what these lack: both together are exact."""
PAIRED = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
TURNED = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")
"""Of a warp's eight rows of eight numbers, two neighbours of a row a thread: two of a column instead."""
TIMES = gl.constexpr("{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }")
SAME = gl.constexpr("mov.b32 $0, $1;")


@triton.constexpr_function
def rows_layout(rows, columns):
    """[rows, columns] as a product's first operand is: pairs of columns in a thread, eight rows in a warp."""
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    more = [[0, 8 << n] for n in range((columns // 8).bit_length() - 1)]
    down = [[8 << n, 0] for n in range((rows // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1], *more, *down], lanes, [], [], [rows, columns])


@triton.constexpr_function
def operand_layout(depth, columns):
    """[depth, columns] as a product's second operand is: pairs along the depth in a thread."""
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    more = [[8 << n, 0] for n in range((depth // 8).bit_length() - 1)]
    across = [[0, 8 << n] for n in range((columns // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout([[1, 0], *more, *across], lanes, [], [], [depth, columns])


@triton.constexpr_function
def scales_layout(tokens, groups):
    """[tokens, groups]: pairs of tokens as a product's second operand has them, all groups in a thread."""
    lanes = [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]]
    more = [[8 << n, 0] for n in range((tokens // 8).bit_length() - 1)]
    beside = [[0, 1 << n] for n in range(groups.bit_length() - 1)]
    return gl.DistributedLinearLayout([[1, 0], *beside, *more], lanes, [], [], [tokens, groups])


@triton.constexpr_function
def shared_layout(columns):
    """Rows of ``columns`` numbers of 16 bits, of which eight rows' pieces of 16 bytes lie in different banks."""
    pieces = min(8, columns // 8)
    return gl.SwizzledSharedLayout(8, max(1, 8 // pieces), pieces, [1, 0])


@triton.constexpr_function
def copy_layout(columns):
    """[rows, columns] of 16-bit numbers as they are copied, up to 16 bytes a thread."""
    each = min(8, columns)
    across = max(1, min(32, columns // each))
    return gl.BlockedLayout([1, each], [32 // across, across], [1, 1], [1, 0])


@triton.constexpr_function
def padded_layout(groups, columns):
    """[rows, columns] as it is copied where only the first ``groups`` columns are."""
    across = columns // min(8, groups)
    return gl.BlockedLayout([1, min(8, groups)], [32 // across, across], [1, 1], [1, 0])


@gluon.jit
def piled(first, second, third, fourth):
    """Four of [r, n] -> [4 r, n], one below the other."""
    of_two = gl.join(gl.join(first, third), gl.join(second, fourth))
    return gl.permute(of_two, (2, 3, 0, 1)).reshape([4 * first.shape[0], first.shape[1]])


@gluon.jit
def twice(x):
    """[r, n] -> [2 r, n]: the same rows again."""
    return gl.permute(gl.join(x, x), (2, 0, 1)).reshape([2 * x.shape[0], x.shape[1]])


@gluon.jit
def by_group(first, second, third, fourth, GROUPS: gl.constexpr):
    """Four of [GROUPS · r, n] -> for every group [4 r, n], one below the other."""
    r: gl.constexpr = first.shape[0] // GROUPS
    n: gl.constexpr = first.shape[1]
    of_two = gl.join(gl.join(first, third), gl.join(second, fourth)).reshape([GROUPS, r, n, 2, 2])
    return of_groups(gl.permute(of_two, (3, 4, 1, 2, 0)).reshape([4 * r * n, GROUPS]), GROUPS)


@gluon.jit
def of_groups(x, GROUPS: gl.constexpr):
    """[n, GROUPS] -> the columns [n], of a power of two."""
    n: gl.constexpr = x.shape[0]
    if GROUPS == 1:
        parts = (x.reshape([n]),)
    else:
        even, odd = gl.split(x.reshape([n, GROUPS // 2, 2]))
        evens, odds = of_groups(even, GROUPS // 2), of_groups(odd, GROUPS // 2)
        parts = ()
        half: gl.constexpr = GROUPS // 2
        for g in gl.static_range(half):
            parts = parts + (evens[g], odds[g])
    return parts


@gluon.jit
def as_operand(weights, B: gl.constexpr):
    """Pairs of weights [keys, heads] as a product has them -> as the next one takes them: neighbours are keys."""
    keys: gl.constexpr = weights.shape[0]
    turned = gl.inline_asm_elementwise(TURNED, "=r,r", [weights], dtype=weights.dtype, is_pure=True, pack=2)
    turned = gl.permute(turned.reshape([keys // 8, 8, 8]), (0, 2, 1))
    return gl.convert_layout(turned.reshape([keys, 8]), B)


@gluon.jit
def row_at(unit, row, base_ptr, UNIT: gl.constexpr, BASE: gl.constexpr, STRIDE: gl.constexpr, TYPE: gl.constexpr):
    """Pointer to row ``row`` of unit ``unit``, as elements of a type of 16 bits."""
    return (base_ptr + unit.to(gl.int64) * UNIT + BASE + row * STRIDE).to(gl.pointer_type(TYPE), bitcast=True)


@gluon.jit
def copy_group(
    buffer, unit, number, earliest, heads, pools, room, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Start to copy a group's codes, scales and offsets into one of the buffers; values' scales of seen tokens only."""
    key_head, value_head = heads
    key_codes_ptr, key_scales_ptr, key_offsets_ptr, codes_ptr, scales_ptr, offsets_ptr = pools
    key_codes, key_scales, key_offsets, codes, scales, offsets = room
    ratio: gl.constexpr = K.tokens
    quarter: gl.constexpr = ratio // 4
    row = number % K.rows * K.heads + key_head
    C: gl.constexpr = copy_layout(quarter)
    channel = gl.arange(0, K.dim, layout=gl.SliceLayout(1, C))
    half = gl.arange(0, quarter, layout=gl.SliceLayout(0, C))
    at = row_at(unit, row, key_codes_ptr, K.codes_unit, K.codes_base, K.codes_stride, gl.int16)
    copy(key_codes.index(buffer), at + (channel[:, None] * quarter + half[None, :]))
    L: gl.constexpr = gl.BlockedLayout([K.dim // 32], [32], [1], [0])
    channels = gl.arange(0, K.dim, layout=L)
    at = row_at(unit, row, key_scales_ptr, K.scales_unit, K.scales_base, K.scales_stride, gl.bfloat16)
    copy(key_scales.index(buffer), at + channels)
    at = row_at(unit, row, key_offsets_ptr, K.offsets_unit, K.offsets_base, K.offsets_stride, gl.bfloat16)
    copy(key_offsets.index(buffer), at + channels)

    row = number % V.rows * V.heads + value_head
    halves: gl.constexpr = V.dim // 4
    D: gl.constexpr = copy_layout(halves)
    place = gl.arange(0, ratio, layout=gl.SliceLayout(1, D))
    token = place % quarter * 4 + place // quarter
    half = gl.arange(0, halves, layout=gl.SliceLayout(0, D))
    at = row_at(unit, row, codes_ptr, V.codes_unit, V.codes_base, V.codes_stride, gl.int16)
    copy(codes.index(buffer), at + (token[:, None] * halves + half[None, :]))
    groups: gl.constexpr = V.dim // V.width
    E: gl.constexpr = copy_layout(groups)
    place = gl.arange(0, ratio, layout=gl.SliceLayout(1, E))
    token = place % quarter * 4 + place // quarter
    group = gl.arange(0, groups, layout=gl.SliceLayout(0, E))
    at = row_at(unit, row, scales_ptr, V.scales_unit, V.scales_base, V.scales_stride, gl.bfloat16)
    at = at + (token[:, None] * groups + group[None, :])
    copy(scales.index(buffer), at, mask=(number * ratio + token >= earliest)[:, None])
    lines: gl.constexpr = max(8, groups)
    F: gl.constexpr = padded_layout(groups, lines)
    place = gl.arange(0, ratio, layout=gl.SliceLayout(1, F))
    token = place % quarter * 4 + place // quarter
    group = gl.arange(0, lines, layout=gl.SliceLayout(0, F))
    at = row_at(unit, row, offsets_ptr, V.offsets_unit, V.offsets_base, V.offsets_stride, gl.bfloat16)
    at = at + (token[:, None] * groups + group[None, :])
    seen = (number * ratio + token >= earliest)[:, None] & (group < groups)[None, :]
    copy(offsets.index(buffer), at, mask=seen)


@gluon.jit
def weigh(logit, seen, largest, total):
    """Take logits [n, 8] into a running softmax: (largest, total, weights, what sums keep)."""
    logit = gl.where(seen[:, None], logit, float("-inf"))
    above = gl.maximum(largest, gl.max(logit, axis=0))
    finite = gl.where(above == float("-inf"), 0.0, above)
    weight = gl.exp2(logit - finite[None, :])
    kept = gl.exp2(largest - finite)
    return above, total * kept[None, :] + weight, weight, kept


@gluon.jit
def power(EXPONENT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """A power of two as bf16 numbers, from their bits: of a small constant the compiler makes zero."""
    bits: gl.constexpr = (127 + EXPONENT) * 128
    return gl.full([ROWS, COLUMNS], bits, gl.int16, LAYOUT).to(gl.bfloat16, bitcast=True)


@gluon.jit
def multiplied(x, factor):
    """bf16 numbers times others, in pairs."""
    return gl.inline_asm_elementwise(TIMES, "=r,r,r", [x, factor], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def of_codes(half):
    """Halfwords of four codes, two of them side by side -> four tensors of bf16 numbers like them."""
    a, b, c, d = gl.inline_asm_elementwise(
        CODES, "=r,=r,=r,=r,r", [half], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True,
        pack=2,
    )  # fmt: skip
    return a, b, c, d


@gluon.jit
def unpacked(half, LARGE_SCALE: gl.constexpr):
    """``of_codes``, beside an operand that is LOWERED for a large scale."""
    a, b, c, d = of_codes(half)
    if LARGE_SCALE:
        LAYOUT: gl.constexpr = half.type.layout
        lift = power(LOWERED, half.shape[0], half.shape[1], LAYOUT)
        a, b, c, d = multiplied(a, lift), multiplied(b, lift), multiplied(c, lift), multiplied(d, lift)
    return a, b, c, d


@gluon.jit
def of_keys(codes, queries, scale, K: gl.constexpr, M: gl.constexpr, LARGE_SCALE: gl.constexpr):
    """Products [tokens, 8] of a group's codes and of queries [dim, 8] times scales [dim]."""
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    high, low = gl.inline_asm_elementwise(
        SCALED, "=r,=r,r,r", [queries, scale[:, None]], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
    )
    half = codes.permute((1, 0)).load(rows_layout(K.tokens // 4, K.dim))
    a, b, c, d = unpacked(half, LARGE_SCALE)
    keys = gl.convert_layout(piled(a, b, c, d), A)
    products = mma_v2(keys, gl.convert_layout(high, B), gl.full([K.tokens, 8], 0.0, gl.float32, M))
    return mma_v2(keys, gl.convert_layout(low, B), products)


@gluon.jit
def of_values(
    codes, scales, weights, out, kept, V: gl.constexpr, M: gl.constexpr, LARGE_SCALE: gl.constexpr
):  # fmt: skip
    """Outputs, times ``kept``, with a group's values but for their offsets, by groups of channels."""
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    W: gl.constexpr = operand_layout(V.tokens, 8)
    groups: gl.constexpr = V.dim // V.width
    lift: gl.constexpr = RAISED - LOWERED if LARGE_SCALE else RAISED
    lifted = multiplied(weights, power(lift, V.tokens, 8, W))
    each_scale = of_groups(scales.load(scales_layout(V.tokens, groups)), groups)
    a, b, c, d = unpacked(codes.permute((1, 0)).load(rows_layout(V.dim // 4, V.tokens)), LARGE_SCALE)
    values = by_group(a, b, c, d, groups)
    more = ()
    for g in gl.static_range(groups):
        scaled = multiplied(lifted, gl.convert_layout(each_scale[g], gl.SliceLayout(1, W))[:, None])
        some = gl.convert_layout(values[g].reshape([V.width, V.tokens]), A)
        more = more + (mma_v2(some, gl.convert_layout(scaled, B), out[g] * kept[None, :]),)
    return more


@gluon.jit
def units(PLACES: gl.constexpr, LAYOUT: gl.constexpr):
    """What products of PLACES rows, a quarter of them of each code, are to be multiplied by."""
    part = gl.arange(0, PLACES, layout=LAYOUT) // (PLACES // 4)
    return gl.where(part % 2 == 0, UNIT, UNIT / 16)


@gluon.jit
def take_tail(
    slot, first, earliest, position, heads, tails, q, scale, largest, total, out, offset_sums,
    K: gl.constexpr, V: gl.constexpr, TK: gl.constexpr, TV: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """Take the raw rows from position ``first`` on into the running softmax: (largest, total, outputs, offsets)."""
    key_head, value_head = heads
    key_tail_ptr, tail_ptr = tails
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    R: gl.constexpr = rows_layout(K.tokens, K.dim)
    W: gl.constexpr = rows_layout(V.width, K.tokens)
    groups: gl.constexpr = V.dim // V.width
    quarter: gl.constexpr = V.width // 4
    channel = gl.arange(0, K.dim, layout=gl.SliceLayout(0, R))
    number = first + gl.arange(0, K.tokens, layout=gl.SliceLayout(1, R))
    met = (number <= position) & (number >= earliest)
    row = number % TK.rows * TK.heads + key_head
    keys_at = row_at(slot, row, key_tail_ptr, TK.plain_unit, TK.plain_base, TK.plain_stride, gl.bfloat16)
    k = gl.load(keys_at[:, None] + channel[None, :], mask=met[:, None], other=0.0)
    products = mma_v2(gl.convert_layout(k, A), q, gl.full([K.tokens, 8], 0.0, gl.float32, M))
    place = first + gl.arange(0, K.tokens, layout=gl.SliceLayout(1, M))
    seen = (place <= position) & (place >= earliest)
    largest, total, weight, kept = weigh(products * scale, seen, largest, total)
    narrow = gl.inline_asm_elementwise(PAIRED, "=r,r,r", [weight], dtype=gl.bfloat16, is_pure=True, pack=2)
    weights = as_operand(narrow, B)
    token = first + gl.arange(0, K.tokens, layout=gl.SliceLayout(0, W))
    line = gl.arange(0, V.width, layout=gl.SliceLayout(1, W))
    taken = ((token <= position) & (token >= earliest))[None, :]
    row_of = token % TV.rows * TV.heads + value_head
    values_at = row_at(slot, row_of, tail_ptr, TV.plain_unit, TV.plain_base, TV.plain_stride, gl.bfloat16)
    at = values_at[None, :] + (line % quarter * 4 + line // quarter)[:, None]
    more = ()
    for g in gl.static_range(groups):
        v = gl.convert_layout(gl.load(at + g * V.width, mask=taken, other=0.0), A)
        more = more + (mma_v2(v, weights, out[g] * kept[None, :]),)
    return largest, total, more, offset_sums * kept[None, :]


@gluon.jit
def share_of(heads, splits, GROUPS: gl.constexpr):
    """(token, split of its keys, group of heads, first head there, heads of a group) of a program of eight heads."""
    program = gl.program_id(0)
    size = heads // GROUPS
    blocks = (size + 7) // 8
    group = program // blocks % GROUPS
    split = program // (blocks * GROUPS) % splits
    token = program // (blocks * GROUPS * splits)
    return token, split, group, program % blocks * 8, size


@gluon.jit
def seen_by(token, positions_ptr, request_ptr, left_ptr, window, chunk, LEFT: gl.constexpr):
    """(a token's request, its position, the first position that it sees); position -1 where it is nobody's."""
    request = gl.load(request_ptr + token)
    position = gl.load(positions_ptr + token, mask=request >= 0, other=-1)
    request = gl.maximum(request, 0)
    left = position * 0
    if LEFT:
        left = gl.load(left_ptr + request)
    of_chunk = left + (position - left) // gl.maximum(chunk, 1) * chunk
    return request, position, gl.maximum(gl.where(window > 0, position + 1 - window, of_chunk), left)


@gluon.jit
def store_lse(
    lse, some, head, inside, token, split, splits, heads, first, sunk, lse_ptr, partial_lse_ptr, sink_ptr
):  # fmt: skip
    """Store what sums of weights come to, of heads from ``first`` on: (factor of outputs, line of ``first``).

    A line is a token's, or that of its part, where its keys are shared.
    """
    line = token.to(gl.int64) * heads + first
    if splits > 1:
        line = (token.to(gl.int64) * splits + split) * heads + first
        gl.store(partial_lse_ptr + line + head, lse, mask=inside)
    else:
        gl.store(lse_ptr + line + head, lse * 0.6931471805599453, mask=inside)
        if sunk:
            sink = gl.load(sink_ptr + first + head, mask=inside, other=float("-inf")).to(gl.float32)
            some = some / (1.0 + gl.exp2(sink * 1.4426950408889634 - lse))
    return some, line


@gluon.jit(do_not_specialize=["heads", "window", "chunk", "sunk", "table_columns", "splits"])
def attend_codes_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, q_ptr, sink_ptr, key_codes_ptr, key_scales_ptr, key_plain_ptr,
    codes_ptr, scales_ptr, plain_ptr, key_tail_ptr, tail_ptr, positions_ptr, request_ptr, slots_ptr, table_ptr,
    left_ptr, heads, window, chunk, sunk, table_columns, splits, scale,
    K: gl.constexpr, V: gl.constexpr, TK: gl.constexpr, TV: gl.constexpr, LEFT: gl.constexpr, GROUPS: gl.constexpr,
    DEPTH: gl.constexpr,
):  # fmt: skip
    """As ``attend_groups_kernel``, for eight heads at most a program; DEPTH: groups in shared memory."""
    ratio: gl.constexpr = K.tokens
    quarter: gl.constexpr = ratio // 4
    halves: gl.constexpr = V.dim // 4
    groups: gl.constexpr = V.dim // V.width
    lines: gl.constexpr = max(8, groups)
    M: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    Q: gl.constexpr = operand_layout(K.dim, 8)
    W: gl.constexpr = operand_layout(ratio, 8)
    R: gl.constexpr = rows_layout(16, K.dim)
    ROWS: gl.constexpr = gl.SliceLayout(1, M)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, M)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])

    token, split, group, first_head, size = share_of(heads, splits, GROUPS)
    key_head = group * K.heads // GROUPS
    value_head = group * V.heads // GROUPS
    request, position, earliest = seen_by(token, positions_ptr, request_ptr, left_ptr, window, chunk, LEFT)
    closed = (position + 1) // ratio
    first = gl.minimum(earliest // ratio, closed)
    each = (closed - first + splits - 1) // splits
    begin = first + split * each
    end = gl.minimum(begin + each, closed)
    table_at = table_ptr + request.to(gl.int64) * table_columns

    head = first_head + gl.arange(0, 8, layout=gl.SliceLayout(0, Q))
    channel = gl.arange(0, K.dim, layout=gl.SliceLayout(1, Q))
    line = token.to(gl.int64) * heads + group * size
    q = gl.load(q_ptr + (line + head)[None, :] * K.dim + channel[:, None], mask=(head < size)[None, :], other=0.0)
    raw_q = gl.convert_layout(q, B)
    raised = multiplied(q, power(RAISED, K.dim, 8, Q))
    key_codes = gl.allocate_shared_memory(gl.int16, [DEPTH, K.dim, quarter], shared_layout(quarter))
    key_scales = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, K.dim], PLAIN)
    key_offsets = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, K.dim], PLAIN)
    codes = gl.allocate_shared_memory(gl.int16, [DEPTH, ratio, halves], shared_layout(halves))
    scales = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, ratio, groups], FLAT)
    offsets = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, ratio, lines], FLAT)
    pools = key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr
    room = key_codes, key_scales, key_offsets, codes, scales, offsets
    both = key_head, value_head

    largest = gl.full([8], float("-inf"), gl.float32, COLUMNS)
    total = gl.full([ratio, 8], 0.0, gl.float32, M)
    offset_sums = gl.full([16, 8], 0.0, gl.float32, M)
    out = ()
    for _ in gl.static_range(groups):
        out = out + (gl.full([V.width, 8], 0.0, gl.float32, M),)
    place = gl.arange(0, ratio, layout=ROWS)
    member = place % quarter * 4 + place // quarter
    unit_of = (units(ratio, ROWS) * scale)[:, None]
    SPREAD: gl.constexpr = gl.BlockedLayout([K.dim // 32], [32], [1], [0])
    ACROSS: gl.constexpr = gl.BlockedLayout([1, groups], [32, 1], [1, 1], [1, 0])
    for ahead in gl.static_range(DEPTH - 1):
        some_number = begin + ahead
        some_unit = gl.load(table_at + some_number // K.rows, mask=some_number < end, other=0)
        if some_number < end:
            copy_group(ahead, gl.maximum(some_unit, 0), some_number, earliest, both, pools, room, K, V)
        async_copy.commit_group()
    following = begin + DEPTH - 1
    unit = gl.load(table_at + following // K.rows, mask=following < end, other=0)
    buffer = 0
    for number in range(begin, end):
        async_copy.wait_group(DEPTH - 2)
        barrier()
        following = number + DEPTH - 1
        # The next copy's unit is found while this group is multiplied.
        next_unit = gl.load(table_at + (following + 1) // K.rows, mask=following + 1 < end, other=0)
        into = gl.where(buffer == 0, DEPTH - 1, buffer - 1)
        if following < end:
            copy_group(into, gl.maximum(unit, 0), following, earliest, both, pools, room, K, V)
        async_copy.commit_group()
        unit = next_unit

        scale_of = key_scales.index(buffer).load(gl.SliceLayout(1, Q))
        offset = key_offsets.index(buffer).load(gl.SliceLayout(0, R))
        spread = gl.inline_asm_elementwise(
            SAME, "=r,r,r", [offset[None, :], gl.full([16, K.dim], 0, gl.int16, R)],
            dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
        start = mma_v2(gl.convert_layout(spread, A), raw_q, gl.full([16, 8], 0.0, gl.float32, M)) * scale
        starts = twice(start)
        if ratio == 64:
            starts = twice(starts)
        bits = key_scales.index(buffer).load(SPREAD).to(gl.int16, bitcast=True).to(gl.int32)
        if gl.max(bits, axis=0) >= LARGE:
            lowered = multiplied(raised, power(-LOWERED, K.dim, 8, Q))
            products = of_keys(key_codes.index(buffer), lowered, scale_of, K, M, True)
        else:
            products = of_keys(key_codes.index(buffer), raised, scale_of, K, M, False)
        logit = products * unit_of + gl.convert_layout(starts, M)
        largest, total, weight, kept = weigh(logit, number * ratio + member >= earliest, largest, total)

        narrow = gl.inline_asm_elementwise(PAIRED, "=r,r,r", [weight], dtype=gl.bfloat16, is_pure=True, pack=2)
        weights = as_operand(narrow, W)
        offset = offsets.index(buffer).permute((1, 0)).load(rows_layout(lines, ratio))
        if lines == 8:
            offset = twice(offset)
        offset_sums = mma_v2(gl.convert_layout(offset, A), gl.convert_layout(weights, B), offset_sums * kept[None, :])
        bits = scales.index(buffer).load(ACROSS).to(gl.int16, bitcast=True).to(gl.int32)
        if gl.max(gl.max(bits, axis=1), axis=0) >= LARGE:
            out = of_values(codes.index(buffer), scales.index(buffer), weights, out, kept, V, M, True)
        else:
            out = of_values(codes.index(buffer), scales.index(buffer), weights, out, kept, V, M, False)
        buffer = gl.where(buffer == DEPTH - 1, 0, buffer + 1)
    async_copy.wait_group(0)
    plain = ()
    for g in gl.static_range(groups):
        plain = plain + (out[g] * units(V.width, ROWS)[:, None],)
    out = plain

    if split == splits - 1:
        slot = gl.maximum(gl.load(slots_ptr + request), 0)
        tails = key_tail_ptr, tail_ptr
        largest, total, out, offset_sums = take_tail(
            slot, closed * ratio, earliest, position, both, tails, raw_q, scale, largest, total, out, offset_sums,
            K, V, TK, TV, M,
        )  # fmt: skip

    sums = gl.sum(total, axis=0)
    some = 1.0 / gl.where(sums == 0.0, 1.0, sums)
    lse = largest + gl.log2(gl.where(sums == 0.0, 1.0, sums))
    heads_of = first_head + gl.arange(0, 8, layout=COLUMNS)
    inside = heads_of < size
    some, at_line = store_lse(
        lse, some, heads_of, inside, token, split, splits, heads, group * size, sunk, lse_ptr, partial_lse_ptr, sink_ptr
    )
    number_of = gl.arange(0, 16, layout=ROWS)
    row_of = gl.arange(0, V.width, layout=ROWS)
    fourth: gl.constexpr = V.width // 4
    at = (at_line + heads_of)[None, :] * V.dim + (row_of % fourth * 4 + row_of // fourth)[:, None]
    nothing = (sums == 0.0)[None, :]
    for g in gl.static_range(groups):
        of_group = gl.sum(gl.where((number_of == g)[:, None], offset_sums, 0.0), axis=0)
        x = gl.where(nothing, 0.0, (out[g] + of_group[None, :]) * some[None, :])
        if splits > 1:
            gl.store(partial_ptr + at + g * V.width, x, mask=inside[None, :])
        else:
            gl.store(out_ptr + at + g * V.width, x.to(out_ptr.dtype.element_ty), mask=inside[None, :])
