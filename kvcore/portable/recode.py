"""Rows of one format as rows of another, on the host: by the encoders and decoders of any backend.

It knows formats and components; neither specs, pages nor requests.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from kvcore.arrays import to_numpy
from kvcore.ops import Ops
from kvcore.portable.rows import HostRows
from kvcore.spec import FORMATS, Component, Format
from kvcore.spec.component import Part

Rows = np.ndarray[Any, Any]
"""Canonical rows [n, bytes] uint8, or values in fp32."""

AT_ONCE = 1 << 22
"""Channels that are read and coded at a time, so that what there is beside the pages stays small."""

TURNED = msgspec.structs.replace(FORMATS["bf16"], name="bf16_turned", hadamard=True)
"""Rows rotated as ``encode`` does it; the rotation undoes itself."""


def scale_of(component: Component) -> float:
    """What the component's values are multiplied by beside their own scales."""
    scaled = any(part.format.global_scaled for part in component.parts)
    return getattr(component, "global_scale", 1.0) if scaled else 1.0


def pieces(tokens: int, step: int, part: Part) -> Iterator[tuple[int, int]]:
    """Tokens as ranges [first, end) of whole steps, each of ``AT_ONCE`` channels of a part or a little less."""
    channels = step * part.heads * (part.format.dim or 1) // part.format.tokens
    size = step * max(1, AT_ONCE // channels)
    return ((first, min(first + size, tokens)) for first in range(0, tokens, size))


def joined(rows: Rows, one: Format, tokens: int) -> Rows:
    """Rows of one token each, [n · tokens, heads, bytes], as rows of several, [n, heads, tokens · bytes]."""
    groups = rows.reshape(-1, tokens, *rows.shape[1:]).transpose(0, 2, 1, 3)
    fields = [groups[..., first:end].reshape(*groups.shape[:2], tokens * (end - first)) for first, end in _places(one)]
    return np.concatenate(fields, axis=2)


def parted(rows: Rows, one: Format, tokens: int) -> Rows:
    """The inverse of ``joined``."""
    count, heads = rows.shape[:2]
    fields = [
        rows[..., first * tokens : end * tokens].reshape(count, heads, tokens, end - first)
        for first, end in _places(one)
    ]
    return np.concatenate(fields, axis=3).transpose(0, 2, 1, 3).reshape(count * tokens, heads, one.row)


def _places(format: Format) -> list[tuple[int, int]]:
    return [format.byte_range(field.name) for field in format.fields]


class Codec:
    """Encoders and decoders of a backend, which note whether what they wrote reads as what it was.

    Attributes:
        exact: whether all did so far.
    """

    def __init__(self, ops: Ops) -> None:
        self._ops, self.exact = ops, True

    def recoded(self, before: Format, after: Format, rows: Rows, scales: tuple[float, float] = (1.0, 1.0)) -> Rows:
        """Rows [n, bytes] of one format as rows of another; ``scales``: global ones before and after."""
        size = max(1, AT_ONCE // (before.dim or 1))
        out = [np.zeros((0, after.row), np.uint8)]
        stays = before.hadamard and after.hadamard
        if stays:
            after = msgspec.structs.replace(after, hadamard=False)  # they are rotated already
        for first in range(0, len(rows), size):
            values = self.decoded(before, rows[first : first + size], scales[0])
            if before.hadamard and not stays:
                values = self._turned(values)
            out.append(self.encoded(after, values, scales[1]))
        return np.concatenate(out)

    def decoded(self, format: Format, rows: Rows, scale: float = 1.0) -> Rows:
        """Values [n, dim] in fp32."""
        if not len(rows):
            return np.zeros((0, format.dim or 0), np.float32)
        rows = np.ascontiguousarray(rows)
        return to_numpy(self._ops.decode(format, self._ops.asarray(rows), None, scale)).astype(np.float32)

    def encoded(self, format: Format, values: Rows, scale: float = 1.0) -> Rows:
        """Canonical rows of values [n, dim]."""
        if not len(values):
            return np.zeros((0, format.row), np.uint8)
        values = np.ascontiguousarray(values)
        rows = to_numpy(self._ops.encode(format, self._ops.asarray(values), scale))
        if self.exact:
            wanted = self._turned(values) if format.hadamard else values
            self.exact = np.array_equal(self.decoded(format, rows, scale), wanted, equal_nan=True)
        return rows

    def rounded(self, values: Rows) -> Rows:
        """Values as rings hold them: in bf16."""
        raw = FORMATS["bf16"].for_dim(values.shape[-1])
        flat = values.reshape(-1, values.shape[-1])
        return self.decoded(raw, self.encoded(raw, flat)).reshape(values.shape)

    def _turned(self, values: Rows) -> Rows:
        turned = TURNED.for_dim(values.shape[1])
        return self.decoded(turned, to_numpy(self._ops.encode(turned, self._ops.asarray(np.ascontiguousarray(values)))))


class Tokens:
    """Keys and values of a request as its rows read, token by token, however many tokens a row is of."""

    def __init__(self, codec: Codec, component: Component, rows: Rows, ring: HostRows | None, length: int) -> None:
        """``rows`` of whole groups; ``ring``: raw rows of the open one, where there is any."""
        self._codec, self._component, self._rows, self._ring = codec, component, rows, ring
        self._closed = length // component.tokens_per_row * component.tokens_per_row

    def format(self, number: int) -> Format:
        """Of a part's rows."""
        return self._component.parts[number].format

    def values(self, number: int, span: range) -> Rows:
        """[tokens, heads, dim] in fp32 of some positions."""
        format, ratio = self.format(number), self._component.tokens_per_row
        heads, dim = self._component.parts[number].heads, self._component.given[number].format.dim or 0
        first, end = span.start // ratio, -(-min(span.stop, self._closed) // ratio)
        rows = self._part(number, self._rows[first : max(first, end)])
        groups = self._codec.decoded(format, rows.reshape(-1, format.row))
        if format.tokens > 1:
            found = groups.reshape(len(rows), heads, dim, ratio).transpose(0, 3, 1, 2)
        else:
            found = groups.reshape(len(rows), heads, ratio, dim).transpose(0, 2, 1, 3)
        found = found.reshape(-1, heads, dim)[span.start - first * ratio :][: len(span)]
        rest = self._raw(number, range(max(span.start, self._closed), max(span.stop, self._closed)))
        return np.concatenate([found, rest])

    def coded(self, number: int, one: Format, span: range) -> Rows:
        """Rows [tokens, heads, bytes] of one token each, in a format over channels that the part is in."""
        ratio = self._component.tokens_per_row
        first, end = span.start // ratio, -(-min(span.stop, self._closed) // ratio)
        rows = self._part(number, self._rows[first : max(first, end)])
        found = parted(rows, one, ratio)[span.start - first * ratio :][: len(span)]
        rest = self._raw(number, range(max(span.start, self._closed), max(span.stop, self._closed)))
        fresh = self._codec.encoded(one, rest.reshape(-1, one.dim or 0))
        return np.concatenate([found, fresh.reshape(len(rest), found.shape[1], one.row)])

    def _part(self, number: int, rows: Rows) -> Rows:
        """Of whole rows, a part's: [n, heads, bytes]."""
        parts = self._component.parts
        start = sum(part.heads * part.format.row for part in parts[:number])
        part = parts[number]
        return rows[:, start : start + part.heads * part.format.row].reshape(len(rows), part.heads, part.format.row)

    def _raw(self, number: int, span: range) -> Rows:
        """Values [tokens, heads, dim] of positions of the open group."""
        parts = self._component.given
        part = parts[number]
        dim = part.format.dim or 0
        if self._ring is None or not span:
            return np.zeros((0, part.heads, dim), np.float32)
        start = sum(part.heads * part.format.row for part in parts[:number])
        at = np.searchsorted(np.asarray(self._ring.positions), np.asarray(span))
        rows = self._ring.rows[at, start : start + part.heads * part.format.row]
        return self._codec.decoded(part.format, rows.reshape(-1, part.format.row)).reshape(len(span), part.heads, dim)
