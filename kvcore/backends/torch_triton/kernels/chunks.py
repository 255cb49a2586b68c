"""Rows for products: chunks of channels, loaded as they are stored and decoded where they are used.

A chunk lies in one field and its groups are whole, so nothing is loaded where the other field lies. ``S`` is a record
with the chunk's width, the products' precision (``full``: fp32, else bf16) and ``apart``.
"""

import triton
import triton.language as tl

from kvcore.backends.torch_triton.kernels.codes import e2m1_value, e4m3_value, e8m0_value, nf4_value
from kvcore.backends.torch_triton.kernels.rows import element_offsets


@triton.constexpr_function
def in_words(R):
    """Codes of a byte are loaded four at a time, so that registers hold them packed until they are decoded."""
    places = (R.codes_unit, R.codes_base, R.codes_stride)
    return R.code in ("e4m3", "int8") and all(number % 4 == 0 for number in places)


@triton.jit
def code_value(code, R: tl.constexpr, NATIVE: tl.constexpr):
    """Codes of a byte (int32) -> fp32 before scaling."""
    if R.code == "e4m3":
        value = e4m3_value(code, NATIVE)
    else:
        value = code.to(tl.int8).to(tl.float32)
    return value


@triton.jit
def load_chunk(unit, row, valid, codes_ptr, plain_ptr, FIRST: tl.constexpr, R: tl.constexpr, S: tl.constexpr):
    """Channels FIRST .. FIRST + S.chunk of rows [n] as they are stored: four codes to an int32, bytes, or floats."""
    keep = valid[:, None]
    if FIRST < R.quant and in_words(R):
        at = element_offsets(unit, row, R.codes_unit, R.codes_base, R.codes_stride, 4)[:, None]
        word = FIRST // 4 + tl.arange(0, S.chunk // 4)[None, :]
        raw = tl.load(codes_ptr.to(tl.pointer_type(tl.int32)) + at + word, mask=keep, other=0)
    elif FIRST < R.quant:
        packed: tl.constexpr = 2 if R.code == "e2m1" or R.code == "nf4" else 1
        at = element_offsets(unit, row, R.codes_unit, R.codes_base, R.codes_stride, 1)[:, None]
        byte = FIRST // packed + tl.arange(0, S.chunk // packed)[None, :]
        raw = tl.load(codes_ptr + at + byte, mask=keep, other=0)
    else:
        size: tl.constexpr = 4 if R.plain == "fp32" else 2
        dtype: tl.constexpr = tl.float32 if R.plain == "fp32" else tl.bfloat16 if R.plain == "bf16" else tl.float16
        at = element_offsets(unit, row, R.plain_unit, R.plain_base, R.plain_stride, size)[:, None]
        channel = FIRST - R.quant + tl.arange(0, S.chunk)[None, :]
        if FIRST + S.chunk > R.dim:
            keep = keep & (channel < R.dim - R.quant)
        raw = tl.load(plain_ptr.to(tl.pointer_type(dtype)) + at + channel, mask=keep, other=0.0)
    return raw


@triton.jit
def load_chunk_scales(
    unit, row, valid, scales_ptr, FIRST: tl.constexpr, R: tl.constexpr, S: tl.constexpr, NATIVE: tl.constexpr
):
    """Scales of the chunk's groups, fp32 [n, groups]."""
    groups: tl.constexpr = S.chunk // R.width if R.width < S.chunk else 1
    group = FIRST // R.width + tl.arange(0, groups)[None, :]
    size: tl.constexpr = 4 if R.scale == "fp32" else 1
    at = element_offsets(unit, row, R.scales_unit, R.scales_base, R.scales_stride, size)[:, None] + group
    if R.scale == "fp32":
        scale = tl.load(scales_ptr.to(tl.pointer_type(tl.float32)) + at, mask=valid[:, None], other=0.0)
    else:
        stored = tl.load(scales_ptr + at, mask=valid[:, None], other=0).to(tl.int32)
        if R.scale == "e8m0":
            scale = e8m0_value(stored)
        else:
            scale = e4m3_value(stored, NATIVE)
    return scale


@triton.jit
def decode_chunk(raw, scale, valid, FIRST: tl.constexpr, R: tl.constexpr, S: tl.constexpr, NATIVE: tl.constexpr):
    """What ``load_chunk`` returned as numbers [n, chunk] in the products' precision.

    With S.apart a row's only scale is left to the caller.
    """
    dtype: tl.constexpr = tl.float32 if S.full else tl.bfloat16
    n: tl.constexpr = raw.shape[0]
    if FIRST < R.quant:
        if R.code == "e2m1":
            byte = raw.to(tl.int32)
            value = tl.reshape(tl.join(e2m1_value(byte & 15), e2m1_value(byte >> 4)), (n, S.chunk))
        elif R.code == "nf4":
            byte = raw.to(tl.int32)
            value = tl.reshape(tl.join(nf4_value(byte & 15), nf4_value(byte >> 4)), (n, S.chunk))
            value = tl.where(valid[:, None], value, 0.0)
        elif in_words(R):
            even = tl.join(code_value(raw & 0xFF, R, NATIVE), code_value((raw >> 16) & 0xFF, R, NATIVE))
            odd = tl.join(code_value((raw >> 8) & 0xFF, R, NATIVE), code_value((raw >> 24) & 0xFF, R, NATIVE))
            value = tl.reshape(tl.join(even, odd), (n, S.chunk))
        else:
            value = code_value(raw.to(tl.int32), R, NATIVE)
        if R.groups > 1 or not S.apart:
            groups: tl.constexpr = scale.shape[1]
            value = tl.reshape(value, (n, groups, S.chunk // groups)) * scale[:, :, None]
        x = tl.reshape(value.to(dtype), (n, S.chunk))
    else:
        x = raw.to(dtype)
    return x
