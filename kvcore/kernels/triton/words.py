"""Codes of four bits and of eight, taken from words to bf16 numbers a pair at a time (sm_80's bf16 arithmetic).

NF4's nibbles are looked up: a permutation of bytes picks four entries of a table of eight at once, a second one those
of the other eight, and a third one chooses between them by the fourth bit. All results are exact; NF4's levels, which
are not bf16 numbers, come as a sum of two. The bits of e2m1 are moved to where bf16 has them.
"""

import numpy as np
import triton
import triton.language as tl

from kvcore.kernels.triton.chunks import chunk_scales, decode_chunk, e2m1_pair, load_row, load_scales
from kvcore.spec.codes import NF4_LEVELS


def _upper(values: np.ndarray) -> np.ndarray:
    """fp32 -> the bits of the nearest bf16 numbers."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def table_of(bits: np.ndarray) -> tuple[int, ...]:
    """Sixteen numbers of 16 bits as words: four of the upper bytes, then four of the lower ones."""
    parts = (bits >> 8).astype(np.uint8), (bits & 0xFF).astype(np.uint8)
    return tuple(int(word) for part in parts for word in part.view("<u4"))


_LEVELS = np.array(NF4_LEVELS, np.float32)
_NEAR = _upper(_LEVELS)
_REST = _LEVELS - (_NEAR.astype(np.uint32) << 16).view(np.float32)

TABLES = {"nf4": table_of(_NEAR), "nf4_rest": table_of(_upper(_REST))}

_LOOK_UP = """
    and.b32 s, {word}, 0x7777;
    shr.u32 t, {word}, 1;
    and.b32 t, t, 0x4444;
    or.b32 t, t, 0x3210;
    prmt.b32 a, {0:#x}, {1:#x}, s;
    prmt.b32 b, {2:#x}, {3:#x}, s;
    prmt.b32 h, a, b, t;
    prmt.b32 a, {4:#x}, {5:#x}, s;
    prmt.b32 b, {6:#x}, {7:#x}, s;
    prmt.b32 l, a, b, t;
    prmt.b32 {first}, l, h, 0x5140;
    prmt.b32 {second}, l, h, 0x7362;
"""


def _nibbles(table: str) -> str:
    """Assembly from two words of eight nibbles to eight pairs, nibble n of both."""
    body = """
    and.b32 e, $8, 0x0f0f0f0f;
    and.b32 w, $9, 0x0f0f0f0f;
    shl.b32 w, w, 4;
    or.b32 e, e, w;
    shr.u32 w, $8, 4;
    and.b32 w, w, 0x0f0f0f0f;
    and.b32 o, $9, 0xf0f0f0f0;
    or.b32 o, o, w;
"""
    for word, first in (("e", 0), ("o", 1)):
        names = [f"${first + n}" for n in (0, 2, 4, 6)]
        body += _LOOK_UP.format(*TABLES[table], word=word, first=names[0], second=names[1])
        body += f"shr.u32 {word}, {word}, 16;"
        body += _LOOK_UP.format(*TABLES[table], word=word, first=names[2], second=names[3])
    return "{ .reg .b32 s, t, a, b, h, l, w, e, o;\n" + body + "}"


def _e2m1() -> str:
    """Assembly from two words of eight e2m1 codes to eight pairs, code n of both, times both words' scales."""
    body = """
    prmt.b32 t, $8, $9, 0x5410;
    prmt.b32 u, $8, $9, 0x7632;
    prmt.b32 m, $10, $11, 0x7632;
    mov.b32 z, 0x80008000;
    mov.b32 n, 0x7e807e80;
"""
    body += "".join(e2m1_pair("tu"[code // 4], 4 * (code % 4), f"${code}") for code in range(8))
    return "{ .reg .b32 t, u, m, z, n, a, b;\n" + body + "}"


NF4, NF4_REST = tl.constexpr(_nibbles("nf4")), tl.constexpr(_nibbles("nf4_rest"))
E2M1 = tl.constexpr(_e2m1())

INT8 = tl.constexpr(
    """{
    .reg .b32 t, u, x, s, m;
    mov.b32 m, 0xbf80bf80;
    prmt.b32 t, $4, $5, 0x5140;
    prmt.b32 u, $4, $5, 0x7362;
"""
    + "".join(
        f"""
    prmt.b32 x, {source}, 0x43434343, {selector};
    and.b32 s, x, 0xff80ff80;
    and.b32 x, x, 0xff7fff7f;
    fma.rn.bf16x2 ${number}, s, m, x;
"""
        for number, (source, selector) in enumerate((("t", 0x4140), ("t", 0x4342), ("u", 0x4140), ("u", 0x4342)))
    )
    + "}"
)
"""Two words of four int8 codes to four pairs, code n of both: seven bits beside 128, less 128 or 256 by the sign."""

E4M3 = tl.constexpr(
    """{
    .reg .b32 t, u, x;
    .reg .b16 c0, c1, c2, c3, h0, h1;
    .reg .f32 f0, f1;
    prmt.b32 t, $4, $5, 0x5140;
    prmt.b32 u, $4, $5, 0x7362;
    mov.b32 {c0, c1}, t;
    mov.b32 {c2, c3}, u;
"""
    + "".join(
        f"""
    cvt.rn.f16x2.e4m3x2 x, c{number};
    mov.b32 {{h0, h1}}, x;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    cvt.rn.bf16x2.f32 ${number}, f1, f0;
"""
        for number in range(4)
    )
    + "}"
)
"""Two words of four e4m3 codes to four pairs, code n of both."""


@triton.jit
def byte_parts(word, R: tl.constexpr):
    """Words of four codes -> four tensors of bf16 numbers like it: of the first code of each word, of the second ..."""
    tl.static_assert(R.code == "int8" or R.code == "e4m3", "an element code of a byte that is not known")
    return tl.inline_asm_elementwise(
        INT8 if R.code == "int8" else E4M3, "=r,=r,=r,=r,r,r", [word],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def e2m1_parts(word, scale):
    """Words of eight e2m1 codes and their fp32 scales, powers of two -> eight tensors of bf16 numbers likewise."""
    return tl.inline_asm_elementwise(
        E2M1, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r", [word, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
               tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def nf4_parts(word, ASM: tl.constexpr):
    """Words of eight NF4 codes -> eight tensors of bf16 numbers likewise: the nearest ones, or what these lack."""
    return tl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [word],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
               tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def nf4_sums(word):
    """Words [w, n] -> eight tensors [2 w, n] whose two halves add up to the levels."""
    w: tl.constexpr = word.shape[0]
    n: tl.constexpr = word.shape[1]
    word = tl.reshape(tl.broadcast_to(word[None, :, :], (2, w, n)), (2 * w, n))
    near, rest = nf4_parts(word, NF4), nf4_parts(word, NF4_REST)
    lacking = (tl.arange(0, 2 * w) >= w)[:, None]
    parts = ()
    for p in tl.static_range(8):
        parts = parts + (tl.where(lacking, rest[p], near[p]),)
    return parts


@triton.jit
def load_packed(at, valid, R: tl.constexpr, S: tl.constexpr):
    """``chunks.load_row``, four-bit codes in words where S says that they are taken so."""
    if S.parts == 8:
        codes_at, _, _ = at
        raw = ()
        chunks: tl.constexpr = S.chunks
        for c in tl.static_range(chunks):
            word = c * S.chunk // 8 + tl.arange(0, S.chunk // 8)[None, :]
            pointers = codes_at.to(tl.pointer_type(tl.int32))[:, None] + word
            raw = raw + (tl.load(pointers, mask=valid[:, None], other=0),)
        scales = load_scales(at, valid, R)
    else:
        raw, scales = load_row(at, valid, R, S)
    return raw, scales


@triton.jit
def unpack_chunk(
    raw, scales, valid, FIRST: tl.constexpr, R: tl.constexpr, S: tl.constexpr, TURNED: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """A chunk of rows [n] as S.parts tensors [n, chunk / parts], or [chunk / parts, n] for TURNED ones, keys.

    Channel k is in tensor k mod parts: codes stay where their words are, and nothing moves between threads. With
    S.twice tensors have two halves that add up to the channels.
    """
    n: tl.constexpr = raw.shape[0]
    if S.parts == 1:
        x = decode_chunk(raw, scales, valid, FIRST, R, S, NATIVE)
        parts = (tl.trans(x) if TURNED else x,)
    else:
        word = tl.trans(raw) if TURNED else raw
        if S.parts == 4:
            parts = byte_parts(word, R)
        elif R.code == "nf4":
            parts = nf4_sums(word) if S.twice else nf4_parts(word, NF4)
        else:
            tl.static_assert(R.code == "e2m1", "an element code of four bits that is not known")
            some = chunk_scales(scales, FIRST, R, S, NATIVE)
            groups: tl.constexpr = some.shape[1]
            some = tl.broadcast_to(some[:, :, None], (n, groups, S.chunk // 8 // groups))
            some = tl.reshape(some, (n, S.chunk // 8))
            parts = e2m1_parts(word, tl.trans(some) if TURNED else some)
    return parts
