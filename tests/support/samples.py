"""Of products too large for every run, the points that show every pair once. ``pytest --every`` takes them all."""

from collections.abc import Callable, Hashable, Iterable
from itertools import zip_longest
from typing import TypeVar

from tests.support.backends_under_test import BACKENDS

Point = TypeVar("Point")
EVERY = False
"""Whether all was asked for, by ``--every``."""


def examples(few: int, many: int) -> int:
    """How many examples are drawn, or every which point is tried: by default, and where all is asked for."""
    return many if EVERY else few


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


def fewest(points: Iterable[Point], shows: Callable[[Point], set[Hashable]]) -> list[Point]:
    """Points that show all that any does, each the one that shows most of what is left; of equals the first."""
    left = {point: shows(point) for point in points}
    chosen = []
    while left:
        point = max(left, key=lambda each: len(left[each]))
        shown = left.pop(point)
        if not shown:
            break
        chosen.append(point)
        left = {each: rest for each, shows in left.items() if (rest := shows - shown)}
    return chosen


def quick(ids: Iterable[str]) -> list[str]:
    """Of a test's cases some that show every word of its ids on every backend: a grid's diagonal, and what it lacks."""
    words = {id: words_of(id) for id in ids}
    backends = {id: tuple(word for word in found if word in BACKENDS) for id, found in words.items()}
    cases = {id: [word for word in found if word not in BACKENDS] for id, found in words.items()}
    columns = [list(dict.fromkeys(column)) for column in zip_longest(*cases.values())]

    def beside(id: str) -> bool:
        places = [column.index(word) for column, word in zip(columns, cases[id], strict=False)]
        return any(place != max(places) % len(column) for column, place in zip(columns, places, strict=False))

    return covering(sorted(words, key=beside), lambda id: {(*backends[id], word) for word in words[id]})


def words_of(id: str) -> list[str]:
    """What the parameters of a test's case are called, as its id has them between brackets and dashes."""
    return id.partition("[")[2].removesuffix("]").split("-")
