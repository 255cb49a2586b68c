"""What the element codes and scale rules mean, worked out from their definitions in exact arithmetic.

Independent of kvcore: levels are built from sign, exponent and mantissa as fractions; products of two fp32 numbers are
exact in float64; a float64 quotient rounded to fp32 is the correctly rounded quotient (53 >= 2 * 24 + 2 bits).
"""

from fractions import Fraction

import numpy as np

E2M1_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e4m3_value(bits: int) -> float:
    """e4m3fn: bias 7, subnormals of 2^-9, no infinities, 0x7f and 0xff are NaN."""
    sign, exponent, mantissa = bits >> 7, bits >> 3 & 15, bits & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    magnitude = Fraction(mantissa, 512) if exponent == 0 else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
    return -float(magnitude) if sign else float(magnitude)


E4M3_LEVELS = np.array([e4m3_value(bits) for bits in range(127)])


def every_bf16() -> np.ndarray:
    """All 65,536 bf16 values as fp32, in the order of their bits."""
    return (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)


def nearest_even(values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Codes of the nearest levels, ties to the even code, beyond the last level the last; sign not included."""
    magnitudes = np.abs(values.astype(np.float64))
    above = np.searchsorted(levels, magnitudes)
    low, high = np.maximum(above - 1, 0), np.minimum(above, len(levels) - 1)
    down, up = magnitudes - levels[low], levels[high] - magnitudes
    return np.where((up < down) | ((up == down) & (high % 2 == 0)) | (low == high), high, low).astype(np.uint8)


def e4m3_codes(values: np.ndarray) -> np.ndarray:
    """e4m3 bits of finite values, saturating."""
    return nearest_even(values, E4M3_LEVELS) | np.where(np.signbit(values), 0x80, 0).astype(np.uint8)


def e2m1_codes(values: np.ndarray) -> np.ndarray:
    """e2m1 bits of finite values, saturating; -0 keeps its sign."""
    return nearest_even(values, E2M1_LEVELS) | np.where(np.signbit(values), 8, 0).astype(np.uint8)


def product(values: np.ndarray, factor: float) -> np.ndarray:
    """fp32 product with a number that is first rounded to fp32."""
    return (values.astype(np.float64) * np.float64(np.float32(factor))).astype(np.float32)


def quotient(values: np.ndarray, divisors: np.ndarray) -> np.ndarray:
    """Correctly rounded fp32 quotient."""
    with np.errstate(under="ignore"):
        return (values.astype(np.float64) / np.asarray(divisors, np.float64)).astype(np.float32)


def power_of_two(values: np.ndarray) -> np.ndarray:
    """Exponent of the smallest power of two that is not below each value."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.where(mantissa == 0.5, exponent - 1, exponent)


def bf16_bits(value: float) -> int:
    """bf16 bits of a finite number, nearest even, by integers on its fp32 bits."""
    bits = int(np.float32(value).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def same_values(found, expected):
    """Equal as numbers and in the sign of zero; NaN equals NaN."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        found, expected = found.astype(np.float64).ravel(), np.asarray(expected, np.float64).ravel()
    equal = (found == expected) & (np.signbit(found) == np.signbit(expected)) | np.isnan(found) & np.isnan(expected)
    assert equal.all(), f"first at {np.flatnonzero(~equal)[:3]}: {found[~equal][:3]}, wanted {expected[~equal][:3]}"
