"""Rows for products: chunks of channels, loaded as they are stored and decoded where they are used.

A chunk lies in one field and its groups are whole, so nothing is loaded where the other field lies. Between loading and
decoding, codes of a byte and scales of a byte stay packed in words. ``S`` is a record with the chunk's width, the
products' precision (``full``: fp32, else bf16) and ``apart``.
"""

import triton
import triton.language as tl

from kvcore.kernels.triton.codes import e2m1_value, nf4_value
from kvcore.kernels.triton.rows import code_value, element_offsets, scale_value


@triton.constexpr_function
def in_words(R):
    """Codes of a byte are loaded four at a time where rows begin on multiples of four bytes."""
    places = (R.codes_unit, R.codes_base, R.codes_stride)
    return R.code in ("e4m3", "int8") and all(number % 4 == 0 for number in places)


@triton.constexpr_function
def nibble_words(R, S):
    """e2m1 codes are loaded eight at a time where rows of many groups begin on multiples of four bytes.

    Rows of few, index keys and heads, have kernels of their own for that.
    """
    places = (R.codes_unit, R.codes_base, R.codes_stride)
    return R.code == "e2m1" and R.groups > 8 and not S.full and all(number % 4 == 0 for number in places)


@triton.constexpr_function
def scale_words(R):
    """Words that hold a row's scales of a byte, padding included; 0 where they are not whole aligned words."""
    places = (R.scales_unit, R.scales_base, R.scales_stride)
    words = -(-R.groups // 4)
    whole = R.scale in ("e8m0", "e4m3") and all(number % 4 == 0 for number in places)
    return words if whole and 4 * words <= R.groups + R.pad else 0


@triton.jit
def row_pointers(unit, row, codes_ptr, scales_ptr, plain_ptr, R: tl.constexpr):
    """(codes, scales, plain channels), byte pointers [n], of rows [n] of units [n]."""
    return (
        codes_ptr + element_offsets(unit, row, R.codes_unit, R.codes_base, R.codes_stride, 1),
        scales_ptr + element_offsets(unit, row, R.scales_unit, R.scales_base, R.scales_stride, 1),
        plain_ptr + element_offsets(unit, row, R.plain_unit, R.plain_base, R.plain_stride, 1),
    )


@triton.jit
def load_chunk(at, valid, FIRST: tl.constexpr, R: tl.constexpr, S: tl.constexpr):
    """Channels FIRST .. FIRST + S.chunk of rows [n]: codes in int32 or in bytes, or floats; else zeros."""
    codes_at, _, plain_at = at
    keep = valid[:, None]
    if R.quant > FIRST and in_words(R):
        word = FIRST // 4 + tl.arange(0, S.chunk // 4)[None, :]
        raw = tl.load(codes_at.to(tl.pointer_type(tl.int32))[:, None] + word, mask=keep, other=0)
    elif R.quant > FIRST and nibble_words(R, S):
        word = FIRST // 8 + tl.arange(0, S.chunk // 8)[None, :]
        raw = tl.load(codes_at.to(tl.pointer_type(tl.int32))[:, None] + word, mask=keep, other=0)
    elif R.quant > FIRST:
        packed: tl.constexpr = 2 if R.code == "e2m1" or R.code == "nf4" else 1
        byte = FIRST // packed + tl.arange(0, S.chunk // packed)[None, :]
        raw = tl.load(codes_at[:, None] + byte, mask=keep, other=0)
    else:
        tl.static_assert(R.plain == "fp32" or R.plain == "bf16" or R.plain == "fp16", "a plain code that is not known")
        dtype: tl.constexpr = tl.float32 if R.plain == "fp32" else tl.bfloat16 if R.plain == "bf16" else tl.float16
        channel = FIRST - R.quant + tl.arange(0, S.chunk)[None, :]
        if FIRST + S.chunk > R.dim:
            keep = keep & (channel < R.dim - R.quant)
        raw = tl.load(plain_at.to(tl.pointer_type(dtype))[:, None] + channel, mask=keep, other=0.0)
    return raw


@triton.jit
def load_scales(at, valid, R: tl.constexpr):
    """A row's scales: its words, int32 [n] each; or each of them, fp32 bits or a byte, as int32 [n]."""
    _, scales_at, _ = at
    scales = ()
    words: tl.constexpr = scale_words(R)
    groups: tl.constexpr = R.groups
    if words:
        for w in tl.static_range(words):
            scales = scales + (tl.load(scales_at.to(tl.pointer_type(tl.int32)) + w, mask=valid, other=0),)
    elif R.scale == "fp32":
        for g in tl.static_range(groups):
            scales = scales + (tl.load(scales_at.to(tl.pointer_type(tl.int32)) + g, mask=valid, other=0),)
    else:
        tl.static_assert(R.scale == "e8m0" or R.scale == "e4m3", "a scale code that the kernels do not load")
        for g in tl.static_range(groups):
            scales = scales + (tl.load(scales_at + g, mask=valid, other=0).to(tl.int32),)
    return scales


def of_e4m3_word(numbers: str = "", pairs: str = "") -> str:
    """Assembly from a word of four e4m3 codes to as many bf16 numbers.

    ``numbers`` and ``pairs`` are what is done to them on the way: to f0 .. f3 in fp32, to x and y of two bf16 numbers.
    """
    return f"""{{
    .reg .b16 low, high, h0, h1, h2, h3;
    .reg .b32 x, y;
    .reg .f32 f0, f1, f2, f3;
    mov.b32 {{low, high}}, $4;
    cvt.rn.f16x2.e4m3x2 x, low;
    cvt.rn.f16x2.e4m3x2 y, high;
    mov.b32 {{h0, h1}}, x;
    mov.b32 {{h2, h3}}, y;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    cvt.f32.f16 f2, h2;
    cvt.f32.f16 f3, h3;
    {numbers}
    cvt.rn.bf16x2.f32 x, f1, f0;
    cvt.rn.bf16x2.f32 y, f3, f2;
    {pairs}
    mov.b32 {{$0, $1}}, x;
    mov.b32 {{$2, $3}}, y;
}}"""


E4M3_WORD = tl.constexpr(of_e4m3_word())
E4M3_WORD_TIMES = tl.constexpr(of_e4m3_word(numbers="\n".join(f"mul.f32 f{n}, f{n}, $5;" for n in range(4))))
E4M3_WORD_TIMES_PAIR = tl.constexpr(of_e4m3_word(pairs="mul.rn.bf16x2 x, x, $5;\nmul.rn.bf16x2 y, y, $5;"))
"""Times an fp32 number, and times a bf16 number that a register holds twice."""


@triton.jit
def e4m3_words(word):
    """Words of four e4m3 codes [n, w] -> bf16 [n, 4 w]."""
    a, b, c, d = tl.inline_asm_elementwise(
        E4M3_WORD, "=h,=h,=h,=h,r", [word], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True,
        pack=1,
    )  # fmt: skip
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (word.shape[0], 4 * word.shape[1]))


@triton.jit
def scaled_e4m3_words(word, scale):
    """Words of four e4m3 codes [n, w] times scales [n, w] -> bf16 [n, 4 w]."""
    a, b, c, d = tl.inline_asm_elementwise(
        E4M3_WORD_TIMES, "=h,=h,=h,=h,r,f", [word, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
    )  # fmt: skip
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (word.shape[0], 4 * word.shape[1]))


def e2m1_pair(source: str, first: int, result: str) -> str:
    """Assembly from an e2m1 code at bit ``first`` of either half of a register to a pair, times the halves of ``m``.

    A code's magnitude, placed on either side of the border between a bf16 number's exponent and its mantissa, is the
    code's value times 2^-126, subnormal ones included. ``n`` holds 2^126 twice, ``z`` two negative zeros.
    """
    moved = "".join(
        f"{'shl.b32' if bits >= 0 else 'shr.u32'} {register}, {source}, {abs(bits)};"
        for register, bits in (("a", 6 - first), ("b", 12 - first))
    )
    return f"""
    {moved}
    and.b32 a, a, 0x01c001c0;
    and.b32 b, b, 0x80008000;
    or.b32 a, a, b;
    fma.rn.bf16x2 a, a, n, z;
    fma.rn.bf16x2 {result}, a, m, z;
"""


E2M1_WORD = tl.constexpr(
    """{
    .reg .b32 t, u, m, z, n, a, b, p0, p1, p2, p3;
    shr.u32 a, $8, 4;
    prmt.b32 t, $8, a, 0x5410;
    prmt.b32 u, $8, a, 0x7632;
    prmt.b32 m, $9, $9, 0x3232;
    mov.b32 z, 0x80008000;
    mov.b32 n, 0x7e807e80;
"""
    + "".join(
        e2m1_pair("tu"[pair // 2], 8 * (pair % 2), f"p{pair}") + f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, p{pair};"
        for pair in range(4)
    )
    + "}"
)
"""A word of eight e2m1 codes, neighbours as pairs, to eight bf16 numbers times the upper half of an fp32 scale."""


@triton.jit
def scaled_e2m1_words(word, scale):
    """Words of eight e2m1 codes [n, w] times scales [n, w] that are bf16 numbers in fp32 -> bf16 [n, 8 w]."""
    a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
        E2M1_WORD,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [word, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
               tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )  # fmt: skip
    even, odd = tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(even, odd), (word.shape[0], 8 * word.shape[1]))


@triton.jit
def word_scales(
    scales, FIRST: tl.constexpr, R: tl.constexpr, S: tl.constexpr, NATIVE: tl.constexpr, N: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """Scales of the chunk's words of EACH codes, [n, chunk / EACH]."""
    some = chunk_scales(scales, FIRST, R, S, NATIVE)
    groups: tl.constexpr = some.shape[1]
    some = tl.broadcast_to(some[:, :, None], (N, groups, S.chunk // EACH // groups))
    return tl.reshape(some, (N, S.chunk // EACH))


@triton.jit
def nibble_scales(scales, FIRST: tl.constexpr, R: tl.constexpr, S: tl.constexpr, NATIVE: tl.constexpr, N: tl.constexpr):
    """Scales of the chunk's words of eight codes, [n, chunk / 8]: where one word holds them, each takes its own."""
    if scale_words(R) and S.chunk <= 4 * R.width:
        first: tl.constexpr = FIRST // R.width
        group = first % 4 + 8 * tl.arange(0, S.chunk // 8) // R.width
        scale = scale_value((scales[first // 4][:, None] >> 8 * group[None, :]) & 0xFF, R, NATIVE)
    else:
        scale = word_scales(scales, FIRST, R, S, NATIVE, N, 8)
    return scale


@triton.jit
def chunk_scales(scales, FIRST: tl.constexpr, R: tl.constexpr, S: tl.constexpr, NATIVE: tl.constexpr):
    """Scales of the groups of the chunk from channel FIRST on, fp32 [n, groups]."""
    groups: tl.constexpr = S.chunk // R.width if R.width < S.chunk else 1
    first: tl.constexpr = FIRST // R.width
    words: tl.constexpr = scale_words(R)
    if words:
        # The chunk's groups lie in one word, or fill several.
        some: tl.constexpr = groups if groups < 4 else 4
        for w in tl.static_range((groups + 3) // 4):
            shift = 8 * ((first + 4 * w) % 4 + tl.arange(0, some))[None, :]
            stored = (scales[(first + 4 * w) // 4][:, None] >> shift) & 0xFF
            part = scale_value(stored, R, NATIVE)
            scale = part if w == 0 else side_by_side(scale, part)  # noqa: F821 - bound from the second word on
    else:
        for g in tl.static_range(groups):
            part = scale_value(scales[first + g], R, NATIVE)[:, None]
            scale = part if g == 0 else side_by_side(scale, part)
    return scale


@triton.jit
def scaled(value, scales, FIRST: tl.constexpr, R: tl.constexpr, S: tl.constexpr, NATIVE: tl.constexpr):
    """Codes' values [n, chunk] of the chunk from FIRST on, times their groups' scales."""
    n: tl.constexpr = value.shape[0]
    scale = chunk_scales(scales, FIRST, R, S, NATIVE)
    groups: tl.constexpr = scale.shape[1]
    value = tl.reshape(value, (n, groups, S.chunk // groups)) * scale[:, :, None]
    return tl.reshape(value, (n, S.chunk))


@triton.jit
def side_by_side(left, right):
    """[n, w] and [n, w] -> [n, 2 w]."""
    n: tl.constexpr = left.shape[0]
    w: tl.constexpr = left.shape[1]
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (n, 2 * w))


@triton.jit
def decode_chunk(raw, scales, valid, FIRST: tl.constexpr, R: tl.constexpr, S: tl.constexpr, NATIVE: tl.constexpr):
    """What ``load_chunk`` and ``load_scales`` returned as numbers [n, chunk] in the products' precision.

    With S.apart a row's only scale is left to the caller.
    """
    dtype: tl.constexpr = tl.float32 if S.full else tl.bfloat16
    n: tl.constexpr = raw.shape[0]
    if R.quant > FIRST:
        if nibble_words(R, S) and NATIVE:
            x = scaled_e2m1_words(raw, nibble_scales(scales, FIRST, R, S, NATIVE, n))
        elif nibble_words(R, S):
            code = (raw[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
            value = e2m1_value(tl.reshape(code, (n, S.chunk)))
        elif R.code == "e2m1":
            byte = raw.to(tl.int32)
            value = tl.reshape(tl.join(e2m1_value(byte & 15), e2m1_value(byte >> 4)), (n, S.chunk))
        elif R.code == "nf4":
            byte = raw.to(tl.int32)
            value = tl.reshape(tl.join(nf4_value(byte & 15), nf4_value(byte >> 4)), (n, S.chunk))
            value = tl.where(valid[:, None], value, 0.0)
        elif in_words(R) and R.code == "e4m3" and NATIVE and not S.full:
            if R.groups == 1 and S.apart:
                x = e4m3_words(raw)
            else:
                x = scaled_e4m3_words(raw, word_scales(scales, FIRST, R, S, NATIVE, n, 4))
        elif in_words(R):
            even = tl.join(code_value(raw & 0xFF, R, NATIVE), code_value((raw >> 16) & 0xFF, R, NATIVE))
            odd = tl.join(code_value((raw >> 8) & 0xFF, R, NATIVE), code_value((raw >> 24) & 0xFF, R, NATIVE))
            value = tl.reshape(tl.join(even, odd), (n, S.chunk))
        else:
            value = code_value(raw.to(tl.int32), R, NATIVE)
        # Those were scaled as they were taken from their words.
        if not (NATIVE and not S.full and (nibble_words(R, S) or (in_words(R) and R.code == "e4m3"))):
            if R.groups > 1 or not S.apart:
                value = scaled(value, scales, FIRST, R, S, NATIVE)
            x = value.to(dtype)
    else:
        x = raw.to(dtype)
    return x


@triton.jit
def load_row(at, valid, R: tl.constexpr, S: tl.constexpr):
    """(chunks, scales) of rows [n] as they are stored, all loads under way at once."""
    chunks: tl.constexpr = S.chunks
    raw = ()
    for c in tl.static_range(chunks):
        raw = raw + (load_chunk(at, valid, c * S.chunk, R, S),)
    scales = ()
    if R.quant:
        scales = load_scales(at, valid, R)
    return raw, scales
