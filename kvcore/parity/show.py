"""A report summed up: verbs by backends with counts, and failures in words. Knows no terminal and no HTML."""

from collections.abc import Sequence

import msgspec

from kvcore.foreign import printable
from kvcore.parity.records import STATUSES, Record, Report

FAILURES_SHOWN = 20


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One backend, run in one way."""

    backend: str
    how: str

    @property
    def title(self) -> str:
        """As a table heads it."""
        return f"{printable(self.backend)}\n{printable(self.how) or 'did not run'}"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One verb of one column.

    Attributes:
        counts: status -> checks, only those that occur.
        max_abs: largest difference that was met.
        max_ulp: the same in steps of the result's precision.
    """

    counts: dict[str, int]
    max_abs: float
    max_ulp: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to see in a report.

    Attributes:
        spec: name and short digest.
        columns: backends, each in each way it ran.
        verbs: row by row, a cell a column; None where a column has no record of the verb.
        totals: one cell a column.
        agrees: the report's verdict.
    """

    spec: str
    columns: tuple[Column, ...]
    verbs: dict[str, tuple[Cell | None, ...]]
    totals: tuple[Cell | None, ...]
    agrees: bool


def summarise(report: Report) -> Summary:
    """Count a report."""
    shown = tuple(dict.fromkeys((record.backend, record.how) for record in report.checks))
    groups: dict[tuple[str, tuple[str, str]], list[Record]] = {}
    for record in report.checks:
        groups.setdefault((record.verb, (record.backend, record.how)), []).append(record)
    verbs = tuple(dict.fromkeys(record.verb for record in report.checks))
    return Summary(
        spec=f"{report.spec.name or 'unnamed'} ({report.spec.digest[:16]})",
        columns=tuple(Column(backend=backend, how=how) for backend, how in shown),
        verbs={verb: tuple(_cell(groups.get((verb, column), ())) for column in shown) for verb in verbs},
        totals=tuple(
            _cell([record for (_, group), found in groups.items() if group == column for record in found])
            for column in shown
        ),
        agrees=report.agrees,
    )


def cell_text(cell: Cell | None) -> str:
    """A cell in words: ``42``, ``40 agree, 2 disagree``, ``-``."""
    if cell is None:
        return "-"
    if set(cell.counts) == {"agree"}:
        return str(cell.counts["agree"])
    return ", ".join(f"{count} {status}" for status, count in cell.counts.items())


def failure_text(record: Record) -> str:
    """A failed record as a short paragraph: the check, the place, both bytes, both values, the likely cause.

    Whatever the record says, it is one line each.
    """
    head = f"{record.status}: {record.check} on {record.backend}" + (f" ({record.how})" if record.how else "")
    mismatch = record.first_mismatch
    if mismatch is None:
        return f"{printable(head)}\n    {printable(record.detail)}"
    lines = [head, f"    {record.mismatches} mismatches, the first in {mismatch.output}: {mismatch.where}"]
    if mismatch.want_value or mismatch.got_value:
        lines.append(
            f"    want {mismatch.want_value} (bytes {mismatch.want_bytes}), "
            f"got {mismatch.got_value} (bytes {mismatch.got_bytes})"
        )
    if mismatch.cause:
        lines.append(f"    likely cause: {mismatch.cause}")
    return "\n".join(map(printable, lines))


def _cell(records: Sequence[Record]) -> Cell | None:
    if not records:
        return None
    found = [record.status for record in records]
    return Cell(
        counts={status: found.count(status) for status in STATUSES if status in found},
        max_abs=max(record.max_abs for record in records),
        max_ulp=max(record.max_ulp for record in records),
    )
