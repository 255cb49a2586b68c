"""Records that say the same thing, as one line: a report of thousands of checks is read by its exceptions."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvcore.parity.records import Record

SINGLE = ("disagree", "error", "known_gap")
"""What is never grouped: each has its own first mismatch or reason."""


class Group(NamedTuple):
    """Checks of one verb on one backend that differ only in layout and shape.

    Attributes:
        status: of all of them.
        formats: second part of their ids.
        cases: layouts and shapes in words, ``packed, planar × no_tokens, ragged``.
        count: how many they are.
        max_abs: largest difference that any of them met.
        max_ulp: the same in steps.
        detail: what all of them remark.
    """

    status: str
    formats: str
    cases: str
    count: int
    max_abs: float
    max_ulp: int
    detail: str


def single(records: Sequence[Record]) -> list[Record]:
    """Those that stand for themselves, in order of their ids."""
    return sorted((record for record in records if record.status in SINGLE), key=lambda record: record.check)


def grouped(records: Sequence[Record]) -> list[Group]:
    """All others, in order of first occurrence."""
    alike: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if record.status not in SINGLE:
            alike.setdefault((record.status, record.check.split("/")[1], record.detail), []).append(record)
    return [
        Group(
            status=status,
            formats=formats,
            cases="; ".join(_cases(found)),
            count=len(found),
            max_abs=max(record.max_abs for record in found),
            max_ulp=max(record.max_ulp for record in found),
            detail=detail,
        )
        for (status, formats, detail), found in alike.items()
    ]


def _cases(records: Sequence[Record]) -> Iterator[str]:
    """Layouts that were checked in the same shapes, together."""
    shapes: dict[str, list[str]] = {}
    for record in records:
        _, _, layout, shape = record.check.split("/", 3)
        shapes.setdefault(layout, []).append(shape)
    layouts: dict[tuple[str, ...], list[str]] = {}
    for layout, found in shapes.items():
        layouts.setdefault(tuple(found), []).append(layout)
    for found, names in layouts.items():
        yield ", ".join(found) if names == ["any"] else f"{', '.join(names)} × {', '.join(found)}"
