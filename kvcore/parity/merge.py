"""Reports from machines that never meet, as one: a CUDA host's, a TPU host's, a laptop's."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvcore.errors import SpecError
from kvcore.parity.records import STATUSES, Record, Report, Run

if TYPE_CHECKING:
    from kvcore.ops.tolerances import Bound

# The worse of two: what failed anywhere has failed.
_WORST_FIRST = ("disagree", "error", "known_gap", "agree", "unsupported", "unavailable")
assert set(_WORST_FIRST) == set(STATUSES)


def merge(reports: Mapping[str, Report]) -> Report:
    """All runs and records of some reports, given by name.

    A check that one backend passed the same way (``how``) in several reports is kept once, the worst result of it. A
    backend that could not run on one machine but did on another is shown where it ran.

    Raises:
        SpecError: no report, or reports of different specs or with different bounds for the same results: their records
            don't speak of the same thing.
    """
    if not reports:
        raise SpecError(got="no reports", where="parity merge", allowed="one report or more")
    first_name, first = next(iter(reports.items()))
    for name, report in reports.items():
        if report.spec.digest != first.spec.digest:
            raise SpecError(
                got=f"spec {report.spec.name} {report.spec.digest[:16]}",
                where=name,
                allowed=f"spec {first.spec.name} {first.spec.digest[:16]}, as in {first_name}",
                hint="Run both with the same --spec and the same version of kvcore.",
            )
    measured = {name: report for name, report in reports.items() if _uses_tolerances(report)}
    bounds: dict[tuple[str, str], tuple[str, Bound]] = {}
    for name, report in measured.items():
        for bound in report.tolerances:
            one_name, one = bounds.setdefault((bound.operation, bound.format), (name, bound))
            if bound != one:
                raise SpecError(
                    got=f"another tolerance of {bound.operation}, {bound.format}",
                    where=name,
                    allowed=f"that of {one_name}",
                    hint="Run both with the same version of kvcore.",
                )
    kept: dict[tuple[str, str, str], Record] = {}
    for report in reports.values():
        for record in report.checks:
            key = record.backend, record.how, record.check
            kept[key] = _worse(kept[key], record) if key in kept else record
    ran = {(record.backend, record.check) for record in kept.values() if record.status != "unavailable"}
    checks = [
        record
        for record in kept.values()
        if record.status != "unavailable" or (record.backend, record.check) not in ran
    ]
    runs: list[Run] = []
    for report in reports.values():
        runs += [run for run in report.runs if run not in runs]
    return Report(
        schema=first.schema,
        spec=first.spec,
        runs=tuple(runs),
        # A later version may have bounds that an earlier one had no check for.
        tolerances=tuple(bound for _, bound in bounds.values()) or first.tolerances,
        checks=tuple(sorted(checks, key=lambda record: (record.backend, record.how))),
        quality=first.quality,
    )


def _worse(one: Record, other: Record) -> Record:
    return min(one, other, key=lambda record: _WORST_FIRST.index(record.status))


def _uses_tolerances(report: Report) -> bool:
    """Whether any of its values was compared within a tolerance: bytes are equal or not under any table."""
    return any(record.rule == "arithmetic" for record in report.checks)
