"""Amounts as people write and read them: ``40GiB``, ``128k``, ``37,440 B``."""

import re
from fractions import Fraction

from kvcore.errors import SpecError

BYTE_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
COUNT_UNITS = {"": 1, "k": 1000, "M": 1000**2, "Ki": 1024, "Mi": 1024**2}


def parse_bytes(text: str, where: str) -> int:
    """``40GiB``, ``1.5GB``, ``65536`` -> bytes; units in any case, powers of 1024 with an ``i``.

    Raises:
        SpecError: not a positive whole number of bytes in a known unit.
    """
    return _parse(text, where, BYTE_UNITS, "bytes, such as 40GiB, 512MiB, 1.5GB or 65536")


def parse_count(text: str, where: str) -> int:
    """``131072``, ``128Ki``, ``1M`` -> a count.

    Raises:
        SpecError: not a positive whole number.
    """
    return _parse(text, where, COUNT_UNITS, "a whole number of 1 or more, such as 131072, 128Ki or 1M")


def show_bytes(count: int) -> str:
    """Bytes with a unit that leaves at most four digits before the point: ``1.93 GiB``."""
    if abs(count) < 1024:
        return f"{count} B"
    for power, prefix in enumerate("KMGT", start=1):
        if abs(count) < 1024 ** (power + 1) or prefix == "T":
            return f"{count / 1024**power:,.2f} {prefix}iB"
    raise AssertionError(count)


def show_fraction(value: Fraction) -> str:
    """An exact number of bytes as a person reads it: whole, or with three decimals."""
    return f"{int(value):,}" if value.denominator == 1 else f"{float(value):,.3f}"


def _parse(text: str, where: str, units: dict[str, int], allowed: str) -> int:
    found = re.fullmatch(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    factors = {unit.lower(): factor for unit, factor in units.items()}
    if not found or found[2].lower() not in factors:
        raise SpecError(got=repr(text), where=where, allowed=allowed)
    amount = Fraction(found[1].replace("_", "").replace(",", "")) * factors[found[2].lower()]
    if amount < 1 or amount.denominator != 1:
        raise SpecError(got=repr(text), where=where, allowed=allowed)
    return int(amount)
