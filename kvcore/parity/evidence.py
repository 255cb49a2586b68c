"""How a page orders what a report has: the strongest evidence first, chips of one kind and equal environments once."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcore.parity.records import Report, Run
from kvcore.parity.show import Cell, Column, Summary

STRENGTH: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("did not run", lambda how: not how),
    ("compiled, not run", lambda how: "ahead of time" in how.lower()),
    ("interpreted", lambda how: "interpreter" in how.lower()),
    ("run on an accelerator", lambda how: how.startswith(("cuda (", "tpu ("))),
    ("run on a CPU", bool),
)
"""Kinds of evidence, and which ways of running are of it; the first that fits."""

ORDER = ("run on an accelerator", "run on a CPU", "interpreted", "compiled, not run", "did not run")
"""The strongest first."""

CHIP = re.compile(r"TPU (v\w+)")


class Evidence(NamedTuple):
    """One column of the page: a backend that ran in one way, on one chip or, with equal counts, on several.

    Attributes:
        backend: its name.
        how: how it ran, with all chips.
        kind: of the evidence, one of ``ORDER``.
        columns: of the summary, by number.
        cells: verb -> what each of them has; None without a record.
        total: over all verbs, of each.
    """

    backend: str
    how: str
    kind: str
    columns: tuple[int, ...]
    cells: dict[str, Cell | None]
    total: Cell | None

    @property
    def verbs(self) -> int:
        """Verbs that have a record."""
        return sum(cell is not None for cell in self.cells.values())


class Environment(NamedTuple):
    """Runs of a backend with equal versions on equal platforms."""

    backend: str
    ways: tuple[str, ...]
    run: Run
    commits: tuple[str, ...]
    commands: tuple[str, ...]


def evidence(summary: Summary) -> list[Evidence]:
    """The columns of a summary, the strongest evidence first and within a kind what has most checks."""
    alike: dict[object, list[int]] = {}
    for number, column in enumerate(summary.columns):
        counts = tuple((verb, _counts(cells[number])) for verb, cells in summary.verbs.items())
        chip = CHIP.match(column.how)
        key = (column.backend, CHIP.sub("TPU", column.how, count=1), counts) if chip else number
        alike.setdefault(key, []).append(number)
    found = [_column(summary, tuple(numbers)) for numbers in alike.values()]
    return sorted(found, key=lambda one: (ORDER.index(one.kind), -checks(one.total)))


def kind_of(how: str) -> str:
    """Which kind of evidence a way of running gives."""
    return next(kind for kind, fits in STRENGTH if fits(how))


def checks(cell: Cell | None) -> int:
    """How many checks a cell counts."""
    return 0 if cell is None else sum(cell.counts.values())


def most(summary: Summary) -> dict[str, int]:
    """Verb -> the most checks of it that any column has: what a dash, or a smaller number, is to be held against."""
    return {verb: max(map(checks, cells), default=0) for verb, cells in summary.verbs.items()}


def ordered(columns: Sequence[Evidence], summary: Summary) -> list[tuple[int, Column]]:
    """Every column of the summary by number, in the order of the page."""
    return [(number, summary.columns[number]) for column in columns for number in column.columns]


def environments(report: Report) -> list[Environment]:
    """Runs with equal versions together, the strongest evidence first."""
    alike: dict[object, list[Run]] = {}
    for run in report.runs:
        key = run.backend, run.kvcore, run.python, tuple(sorted(run.versions.items())), run.platform
        alike.setdefault(key, []).append(run)
    found = [
        Environment(
            backend=runs[0].backend,
            ways=_folded([run.how or run.reason for run in runs]),
            run=runs[0],
            commits=tuple(dict.fromkeys(run.commit[:12] for run in runs if run.commit)),
            commands=tuple(dict.fromkeys(run.command for run in runs)),
        )
        for runs in alike.values()
    ]
    return sorted(found, key=lambda one: ORDER.index(kind_of(one.run.how)))


def _column(summary: Summary, numbers: tuple[int, ...]) -> Evidence:
    first = numbers[0]
    (how,) = _folded([summary.columns[number].how for number in numbers])
    return Evidence(
        backend=summary.columns[first].backend,
        how=how,
        kind=kind_of(summary.columns[first].how),
        columns=numbers,
        cells={verb: cells[first] for verb, cells in summary.verbs.items()},
        total=summary.totals[first],
    )


def _folded(ways: Sequence[str]) -> tuple[str, ...]:
    """Ways of running, those that differ in the chip alone as one: ``TPU v4, v5e, compiled …``."""
    chips: dict[str, list[str]] = {}
    for how in dict.fromkeys(ways):
        found = CHIP.match(how)
        chips.setdefault(CHIP.sub("TPU {}", how, count=1) if found else how, []).append(found[1] if found else "")
    return tuple(how.replace("{}", ", ".join(names)) if names[0] else how for how, names in chips.items())


def _counts(cell: Cell | None) -> tuple[tuple[str, int], ...]:
    return () if cell is None else tuple(cell.counts.items())
