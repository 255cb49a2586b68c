"""Blocks of rows as matrices that a product takes as they lie: which row and channel each lane is, codes by casts.

A line is 128 lanes. A row of 128 channels is one of them, a longer one several, and several shorter ones share one,
each in a slot of its own. Nothing is moved between lanes: queries are laid out like rows, and what scales a row comes
beside its logit.
"""

from functools import cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas.codes import of_bits
from kvcore.plan import Region
from kvcore.spec.layout import LANES, TILE_BYTES, WORDS

CODES = ("bf16", "fp32", "e4m3", "int8", "e2m1")
REBIASED = (5, 6)
"""Generations that cast an e4m3 of another bias at once, and the one that is stored in many operations; later ones cast
that, and on earlier ones every cast is emulated."""
MOST_SPAN = 4
"""Lines of a row that are read as they lie."""


class Lie(NamedTuple):
    """How rows of a format lie in lines.

    Attributes:
        code: of the elements.
        planes: matrices that a tile becomes: two of nibbles, the even channels and the odd ones.
        slots: rows of a line.
        span: lines of a row; 1 where there are several slots.
        lines: of a tile, in every plane.
        groups: scales of a row, 0 where it has none.
        width: channels that share one.
        words: that hold a row's scales.
        channels: of a row in every plane.
    """

    code: str
    planes: int
    slots: int
    span: int
    lines: int
    groups: int
    width: int
    words: int
    channels: int

    @property
    def slot(self) -> int:
        """Lanes of one."""
        return LANES // self.slots


@cache
def lie(region: Region) -> Lie | str:
    """How the rows of a region lie, or why they cannot be read as they do."""
    format = region.format
    values = [field for field in format.fields if field.is_value]
    if region.layout != "tpu_tile" or region.growth != "block":
        return f"attention reads blocks of tiles, and rows are in {region.growth}s of layout {region.layout}"
    if len(values) > 1 or format.tokens > 1 or format.hadamard:
        return f"a row of {format.name} is more than codes and their scales"
    (field,), place = values, region.unit.places[0]
    if field.code not in CODES or field.has_offsets:
        return f"codes {field.code} have no cast"
    if field.group is not None and (field.scale not in ("fp32", "e8m0") or region.unit.places[-1].buffer != WORDS):
        return f"scales of {format.name} are not words of their own"
    if field.scale == "fp32" and field.groups > 1:
        return f"{format.name} has several fp32 scales a row"
    size = {"bf16": 2, "fp32": 4}.get(field.code, 1)
    lanes = place.stride // size
    planes, span = 1 + (field.code == "e2m1"), max(1, lanes // LANES)
    bf16 = field.code == "bf16"
    if span > MOST_SPAN or span & span - 1 or (bf16 and (span > 2 or lanes < LANES // 2)):
        return f"rows of {format.dim} channels are too long or too short a line"
    words = 0 if field.group is None else region.unit.places[-1].stride // 4
    lines = TILE_BYTES // size // LANES
    channels = -(-field.size // planes)
    return Lie(field.code, planes, max(1, LANES // lanes), span, lines, field.groups, field.width, words, channels)


def rows_of(region: Region, how: Lie) -> np.ndarray:
    """[slots, lines of a unit] the unit's row that each slot of a line holds, -1 in pads."""
    size = dict(region.unit.buffers)[region.unit.places[0].buffer]
    line = np.arange(size // TILE_BYTES * how.lines)[None]
    slot = np.arange(how.slots)[:, None]
    row = line // how.span * how.slots + slot
    if how.code == "bf16" and how.slots == 2:
        # A tile is four rows of a line of bytes each, high ones and low ones: two of them become one line.
        row = line // 2 * 4 + line % 2 + 2 * slot
    return np.where(row < region.rows * region.heads, row, -1)


def channels_of(region: Region, how: Lie) -> np.ndarray:
    """[planes, span, slot's lanes] the channel that a lane of a slot holds, -1 in pads."""
    lane = np.arange(how.slot)[None, None]
    channel = np.arange(how.span)[None, :, None] * LANES + lane
    channel = channel * how.planes + np.arange(how.planes)[:, None, None]
    return np.where(channel < (region.format.dim or 0), channel, -1)


def matrices(how: Lie, words, native: bool) -> list:
    """Tiles as words [n, 128] int32, or fp32 lines, -> [n · lines, 128] of every plane, bf16 or fp32.

    ``native``: the chip casts e4m3 itself.
    """
    if how.code == "fp32":
        return [_filled(how, words)]
    if how.code == "bf16":
        return [pltpu.bitcast(_filled(how, _halves(how, words)), jnp.bfloat16)]
    words = _filled(how, words)
    if how.code == "int8":
        return [pltpu.bitcast(words, jnp.int8).astype(jnp.bfloat16)]
    if how.code == "e4m3":
        if native:
            return [pltpu.bitcast(words, jnp.float8_e4m3fn).astype(jnp.bfloat16)]
        return [pltpu.bitcast(_rebiased(words), jnp.float8_e4m3b11fnuz).astype(jnp.bfloat16)]
    # Of e5m2 codes, which have room for a nibble's two bits of exponent and one of significand.
    low = (words & 0x07070707) << 1 | (words & 0x08080808) << 4
    high = lax.shift_right_logical(words, 3) & 0x0E0E0E0E | words & np.int32(-0x7F7F7F80)
    return [pltpu.bitcast(half, jnp.float8_e5m2).astype(jnp.bfloat16) for half in (low, high)]


def _filled(how: Lie, words):
    """Lines without what pads rows in them: it may be anything, and 0 times that is a number only where that is one."""
    if how.channels == how.slot * how.span:
        return words
    if how.code == "fp32":
        line, lane = (lax.broadcasted_iota(jnp.int32, words.shape, axis) for axis in (0, 1))
        return jnp.where(lane + LANES * (line & how.span - 1) < how.channels, words, 0.0)
    lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1) & how.slot - 1
    bits, kept = 32 // how.lines, jnp.zeros((1, LANES), jnp.int32)
    for number in range(how.lines):
        mine = np.uint32(((1 << bits) - 1) << bits * number).view(np.int32)
        kept |= jnp.where(lane + LANES * (number & how.span - 1) < how.channels, mine, np.int32(0))
    return words & kept


def factor(how: Lie, native: bool) -> float:
    """What a matrix must be multiplied by: casts that have another exponent's bias."""
    return {"e4m3": 1.0 if native else 2.0**4, "e2m1": 2.0**14}.get(how.code, 1.0)


def _halves(how: Lie, words):
    """Words of bf16 rows, all high bytes of a row and then all low ones -> words of two elements each."""
    lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    if how.slots == 2:
        # Bytes of four rows: two of them become the first half of the lanes, two the other.
        high, low = _turned(words, LANES // 2), _turned(words, -how.channels)
        first = (words & 0xFF) << 8 | low & 0xFF | (words & 0xFF00) << 16 | (low & 0xFF00) << 8
        low = _turned(words, LANES // 2 - how.channels)
        second = lax.shift_right_logical(high, 8) & 0xFF00 | lax.shift_right_logical(low, 16) & 0xFF
        second = second | high & np.int32(-0x1000000) | lax.shift_right_logical(low, 8) & 0xFF0000
        return jnp.where(lane < LANES // 2, first, second)
    # Low bytes begin where high ones end: in a line of bytes, and go on in the next.
    low, rest = _turned(words, -how.channels), how.span * LANES - how.channels
    if how.span == 1:
        after = lax.shift_right_logical(low, 8)
        return (words & 0x00FF00FF) << 8 | (jnp.where(lane < rest, low, after) if rest else after) & 0x00FF00FF
    after = lax.shift_right_logical(low, 16)
    low = jnp.where(lane < rest, lax.shift_right_logical(low, 8), after) if rest else after
    return (words & 0xFF) << 8 | (words & 0xFF00) << 16 | low & 0xFF | (low & 0xFF00) << 8


def _turned(words, lanes: int):
    return pltpu.roll(words, lanes % LANES, 1) if lanes % LANES else words


def _rebiased(words):
    """Four e4m3 codes -> codes of an e4m3 whose bias is 11, 2^-4 of the numbers; chips without the one cast the other.

    That one has no -0: its code is NaN, as which NaN is written here.
    """
    magnitude = words & 0x7F7F7F7F
    nan = magnitude + 0x01010101 & np.int32(-0x7F7F7F80)
    some = magnitude + 0x7F7F7F7F & words & np.int32(-0x7F7F7F80)
    return magnitude + lax.shift_right_logical(nan, 7) | some


def scales(how: Lie, scale: str, words: list, group: int):
    """Scales of a group [1, n] fp32, or of any shape, from a row's words, as many arrays."""
    if scale == "fp32":
        return of_bits(words[0])
    byte = lax.shift_right_logical(words[group // 4], 8 * (group % 4)) & 0xFF
    return jnp.where(byte == 0xFF, np.float32(np.nan), of_bits(byte << 23))


class Moves(NamedTuple):
    """Where the words of a piece's rows lie beside those of its lines; see ``moves_of``.

    Attributes:
        patterns: [n, 128, 128] from lanes to lanes, one-hot.
        of: (slot, word, line of 128 lines) -> ((row of words, pattern or -1 where lanes stay), ...).
    """

    patterns: np.ndarray
    of: dict


def moves_of(rows: np.ndarray, words: int) -> Moves:
    """How words of rows, 128 in a line of lanes, come to lie beside the lines that hold the rows.

    Args:
        rows: [slots, lines] of a piece, numbered from its first row of words; -1 in pads.
        words: of a row.
    """
    patterns: list[np.ndarray] = []
    known: dict[bytes, int] = {}
    of = {}
    stay = np.arange(LANES)
    for slot, row in enumerate(rows):
        padded = np.pad(row, (0, -len(row) % LANES), constant_values=-1).reshape(-1, LANES)
        for word in range(words):
            for number, line in enumerate(padded):
                at = np.where(line >= 0, line * words + word, -1)
                found = []
                for source in np.unique(at[at >= 0] // LANES):
                    lane = np.where(at // LANES == source, at % LANES, -1)
                    if np.all((lane == stay) | (lane < 0) & (at < 0)):
                        found.append((int(source), -1))
                        continue
                    key = lane.tobytes()
                    if key not in known:
                        known[key] = len(patterns)
                        patterns.append(lane[None] == stay[:, None])
                    found.append((int(source), known[key]))
                of[slot, word, number] = tuple(found)
    empty = np.zeros((0, LANES, LANES), np.bool_)
    return Moves(np.stack(patterns) if patterns else empty, of)


def moved(words, patterns, count: int) -> list:
    """Words [m, 128] int32 through every pattern of ``patterns`` [count, 128, 128] bf16: bytes are exact in bf16."""
    planes = [(lax.shift_right_logical(words, 8 * byte) & 0xFF).astype(jnp.float32) for byte in range(4)]
    planes = jnp.concatenate(planes, axis=0).astype(jnp.bfloat16)
    found, size = [], len(words)
    for number in range(count):
        bytes_ = jnp.dot(planes, patterns[number], preferred_element_type=jnp.float32).astype(jnp.int32)
        parts = [bytes_[byte * size : (byte + 1) * size] << 8 * byte for byte in range(4)]
        found.append(parts[0] | parts[1] | parts[2] | parts[3])
    return found
