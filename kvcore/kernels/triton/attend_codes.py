"""Attention to int4 keys over tokens and int4 values over channels, from codes as they are: ``attend_groups`` in Gluon.

A program is one warp and takes up to eight query heads of one token. Groups come to shared memory some iterations ahead
of their use, and leave it in the registers that the tensor cores want: two numbers of 16 bits, of neighbouring channels
of keys or neighbouring tokens of values, side by side, each of four codes. A code becomes a bf16 number by an exponent
that is OR'ed to its four bits.

Keys' scales are multiplied into the queries once a group: a product of two bf16 numbers is the sum of two, which are
rows 0 .. 7 and 8 .. 15 of the product, so logits are as exact as in fp32. Their offsets are one number a query and
group, which the sums begin with. Values are offset + code · scale, rounded to bf16 as the weights are.

The tokens of a group are taken in the order in which four products have them: place p is token p mod n · 4 + p div n,
where n is a quarter of the group. Channels of values likewise: output k of four has channels k, 4 + k, and so on.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""By Triton's newer names or its older ones: from pointers to shared memory, and a program's threads together."""
STAGES = 3
"""Groups in shared memory: one in use, the others on their way."""

_CONSTANTS = "mov.b32 m, 0x3f803f80; mov.b32 z, 0xc300c300;\n"


def _code(source: str, number: int, target: str) -> str:
    """Assembly that takes code ``number`` of both halves of a register to a pair of bf16 numbers: 128 + code - 128."""
    shifted = f"shr.u32 x, {source}, {4 * number};\n" if number else f"mov.b32 x, {source};\n"
    return f"{shifted}lop3.b32 x, x, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 {target}, x, m, z;\n"


KEYS = gl.constexpr("{ .reg .b32 x, m, z;\n" + _CONSTANTS + "".join(_code("$4", n, f"${n}") for n in range(4)) + "}")
"""Two halfwords of four codes, side by side, to four pairs: code n of both."""
VALUES = gl.constexpr(
    "{ .reg .b32 x, y, m, z;\n"
    + _CONSTANTS
    + "".join(_code("$4", n, "y") + f"fma.rn.bf16x2 ${n}, y, $5, $6;\n" for n in range(4))
    + "}"
)
"""The same times a pair of scales, and a pair of offsets more."""
SCALED = gl.constexpr(
    "{ .reg .b32 y, z; mov.b32 z, 0x80008000;\n"
    "fma.rn.bf16x2 $0, $2, $3, z; xor.b32 y, $0, z; fma.rn.bf16x2 $1, $2, $3, y; }"
)
"""The products of two pairs, and what these lack: both together are exact."""
PAIRED = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
SAME = gl.constexpr("mov.b32 $0, $1;")


@triton.constexpr_function
def rows_layout(columns):
    """[8, columns] as a product's rows are: pairs of columns in a thread."""
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    more = [[0, 8 << n] for n in range((columns // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1], *more], lanes, [], [], [8, columns])


@triton.constexpr_function
def operand_layout(depth, columns):
    """[depth, columns] as a product's second operand is: pairs along the depth in a thread."""
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    more = [[8 << n, 0] for n in range((depth // 8).bit_length() - 1)]
    across = [[0, 8 << n] for n in range((columns // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout([[1, 0], *more, *across], lanes, [], [], [depth, columns])


@triton.constexpr_function
def grouped_layout(depth, groups, width):
    """The same of [depth, groups, width], whose last two are the columns."""
    lanes = [[2, 0, 0], [4, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    more = [[8 << n, 0, 0] for n in range((depth // 8).bit_length() - 1)]
    across = [[0, 0, 8 << n] for n in range((width // 8).bit_length() - 1)]
    beside = [[0, 1 << n, 0] for n in range(groups.bit_length() - 1)]
    return gl.DistributedLinearLayout([[1, 0, 0], *more, *across, *beside], lanes, [], [], [depth, groups, width])


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


@gluon.jit
def stacked(first, second):
    """[r, n] and [r, n] -> [2 r, n], one below the other."""
    return gl.permute(gl.join(first, second), (2, 0, 1)).reshape([2 * first.shape[0], first.shape[1]])


@gluon.jit
def twice(x, LAYOUT: gl.constexpr):
    """[r] -> [2 r]: the same numbers again."""
    return gl.convert_layout(gl.join(x, x).permute((1, 0)).reshape([2 * x.shape[0]]), LAYOUT)


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
    which = token[:, None] * groups + group[None, :]
    seen = (number * ratio + token >= earliest)[:, None]
    at = row_at(unit, row, scales_ptr, V.scales_unit, V.scales_base, V.scales_stride, gl.bfloat16)
    copy(scales.index(buffer), at + which, mask=seen)
    at = row_at(unit, row, offsets_ptr, V.offsets_unit, V.offsets_base, V.offsets_stride, gl.bfloat16)
    copy(offsets.index(buffer), at + which, mask=seen)


@gluon.jit
def weigh(products, seen, scale, largest, total, L: gl.constexpr, M: gl.constexpr):
    """Take products [16, n] into a running softmax: (largest, total, weights as first operand, what sums keep [16])."""
    columns: gl.constexpr = products.shape[1]
    logit = gl.convert_layout(gl.sum(products.reshape([2, 8, columns]), axis=0), L) * scale
    logit = gl.where(seen[None, :], logit, float("-inf"))
    above = gl.maximum(largest, gl.max(logit, axis=1))
    finite = gl.where(above == float("-inf"), 0.0, above)
    weight = gl.exp2(logit - finite[:, None])
    kept = gl.exp2(largest - finite)
    total = total * kept + gl.sum(weight, axis=1)
    narrow = gl.inline_asm_elementwise(PAIRED, "=r,r,r", [weight], dtype=gl.bfloat16, is_pure=True, pack=2)
    operand = gl.convert_layout(stacked(narrow, narrow), gl.DotOperandLayout(0, M, 2))
    return above, total, operand, twice(kept, gl.SliceLayout(1, M))[:, None]


@gluon.jit
def take_tail(
    slot, first, earliest, position, heads, tails, q, scale, largest, total, out0, out1, out2, out3,
    K: gl.constexpr, V: gl.constexpr, TK: gl.constexpr, TV: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """Take the raw rows from position ``first`` on into the running softmax: (largest, total, four outputs)."""
    key_head, value_head = heads
    key_tail_ptr, tail_ptr = tails
    B: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    L: gl.constexpr = rows_layout(K.tokens)
    R: gl.constexpr = operand_layout(K.dim, K.tokens)
    W: gl.constexpr = operand_layout(K.tokens, V.dim // 4)
    channel = gl.arange(0, K.dim, layout=gl.SliceLayout(1, R))
    number = first + gl.arange(0, K.tokens, layout=gl.SliceLayout(0, R))
    met = (number <= position) & (number >= earliest)
    row = number % TK.rows * TK.heads + key_head
    keys_at = row_at(slot, row, key_tail_ptr, TK.plain_unit, TK.plain_base, TK.plain_stride, gl.bfloat16)
    k = gl.load(keys_at[None, :] + channel[:, None], mask=met[None, :], other=0.0)
    products = mma_v2(q, gl.convert_layout(k, B), gl.full([16, K.tokens], 0.0, gl.float32, M))
    place = first + gl.arange(0, K.tokens, layout=gl.SliceLayout(0, L))
    seen = (place <= position) & (place >= earliest)
    largest, total, weights, kept = weigh(products, seen, scale, largest, total, L, M)
    token = first + gl.arange(0, K.tokens, layout=gl.SliceLayout(1, W))
    fourth = 4 * gl.arange(0, V.dim // 4, layout=gl.SliceLayout(0, W))
    taken = ((token <= position) & (token >= earliest))[:, None]
    row_of = token % TV.rows * TV.heads + value_head
    values_at = row_at(slot, row_of, tail_ptr, TV.plain_unit, TV.plain_base, TV.plain_stride, gl.bfloat16)
    at = values_at[:, None] + fourth[None, :]
    out0 = mma_v2(weights, gl.convert_layout(gl.load(at, mask=taken, other=0.0), B), out0 * kept)
    out1 = mma_v2(weights, gl.convert_layout(gl.load(at + 1, mask=taken, other=0.0), B), out1 * kept)
    out2 = mma_v2(weights, gl.convert_layout(gl.load(at + 2, mask=taken, other=0.0), B), out2 * kept)
    out3 = mma_v2(weights, gl.convert_layout(gl.load(at + 3, mask=taken, other=0.0), B), out3 * kept)
    return largest, total, out0, out1, out2, out3


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
    M: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    Q: gl.constexpr = rows_layout(K.dim)
    L: gl.constexpr = rows_layout(ratio)
    S: gl.constexpr = operand_layout(K.dim, quarter)
    G: gl.constexpr = grouped_layout(ratio, groups, V.width // 4)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [0])

    program = gl.program_id(0)
    size = heads // GROUPS
    blocks = (size + 7) // 8
    group = program // blocks % GROUPS
    split = program // (blocks * GROUPS) % splits
    token = program // (blocks * GROUPS * splits)
    first_head = program % blocks * 8
    key_head = group * K.heads // GROUPS
    value_head = group * V.heads // GROUPS
    request = gl.load(request_ptr + token)
    position = gl.load(positions_ptr + token, mask=request >= 0, other=-1)
    request = gl.maximum(request, 0)
    left = position * 0
    if LEFT:
        left = gl.load(left_ptr + request)
    of_chunk = left + (position - left) // gl.maximum(chunk, 1) * chunk
    earliest = gl.maximum(gl.where(window > 0, position + 1 - window, of_chunk), left)
    closed = (position + 1) // ratio
    first = gl.minimum(earliest // ratio, closed)
    each = (closed - first + splits - 1) // splits
    begin = first + split * each
    end = gl.minimum(begin + each, closed)
    table_at = table_ptr + request.to(gl.int64) * table_columns

    row = first_head + gl.arange(0, 8, layout=gl.SliceLayout(1, Q))
    channel = gl.arange(0, K.dim, layout=gl.SliceLayout(0, Q))
    line = token.to(gl.int64) * heads + group * size
    q = gl.load(q_ptr + (line + row)[:, None] * K.dim + channel[None, :], mask=(row < size)[:, None], other=0.0)
    raw_q = gl.convert_layout(stacked(q, gl.full([8, K.dim], 0.0, gl.bfloat16, Q)), A)
    key_codes = gl.allocate_shared_memory(gl.int16, [DEPTH, K.dim, quarter], shared_layout(quarter))
    key_scales = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, K.dim], PLAIN)
    key_offsets = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, K.dim], PLAIN)
    codes = gl.allocate_shared_memory(gl.int16, [DEPTH, ratio, halves], shared_layout(halves))
    scales = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, ratio, groups], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
    offsets = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, ratio, groups], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
    pools = key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr
    room = key_codes, key_scales, key_offsets, codes, scales, offsets
    both = key_head, value_head

    largest = gl.full([8], float("-inf"), gl.float32, gl.SliceLayout(1, L))
    total = gl.full([8], 0.0, gl.float32, gl.SliceLayout(1, L))
    out0 = gl.full([16, halves], 0.0, gl.float32, M)
    out1, out2, out3 = out0, out0, out0
    place = gl.arange(0, ratio, layout=gl.SliceLayout(0, L))
    member = place % quarter * 4 + place // quarter
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

        scale_of = key_scales.index(buffer).load(gl.SliceLayout(0, Q))
        high, low = gl.inline_asm_elementwise(
            SCALED, "=r,=r,r,r", [q, scale_of[None, :]], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
        turned = gl.convert_layout(stacked(high, low), A)
        offset = key_offsets.index(buffer).load(gl.SliceLayout(1, S))
        spread = gl.inline_asm_elementwise(
            SAME, "=r,r,r", [offset[:, None], gl.full([K.dim, quarter], 0, gl.int16, S)],
            dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
        start = mma_v2(raw_q, gl.convert_layout(spread, B), gl.full([16, quarter], 0.0, gl.float32, M))
        k0, k1, k2, k3 = gl.inline_asm_elementwise(
            KEYS, "=r,=r,=r,=r,r", [key_codes.index(buffer).load(B)],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        first_two = gl.join(mma_v2(turned, k0, start), mma_v2(turned, k2, start))
        last_two = gl.join(mma_v2(turned, k1, start), mma_v2(turned, k3, start))
        products = gl.permute(gl.join(first_two, last_two), (0, 2, 3, 1)).reshape([16, ratio])
        seen = number * ratio + member >= earliest
        largest, total, weights, kept = weigh(products, seen, scale, largest, total, L, M)
        pairs = gl.convert_layout(codes.index(buffer).load(B).reshape([ratio, groups, V.width // 4]), G)
        scale_of = scales.index(buffer).load(gl.SliceLayout(2, G))
        offset = offsets.index(buffer).load(gl.SliceLayout(2, G))
        v0, v1, v2, v3 = gl.inline_asm_elementwise(
            VALUES, "=r,=r,=r,=r,r,r,r", [pairs, scale_of[:, :, None], offset[:, :, None]],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        out0 = mma_v2(weights, gl.convert_layout(v0.reshape([ratio, halves]), B), out0 * kept)
        out1 = mma_v2(weights, gl.convert_layout(v1.reshape([ratio, halves]), B), out1 * kept)
        out2 = mma_v2(weights, gl.convert_layout(v2.reshape([ratio, halves]), B), out2 * kept)
        out3 = mma_v2(weights, gl.convert_layout(v3.reshape([ratio, halves]), B), out3 * kept)
        buffer = gl.where(buffer == DEPTH - 1, 0, buffer + 1)
    async_copy.wait_group(0)

    if split == splits - 1:
        slot = gl.maximum(gl.load(slots_ptr + request), 0)
        tails = key_tail_ptr, tail_ptr
        largest, total, out0, out1, out2, out3 = take_tail(
            slot, closed * ratio, earliest, position, both, tails, raw_q, scale, largest, total, out0, out1, out2, out3,
            K, V, TK, TV, M,
        )  # fmt: skip

    some = 1.0 / gl.where(total == 0.0, 1.0, total)
    lse = largest + gl.log2(gl.where(total == 0.0, 1.0, total))
    heads_of = first_head + gl.arange(0, 8, layout=gl.SliceLayout(1, L))
    inside = heads_of < size
    rows_of = gl.arange(0, 16, layout=gl.SliceLayout(1, M))
    keep = (rows_of < 8) & (first_head + rows_of < size)
    fourth = 4 * gl.arange(0, halves, layout=gl.SliceLayout(0, M))
    if splits > 1:
        part_line = (token.to(gl.int64) * splits + split) * heads + group * size
        gl.store(partial_lse_ptr + part_line + heads_of, lse, mask=inside)
        partial_at = partial_ptr + (part_line + first_head + rows_of)[:, None] * V.dim + fourth[None, :]
        store_quarters(partial_at, out0, out1, out2, out3, some, total, keep, M)
    else:
        gl.store(lse_ptr + line + heads_of, lse * 0.6931471805599453, mask=inside)
        if sunk:
            sink = gl.load(sink_ptr + group * size + heads_of, mask=inside, other=float("-inf")).to(gl.float32)
            some = some / (1.0 + gl.exp2(sink * 1.4426950408889634 - lse))
        at = out_ptr + (line + first_head + rows_of)[:, None] * V.dim + fourth[None, :]
        store_quarters(at, out0, out1, out2, out3, some, total, keep, M)


@gluon.jit
def store_quarters(at, out0, out1, out2, out3, some, total, keep, M: gl.constexpr):
    """Store every fourth channel, from each of four on, of the rows that are kept, times ``some``."""
    factor = twice(gl.where(total == 0.0, 0.0, some), gl.SliceLayout(1, M))[:, None]
    nothing = twice(total, gl.SliceLayout(1, M))[:, None] == 0.0
    store_quarter(at, gl.where(nothing, 0.0, out0 * factor), keep)
    store_quarter(at + 1, gl.where(nothing, 0.0, out1 * factor), keep)
    store_quarter(at + 2, gl.where(nothing, 0.0, out2 * factor), keep)
    store_quarter(at + 3, gl.where(nothing, 0.0, out3 * factor), keep)


@gluon.jit
def store_quarter(at, x, keep):
    """Store numbers at pointers where rows are kept."""
    gl.store(at, x.to(at.dtype.element_ty), mask=keep[:, None])
