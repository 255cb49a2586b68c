"""The picture of a report: each format's error against the bits it takes, as places on a plane of its own units."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvcore.parity.quality import Quality

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, BOTTOM, TOP = 58, 16, 44, 14
"""Room for the axes."""

BITS = (4, 8, 16, 32)
ERRORS = (1e-1, 1e-2, 1e-3, 1e-4)
LOWEST_BITS, HIGHEST_BITS = 3.4, 36.0
LARGEST_ERROR, SMALLEST_ERROR = 0.25, 5e-5

LINE = 13
"""Height of a label; two of its letters are as wide."""

AWAY = 14
"""From a dot to its label."""


class Point(NamedTuple):
    """One format: its dot, and its label's left end and base line."""

    x: float
    y: float
    label: str
    label_x: float
    label_y: float


class Picture(NamedTuple):
    """What a page draws; all in picture units."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    points: list[Point]
    bits: list[tuple[float, str]]
    errors: list[tuple[float, str]]


def draw(qualities: Sequence[Quality]) -> Picture:
    """Dots for the formats that lose something on the sample: no logarithm has room for the others."""
    return Picture(
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=WIDTH - RIGHT,
        top=TOP,
        bottom=HEIGHT - BOTTOM,
        points=_points([quality for quality in qualities if quality.error > 0]),
        bits=[(_x(bits), str(bits)) for bits in BITS],
        errors=[(_y(error), f"{error:g}") for error in ERRORS],
    )


def _points(qualities: Sequence[Quality]) -> list[Point]:
    """Labels stand right of their dots; one that would cover another dot or label moves down until it does not."""
    dots = [(_x(quality.bits), _y(quality.error)) for quality in qualities]
    taken = [(x - 5, x + 5, y + 3) for x, y in dots]
    found: list[Point] = []
    for quality, (x, y) in sorted(zip(qualities, dots, strict=True), key=lambda pair: (pair[1][1], pair[1][0])):
        first = x + AWAY
        last = first + len(quality.format) * LINE / 2
        base = y + 4
        while any(first < right and left < last and abs(base - other) < LINE for left, right, other in taken):
            base += 1
        taken.append((first, last, base))
        found.append(Point(round(x, 1), round(y, 1), quality.format, round(first, 1), round(base, 1)))
    return found


def _x(bits: float) -> float:
    share = math.log(bits / LOWEST_BITS) / math.log(HIGHEST_BITS / LOWEST_BITS)
    return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


def _y(error: float) -> float:
    """Large errors at the top."""
    share = math.log(LARGEST_ERROR / error) / math.log(LARGEST_ERROR / SMALLEST_ERROR)
    return round(TOP + share * (HEIGHT - TOP - BOTTOM), 1)
