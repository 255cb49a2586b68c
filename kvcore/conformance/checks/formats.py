"""Formats alone: values to canonical rows and back, canonical rows to packed pages and back."""

import hashlib
from collections.abc import Callable
from typing import NamedTuple, cast

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from kvcore.arrays import to_numpy
from kvcore.backends.reference import encoding
from kvcore.conformance.canonical import canonical_noise
from kvcore.conformance.case import nan_with_payload
from kvcore.conformance.outputs import Output, exact, rows
from kvcore.ops import Ops
from kvcore.spec import Format
from kvcore.spec.codes import CODES, NF4_LEVELS

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
        for number in range(min(4, count - 1)):
            values[number, number : number + 1] = nan_with_payload(values.dtype, number)
        return [_encoded(bench, values)]

    return drive


def encode_edges(bench: FormatBench) -> list[Output]:
    """Zeros, limits, subnormals, infinities, NaN; and what lies on both sides of where another number is stored.

    Those are group maxima near every kind of scale boundary, and values half way between two that a code has.
    """
    return [_encoded(bench, np.concatenate([_special_rows(bench), _scale_rows(bench), _midpoint_rows(bench)]))]


def decode_rows(count: int) -> Callable[[FormatBench], list[Output]]:
    """Decode rows that were encoded from ordinary values."""

    def drive(bench: FormatBench) -> list[Output]:
        stored = encoding.encode(bench.format, _values(bench, count), bench.scale)
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
        page = encoding.pack_page(bench.format, canonical_noise(bench.rng("bytes"), count, bench.format))
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


def edge_rows(id: str, format: Format, count: int) -> np.ndarray:
    """[count, dim] fp32, for a verb that encodes on its way: of each kind of edges in turn, infinities first."""
    bench = FormatBench(id, format, cast("Ops", None))
    infinite = np.roll(_special_rows(bench), -2, axis=0)
    kinds = [kind for kind in (_midpoint_rows(bench), infinite, _scale_rows(bench)) if len(kind)]
    chosen = [
        kinds[number % len(kinds)][number // len(kinds) % len(kinds[number % len(kinds)])] for number in range(count)
    ]
    return np.array(chosen, np.float32).reshape(count, format.dim or 0)


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
    special += [440.0, 448.5, 456.0, 463.9, 464.0, 464.1, 480.0, -456.0]
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


def _midpoint_rows(bench: FormatBench) -> np.ndarray:
    """Rows whose group maxima make a scale of 1, or of 4, and values half way between neighbours of the row's codes."""
    dim = bench.format.dim or 0
    peaks = np.arange(dim) % 16 == 0
    found = [np.zeros((0, dim), np.float32)]
    for code in dict.fromkeys(field.code for field in bench.format.fields if field.is_value):
        middle = _midpoints(code)
        values = [np.nextafter(middle, np.float32(-np.inf)), middle, np.nextafter(middle, np.float32(np.inf))]
        inside = np.stack(values, axis=1).reshape(-1)
        width = max(1, dim - int(peaks.sum()))
        rows_of = np.full((-(-len(inside) // width), dim), CODES[code].largest, np.float32)
        rows_of[:, ~peaks] = np.resize(inside, (len(rows_of), dim - int(peaks.sum())))
        found.append(rows_of)
        if CODES[code].bits <= 8:
            found.append(rows_of * np.float32(4))
    return np.concatenate(found)


def _midpoints(code: str) -> np.ndarray:
    """fp32 values half way between two that a code has next to each other; of codes of 16 bits some of them."""
    if code == "nf4":
        levels = np.array(NF4_LEVELS, np.float32)
    elif code == "int8":
        levels = np.arange(-127, 128, dtype=np.float32)
    elif code in encoding.DTYPES and code != "fp32":
        bits = CODES[code].bits
        numbers = np.arange(2**bits, dtype=encoding.BITS[bits]).view(encoding.DTYPES[code]).astype(np.float32)
        levels = np.unique(numbers[np.isfinite(numbers)])
    else:
        return np.zeros(0, np.float32)
    middle = levels[:-1] + (levels[1:] - levels[:-1]) / np.float32(2)
    return middle[:: max(1, len(middle) // 256)]
