"""A plane of labelled dots as SVG: what benchmarks of quality draw, lower left better."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

OWN, OTHERS = "#4878a8", "#c06030"
LEFT, TOP, BOTTOM = 70, 40, 50
LINE = 14
"""From one label's base line to the next."""
LETTER = 6.2
"""Width of one in a label, about."""


class Dot(NamedTuple):
    """One dot; ``interval``: the ends of a bar through it."""

    x: float
    y: float
    label: str
    colour: str = OWN
    interval: tuple[float, float] | None = None


def scatter(
    title: str,
    across: str,
    dots: Sequence[Dot],
    *,
    marks: tuple[Sequence[float], Sequence[float]],
    ends: tuple[tuple[float, float], tuple[float, float]],
    written: Callable[[float], str],
    room: int = 190,
) -> str:
    """The picture.

    Args:
        title: above it.
        across: what x is.
        dots: in any order.
        marks: on either axis.
        ends: (low, high) of either axis; what is beyond is drawn at the end.
        written: a mark of the upright axis as text.
        room: pixels for labels, right of the last dot.
    """
    width, height, right = 760, 400, room
    (low_x, high_x), (low_y, high_y) = ends

    def x(value: float) -> float:
        return LEFT + (min(max(value, low_x), high_x) - low_x) / (high_x - low_x) * (width - LEFT - right)

    def y(value: float) -> float:
        return height - BOTTOM - (min(max(value, low_y), high_y) - low_y) / (high_y - low_y) * (height - BOTTOM - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="8" y="18" font-size="14">{title}</text>',
        f'<path d="M{LEFT} {TOP - 6}V{height - BOTTOM + 6}H{width - right + 8}" fill="none" stroke="#888"/>',
        f'<text x="{(LEFT + width - right) / 2}" y="{height - 10}" text-anchor="middle">{across}</text>',
        *(
            f'<text x="{x(at):.1f}" y="{height - BOTTOM + 22}" text-anchor="middle">{at:g}</text>'
            for at in marks[0]
            if low_x <= at <= high_x
        ),
        *(
            f'<text x="{LEFT - 8}" y="{y(at) + 4:.1f}" text-anchor="end">{written(at)}</text>'
            for at in marks[1]
            if low_y <= at <= high_y
        ),
    ]
    places = [(x(dot.x), y(dot.y)) for dot in dots]
    taken: list[tuple[float, float, float]] = []
    for dot, (place_x, place_y) in sorted(zip(dots, places, strict=True), key=lambda pair: pair[0].y):
        start, end = place_x + 8, place_x + 8 + LETTER * len(dot.label)
        nearby = (place_y + way * off for off in range(height) for way in (-1, 1))
        label_y = next(
            free
            for free in nearby
            if TOP - 6 <= free <= height - BOTTOM + 6
            and not any(abs(free - at) < LINE and start < last and first < end for first, last, at in taken)
            and not any(abs(free - at_y) < LINE / 2 + 2 and start < at_x < end for at_x, at_y in places)
        )
        taken.append((start, end, label_y))
        if dot.interval is not None:
            low, high = map(y, dot.interval)
            parts.append(f'<path d="M{place_x:.1f} {low:.1f}V{high:.1f}" stroke="{dot.colour}"/>')
        if abs(place_y - label_y) > LINE / 2:
            parts.append(f'<path d="M{place_x:.1f} {place_y:.1f}L{start:.1f} {label_y:.1f}" stroke="#bbb"/>')
        parts.append(f'<circle cx="{place_x:.1f}" cy="{place_y:.1f}" r="4" fill="{dot.colour}"/>')
        parts.append(f'<text x="{start:.1f}" y="{label_y + 4:.1f}">{dot.label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
