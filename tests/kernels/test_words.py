"""The byte permutations that take codes apart, carried out instruction by instruction: every code's number."""

import re

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")

from kvcore.kernels.triton import chunks, rows, words
from kvcore.spec.codes import E2M1_LEVELS, NF4_LEVELS

NF4 = np.array(NF4_LEVELS, np.float32)
E2M1 = np.array([*E2M1_LEVELS, *(-level for level in E2M1_LEVELS)], np.float32)


def halves(word):
    """The two bf16 numbers of a register."""
    return (np.array([word & 0xFFFF, word >> 16], np.uint32) << 16).view(np.float32)


def permuted(low, high, selector):
    """PTX ``prmt.b32``: four bytes chosen from eight; the plain mode, without replicated signs."""
    source = low.to_bytes(4, "little") + high.to_bytes(4, "little")
    picks = [selector >> 4 * n & 15 for n in range(4)]
    assert max(picks) < 8
    return int.from_bytes(bytes(source[pick] for pick in picks), "little")


def multiplied(a, b, c):
    """PTX ``fma.rn.bf16x2`` where the result is a bf16 number, as it must be here."""
    bits = (halves(a) * halves(b) + halves(c)).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return int(bits[0] >> 16 | bits[1])


def subtracted(a, b):
    """PTX ``sub.rn.f16x2``."""
    first, second = np.array([a, b], np.uint32).view(np.float16).reshape(2, 2)
    return int((first - second).view(np.uint32)[0])


def number(bits):
    """The fp32 number of a register."""
    return np.uint32(bits).view(np.float32)


def e4m3_pair(high, low):
    """PTX ``cvt.rn.satfinite.e4m3x2.f32``."""
    found = np.array([number(low), number(high)])
    codes = np.clip(found, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return int(codes.view(np.uint16)[0])


def bf16_pair(high, low):
    """PTX ``cvt.rn.bf16x2.f32``."""
    return int(np.array([number(low), number(high)]).astype(ml_dtypes.bfloat16).view(np.uint32)[0])


OPERATIONS = {
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "sub.rn.f16x2": subtracted,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "mov.b32": lambda a: a,
    "lop3.b32": lambda a, b, c, table: (a & b) | c if table == 0xEA else None,
    "prmt.b32": permuted,
    "fma.rn.bf16x2": multiplied,
    "cvt.rn.satfinite.e4m3x2.f32": e4m3_pair,
    "cvt.rn.bf16x2.f32": bf16_pair,
    "pair.b32": lambda low, high: low | high << 16,
}


def registers(assembly, *inputs, first):
    """All registers after the assembly, inputs in $first and on; unpacking moves are left out."""
    state = {f"${first + n}": value for n, value in enumerate(inputs)}
    assembly = re.sub(r"mov\.b32 (\S+), \{(\w+, \w+)\}", r"pair.b32 \1, \2", assembly)
    for line in re.split(r"[;\n{]", assembly):
        operation, _, operands = line.strip().partition(" ")
        names = [name.strip() for name in operands.split(",")]
        if operation in OPERATIONS and names[0]:
            given = [state[name] if name in state else int(name, 0) for name in names[1:]]
            state[names[0]] = OPERATIONS[operation](*given)
    return state


def packed(codes, bits):
    return sum((code & (1 << bits) - 1) << bits * place for place, code in enumerate(codes))


@pytest.mark.parametrize(
    "codes", [range(16), (15, 0, 8, 7, 1, 14, 9, 6, 2, 3, 4, 5, 10, 11, 12, 13)], ids=["in order", "mixed"]
)
def test_nf4_codes_of_two_words_are_taken_apart(codes):
    codes = np.array(codes).reshape(2, 8)
    near, rest = (
        np.stack([halves(found[f"${n}"]) for n in range(8)], axis=1)
        for table in (words.NF4, words.NF4_REST)
        for found in [registers(table.value, *(packed(row.tolist(), 4) for row in codes), first=8)]
    )
    assert np.abs(near - NF4[codes]).max() <= 2.0**-9
    assert np.abs(near + rest - NF4[codes]).max() <= 2.0**-17


def test_e2m1_codes_of_two_words_are_taken_apart():
    first, second = (1, 0, 8, 7, 15, 14, 9, 6), (2, 3, 4, 5, 10, 11, 12, 13)
    scales = [int(np.float32(scale).view(np.uint32)) for scale in (0.25, 2.0**-120)]
    found = registers(words.E2M1.value, packed(first, 4), packed(second, 4), *scales, first=8)
    for n, codes in enumerate(zip(first, second, strict=True)):
        got, want = halves(found[f"${n}"]), E2M1[list(codes)] * np.float32([0.25, 2.0**-120])
        assert got.tolist() == want.tolist()
        assert np.signbit(got).tolist() == np.signbit(want).tolist()


@pytest.mark.parametrize("scale", [0.25, 1.875 * 2.0**-7, 448.0, 2.0**-120], ids=str)
@pytest.mark.parametrize("codes", [(1, 0, 8, 7, 15, 14, 9, 6), (2, 3, 4, 5, 10, 11, 12, 13)], ids=str)
def test_e2m1_codes_of_a_word_are_taken_apart(codes, scale):
    found = registers(chunks.E2M1_WORD.value, packed(codes, 4), int(np.float32(scale).view(np.uint32)), first=8)
    got, want = np.concatenate([halves(found[f"p{n}"]) for n in range(4)]), E2M1[list(codes)] * np.float32(scale)
    assert got.tolist() == want.tolist()
    assert np.signbit(got).tolist() == np.signbit(want).tolist()


@pytest.mark.parametrize("start", range(-127, 128, 8))
def test_int8_codes_of_two_words_are_taken_apart(start):
    codes = np.clip(np.arange(start, start + 8), -127, 127).reshape(2, 4)
    found = registers(words.INT8.value, *(packed(row.tolist(), 8) for row in codes), first=4)
    assert [halves(found[f"${n}"]).tolist() for n in range(4)] == codes.T.tolist()


def bits(numbers):
    return [int(each) for each in np.array(numbers, np.float32).view(np.uint32)]


@pytest.mark.parametrize(
    "numbers",
    [(1.0, -0.0, 240.0, -256.0), (448.0, -463.9, 0.001953125, 2.0**-10), (17.0, 19.0, -0.0029296875, np.nan)],
    ids=["usual", "largest and least", "ties and NaN"],
)
def test_four_numbers_become_e4m3_codes_side_by_side(numbers):
    want = np.clip(np.array(numbers, np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    for kept in ((0xFF,) * 4, (0xFF, 0, 0xFF, 0), (0,) * 4):
        found = registers(rows.E4M3_BYTES.value, *bits(numbers), packed(kept, 8), first=1)
        assert list(found["$0"].to_bytes(4, "little")) == (want & np.array(kept, np.uint8)).tolist()


@pytest.mark.parametrize("numbers", [(1.00390625, -1.01171875), (3.4e38, -np.inf), (2.0**-140, -0.0)])
def test_two_numbers_are_rounded_to_bf16(numbers):
    found = registers(rows.ROUND_PAIRS.value, *bits(numbers), first=2)
    with np.errstate(over="ignore"):
        want = np.array(numbers, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert [found["$0"], found["$1"]] == bits(want)
