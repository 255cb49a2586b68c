"""Formats alone: values to canonical rows and back, canonical rows to packed pages and back."""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from kvcore.arrays import to_numpy
from kvcore.backends.reference import encoding
from kvcore.conformance.canonical import canonical_noise
from kvcore.conformance.outputs import Output, exact, rows
from kvcore.ops import Ops
from kvcore.spec import Format
from kvcore.spec.codes import CODES

GLOBAL_SCALE = 0.37


class FormatBench(NamedTuple):
    """A sized format in the hands of one backend; seeds come from the check's id."""

    id: str
    format: Format
    ops: Ops

    def rng(self, name: str) -> np.random.Generator:
        """A generator for one named input."""
        return np.random.default_rng(np.frombuffer(hashlib.sha256(f"{self.id} {name}".encode()).digest(), np.uint32))

    @property
    def scale(self) -> float:
        """The global scale to use: 1 where the format has none."""
        return GLOBAL_SCALE if self.format.global_scaled else 1.0


class FormatCheck(NamedTuple):
    """One row of the table of format checks: verb, kind of input, drive."""

    name: str
    case: str
    drive: Callable[[FormatBench], list[Output]]


def encode_rows(count: int, dtype: DTypeLike) -> Callable[[FormatBench], list[Output]]:
    """Encode ``count`` rows of very different magnitude."""

    def drive(bench: FormatBench) -> list[Output]:
        values = _values(bench, count).astype(dtype)
        return [_encoded(bench, values)]

    return drive


def encode_edges(bench: FormatBench) -> list[Output]:
    """Zeros, limits, subnormals, infinities, NaN; and group maxima on both sides of every kind of scale boundary."""
    return [_encoded(bench, np.concatenate([_special_rows(bench), _scale_rows(bench)]))]


def decode_rows(count: int) -> Callable[[FormatBench], list[Output]]:
    """Decode rows that were encoded from ordinary values."""

    def drive(bench: FormatBench) -> list[Output]:
        stored = encoding.encode(None, bench.format, _values(bench, count), bench.scale)
        return [_decoded(bench, stored)]

    return drive


def decode_any(bench: FormatBench) -> list[Output]:
    """Decode random bytes: every code and every scale, also those that no encoder writes."""
    return [_decoded(bench, bench.rng("bytes").integers(0, 256, (300, bench.format.row), np.uint8))]


def pack_page(count: int) -> Callable[[FormatBench], list[Output]]:
    """Pack random rows into a page."""

    def drive(bench: FormatBench) -> list[Output]:
        page = to_numpy(
            bench.ops.pack_page(
                bench.format, bench.ops.asarray(canonical_noise(bench.rng("bytes"), count, bench.format))
            )
        )
        return [exact("page", page, "byte")]

    return drive


def unpack_page(count: int) -> Callable[[FormatBench], list[Output]]:
    """Take rows out of a page whose padding is not zero."""

    def drive(bench: FormatBench) -> list[Output]:
        page = encoding.pack_page(None, bench.format, canonical_noise(bench.rng("bytes"), count, bench.format))
        stored = to_numpy(bench.ops.unpack_page(bench.format, bench.ops.asarray(page), count))
        return [rows("rows", stored, bench.format, "row", "byte")]

    return drive


FORMAT_CHECKS: tuple[FormatCheck, ...] = (
    FormatCheck("encode", "no_rows", encode_rows(0, np.float32)),
    FormatCheck("encode", "one_row", encode_rows(1, np.float32)),
    FormatCheck("encode", "rows", encode_rows(67, np.float32)),
    FormatCheck("encode", "bf16_rows", encode_rows(67, ml_dtypes.bfloat16)),
    FormatCheck("encode", "edges", encode_edges),
    FormatCheck("decode", "no_rows", decode_rows(0)),
    FormatCheck("decode", "rows", decode_rows(67)),
    FormatCheck("decode", "any_bytes", decode_any),
    FormatCheck("pack_page", "one_row", pack_page(1)),
    FormatCheck("pack_page", "rows", pack_page(33)),
    FormatCheck("unpack_page", "one_row", unpack_page(1)),
    FormatCheck("unpack_page", "rows", unpack_page(33)),
)


def _encoded(bench: FormatBench, values: np.ndarray) -> Output:
    stored = to_numpy(bench.ops.encode(bench.format, bench.ops.asarray(values), bench.scale))
    return rows("rows", stored, bench.format, "row", "byte")


def _decoded(bench: FormatBench, stored: np.ndarray) -> Output:
    values = bench.ops.decode(bench.format, bench.ops.asarray(stored), bench.format.dim, bench.scale)
    return exact("values", to_numpy(values), "row", "channel")


def _values(bench: FormatBench, count: int) -> np.ndarray:
    values = bench.rng("values").standard_normal((count, bench.format.dim or 0), np.float32)
    return values * np.exp2(bench.rng("magnitude").integers(-20, 12, (count, 1))).astype(np.float32)


def _special_rows(bench: FormatBench) -> np.ndarray:
    """One row for every special value: the value in the first and last channel of an ordinary row, and a row of it."""
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.17549435e-38, 3.4028235e38, 65504.0, 65520.0]
    special += [
        limit * sign for code in CODES.values() for limit in (code.largest, code.largest * 1.04) for sign in (1, -1)
    ]
    special += [1e-4, 9.9e-5, 1.1e-4, 2.0**-126, 6 * 2.0**-126, 5 * 2.0**-126, 6 * 2.0**-9, 2.0**-9]
    with np.errstate(over="ignore"):
        column = np.array(special, np.float32)
    ordinary = bench.rng("ordinary").standard_normal((len(column), bench.format.dim or 0), np.float32)
    alone = np.zeros_like(ordinary)
    for values in (ordinary, alone):
        values[:, 0] = column
        values[:, -1] = -column
    return np.concatenate([ordinary, alone])


def _scale_rows(bench: FormatBench) -> np.ndarray:
    """Rows whose largest magnitude is just below, at and just above a power of two times the code's limit."""
    limits = {CODES[field.code].largest for field in bench.format.fields if field.group is not None} or {1.0}
    largest = np.array([limit * 2.0**k for limit in sorted(limits) for k in (-30, -9, -1, 0, 1, 8)], np.float32)
    steps = [np.nextafter(largest, np.float32(0)), largest, np.nextafter(largest, np.float32(np.inf))]
    amax = np.concatenate([*steps, largest * np.float32(1.2)])
    rows_of = bench.rng("scaled").uniform(-1, 1, (len(amax), bench.format.dim or 0)).astype(np.float32) * amax[:, None]
    group = max(1, min(16, bench.format.dim or 1))
    rows_of[:, ::group] = amax[:, None]
    return rows_of
