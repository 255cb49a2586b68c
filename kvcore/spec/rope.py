"""Rotary position embedding, as data: which inverse frequencies a layer rotates its last dims with.

The last ``dim`` channels are rotated in interleaved pairs (2k, 2k+1). The angle at position t is the fp32 product
``fp32(t) * fp32(f_k)``: float64 angles differ visibly at long positions. There is no attention factor.
"""

import math
import struct
from functools import cached_property

import msgspec

from kvcore.counts import as_count
from kvcore.errors import SpecError


class Yarn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """YaRN: frequencies divided by ``factor`` above a ramp, kept below it (arXiv 2309.00071, section 3.2)."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        """All four are divided by, or are arguments of a logarithm."""
        for name in self.__struct_fields__:
            if not _is_above(getattr(self, name), 0):
                raise SpecError(got=getattr(self, name), where=f"rope.yarn.{name}", allowed="a finite number above 0")


class Rope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Frequencies ``theta^(-2k / dim)`` for pair k, optionally stretched by YaRN."""

    dim: int
    theta: float
    yarn: Yarn | None = None

    def __post_init__(self) -> None:
        """An odd dim has no pairs; YaRN divides by ln theta."""
        dim = as_count(self.dim, 2)
        if dim is None or dim % 2:
            raise SpecError(got=self.dim, where="rope.dim", allowed="an even integer, 2 or more")
        msgspec.structs.force_setattr(self, "dim", dim)
        if not _is_above(self.theta, 1):
            raise SpecError(got=self.theta, where="rope.theta", allowed="a finite number above 1")

    @cached_property
    def inverse_frequencies(self) -> tuple[float, ...]:
        """The ``dim / 2`` frequencies, each rounded to fp32 once, so that every backend uses the same numbers."""
        pairs = range(self.dim // 2)
        plain = [self.theta ** (-2 * k / self.dim) for k in pairs]
        if self.yarn is None:
            return tuple(_fp32(f) for f in plain)
        low = math.floor(self._correction(self.yarn.beta_fast))
        high = math.ceil(self._correction(self.yarn.beta_slow))
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = [min(max((k - low) / max(high - low, 1e-3), 0.0), 1.0) for k in pairs]
        return tuple(_fp32(f / self.yarn.factor * r + f * (1 - r)) for f, r in zip(plain, ramp, strict=True))

    def _correction(self, beta: float) -> float:
        """The pair that turns ``beta`` times over the original length."""
        assert self.yarn is not None
        turns = self.yarn.original_length / (2 * math.pi * beta)
        return self.dim * math.log(turns) / (2 * math.log(self.theta))


def _is_above(value: object, least: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least < value < math.inf


def _fp32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]
