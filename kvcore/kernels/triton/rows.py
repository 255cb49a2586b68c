"""One tile of rows to and from the pools: encode and store, load and decode, by a ``RowRecord``.

A tile is [n, tiles, width]: n rows, their channels in groups that share a scale. Channel numbers at or above ``quant``
are the plain field's, at or above ``dim`` filling. Bytes that lie in wider elements are addressed in those elements, so
that the compiler sees contiguous runs and moves them in wide accesses.
"""

import triton
import triton.language as tl

from kvcore.kernels.triton.codes import (
    bf16_bits,
    bits_float,
    e2m1_code,
    e2m1_code_of_narrow,
    e2m1_value,
    e4m3_code,
    e4m3_value,
    e8m0_value,
    float_bits,
    int8_code,
    nf4_code,
    nf4_value,
    round_bf16,
)  # fmt: skip


@triton.jit
def channels(R: tl.constexpr):
    """Channel numbers of a tile: [1, tiles, width]."""
    group = tl.arange(0, R.tiles)[None, :, None]
    return group * R.width + tl.arange(0, R.width)[None, None, :]


@triton.jit
def element_offsets(unit, row, UNIT: tl.constexpr, BASE: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr):
    """Offsets [n] (64-bit, in elements of SIZE bytes) of a field of row ``row`` [n] of units [n]."""
    return unit.to(tl.int64) * (UNIT // SIZE) + row.to(tl.int64) * (STRIDE // SIZE) + BASE // SIZE


@triton.jit
def butterfly(x, STRIDE: tl.constexpr, R: tl.constexpr):
    """One stage of the rotation: sums and differences of channels STRIDE apart."""
    n: tl.constexpr = x.shape[0]
    pairs = tl.permute(tl.reshape(x, (n, R.dim // (2 * STRIDE), 2, STRIDE)), (0, 1, 3, 2))
    low, high = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), x.shape)


@triton.jit
def hadamard(x, R: tl.constexpr, NATIVE: tl.constexpr):
    """Rotate rows by the orthonormal Sylvester matrix: butterflies of strides 1, 2, 4 ..., one product, then bf16."""
    for stage in tl.static_range(R.dim.bit_length() - 1):
        x = butterfly(x, 1 << stage, R)
    return round_pairs(x * (R.dim**-0.5), NATIVE)


ROUND_PAIRS = tl.constexpr(
    """{
    .reg .b32 pair;
    cvt.rn.bf16x2.f32 pair, $3, $2;
    shl.b32 $0, pair, 16;
    and.b32 $1, pair, 0xffff0000;
}"""
)


@triton.jit
def round_pairs(x, NATIVE: tl.constexpr):
    """``round_bf16``, of NaN some NaN: two numbers in an instruction, of which one takes a GPU as long as eight."""
    if NATIVE:
        bits = tl.inline_asm_elementwise(ROUND_PAIRS, "=r,=r,f,f", [x], dtype=tl.int32, is_pure=True, pack=2)
        x = bits_float(bits)
    else:
        x = round_bf16(x, NATIVE)
    return x


@triton.jit
def scale_of(largest, R: tl.constexpr, NATIVE: tl.constexpr):
    """Group maxima (fp32 bits, finite) -> (stored bits, fp32 scale) by the record's rule."""
    product = bits_float(tl.maximum(largest, R.floor_bits)) * R.inverse
    if R.scale_floor_bits:
        product = bits_float(tl.maximum(float_bits(product), R.scale_floor_bits))
    if R.rule == "pow2":
        exponent = (float_bits(product) + 0x7FFFFF) >> 23
        scale = bits_float(exponent << 23)
        stored = exponent if R.scale == "e8m0" else exponent << 23
    elif R.rule == "e4m3":
        relative = tl.div_rn(product, tl.full(product.shape, R.global_scale, tl.float32))
        stored = e4m3_code(tl.minimum(tl.maximum(relative, 0.001953125), 448.0), NATIVE)
        scale = e4m3_value(stored, NATIVE) * R.global_scale
    elif R.rule == "quotient":
        quotient = tl.div_rn(bits_float(largest), tl.full(largest.shape, R.largest, tl.float32))
        stored = tl.maximum(float_bits(quotient), R.scale_floor_bits)
        scale = bits_float(stored)
    elif R.rule == "fp32" or R.rule == "absmax":
        scale = bits_float(tl.maximum(largest, R.floor_bits)) if R.rule == "absmax" else product
        stored = float_bits(scale)
    else:
        tl.static_assert(False, "a scale rule that the kernels do not know")
    return stored, scale


@triton.jit
def half_away(x):
    """trunc(x ± 0.5), by what is left over of a magnitude's bits: no product is fused with the sum then."""
    bits = float_bits(x) & 0x7FFFFFFF
    magnitude = bits_float(bits)
    whole = tl.floor(magnitude)
    # 0x3EFFFFFF, the number just below a half, is one in which fp32's sum rounds up.
    up = (magnitude - whole >= 0.5) | (bits == 0x3EFFFFFF)
    whole = tl.where(up, whole + 1.0, whole)
    return tl.where(x < 0.0, -whole, whole)


@triton.jit
def larger(a, b):
    """The larger of two numbers, NaN where one is none."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(x, inside, R: tl.constexpr, NATIVE: tl.constexpr):
    """Bits of the largest magnitude of each group [n, tiles]; of one that is not finite those of infinity, or above."""
    if NATIVE and x.shape[0] > 1 and not R.hadamard:
        # Instructions on fp32 numbers take signs off on the way, which the compiler would do in some of their own. A
        # program of one row lacks registers sooner, and rotated rows have a group's channels in all lanes, of which
        # integers have a maximum in one instruction.
        x = tl.inline_asm_elementwise("abs.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        if R.quant < R.tiles * R.width:
            x = tl.where(inside, x, 0.0)
        largest = float_bits(tl.reduce(x, 2, larger))
    else:
        magnitude = float_bits(x) & 0x7FFFFFFF
        if R.quant < R.tiles * R.width:
            magnitude = tl.where(inside, magnitude, 0)
        largest = tl.max(magnitude, axis=2)
    return largest


@triton.jit
def clamped(x, LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    """Numbers within ± LIMIT; of NaN anything."""
    if NATIVE:
        limit = tl.full(x.shape, LIMIT, tl.float32)
        x = tl.inline_asm_elementwise(
            "min.xorsign.abs.f32 $0, $1, $2;", "=f,f,f", [x, limit], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    return x


@triton.jit
def ratios(x, inside, R: tl.constexpr, NATIVE: tl.constexpr):
    """Values [n, tiles, width] -> (what rounds to codes; scale bits as int32 and finiteness, both [n, tiles])."""
    largest = largest_of(x, inside, R, NATIVE)
    finite = largest < 0x7F800000
    largest = tl.where(finite, largest, 0)
    if R.limit < float("inf"):
        # Values so large that code times scale would be infinite; clamped, a code never is above the code's largest.
        largest = tl.minimum(largest, R.limit_bits)
        x = clamped(x, R.limit, NATIVE)
    stored, scale = scale_of(largest, R, NATIVE)
    if R.rule == "pow2":
        # No clamp: a power of two that is rounded up leaves at most the code's largest value, and a hair.
        ratio = x * bits_float((254 << 23) - float_bits(scale))[:, :, None]
    elif R.rule == "quotient":
        ratio = x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, :, None]
        ratio = clamped(ratio, R.largest, NATIVE)
        if R.code == "int8":
            ratio = half_away(ratio)
    else:
        ratio = tl.div_rn(x, tl.broadcast_to(scale[:, :, None], x.shape))
        ratio = clamped(ratio, R.largest, NATIVE)
    tl.static_assert(R.scale == "e8m0" or R.scale == "e4m3" or R.scale == "fp32", "a scale code that is not known")
    bad: tl.constexpr = 0xFF if R.scale == "e8m0" else (0x7F if R.scale == "e4m3" else 0x7FC00000)
    return ratio, tl.where(finite, stored, bad), finite


@triton.jit
def code_of(ratio, R: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr):
    """Codes as int32 of ``ratios``; NARROW: all came from bf16 numbers. Of groups that are not finite anything."""
    if R.code == "e4m3":
        code = e4m3_code(ratio, NATIVE)
    elif R.code == "e2m1":
        code = e2m1_code_of_narrow(ratio) if NARROW and R.rule == "pow2" else e2m1_code(ratio)
    elif R.code == "int8":
        code = int8_code(ratio)
    elif R.code == "nf4":
        code = nf4_code(ratio)
    else:
        tl.static_assert(False, "an element code that the kernels do not encode")
    return code


E4M3_BYTES = tl.constexpr(
    """{
    .reg .b16 low, high;
    .reg .b32 word;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 word, {low, high};
    and.b32 $0, word, $5;
}"""
)
"""Four numbers to e4m3 codes side by side in a word, of which a word of ones and zeros leaves some."""


@triton.jit
def bytes_of(ratio, finite, R: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr):
    """Codes of a byte each of ``ratios``, zero in groups that are not finite."""
    if NATIVE and R.code == "e4m3":
        kept = tl.broadcast_to(tl.where(finite, 0xFF, 0).to(tl.uint8)[:, :, None], ratio.shape)
        # The compiler would take each code out of its pair, and clear and pack them one by one.
        byte = tl.inline_asm_elementwise(
            E4M3_BYTES, "=r,f,f,f,f,r", [ratio, kept], dtype=tl.uint8, is_pure=True, pack=4
        )  # fmt: skip
    else:
        byte = tl.where(finite[:, :, None], code_of(ratio, R, NARROW, NATIVE), 0).to(tl.uint8)
    return byte


@triton.jit
def store_codes(
    x, unit, row, valid, codes_ptr, scales_ptr, R: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr
):
    """Encode the scaled channels of x [n, tiles, width] and store codes, scales and padding.

    NARROW: every value is a bf16 number.
    """
    n: tl.constexpr = x.shape[0]
    channel = channels(R)
    ratio, scale, finite = ratios(x, channel < R.quant, R, NATIVE)
    at = element_offsets(unit, row, R.codes_unit, R.codes_base, R.codes_stride, 1)[:, None, None]
    if R.code_words:
        eighth = tl.arange(0, R.tiles)[None, :, None] * (R.width // 8) + tl.arange(0, R.width // 8)[None, None, :]
        word = tl.where(finite[:, :, None], words(code_of(ratio, R, NARROW, NATIVE), 4), 0)
        store_words(codes_ptr, at + eighth * 4, word, valid[:, None, None] & (eighth < R.quant // 8))
    elif R.code == "e2m1" or R.code == "nf4":
        code = code_of(ratio, R, NARROW, NATIVE)
        low, high = tl.split(tl.reshape(code, (n, R.tiles, R.width // 2, 2)))
        half = tl.arange(0, R.tiles)[None, :, None] * (R.width // 2) + tl.arange(0, R.width // 2)[None, None, :]
        keep = valid[:, None, None] & (half < R.quant // 2)
        byte = tl.where(finite[:, :, None], low | (high << 4), 0).to(tl.uint8)
        tl.store(codes_ptr + at + half, byte, mask=keep)
    else:
        keep = valid[:, None, None] & (channel < R.quant)
        tl.store(codes_ptr + at + channel, bytes_of(ratio, finite, R, NARROW, NATIVE), mask=keep)
    group = tl.arange(0, R.tiles)[None, :]
    if R.scale == "fp32":
        target = (
            scales_ptr.to(tl.pointer_type(tl.int32))
            + element_offsets(unit, row, R.scales_unit, R.scales_base, R.scales_stride, 4)[:, None]
            + group
        )
        tl.store(target, scale, mask=valid[:, None] & (group < R.groups))
    else:
        scale = tl.where(group < R.groups, scale, 0)
        at = element_offsets(unit, row, R.scales_unit, R.scales_base, R.scales_stride, 1)[:, None]
        if R.scale_words and R.tiles == 4:
            store_words(scales_ptr, at, tl.sum(scale << (group * 8), axis=1)[:, None], valid[:, None])
        else:
            tl.store(scales_ptr + at + group, scale.to(tl.uint8), mask=valid[:, None] & (group < R.groups + R.pad))


@triton.jit
def words(code, BITS: tl.constexpr):
    """Codes of BITS bits (int32, [a, b, c]) side by side in 32-bit words, the first lowest: [a, b, c * BITS / 32]."""
    each: tl.constexpr = 32 // BITS
    apart = tl.reshape(code, (code.shape[0], code.shape[1], code.shape[2] // each, each))
    return tl.sum(apart << (tl.arange(0, each) * BITS)[None, None, None, :], axis=3)


@triton.jit
def store_words(pointer, at, word, mask):
    """Store 32-bit words at byte offsets that are multiples of 4."""
    tl.store(pointer.to(tl.pointer_type(tl.int32)) + at // 4, word, mask=mask)


@triton.jit
def within(x, R: tl.constexpr):
    """Finite values clamped to the plain field's range; infinities and NaN as they are."""
    if R.plain == "bf16" or R.plain == "fp16":
        largest: tl.constexpr = 65504.0 if R.plain == "fp16" else 3.3895313892515355e38
        x = tl.where((float_bits(x) & 0x7FFFFFFF) < 0x7F800000, tl.minimum(tl.maximum(x, -largest), largest), x)
    return x


@triton.jit
def store_plain(x, channel, unit, row, valid, plain_ptr, R: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr):
    """Store x [n, a, b], whose channels are numbered by ``channel`` [1, a, b], in the plain field where they belong.

    NARROW: every value is a bf16 number, which a bf16 field takes as it is.
    """
    size: tl.constexpr = 4 if R.plain == "fp32" else 2
    at = element_offsets(unit, row, R.plain_unit, R.plain_base, R.plain_stride, size)[:, None, None] + (
        channel - R.quant
    )
    keep = valid[:, None, None] & (channel >= R.quant) & (channel < R.dim)
    if not (NARROW and R.plain == "bf16"):
        x = within(x, R)
    if R.plain == "fp32":
        bits = tl.where(x != x, 0x7FC00000, float_bits(x))
        tl.store(plain_ptr.to(tl.pointer_type(tl.int32)) + at, bits, mask=keep)
    elif R.plain == "bf16":
        bits = bf16_bits(x, NATIVE).to(tl.int16)
        tl.store(plain_ptr.to(tl.pointer_type(tl.int16)) + at, bits, mask=keep)
    elif R.plain == "fp16":
        bits = x.to(tl.float16).to(tl.int16, bitcast=True)
        bits = tl.where(x != x, 0x7E00, bits.to(tl.int32)).to(tl.int16)
        tl.store(plain_ptr.to(tl.pointer_type(tl.int16)) + at, bits, mask=keep)
    else:
        tl.static_assert(False, "a plain code that the kernels do not store")


@triton.jit
def store_rows(
    x, unit, row, valid, codes_ptr, scales_ptr, plain_ptr, R: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr
):
    """Encode x [n, tiles, width] fp32 (NARROW: bf16 numbers) and store it at rows [n] of units [n] where ``valid``."""
    if R.hadamard:
        x = hadamard(x, R, NATIVE)
    if R.quant:
        store_codes(x, unit, row, valid, codes_ptr, scales_ptr, R, NARROW or R.hadamard, NATIVE)
    if R.plain != "":
        store_plain(x, channels(R), unit, row, valid, plain_ptr, R, NARROW or R.hadamard, NATIVE)


@triton.jit
def load_scales(unit, row, valid, scales_ptr, R: tl.constexpr, NATIVE: tl.constexpr):
    """Scales [n, tiles] as fp32; 0 where not ``valid``."""
    group = tl.arange(0, R.tiles)[None, :]
    keep = valid[:, None] & (group < R.groups)
    if R.scale == "fp32":
        source = (
            scales_ptr.to(tl.pointer_type(tl.float32))
            + element_offsets(unit, row, R.scales_unit, R.scales_base, R.scales_stride, 4)[:, None]
            + group
        )
        scale = tl.load(source, mask=keep, other=0.0)
    else:
        source = (
            scales_ptr + element_offsets(unit, row, R.scales_unit, R.scales_base, R.scales_stride, 1)[:, None] + group
        )
        scale = scale_value(tl.load(source, mask=keep, other=0).to(tl.int32), R, NATIVE)
    return scale


@triton.jit
def scale_value(stored, R: tl.constexpr, NATIVE: tl.constexpr):
    """Stored scale bits (int32) as fp32."""
    if R.scale == "fp32":
        scale = bits_float(stored)
    elif R.scale == "e8m0":
        scale = e8m0_value(stored)
    elif R.scale == "e4m3":
        scale = e4m3_value(stored, NATIVE)
    else:
        tl.static_assert(False, "a scale code that the kernels do not read")
    return scale


@triton.jit
def code_value(code, R: tl.constexpr, NATIVE: tl.constexpr):
    """Codes (int32) as fp32 values before scaling."""
    if R.code == "e2m1":
        value = e2m1_value(code)
    elif R.code == "nf4":
        value = nf4_value(code)
    elif R.code == "e4m3":
        value = e4m3_value(code, NATIVE)
    elif R.code == "int8":
        value = ((code << 24) >> 24).to(tl.float32)
    else:
        tl.static_assert(False, "an element code that the kernels do not decode")
    return value


@triton.jit
def load_codes(unit, row, valid, codes_ptr, R: tl.constexpr, NATIVE: tl.constexpr):
    """Codes [n, tiles, width] as fp32 values before scaling; 0 where not ``valid``."""
    at = element_offsets(unit, row, R.codes_unit, R.codes_base, R.codes_stride, 1)[:, None, None]
    if R.code == "e2m1" or R.code == "nf4":
        half = tl.arange(0, R.tiles)[None, :, None] * (R.width // 2) + tl.arange(0, R.width // 2)[None, None, :]
        byte = tl.load(codes_ptr + at + half, mask=valid[:, None, None] & (half < R.quant // 2), other=0).to(tl.int32)
        low, high = code_value(byte & 15, R, NATIVE), code_value(byte >> 4, R, NATIVE)
        value = tl.reshape(tl.join(low, high), (unit.shape[0], R.tiles, R.width))
    else:
        channel = channels(R)
        byte = tl.load(codes_ptr + at + channel, mask=valid[:, None, None] & (channel < R.quant), other=0)
        value = code_value(byte.to(tl.int32), R, NATIVE)
    return value


@triton.jit
def load_plain(unit, row, valid, plain_ptr, R: tl.constexpr):
    """The plain field's channels of a tile [n, tiles, width] as fp32; 0 elsewhere and where not ``valid``."""
    channel = channels(R)
    size: tl.constexpr = 4 if R.plain == "fp32" else 2
    at = element_offsets(unit, row, R.plain_unit, R.plain_base, R.plain_stride, size)[:, None, None] + (
        channel - R.quant
    )
    keep = valid[:, None, None] & (channel >= R.quant) & (channel < R.dim)
    if R.plain == "fp32":
        value = tl.load(plain_ptr.to(tl.pointer_type(tl.float32)) + at, mask=keep, other=0.0)
    elif R.plain == "bf16":
        bits = tl.load(plain_ptr.to(tl.pointer_type(tl.int16)) + at, mask=keep, other=0)
        value = bits_float(bits.to(tl.int32) << 16)
    elif R.plain == "fp16":
        value = tl.load(plain_ptr.to(tl.pointer_type(tl.float16)) + at, mask=keep, other=0.0).to(tl.float32)
    else:
        tl.static_assert(False, "a plain code that the kernels do not load")
    return value


@triton.jit
def load_rows(unit, row, valid, codes_ptr, scales_ptr, plain_ptr, R: tl.constexpr, NATIVE: tl.constexpr):
    """Load and decode rows [n] of units [n]: fp32 [n, tiles, width], exact zeros where not ``valid`` [n]."""
    if R.quant:
        value = load_codes(unit, row, valid, codes_ptr, R, NATIVE)
        scale = load_scales(unit, row, valid, scales_ptr, R, NATIVE)
        if R.code == "nf4":
            value = tl.where(valid[:, None, None], value, 0.0)
        value = value * scale[:, :, None] * R.global_scale
        if R.plain != "":
            channel = channels(R)
            value = tl.where(channel < R.quant, value, load_plain(unit, row, valid, plain_ptr, R))
    else:
        value = load_plain(unit, row, valid, plain_ptr, R)
    return value


@triton.jit
def as_stored(x, R: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr):
    """What ``load_rows`` would give of rows x [n, tiles, width] that ``store_rows`` had stored."""
    if R.hadamard:
        x = hadamard(x, R, NATIVE)
    value = x
    if R.plain == "fp32":
        value = bits_float(tl.where(x != x, 0x7FC00000, float_bits(x)))
    elif R.plain == "bf16":
        value = round_bf16(within(x, R), NATIVE)
    elif R.plain == "fp16":
        value = bits_float(tl.where(x != x, 0x7FC00000, float_bits(within(x, R).to(tl.float16).to(tl.float32))))
    else:
        tl.static_assert(R.plain == "", "a plain code that the kernels do not know")
    if R.quant:
        channel = channels(R)
        ratio, scale, finite = ratios(x, channel < R.quant, R, NATIVE)
        code = tl.where(finite[:, :, None], code_of(ratio, R, NARROW or R.hadamard, NATIVE), 0)
        scaled = code_value(code, R, NATIVE) * scale_value(scale, R, NATIVE)[:, :, None] * R.global_scale
        value = tl.where(channel < R.quant, scaled, value)
    return value


@triton.jit
def store_dense(out_ptr, at, x, channel, keep, R: tl.constexpr):
    """Store decoded x [n, tiles, width] as rows of ``dim`` channels at element offsets ``at`` [n]: bf16 or fp32."""
    mask = keep[:, None, None] & (channel < R.dim)
    if R.exact:
        # Decoding is exact in bf16, so the upper half of the fp32 number is the bf16 number, NaN included.
        bits = (float_bits(x) >> 16).to(tl.int16)
        tl.store(out_ptr.to(tl.pointer_type(tl.int16)) + at[:, None, None] + channel, bits, mask=mask)
    else:
        tl.store(out_ptr + at[:, None, None] + channel, x, mask=mask)
