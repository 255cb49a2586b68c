"""Running the checks: every backend against the reference, in one process, one record for each check.

The reference drives a check once; its outputs are what every backend's are compared with. The reference itself may be
among the backends: then it runs twice, on fresh pools, and must agree with itself.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from kvcore import environment
from kvcore.backends.reference import ReferenceBackend
from kvcore.conformance.agreement import compare
from kvcore.conformance.outputs import Output
from kvcore.conformance.suite import Check, checks_of, computed_formats_of, sample_of
from kvcore.foreign import Failed, isolated
from kvcore.ops import Backend, Ops, tolerances
from kvcore.ops.fused import created
from kvcore.parity.quality import measure
from kvcore.parity.records import SCHEMA, Record, Report, Run, SpecRef, Status
from kvcore.plan import CachePlan
from kvcore.plugins import BackendInfo
from kvcore.spec import CacheSpec

PLANS_REMEMBERED = 8
"""Plans after which a backend may forget what it compiled: programs for all shapes of a kit would take 20 GB."""

Progress = Callable[[int, int, str], None]
"""Called before each check with the number done, the number of all, and the check's id."""


class Subject:
    """One backend under test: loaded once, its verbs bound to plan after plan.

    Attributes:
        info: the backend's record.
        reason: why it cannot run here, or empty.
        how: how its verbs say they run; empty until they were bound to a plan.
        device: likewise.
    """

    def __init__(self, info: BackendInfo, device: str | None = None) -> None:
        self.info = info
        self.how = ""
        self.device = ""
        self._device = device
        self._bound: tuple[CachePlan, Ops] | None = None
        self._plans = 0
        self._backend: Backend | None = None
        self.reason = objection(info, device)
        if not self.reason:
            found = isolated(info.load)
            if isinstance(found, Failed):
                self.reason = f"failed to load: {found.reason}"
            else:
                self._backend = found

    def ops(self, plan: CachePlan) -> Ops:
        """The backend's verbs for a plan. Checks of one plan follow one another, so the last one is kept."""
        if self._bound is None or self._bound[0] is not plan:
            assert self._backend is not None
            self._plans += 1
            if self.info.forget is not None and self._plans % PLANS_REMEMBERED == 0:
                self.info.forget()
            ops = created(self._backend, plan, device=self._device)
            self.device = str(ops.device)
            self.how = str(getattr(ops, "how", "") or ops.device)
            self._bound = plan, ops
        return self._bound[1]

    def introduce(self, plan: CachePlan) -> None:
        """Learn how the backend runs before its first check, so that every record can say it."""
        if not self.reason:
            # Verbs that cannot be bound are the record of every check that needs them.
            with suppress(Exception):
                self.ops(plan)


def objection(info: BackendInfo, device: str | None = None) -> str:
    """Why a backend cannot run here on a device (None: its own choice), or empty."""
    kind = None if device is None else device.split(":")[0]
    if kind is not None and kind not in info.devices:
        return f"runs on {', '.join(info.devices)}, not on {kind}"
    return info.objection() or ""


def run(
    spec: CacheSpec,
    backends: Sequence[BackendInfo],
    *,
    device: str | None = None,
    only: str = "*",
    sample: bool = False,
    command: str = "",
    progress: Progress | None = None,
) -> Report:
    """Check backends against the reference.

    Args:
        spec: whose roles, formats and storages are checked.
        backends: under test, each once.
        device: for all of them; None for each one's own choice.
        only: a shell pattern that check ids must match.
        sample: of every verb and formats, each shape in one layout only: see ``sample_of``.
        command: what was typed, for the report.
        progress: told about every check.
    """
    checks = sample_of(checks_of(spec)) if sample else checks_of(spec)
    chosen = [check for check in checks if fnmatchcase(check.id, only)]
    subjects = [Subject(info, device) for info in backends]
    for subject in subjects if chosen else []:
        subject.introduce(chosen[0].plan)
    records: dict[str, list[Record]] = {info.name: [] for info in backends}
    for number, check in enumerate(chosen):
        if progress is not None:
            progress(number, len(chosen), check.id)
        for record in check_backends(check, subjects):
            records[record.backend].append(record)
    return report_of(spec, subjects, [record for found in records.values() for record in found], command=command)


def report_of(spec: CacheSpec, subjects: Sequence[Subject], records: Sequence[Record], *, command: str) -> Report:
    """The report of records that were made here by these subjects."""
    described = environment.describe()
    runs = [
        Run(
            backend=subject.info.name,
            how=subject.how,
            device=subject.device,
            reason=subject.reason,
            command=command,
            **described,
        )
        for subject in subjects
    ]
    return Report(
        schema=SCHEMA,
        spec=SpecRef(name=spec.name, digest=spec.digest),
        runs=tuple(runs),
        tolerances=tolerances.table(computed_formats_of(spec)),
        checks=tuple(records),
        quality=measure(),
    )


def check_backends(check: Check, subjects: Sequence[Subject]) -> list[Record]:
    """One check of every backend; the reference is driven once, and only if some backend can run the check."""
    records: list[Record] = []
    driven: tuple[Callable[[Ops], list[Output]], list[Output]] | None = None
    for subject in subjects:
        not_run = blocked(check, subject)
        if not_run is not None:
            records.append(not_run)
            continue
        if driven is None:
            try:
                drive = check.prepare()
                driven = drive, drive(ReferenceBackend().create(check.plan))
            except Exception as error:  # noqa: BLE001 - a component of outside code may fail in any way
                detail = f"the reference failed: {first_line(error)}"
                return [*records, *(_record(check, one, "error", detail=detail) for one in subjects[len(records) :])]
        records.append(with_known_gaps(_compared(check, subject, *driven), subject.info))
    return records


def blocked(check: Check, subject: Subject) -> Record | None:
    """The record of a check that is not run, or None."""
    lacking = subject.info.lacks(check.needs)
    if subject.reason:
        return _record(check, subject, "unavailable", detail=subject.reason)
    if lacking is not None:
        return _record(check, subject, "unsupported", detail=lacking)
    return None


def _compared(check: Check, subject: Subject, drive: Callable[[Ops], list[Output]], wanted: list[Output]) -> Record:
    started = time.perf_counter()
    try:
        agreement = compare(wanted, drive(subject.ops(check.plan)))
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is its record
        return _record(check, subject, "error", detail=first_line(error), seconds=time.perf_counter() - started)
    return _record(
        check,
        subject,
        "disagree" if agreement.mismatches else "agree",
        max_abs=agreement.max_abs,
        max_ulp=agreement.max_ulp,
        mismatches=agreement.mismatches,
        first_mismatch=agreement.first_mismatch,
        detail=agreement.note,
        seconds=round(time.perf_counter() - started, 6),
    )


def _record(check: Check, subject: Subject, status: Status, **fields: Any) -> Record:
    return Record(check=check.id, backend=subject.info.name, how=subject.how, status=status, rule=check.rule, **fields)


def with_known_gaps(record: Record, info: BackendInfo) -> Record:
    """Known gaps are strict: one that has closed is an error, so that lists can't rot."""
    for gap in info.known_gaps:
        if not fnmatchcase(record.check, gap.check):
            continue
        if record.status == "agree":
            detail = f"agrees, but is listed as a known gap ({gap.status}): take it off the list"
            return msgspec.structs.replace(record, status="error", detail=detail)
        detail = "; ".join(filter(None, (f"{gap.status}: {gap.reason}", record.detail)))
        return msgspec.structs.replace(record, status="known_gap", detail=detail)
    return record


def first_line(error: BaseException) -> str:
    """An error's kind and the first line of what it says."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
