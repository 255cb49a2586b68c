"""The byte permutations that take codes apart, carried out instruction by instruction: every code's number."""

import re

import numpy as np
import pytest

pytest.importorskip("triton")

from kvcore.backends.torch_triton.kernels import words
from kvcore.spec.codes import E2M1_LEVELS, NF4_LEVELS

NF4 = np.array(NF4_LEVELS, np.float32)
E2M1 = np.array([*E2M1_LEVELS, *(-level for level in E2M1_LEVELS)], np.float32)


def permuted(low, high, selector):
    """PTX ``prmt.b32``: four bytes chosen from eight; the plain mode, without replicated signs."""
    source = low.to_bytes(4, "little") + high.to_bytes(4, "little")
    picks = [selector >> 4 * n & 15 for n in range(4)]
    assert max(picks) < 8
    return int.from_bytes(bytes(source[pick] for pick in picks), "little")


def eight(assembly, word):
    """Registers x, y, u, v after the instructions before any multiplication: bits of eight bf16 numbers."""
    state = {"$8": word}

    def value(name):
        return state[name] if name in state else int(name, 0)

    for operation, target, *sources in re.findall(
        r"(prmt|and|or|shr)\.\w+ (\S+), (\S+), ([^\s,;]+)(?:, (\S+))?;", assembly
    ):
        given = [value(source) for source in sources if source]
        state[target] = {
            "and": lambda a, b: a & b, "or": lambda a, b: a | b, "shr": lambda a, b: a >> b, "prmt": permuted,
        }[operation](*given)  # fmt: skip
    return [state[name] >> shift & 0xFFFF for name in "xyuv" for shift in (0, 16)]


def numbers(assembly, codes):
    word = sum(code << 4 * place for place, code in enumerate(codes))
    return (np.array(eight(assembly, word), np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("codes", [range(8), range(8, 16), (15, 0, 8, 7, 1, 14, 9, 6)], ids=["low", "high", "mixed"])
def test_nibbles_are_looked_up(codes):
    codes = list(codes)
    e2m1 = numbers(words.E2M1.value, codes)
    assert e2m1.tolist() == E2M1[codes].tolist()
    assert np.signbit(e2m1).tolist() == [code >= 8 for code in codes]
    near, rest = numbers(words.NF4.value, codes), numbers(words.NF4_REST.value, codes)
    assert np.abs(near - NF4[codes]).max() <= 2.0**-9
    assert np.abs(near + rest - NF4[codes]).max() <= 2.0**-17
