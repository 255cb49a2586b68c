"""The element codes and scale rules that formats are built from: two tables, read by everything.

A code says how one channel is written in bits; a scale rule says how the scale of a group of channels is found from its
largest magnitude. Neither knows any format, layout or framework.
"""

import math
import struct
from collections.abc import Collection, Iterable
from functools import cache
from typing import Protocol

import msgspec

from kvcore.errors import BackendError, SpecError


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """How one element is stored.

    Attributes:
        bits: width of one element; 4-bit elements are packed two to a byte, the even one in the low nibble.
        largest: largest finite magnitude, to which encoders clamp finite values. 0 for codes without values.
        significand: significant bits of a value, used to work out whether decoding is exact in bf16.
        signed: False where the smallest value is 0.
        nan: bits of the one NaN that encoders write, or None where the code has none.
    """

    name: str
    bits: int
    largest: float = 0.0
    significand: int = 0
    signed: bool = True
    nan: int | None = None


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """How a group's scale follows from ``amax``, the group's largest magnitude (never below the format's floors).

    Attributes:
        power_of_two: the scale is a power of two, so that it neither rounds values nor limits bf16 decoding.
        offset: a group has an offset beside its scale, in a field named ``offsets`` of the scales' code, and a value is
            offset + code * scale.
        scales: codes that can hold such a scale.
        meaning: the rule as a formula; ``largest`` is the element code's.
    """

    name: str
    power_of_two: bool
    scales: tuple[str, ...]
    meaning: str
    offset: bool = False


CODES: dict[str, Code] = {
    code.name: code
    for code in (
        Code(name="fp32", bits=32, largest=3.4028234663852886e38, significand=24, nan=0x7FC00000),
        Code(name="bf16", bits=16, largest=3.3895313892515355e38, significand=8, nan=0x7FC0),
        Code(name="fp16", bits=16, largest=65504.0, significand=11, nan=0x7E00),
        Code(name="e4m3", bits=8, largest=448.0, significand=4, nan=0x7F),
        Code(name="e8m0", bits=8, significand=1, nan=0xFF),
        Code(name="int8", bits=8, largest=127.0, significand=7),
        Code(name="e2m1", bits=4, largest=6.0, significand=2),
        Code(name="nf4", bits=4, largest=1.0, significand=24),
        Code(name="uint4", bits=4, largest=15.0, significand=4, signed=False),
        Code(name="zero", bits=8),
    )
}

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            name="pow2",
            power_of_two=True,
            scales=("e8m0", "fp32"),
            meaning="smallest power of two >= amax * fp32(1/largest), from bits",
        ),
        Rule(name="fp32", power_of_two=False, scales=("fp32",), meaning="amax * fp32(1/largest), in fp32"),
        Rule(
            name="e4m3",
            power_of_two=False,
            scales=("e4m3",),
            meaning="e4m3(clip(amax * fp32(1/largest) / global_scale, 2^-9, 448)), to nearest",
        ),
        Rule(name="absmax", power_of_two=False, scales=("fp32",), meaning="amax, in fp32"),
        Rule(
            name="quotient",
            power_of_two=False,
            scales=("fp32",),
            meaning="amax / largest, in fp32; codes of value * (1 / scale), integers rounded half away from zero",
        ),
        Rule(
            name="range",
            power_of_two=False,
            scales=("bf16",),
            meaning="offset: bf16(smallest), 0 below the floor; scale: bf16(max(largest - offset, floor) * fp32(1/15))",
            offset=True,
        ),
    )
}


@cache
def largest_kept(code: str, rule: str | None) -> float:
    """Largest magnitude that is finite when it is read back, an fp32 number; encoders clamp finite values to it.

    A code without a scale reaches as far as its largest value. With one it reaches as far as code times scale does in
    fp32: a scale that is rounded up may take the largest code beyond that.
    """
    largest, most = CODES[code].largest, CODES["fp32"].largest
    if rule is None:
        return largest
    if RULES[rule].offset:
        # Far enough from the end of fp32 that neither the range of a group nor what is read of it leaves it.
        return 2.0**126
    if RULES[rule].power_of_two:
        # The largest number below 2^128 of the code's significant bits, with a scale that is no more than 2^127.
        return min(largest * 2.0**127, 2.0**128 - 2.0 ** (128 - CODES[code].significand), most)
    if rule not in ("fp32", "quotient"):
        return most
    kept, inverse = most, _fp32(1 / largest)
    while not math.isfinite(_fp32(largest * _fp32(kept / largest if rule == "quotient" else kept * inverse))):
        kept = struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", kept))[0] - 1))[0]
    return kept


def _fp32(value: float) -> float:
    """The nearest fp32 number, infinite beyond the largest."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.inf


RANGE_SMALLEST = 2.0**-110
"""Scales and offsets of the ``range`` rule that are nearer to zero are never written, and read as zero: no sum of an
offset and a code's product is subnormal then."""

E4M3_SCALE_SMALLEST = 2.0**-9
"""Smallest e4m3 scale that is not zero: the lower clip of the ``e4m3`` rule."""

NF4_LEVELS: tuple[float, ...] = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The sixteen NormalFloat levels, code 0 first (QLoRA, arXiv 2305.14314, appendix E)."""

E2M1_LEVELS: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The e2m1 magnitudes, code 0 first; bit 3 of a code is the sign."""


def code(name: str, *, where: str) -> Code:
    """Look a code up; an unknown one is refused, never reinterpreted as a similar one."""
    if name not in CODES:
        raise SpecError(
            got=name,
            where=where,
            allowed=", ".join(CODES),
            hint="e4m3 means e4m3fn (bias 7, no infinities); e4m3fnuz is another encoding and is not supported.",
        )
    return CODES[name]


def unknown(what: str, name: object, where: str) -> BackendError:
    """The error of an encoder, a decoder or a kernel that meets a code or rule it was not written for."""
    return BackendError(
        got=f"{what} {name!r}",
        where=where,
        allowed="what this backend was written for: nothing is stored as a code that is like it",
        hint="Choose another format or backend.",
    )


class Coded(Protocol):
    """A field of a format, as far as its element code goes."""

    @property
    def is_value(self) -> bool: ...
    @property
    def code(self) -> str: ...


class OfFields(Protocol):
    """A format, as far as the codes of its fields go."""

    @property
    def name(self) -> str: ...
    @property
    def fields(self) -> Iterable[Coded]: ...


def check_known(formats: Iterable[OfFields], codes: Collection[str], backend: str) -> None:
    """Refuse formats of which a backend does not know every element code, before a plan is bound to it.

    Raises:
        BackendError: with the code's name.
    """
    for format in formats:
        for field in format.fields:
            if field.is_value and field.code not in codes:
                raise unknown("element code", field.code, f"format {format.name}: {backend}")
