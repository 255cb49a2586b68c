"""Records of the tests over requests (life, isolation, exchange, bad input): a report shows them beside the verbs."""

import re

import msgspec
import pytest

from kvcore.parity.records import Record
from kvcore.parity.run import Subject, first_line, with_known_gaps


def record_of(item: pytest.Item, call: pytest.CallInfo[None], subject: Subject) -> Record:
    """``TEST/requests/any/CASE``: it agrees if it passed, disagrees if an assertion failed."""
    name = getattr(item, "originalname", item.name).removeprefix("test_")
    given = item.name.partition("[")[2].removesuffix("]")
    case = re.sub(r"\W+", "_", re.sub(rf"(^|-){re.escape(subject.info.name)}($|-)", "", given, count=1)) or "all"
    found = Record(
        check=f"{name}/requests/any/{case}",
        backend=subject.info.name,
        how=subject.how,
        status="agree",
        rule="storage",
        seconds=round(call.duration, 6),
    )
    if call.excinfo is not None:
        error = call.excinfo.value
        failed = isinstance(error, (AssertionError, pytest.fail.Exception))
        found = msgspec.structs.replace(found, status="disagree" if failed else "error", detail=first_line(error))
    return with_known_gaps(found, subject.info)


def settle(report: pytest.TestReport, record: Record) -> None:
    """Let a test's outcome follow its record: a known gap is expected to fail, and a closed one fails."""
    if record.status == "known_gap":
        report.outcome, report.wasxfail = "skipped", record.detail  # type: ignore[attr-defined]  # as pytest does
    elif record.status == "error" and report.outcome == "passed":
        report.outcome, report.longrepr = "failed", record.detail


def to_text(record: Record) -> str:
    """As it travels with a test: through JUnit XML and across processes."""
    return msgspec.json.encode(record).decode()
