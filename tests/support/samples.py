"""Of products too large for every run, the points that show every pair once. ``pytest --every`` takes them all."""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Point = TypeVar("Point")


def covering(points: Iterable[Point], shows: Callable[[Point], set[Hashable]]) -> list[Point]:
    """The points, in their order, that show something which none before them shows."""
    seen: set[Hashable] = set()
    chosen = []
    for point in points:
        new = shows(point) - seen
        if new:
            chosen.append(point)
            seen |= new
    return chosen
