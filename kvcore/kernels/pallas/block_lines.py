"""Blocks of rows as matrices that a product takes as they lie: which row and channel each lane is, codes by casts.

A line is 128 lanes. A row of 128 channels is one of them, a longer one several, and several shorter ones share one,
each in a slot of its own. Nothing is moved between lanes: queries are laid out like rows, and what scales a row comes
beside its logit.
"""

import functools
from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas.codes import of_bits
from kvcore.plan import Region
from kvcore.spec.codes import NF4_LEVELS
from kvcore.spec.layout import LANES, TILE_BYTES, WORDS

CODES = ("bf16", "fp32", "e4m3", "int8", "e2m1", "nf4", "uint4")
REBIASED = (5, 6)
"""Generations that cast an e4m3 of another bias at once, and the one that is stored in many operations; later ones cast
that, and on earlier ones every cast is emulated."""
E2M1_FACTOR = 2.0**14
"""What numbers of ``from_e2m1`` must be multiplied by."""
NF4_FACTOR = 1 / 1.0044705867767334
"""The same of nf4: over it every level is the sum of two bf16 numbers to 3e-7, and by itself to 3e-6."""
LOOKED_UP = 32
"""Rows of codes that are looked up together,"""
BY_LANES = 3
"""and of so many such rows one among lanes, by units that would be idle, the others among sublanes."""
UINT4_FACTOR = 1 / 16
"""The same of ``from_uint4``."""
UINT4_MIDDLE = 8.0
"""What those are less than their codes, so that half of them are below 0."""
MOST_SPAN = 4
"""Lines of a row that are read as they lie."""


SPREAD_LINES = 2048
"""Lines whose scales are spread by one product, if a piece is a multiple of so many."""


class Lie(NamedTuple):
    """How rows of a format lie in lines.

    Attributes:
        code: of the elements.
        planes: matrices that a tile becomes: two of nibbles, the even channels and the odd ones.
        slots: rows of a line.
        span: lines of a row; 1 where there are several slots.
        lines: of a tile, in every plane.
        groups: scales of a row, 0 where it has none.
        scale: code of these.
        apart: of these that scale products of their own, since what they scale would not be exact in bf16; else 1.
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
    scale: str
    apart: int
    width: int
    words: int
    channels: int

    @property
    def slot(self) -> int:
        """Lanes of one."""
        return LANES // self.slots

    @property
    def levels(self) -> int:
        """Matrices whose sum a plane is: numbers that are no bf16 ones are two."""
        return 2 if self.code == "nf4" else 1

    @property
    def has_offsets(self) -> bool:
        """True where numbers are an offset and a code times a scale; words hold all scales, and then all offsets."""
        return self.code == "uint4"

    @property
    def spreads(self) -> bool:
        """True where scales are spread over lanes, which are scaled before they are multiplied."""
        return self.groups > self.apart

    def part_of(self, lane):
        """Which of the scales that are apart is that of a lane, counted from the first lane of a plane."""
        return (lane & self.slot - 1) // (self.width // self.planes)


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
    if field.code not in CODES:
        return f"codes {field.code} have no cast"
    known = ("bf16",) if field.has_offsets else ("fp32", "e8m0")
    if field.group is not None and (field.scale not in known or region.unit.places[-1].buffer != WORDS):
        return f"scales of {format.name} are not words of their own"
    size = {"bf16": 2, "fp32": 4}.get(field.code, 1)
    lanes = place.stride // size
    planes, span = 1 + (field.element.bits == 4), max(1, lanes // LANES)
    apart = field.groups if field.scale in ("fp32", "bf16") and field.groups else 1
    bf16 = field.code == "bf16"
    if span > MOST_SPAN or span & span - 1 or (bf16 and (span > 2 or lanes < LANES // 2)):
        return f"rows of {format.dim} channels are too long or too short a line"
    if apart > 1 and span > 1:
        return f"{format.name} has several {field.scale} scales a row, and a row is more than a line"
    words = 0 if field.group is None else region.unit.places[-1].stride // 4
    slots = max(1, LANES // lanes)
    if field.groups > apart and (words & words - 1 or slots * words % span):
        return f"scales of {format.dim} channels are {words} words a row"
    lines = TILE_BYTES // size // LANES
    channels = -(-field.size // planes)
    groups = field.groups, field.scale or ""
    return Lie(field.code, planes, slots, span, lines, *groups, apart, field.width, words, channels)


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


def matrices(how: Lie, words, native: bool, sublanes: bool) -> list:
    """Tiles as words [n, 128] int32, or fp32 lines, -> [n · lines, 128] of every plane, bf16 or fp32; of every level.

    ``native``: the chip casts e4m3 itself; ``sublanes``: it looks levels up among these, too.
    """
    if how.code == "fp32":
        return [_filled(how, words)]
    if how.code == "bf16":
        return [pltpu.bitcast(_filled(how, _halves(how, words)), jnp.bfloat16)]
    words = _filled(how, words)
    if how.code == "int8":
        return [pltpu.bitcast(words, jnp.int8).astype(jnp.bfloat16)]
    if how.code == "e4m3":
        return [from_e4m3(words, native)]
    if how.code == "nf4":
        low, high = (_nf4(lax.shift_right_logical(words, bits) & 0x0F0F0F0F, sublanes) for bits in (0, 4))
        return [level for both in zip(low, high, strict=True) for level in both]
    if how.code == "uint4":
        return [from_uint4(words << 4), from_uint4(words)]
    high = lax.shift_right_logical(words, 3) & 0x0E0E0E0E | words & np.int32(-0x7F7F7F80)
    return [from_e2m1(words), pltpu.bitcast(high, jnp.float8_e5m2).astype(jnp.bfloat16)]


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
    factors = {"e4m3": e4m3_factor(native), "e2m1": E2M1_FACTOR, "nf4": NF4_FACTOR, "uint4": UINT4_FACTOR}
    return factors.get(how.code, 1.0)


def from_e2m1(words):
    """Words [n, 128], of which the lower half of each byte is a code -> [4n, 128] bf16, 2^-14 of the numbers.

    By codes of e5m2, which have room for two bits of exponent and one of significand.
    """
    low = (words & 0x07070707) << 1 | (words & 0x08080808) << 4
    return pltpu.bitcast(low, jnp.float8_e5m2).astype(jnp.bfloat16)


def from_uint4(words):
    """Words [n, 128], of which the upper half of each byte is a code -> [4n, 128] bf16, 16 times the code less 8."""
    return pltpu.bitcast(words & np.int32(-0x0F0F0F10) ^ np.int32(-0x7F7F7F80), jnp.int8).astype(jnp.bfloat16)


def _nf4(words, sublanes: bool):
    """Words [n, 128] of four codes -> two of [4n, 128] bf16, which add up to the levels over ``NF4_FACTOR``."""
    code = pltpu.bitcast(words, jnp.int8).astype(jnp.int32)
    found = []
    for number, first in enumerate(range(0, len(code), LOOKED_UP)):
        some = code[first : first + LOOKED_UP]
        by_lanes = number % BY_LANES == 0 or len(some) % 8 or not sublanes
        found.append(_among_lanes(some) if by_lanes else _among_sublanes(some))
    bits = jnp.concatenate(found, axis=0)
    return of_bits(bits).astype(jnp.bfloat16), pltpu.bitcast(bits.astype(jnp.int16), jnp.bfloat16)


def _among_lanes(code):
    """Bits of the levels of codes [n, 128], from a table that has one a lane."""
    rows = 8 if len(code) % 8 == 0 else len(code)
    table = jnp.concatenate([_table(0, (rows, LANES), 1)] * (len(code) // rows), axis=0)
    return jnp.take_along_axis(table, code, axis=1, mode="promise_in_bounds")


def _among_sublanes(code):
    """The same from two tables that have one a sublane."""
    tables, found = [_table(first, (8, LANES), 0) for first in (0, 8)], []
    for first in range(0, len(code), 8):
        some = code[first : first + 8]
        low, high = (jnp.take_along_axis(table, some & 7, axis=0, mode="promise_in_bounds") for table in tables)
        found.append(jnp.where(some < 8, low, high))
    return jnp.concatenate(found, axis=0)


def _table(first: int, shape: tuple[int, int], axis: int):
    """Bits of the levels from one on, along an axis."""
    place = lax.broadcasted_iota(jnp.int32, shape, axis)
    return functools.reduce(
        lambda table, one: jnp.where(place == one[0], one[1], table),
        enumerate(NF4_BITS[first : first + shape[axis]]),
        jnp.zeros(shape, jnp.int32),
    )


def _nf4_bits() -> list[np.int32]:
    """Of every level over the factor the bits of the bf16 number next to it, and of what is left below them.

    The upper half is what rounds to the former with the lower half below it: it needs no mask.
    """
    found = []
    for level in np.array(NF4_LEVELS) / NF4_FACTOR:
        first = level.astype(jnp.bfloat16)
        rest = (level - first.astype(np.float64)).astype(jnp.bfloat16)
        low = int(rest.view(np.uint16)) if rest else 0
        high = int(first.view(np.uint16)) - (low >> 15)
        found.append(np.uint32(high << 16 | low).view(np.int32))
    return found


NF4_BITS = _nf4_bits()


def casts_e4m3(interpret: Any) -> bool:
    """True where the chip that a kernel is compiled for casts e4m3 as it is, or emulates every cast.

    In a trace that says of no chip what it is for, False: every chip compiles the other cast.
    """
    if interpret:
        return False
    try:
        return pltpu.get_tpu_info().generation not in REBIASED
    except ValueError:
        return False


def looks_among_sublanes(interpret: Any) -> bool:
    """True where the chip that a kernel is compiled for looks numbers up among sublanes; every one does among lanes."""
    if interpret:
        return True
    try:
        return pltpu.get_tpu_info().generation > 4
    except ValueError:
        return False


def from_e4m3(words, native: bool):
    """Words [n, 128] of four codes -> [4n, 128] bf16, to be multiplied by ``e4m3_factor``."""
    if native:
        return pltpu.bitcast(words, jnp.float8_e4m3fn).astype(jnp.bfloat16)
    return pltpu.bitcast(_rebiased(words), jnp.float8_e4m3b11fnuz).astype(jnp.bfloat16)


def e4m3_factor(native: bool) -> float:
    """What numbers of ``from_e4m3`` must be multiplied by."""
    return 1.0 if native else 2.0**4


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


def scales(how: Lie, words, part: int):
    """Scales fp32 of a group of rows, from their words, a list of arrays of any shape."""
    if how.scale == "fp32":
        return of_bits(words[part])
    if how.scale == "bf16":
        return _half(words, part)
    byte = words[part] & 0xFF
    return jnp.where(byte == 0xFF, np.float32(np.nan), of_bits(byte << 23))


def offsets(how: Lie, words, part: int):
    """What is added to the numbers of ``matrices`` times their scale, of a group of rows."""
    middle = scales(how, words, part) * np.float32(UINT4_MIDDLE)
    return (_half(words, how.groups + part) + middle) * np.float32(1 / UINT4_FACTOR)


def _half(words, number: int):
    """The bf16 number ``number`` of words, the lower half first."""
    word = words[number // 2]
    return of_bits(word & np.int32(-0x10000) if number % 2 else word << 16)


class Moves(NamedTuple):
    """Where the words of a piece's rows lie beside those of its lines; see ``moves_of``.

    Attributes:
        patterns: [n, fold · 128, 128] bf16, from lanes to lanes, one-hot.
        of: (slot, line of 128 lines) -> ((row of words, pattern or -1 where lanes stay), ...).
        fold: rows of words side by side that are one such row.
    """

    patterns: np.ndarray
    of: dict
    fold: int = 1

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What a kernel needs of it beside itself."""
        return (self.patterns,) if len(self.patterns) else ()


def moves_of(rows: np.ndarray) -> Moves:
    """How words of rows, one each and 128 in a line of lanes, come to lie beside the lines that hold the rows.

    Args:
        rows: [slots, lines] of a piece, numbered from its first row of words; -1 in pads.
    """
    folded = _folded(rows)
    if folded is not None:
        return folded
    patterns: list[np.ndarray] = []
    known: dict[bytes, int] = {}
    of = {}
    stay = np.arange(LANES)
    for slot, row in enumerate(rows):
        padded = np.pad(row, (0, -len(row) % LANES), constant_values=-1).reshape(-1, LANES)
        for number, at in enumerate(padded):
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
            of[slot, number] = tuple(found)
    empty = np.zeros((0, LANES, LANES), np.bool_)
    return Moves((np.stack(patterns) if patterns else empty).astype(jnp.bfloat16), of)


def _folded(rows: np.ndarray) -> Moves | None:
    """The same where every 128 lines have as many rows of words for themselves, several of them: a pattern a slot."""
    slots, lines = rows.shape
    blocks = lines // LANES
    fold, rest = divmod(int(rows.max()) + 1, max(blocks, 1) * LANES)
    if lines % LANES or rest or fold < 2:
        return None
    lane = rows.reshape(slots, blocks, LANES) - fold * LANES * np.arange(blocks)[:, None]
    if (lane != lane[:, :1]).any() or (lane < 0).any() or (lane >= fold * LANES).any():
        return None
    patterns = lane[:, 0, None, :] == np.arange(fold * LANES)[None, :, None]
    of = {(slot, number): ((number, slot),) for slot in range(slots) for number in range(blocks)}
    return Moves(patterns.astype(jnp.bfloat16), of, fold)


def moved(words, patterns, count: int, fold: int) -> list:
    """Words [m, 128] int32, ``fold`` rows as one, through every pattern of ``patterns`` [count, fold · 128, 128] bf16.

    Bytes are exact in bf16.
    """
    if fold > 1:
        apart = words.reshape(len(words) // fold, fold, LANES)
        words = jnp.concatenate([apart[:, number] for number in range(fold)], axis=1)
    planes = [(lax.shift_right_logical(words, 8 * byte) & 0xFF).astype(jnp.float32) for byte in range(4)]
    planes = jnp.concatenate(planes, axis=0).astype(jnp.bfloat16)
    found, size = [], len(words)
    for number in range(count):
        bytes_ = jnp.dot(planes, patterns[number], preferred_element_type=jnp.float32).astype(jnp.int32)
        parts = [bytes_[byte * size : (byte + 1) * size] << 8 * byte for byte in range(4)]
        found.append(parts[0] | parts[1] | parts[2] | parts[3])
    return found


class Spread(NamedTuple):
    """How the scales of a piece's groups come to every lane of its lines, by two products; see ``spread``.

    A row of words goes to as many lines as its 128 words are for, fewer than 128; ``folds`` rows of words far from each
    other go to 128 lines at once, ``count`` times.

    Attributes:
        chosen: [slots · words, lines of a row of words, 128] bf16, of each line the lane of its word.
        places: [slots · words · bytes · count / 2, count · 128] int32, of each lane the byte that scales it: two rows
            of bf16 to a word, as a register holds them.
        folds, count, bytes: as above, and those of a word that are used.
        lines: of a piece.
    """

    chosen: np.ndarray
    places: np.ndarray
    folds: int
    count: int
    bytes: int
    lines: int

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What a kernel needs of it beside itself."""
        return self.chosen, self.places


def spread_of(how: Lie, lines: int) -> Spread:
    """For pieces of so many lines."""
    folds, wide = how.slots * how.words // how.span, how.width // how.planes
    per_word, bytes_ = LANES // folds, 2 if how.groups == 2 else 4
    count = -(-(lines if lines % SPREAD_LINES else SPREAD_LINES) // LANES)
    line, lane = np.arange(per_word)[:, None], np.arange(LANES)[None]
    slot, word = (array.reshape(-1, 1, 1) for array in np.divmod(np.arange(how.slots * how.words), how.words))
    # The groups of a row are those of its lines, one after another, as many in each.
    per_line = how.slot // wide
    first = line % how.span * per_line
    used = (4 * word < first + per_line) & (4 * word + 3 >= first)
    chosen = used & (lane == (line // how.span * how.slots + slot) * how.words + word)
    byte = np.arange(bytes_)[:, None]
    group = 4 * word + byte
    held = (lane // how.slot == slot) & (lane % how.slot // wide == group % per_line) & (group < how.groups)
    same = np.eye(count, dtype=bool)
    places = (held[:, :, None, None, :] & same[None, None, :, :, None]).reshape(-1, 2, count * LANES)
    one = int(np.float32(1).view(np.int32)) >> 16
    pairs = (places * np.array([one, one << 16], np.int32)[:, None]).sum(axis=1, dtype=np.int32)
    return Spread(chosen.astype(jnp.bfloat16), pairs, folds, count, bytes_, lines)


def spread(way: Spread, words, chosen, places, *, careful: bool):
    """Scales of groups [lines, 128] bf16, every lane its own: powers of two, with which codes are exact in bf16.

    Args:
        way: of ``spread_of``.
        words: [m, 128] int32, each with as many exponents.
        chosen, places: of ``way``.
        careful: a scale that is no number spoils nothing but its group; else all that comes with it.
    """
    size = way.folds * way.count
    words = jnp.pad(words, ((0, -len(words) % size), (0, 0)))
    each = []
    for number in range(way.bytes):
        byte = lax.shift_right_logical(words, 8 * number) & 0xFF
        # A product with zeros and ones may not spread what is not finite.
        each.append(jnp.where(byte == 0xFF, -1.0, of_bits(byte << 23)) if careful else of_bits(byte << 23))
    places, per_word, found = pltpu.bitcast(places[...], jnp.bfloat16), LANES // way.folds, []
    for first in range(0, len(words), size):
        rows = []
        for begin in range(first, first + size, way.count):
            exponents = jnp.concatenate([one[begin : begin + way.count] for one in each], axis=0).astype(jnp.bfloat16)
            of_lines = [
                lax.dot_general(chosen[n], exponents, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
                for n in range(len(way.chosen))
            ]
            rows.append(jnp.concatenate(of_lines, axis=1))
        rows = jnp.concatenate(rows, axis=0).astype(jnp.bfloat16)
        lines = jnp.dot(rows, places, preferred_element_type=jnp.float32)
        if careful:
            lines = jnp.where(lines < 0, np.float32(np.nan), lines)
        lines = lines.astype(jnp.bfloat16)
        found += [
            lines[begin : begin + per_word, lane : lane + LANES]
            for begin in range(0, LANES, per_word)
            for lane in range(0, LANES * way.count, LANES)
        ]
    return jnp.concatenate(found, axis=0)[: way.lines]
