"""Attention to rows of codes of a byte, or of NF4, with fp32 scales: ``attend_kv`` in Gluon, for a token a program.

A program is one warp and takes up to eight query heads. Rows come to shared memory some iterations ahead of their use,
and leave it in the registers that the tensor cores want: neighbouring channels of a key, or a channel of two
neighbouring values, side by side. Keys, then channels of values, are the rows of the products, and heads the columns.
Codes of a byte become fp16 numbers, which hold them all; so do the levels of NF4, but for keys a second product adds
what these lack.

Nothing else leaves fp16's range, either. Queries are multiplied by the power of two that brings their largest channel
to 2^14. Values' scales go into the weights, divided by the largest power of two among them so far; as it grows, sums
shrink.
"""

import numpy as np
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kvcore.kernels.triton.attend_codes import (
    as_operand,
    barrier,
    copy,
    copy_layout,
    operand_layout,
    row_at,
    seen_by,
    share_of,
    shared_layout,
    store_lse,
)
from kvcore.kernels.triton.packed import LEVELS_TIMES
from kvcore.kernels.triton.words import table_of
from kvcore.spec.codes import NF4_LEVELS

ROOM = gl.constexpr(14)
"""The power of two that the largest query channel, and the largest weight, come near to."""
LEAST = gl.constexpr(16)
"""Biased exponent from which on values' scales are told apart."""

_LEVELS = np.array(NF4_LEVELS, np.float32) * np.float32(LEVELS_TIMES)
_NEAR = _LEVELS.astype(np.float16)
_LACKING = (_LEVELS - _NEAR.astype(np.float32)).astype(np.float16).view(np.uint16)
_WORDS = table_of(_NEAR.view(np.uint16))
# The upper bytes, rounded, will do: sums in fp32 are no more exact.
_UPPER = table_of(_LACKING + np.uint16(0x80))[:4]

E4M3_KEYS = """{ .reg .b16 a, b; mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"""
E4M3_VALUES = """{ .reg .b16 a, b; .reg .b32 x; prmt.b32 x, $2, 0, 0x3120; mov.b32 {a, b}, x;
    cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"""


def _int8(first: str, second: str) -> str:
    """Assembly that puts two pairs of bytes, each with 128 more, behind the exponent of 1,024, and takes 1,152 off."""
    return f"""{{ .reg .b32 x, y, z; xor.b32 x, $2, 0x80808080; mov.b32 z, 0x64806480;
    prmt.b32 y, x, 0x64646464, {first}; sub.rn.f16x2 $0, y, z;
    prmt.b32 y, x, 0x64646464, {second}; sub.rn.f16x2 $1, y, z; }}"""


def _looked_up(target: str, place: int, words: tuple[int, ...]) -> str:
    """Assembly from four nibbles, by what ``s`` and ``t`` begin with, to their bytes of a table of sixteen.

    Of two words of a permutation one may be written in the instruction; the other is held from ``place`` on.
    """
    _, second, _, fourth = words
    return f"""prmt.b32 a, {_held(place)}, {second:#x}, s; prmt.b32 b, {_held(place + 1)}, {fourth:#x}, s;
    prmt.b32 {target}, a, b, t;
"""


def _held(place: int) -> str:
    """The operand that word ``place`` of HELD is in, behind four results and the codes: one of two alike."""
    return f"${5 + 2 * place}"


HELD = tuple(word - (word >> 31 << 32) for word in (*_WORDS[:4:2], *_WORDS[4::2], *_UPPER[::2], 0x32103210))
"""Words that a program holds in registers, as int32: what else is constant, each use of them would move there anew."""
_NF4 = f"""{{ .reg .b32 s, t, a, b, h, l, x, y, z, w;
    and.b32 s, $4, 0x77777777; shr.u32 t, $4, 1; lop3.b32 t, t, 0x44444444, {_held(6)}, 0xea;
"""
_BOTH = _looked_up("h", 0, _WORDS[:4]) + _looked_up("l", 2, _WORDS[4:])
_NEXT = "shr.u32 s, s, 16; shr.u32 t, t, 16;\n"


def _pairs(looked_up: str, low: str, high: str, first: str, second: str) -> str:
    """Assembly from a register of eight nibbles to the pairs of each two, from bytes ``low`` and ``high`` of each."""
    halves = (
        f"{looked_up} prmt.b32 ${n}, {low}, {high}, {first}; prmt.b32 ${n + 1}, {low}, {high}, {second};\n"
        for n in (0, 2)
    )
    return _NF4 + _NEXT.join(halves) + "}"


E4M3 = gl.constexpr(E4M3_KEYS), gl.constexpr(E4M3_VALUES)
"""Four codes of a key to two pairs; of two codes of either of two values to pairs of both. Likewise the others."""
INT8 = gl.constexpr(_int8("0x4140", "0x4342")), gl.constexpr(_int8("0x4240", "0x4341"))
NF4 = (
    gl.constexpr(_pairs(_BOTH, "l", "h", "0x5140", "0x7362")),
    gl.constexpr(
        _NF4
        + _BOTH
        + "prmt.b32 x, l, h, 0x5140; prmt.b32 y, l, h, 0x7362;\n"
        + _NEXT
        + _BOTH
        + """prmt.b32 z, l, h, 0x5140; prmt.b32 w, l, h, 0x7362;
    prmt.b32 $0, x, z, 0x5410; prmt.b32 $1, x, z, 0x7632; prmt.b32 $2, y, w, 0x5410; prmt.b32 $3, y, w, 0x7632; }"""
    ),
)
NF4_LACKING = gl.constexpr(_pairs(_looked_up("h", 4, _UPPER), "h", "0", "0x1404", "0x3424"))
"""Of keys: what is lacking of the numbers that the first one gives."""
PAIRED = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


@triton.constexpr_function
def assembly_of(S, which):
    """What takes a register of codes apart: of keys (0) or of values (1)."""
    return {"e4m3": E4M3, "int8": INT8, "nf4": NF4}[S.code][which].value


@triton.constexpr_function
def held_word(number):
    """A word of HELD."""
    return HELD[number]


@gluon.jit
def held_words(nothing):
    """The words of HELD in registers; ``nothing`` is zero, which the compiler must not know."""
    words = ()
    for n in gl.static_range(7):
        words = words + (nothing ^ held_word(n),)
    return words


@gluon.jit
def numbers(half, held, ASSEMBLY: gl.constexpr, S: gl.constexpr):
    """Halfwords of codes, two of them side by side -> S.parts tensors of fp16 numbers like them."""
    if S.parts == 2:
        a, b = gl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,r", [half], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
        )
        parts = a, b
    else:
        a, b, c, d = gl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [half, held[0], held[1], held[2], held[3], held[4], held[5], held[6]],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
        parts = a, b, c, d
    return parts


@gluon.jit
def power(exponent):
    """2^(exponent - 127) of biased exponents, zero from 0 down."""
    return (gl.maximum(exponent, 0) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def exponents(x):
    """Biased exponents of fp32 numbers."""
    return (x.to(gl.int32, bitcast=True) & 0x7FFFFFFF) >> 23


@gluon.jit
def copy_side(
    buffer, unit, first, head, codes_ptr, scales_ptr, codes, scales, low, high, KEYS: gl.constexpr, R: gl.constexpr,
    S: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Start to copy rows of KEYS tokens into a buffer; MASKED: zeros beside those from ``low`` to ``high``."""
    C: gl.constexpr = copy_layout(S.columns)
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    row = first % R.rows * R.heads + head
    number = gl.arange(0, KEYS, layout=gl.SliceLayout(1, C))
    half = gl.arange(0, S.columns, layout=gl.SliceLayout(0, C))
    at = row_at(unit, row, codes_ptr, R.codes_unit, R.codes_base, R.codes_stride, gl.int16)
    at = at + ((number * (R.heads * R.codes_stride // 2))[:, None] + half[None, :])
    place = gl.arange(0, KEYS, layout=L)
    scales_at = row_at(unit, row, scales_ptr, R.scales_unit, R.scales_base, R.scales_stride, gl.float32)
    scales_at = scales_at + place * (R.heads * R.scales_stride // 4)
    fields: gl.constexpr = S.fields
    for g in gl.static_range(fields):
        if MASKED:
            keep = (first + number >= low) & (first + number <= high)
            copy(codes.index(buffer * S.fields + g), at + g * S.columns, mask=keep[:, None])
            keep_scale = (first + place >= low) & (first + place <= high)
            copy(scales.index(buffer * S.fields + g), scales_at + g, mask=keep_scale)
        else:
            copy(codes.index(buffer * S.fields + g), at + g * S.columns)
            copy(scales.index(buffer * S.fields + g), scales_at + g)


@gluon.jit
def copy_tile(
    buffer, tile, unit, heads, pools, room, low, high, K: gl.constexpr, V: gl.constexpr, SK: gl.constexpr,
    SV: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Start to copy keys and values of a tile; of a NaN that no query sees only those would be noticed."""
    key_head, value_head = heads
    key_codes_ptr, key_scales_ptr, codes_ptr, scales_ptr = pools
    key_codes, key_scales, codes, scales = room
    unit, first = gl.maximum(unit, 0), tile * KEYS
    copy_side(
        buffer, unit, first, key_head, key_codes_ptr, key_scales_ptr, key_codes, key_scales, low, high, KEYS, K, SK,
        False,
    )  # fmt: skip
    copy_side(buffer, unit, first, value_head, codes_ptr, scales_ptr, codes, scales, low, high, KEYS, V, SV, True)


@gluon.jit(do_not_specialize=["heads", "window", "chunk", "sunk", "table_columns", "splits"])
def attend_packed_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, q_ptr, sink_ptr, key_codes_ptr, key_scales_ptr, codes_ptr,
    scales_ptr, positions_ptr, request_ptr, table_ptr, left_ptr, heads, window, chunk, sunk, table_columns, splits,
    scale, K: gl.constexpr, V: gl.constexpr, SK: gl.constexpr, SV: gl.constexpr, LEFT: gl.constexpr,
    GROUPS: gl.constexpr, KEYS: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """As ``attend_kv_kernel`` of one token a program, for eight heads at most.

    KEYS: of a tile, which lies in one block; DEPTH: tiles in shared memory.
    """
    M: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    Q: gl.constexpr = operand_layout(SK.columns, 8)
    ROWS: gl.constexpr = gl.SliceLayout(1, M)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, M)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    key_fields: gl.constexpr = SK.fields
    key_parts: gl.constexpr = SK.parts
    fields: gl.constexpr = SV.fields
    parts: gl.constexpr = SV.parts
    key_panels: gl.constexpr = key_fields * key_parts
    panels: gl.constexpr = fields * parts

    token, split, group, first_head, size = share_of(heads, splits, GROUPS)
    key_head = group * K.heads // GROUPS
    value_head = group * V.heads // GROUPS
    request, position, earliest = seen_by(token, positions_ptr, request_ptr, left_ptr, window, chunk, LEFT)
    before = earliest // KEYS
    tiles = (gl.maximum(position + 1 - before * KEYS, 0) + KEYS - 1) // KEYS
    each = (tiles + splits - 1) // splits
    begin = before + gl.minimum(split * each, tiles)
    end = gl.minimum(begin + each, before + tiles)
    table_at = table_ptr + request.to(gl.int64) * table_columns
    # Positions have no sign where there is a tile.
    held = held_words(position >> 31)

    line = token.to(gl.int64) * heads + group * size
    head = first_head + gl.arange(0, 8, layout=gl.SliceLayout(0, Q))
    place = gl.arange(0, SK.columns, layout=gl.SliceLayout(1, Q))
    queries = ()
    most = gl.full([8], 0.0, gl.float32, gl.SliceLayout(0, Q))
    for p in gl.static_range(key_panels):
        of_pair = place // 2 * (2 * SK.parts) + p % SK.parts * 2 + place % 2
        channel = p // SK.parts * (K.dim // SK.fields) + of_pair
        at = q_ptr + (line + head)[None, :] * K.dim + channel[:, None]
        x = gl.load(at, mask=(head < size)[None, :], other=0.0).to(gl.float32)
        most = gl.maximum(most, gl.max(gl.abs(x), axis=0))
        queries = queries + (x,)
    raised = 254 + ROOM - gl.maximum(exponents(most), LEAST)
    q = ()
    for p in gl.static_range(key_panels):
        q = q + (gl.convert_layout((queries[p] * power(raised)[None, :]).to(gl.float16), B),)
    factor = gl.convert_layout(power(254 - raised), COLUMNS) * (scale * SK.factor)

    key_codes = gl.allocate_shared_memory(gl.int16, [DEPTH * SK.fields, KEYS, SK.columns], shared_layout(SK.columns))
    key_scales = gl.allocate_shared_memory(gl.float32, [DEPTH * SK.fields, KEYS], PLAIN)
    codes = gl.allocate_shared_memory(gl.int16, [DEPTH * SV.fields, KEYS, SV.columns], shared_layout(SV.columns))
    scales = gl.allocate_shared_memory(gl.float32, [DEPTH * SV.fields, KEYS], PLAIN)
    room = key_codes, key_scales, codes, scales
    pools = key_codes_ptr, key_scales_ptr, codes_ptr, scales_ptr
    both = key_head, value_head

    largest = gl.full([8], float("-inf"), gl.float32, COLUMNS)
    total = gl.full([8], 0.0, gl.float32, COLUMNS)
    out = ()
    for _ in gl.static_range(panels):
        out = out + (gl.full([SV.columns, 8], 0.0, gl.float32, M),)
    top = position * 0 + LEAST
    for ahead in gl.static_range(DEPTH - 1):
        tile = begin + ahead
        unit = gl.load(table_at + tile * KEYS // K.rows, mask=tile < end, other=0)
        if tile < end:
            copy_tile(ahead, tile, unit, both, pools, room, earliest, position, K, V, SK, SV, KEYS)
        async_copy.commit_group()
    following = begin + DEPTH - 1
    unit = gl.load(table_at + following * KEYS // K.rows, mask=following < end, other=0)
    buffer = 0
    for tile in range(begin, end):
        async_copy.wait_group(DEPTH - 2)
        barrier()
        following = tile + DEPTH - 1
        # The next copy's unit is found while this tile is multiplied.
        next_unit = gl.load(table_at + (following + 1) * KEYS // K.rows, mask=following + 1 < end, other=0)
        into = gl.where(buffer == 0, DEPTH - 1, buffer - 1)
        if following < end:
            copy_tile(into, following, unit, both, pools, room, earliest, position, K, V, SK, SV, KEYS)
        async_copy.commit_group()
        unit = next_unit

        logit = gl.full([KEYS, 8], 0.0, gl.float32, M)
        for g in gl.static_range(key_fields):
            half = key_codes.index(buffer * SK.fields + g).load(A)
            products = gl.full([KEYS, 8], 0.0, gl.float32, M)
            pairs = numbers(half, held, assembly_of(SK, 0), SK)
            for p in gl.static_range(key_parts):
                products = mma_v2(pairs[p], q[g * SK.parts + p], products)
            if SK.twice:
                lacking = numbers(half, held, NF4_LACKING, SK)
                for p in gl.static_range(key_parts):
                    products = mma_v2(lacking[p], q[g * SK.parts + p], products)
            of_keys = key_scales.index(buffer * SK.fields + g).load(ROWS)
            logit = logit + products * of_keys[:, None]
        number = tile * KEYS + gl.arange(0, KEYS, layout=ROWS)
        seen = (number >= earliest) & (number <= position)
        logit = gl.where(seen[:, None], logit * factor[None, :], float("-inf"))
        above = gl.maximum(largest, gl.max(logit, axis=0))
        finite = gl.where(above == float("-inf"), 0.0, above)
        weight = gl.exp2(logit - finite[None, :])
        kept = gl.exp2(largest - finite)
        total = total * kept + gl.sum(weight, axis=0)
        largest = above

        of_values = ()
        before_top = top
        for g in gl.static_range(fields):
            some = scales.index(buffer * SV.fields + g).load(ROWS)
            of_values = of_values + (some,)
            top = gl.maximum(top, gl.max(exponents(some), axis=0))
        shrunk = (kept * power(127 + before_top - top))[None, :]
        lowered = power(254 + ROOM - top)
        more = ()
        for g in gl.static_range(fields):
            scaled = weight * (of_values[g] * lowered)[:, None]
            narrow = gl.inline_asm_elementwise(PAIRED, "=r,r,r", [scaled], dtype=gl.float16, is_pure=True, pack=2)
            weights = as_operand(narrow, B)
            half = codes.index(buffer * SV.fields + g).permute((1, 0)).load(A)
            pairs = numbers(half, held, assembly_of(SV, 1), SV)
            for p in gl.static_range(parts):
                more = more + (mma_v2(pairs[p], weights, out[g * SV.parts + p] * shrunk),)
        out = more
        buffer = gl.where(buffer == DEPTH - 1, 0, buffer + 1)
    async_copy.wait_group(0)

    some = 1.0 / gl.where(total == 0.0, 1.0, total)
    lse = largest + gl.log2(gl.where(total == 0.0, 1.0, total))
    heads_of = first_head + gl.arange(0, 8, layout=COLUMNS)
    inside = heads_of < size
    column = SV.parts * gl.arange(0, SV.columns, layout=ROWS)
    some, at_line = store_lse(
        lse, some, heads_of, inside, token, split, splits, heads, group * size, sunk, lse_ptr, partial_lse_ptr, sink_ptr
    )
    # Times what weights were divided by.
    some = gl.where(total == 0.0, 0.0, some * power(top) * (0.5**ROOM * SV.factor))[None, :]
    offset = (at_line + heads_of)[None, :] * V.dim + column[:, None]
    nothing = (total == 0.0)[None, :]
    for p in gl.static_range(panels):
        x = gl.where(nothing, 0.0, out[p] * some)
        channel = p // SV.parts * (V.dim // SV.fields) + p % SV.parts
        if splits > 1:
            gl.store(partial_ptr + offset + channel, x, mask=inside[None, :])
        else:
            gl.store(out_ptr + offset + channel, x.to(out_ptr.dtype.element_ty), mask=inside[None, :])
