"""A mismatch in words: which row, which field, which channel, both bytes, both values."""

import ml_dtypes
import msgspec
import numpy as np

from kvcore.backends.reference import encoding
from kvcore.conformance.diagnosis import cause_of_rows
from kvcore.conformance.outputs import Output
from kvcore.spec import Field, Format
from kvcore.spec.codes import CODES

Array = np.ndarray


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference of a check.

    Attributes:
        output: which of the check's outputs, for example ``1.window``.
        coordinate: index into that output.
        where: the same in words: ``unit 3, row 5, head 0, codes byte 17 (channel 17)``.
        want_bytes: the reference's element, bytes in hex, lowest first.
        got_bytes: the backend's.
        want_value: the element's value as text (``nan`` and ``inf`` are values too).
        got_value: the backend's.
        cause: likely reason, or empty if the pattern is not a known one.
    """

    output: str
    coordinate: tuple[int, ...] = ()
    where: str = ""
    want_bytes: str = ""
    got_bytes: str = ""
    want_value: str = ""
    got_value: str = ""
    cause: str = ""


def whole(want: Output, cause: str) -> Mismatch:
    """A result that can't be compared element by element."""
    return Mismatch(output=want.name, where="the whole output", cause=cause)


def locate_value(want: Output, got: Array, coordinate: tuple[int, ...], cause: str) -> Mismatch:
    """An element of values, indices or masks."""
    one, other = want.array[coordinate], got[coordinate]
    return Mismatch(
        output=want.name,
        coordinate=coordinate,
        where=", ".join(f"{axis} {i}" for axis, i in zip(want.axes, coordinate, strict=True)),
        want_bytes=one.tobytes().hex(),
        got_bytes=other.tobytes().hex(),
        want_value=f"{float(one):.9g}",
        got_value=f"{float(other):.9g}",
        cause=cause,
    )


def locate_row(want: Output, got: Array, format: Format, coordinate: tuple[int, ...]) -> Mismatch:
    """A byte of canonical rows: the element it belongs to, in its field."""
    *place, byte = coordinate
    field, first = _field_at(format, byte)
    size = max(1, CODES[field.code].bits // 8)
    start = first + (byte - first) // size * size
    elements = [array[(*place, slice(start, start + size))] for array in (want.array, got)]
    channel = channel_of(format, byte)
    if channel is None:
        values = [_scale_text(element, field.code) for element in elements]
    else:
        # Of two channels in one byte, the one that differs.
        if CODES[field.code].bits == 4 and (elements[0][0] ^ elements[1][0]) & 0xF == 0:
            channel += 1
        decoded = [decode(array[tuple(place)][None], format, want.global_scale)[0] for array in (want.array, got)]
        values = [f"{float(row[channel]):.9g}" for row in decoded]
    names = [f"{axis} {i}" for axis, i in zip(want.axes[:-1], place, strict=True)]
    inside = f"{field.name} byte {byte - first}" + ("" if channel is None else f" (channel {channel})")
    return Mismatch(
        output=want.name,
        coordinate=coordinate,
        where=", ".join([*names, inside]),
        want_bytes=elements[0].tobytes().hex(),
        got_bytes=elements[1].tobytes().hex(),
        want_value=values[0],
        got_value=values[1],
        cause=cause_of_rows(want.array, got, format),
    )


def decode(rows: Array, format: Format, global_scale: float) -> Array:
    """Canonical rows [..., row_bytes] -> values [..., channels] of the format's own dtype, read by the reference."""
    values = encoding.decode(format, rows.reshape(-1, rows.shape[-1]), format.dim, global_scale)
    return values.reshape(*rows.shape[:-1], values.shape[-1])


def channel_of(format: Format, byte: int) -> int | None:
    """The (first) channel that a byte of the canonical row holds; None for scales and pads."""
    channel = 0
    for field in format.fields:
        first, last = format.byte_range(field.name)
        if not field.is_value:
            continue
        if first <= byte < last:
            return channel + (byte - first) * 8 // CODES[field.code].bits
        channel += field.dims or 0
    return None


def bytes_of_channels(format: Format, wrong: Array) -> Array:
    """[..., channels] -> [..., row_bytes] True in the bytes of wrong channels, and in scales beside any."""
    mask = np.zeros((*wrong.shape[:-1], format.row), bool)
    for byte in range(format.row):
        channel = channel_of(format, byte)
        if channel is None:
            mask[..., byte] = wrong.any(axis=-1)
        else:
            field, _ = _field_at(format, byte)
            mask[..., byte] = wrong[..., channel : channel + max(1, 8 // CODES[field.code].bits)].any(axis=-1)
    return mask


def _field_at(format: Format, byte: int) -> tuple[Field, int]:
    """The field that a byte of the canonical row belongs to, and the field's first byte."""
    for field in format.fields:
        first, last = format.byte_range(field.name)
        if first <= byte < last:
            return field, first
    raise IndexError(byte)


def _scale_text(element: Array, code: str) -> str:
    """The value of a scale, or the byte of a pad."""
    if code == "zero":
        return str(int(element[0]))
    if code == "e8m0":
        return "nan" if element[0] == CODES[code].nan else f"2^{int(element[0]) - 127}"
    dtype = {"fp32": np.dtype(np.float32), "e4m3": np.dtype(ml_dtypes.float8_e4m3fn)}[code]
    return f"{float(np.ascontiguousarray(element).view(dtype)[0]):.9g}"
