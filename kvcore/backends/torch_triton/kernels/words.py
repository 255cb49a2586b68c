"""Codes of four bits and of eight, taken from words to bf16 numbers a pair at a time (sm_90's bf16 arithmetic).

Nibbles are looked up: a permutation of bytes picks four entries of a table of eight at once, a second one those of the
other eight, and a third one chooses between them by the fourth bit. All results are exact; NF4's levels, which are not
bf16 numbers, come as a sum of two.
"""

import numpy as np
import triton
import triton.language as tl

from kvcore.backends.torch_triton.kernels.chunks import chunk_scales, decode_chunk, load_row, load_scales
from kvcore.spec.codes import E2M1_LEVELS, NF4_LEVELS


def _upper(values: np.ndarray) -> np.ndarray:
    """fp32 -> the bits of the nearest bf16 numbers."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def _table(bits: np.ndarray) -> tuple[int, ...]:
    """Sixteen bf16 numbers as words: four of the upper bytes, then four of the lower ones."""
    parts = (bits >> 8).astype(np.uint8), (bits & 0xFF).astype(np.uint8)
    return tuple(int(word) for part in parts for word in part.view("<u4"))


_LEVELS = np.array(NF4_LEVELS, np.float32)
_NEAR = _upper(_LEVELS)
_REST = _LEVELS - (_NEAR.astype(np.uint32) << 16).view(np.float32)
_E2M1 = np.array([*E2M1_LEVELS, *(-level for level in E2M1_LEVELS)], np.float32)

TABLES = {"nf4": _table(_NEAR), "nf4_rest": _table(_upper(_REST)), "e2m1": _table(_upper(_E2M1))}

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


def _look_up(table: str, scaled: bool) -> str:
    """Assembly from a word of eight nibbles to eight bf16 numbers, times a pair of equal ones if scaled."""
    body = _LOOK_UP.format(*TABLES[table], word="$8", first="x", second="y")
    body += "shr.u32 w, $8, 16;" + _LOOK_UP.format(*TABLES[table], word="w", first="u", second="v")
    if scaled:
        body += "mov.b32 z, 0x80008000;"
        body += "".join(f"fma.rn.bf16x2 {name}, {name}, $9, z;" for name in "xyuv")
    body += "".join(f"mov.b32 {{${2 * n}, ${2 * n + 1}}}, {name};" for n, name in enumerate("xyuv"))
    return "{ .reg .b32 s, t, a, b, h, l, w, x, y, u, v, z;\n" + body + "}"


NF4, NF4_REST = tl.constexpr(_look_up("nf4", False)), tl.constexpr(_look_up("nf4_rest", False))
E2M1 = tl.constexpr(_look_up("e2m1", True))
EIGHT, ONE, TWO = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,"), tl.constexpr("r"), tl.constexpr("r,r")


@triton.jit
def eight(parts):
    """Eight tensors [n, w], those of a word's nibbles in order -> [n, 8 w]."""
    a, b, c, d, e, f, g, h = parts
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(even, odd), (a.shape[0], 8 * a.shape[1]))


@triton.jit
def int8_words(word):
    """Words of four int8 codes [n, w] -> bf16 [n, 4 w]: seven bits beside 128, less 128 or 256 by the sign."""
    a, b, c, d = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, y, s, m;
        mov.b32 m, 0xbf80bf80;
        prmt.b32 x, $4, 0x43434343, 0x4140;
        prmt.b32 y, $4, 0x43434343, 0x4342;
        and.b32 s, x, 0xff80ff80;
        and.b32 x, x, 0xff7fff7f;
        fma.rn.bf16x2 x, s, m, x;
        and.b32 s, y, 0xff80ff80;
        and.b32 y, y, 0xff7fff7f;
        fma.rn.bf16x2 y, s, m, y;
        mov.b32 {$0, $1}, x;
        mov.b32 {$2, $3}, y;
        }
        """,
        "=h,=h,=h,=h,r",
        [word],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (word.shape[0], 4 * word.shape[1]))


@triton.jit
def nibble_words(word, scale, ASM: tl.constexpr, SCALED: tl.constexpr):
    """Words of eight codes [n, w] -> bf16 [n, 8 w], times fp32 powers of two [n, w] if SCALED."""
    if SCALED:
        pair = scale.to(tl.int32, bitcast=True)
        pair = ((pair >> 16) & 0xFFFF) | (pair & -65536)
        parts = tl.inline_asm_elementwise(
            ASM, EIGHT + TWO, [word, pair],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                   tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        parts = tl.inline_asm_elementwise(
            ASM, EIGHT + ONE, [word],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                   tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip
    return eight(parts)


@triton.jit
def load_packed(at, valid, R: tl.constexpr, S: tl.constexpr):
    """``chunks.load_row``, four-bit codes in words where S says that they are taken so."""
    if S.words and (R.code == "nf4" or R.code == "e2m1"):
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
def unpack_chunk(raw, scales, valid, FIRST: tl.constexpr, R: tl.constexpr, S: tl.constexpr, NATIVE: tl.constexpr):
    """``chunks.decode_chunk``, from words where S says so."""
    if S.words and R.code == "int8":
        x = int8_words(raw)
    elif S.words and R.code == "nf4":
        x = nibble_words(raw, raw, NF4, False)
    elif S.words and R.code == "e2m1":
        n: tl.constexpr = raw.shape[0]
        some = chunk_scales(scales, FIRST, R, S, NATIVE)
        groups: tl.constexpr = some.shape[1]
        some = tl.broadcast_to(some[:, :, None], (n, groups, S.chunk // 8 // groups))
        x = nibble_words(raw, tl.reshape(some, (n, S.chunk // 8)), E2M1, True)
    else:
        x = decode_chunk(raw, scales, valid, FIRST, R, S, NATIVE)
    return x
