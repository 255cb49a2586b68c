"""Every status that a record can have, and what makes a report agree."""

import msgspec
import pytest

from kvcore import parity
from kvcore.backends import EVERYTHING
from kvcore.parity.run import PLANS_REMEMBERED, Subject
from kvcore.plan import plan_cache
from kvcore.plugins import KnownGap
from kvcore.spec import CacheSpec, LayerSpec, Window
from tests.conformance import broken

SPEC = CacheSpec(layers=(LayerSpec(window=Window(dim=8, window=3, format="fp32")),), block_tokens=8, name="one window")
CHECK = "append_window/fp32/packed/ragged"


def run(info, check: str = CHECK, **options):
    return parity.run(SPEC, [info], only=check, **options)


def gap(check: str = "append_window/*") -> list[KnownGap]:
    return [KnownGap(check=check, status="not_yet", reason="being written")]


@pytest.mark.parametrize(
    ("info", "status", "detail", "agrees"),
    [
        pytest.param(broken.info(), "agree", "", True, id="agree"),
        pytest.param(broken.info(broken.RingOffByOne), "disagree", "", False, id="disagree"),
        pytest.param(broken.info(broken.Raises), "error", "ValueError: no kernel for this shape", False, id="error"),
        pytest.param(
            broken.info(capabilities=EVERYTHING - {"window", "packed"}),
            "unsupported",
            "does not declare packed, window",
            False,
            id="unsupported",
        ),
        pytest.param(
            broken.info(broken.RingOffByOne, known_gaps=gap()),
            "known_gap",
            "not_yet: being written",
            False,
            id="known gap",
        ),
        pytest.param(
            broken.info(known_gaps=gap()),
            "error",
            "agrees, but is listed as a known gap (not_yet): take it off the list",
            False,
            id="a known gap that has closed",
        ),
        pytest.param(broken.info(known_gaps=gap("flush/*")), "agree", "", True, id="a gap in another verb"),
        pytest.param(
            broken.info(requires=("no_such_module",)),
            "unavailable",
            "no_such_module is not installed; pip install nothing",
            False,
            id="not installed",
        ),
        pytest.param(broken.info(probe=lambda: "no such chip"), "unavailable", "no such chip", False, id="no device"),
        pytest.param(
            broken.info(probe=lambda: 1 / 0),
            "unavailable",
            "its probe failed: ZeroDivisionError: division by zero",
            False,
            id="a probe that fails",
        ),
        pytest.param(
            broken.info(load=lambda: 1 / 0),
            "unavailable",
            "failed to load: ZeroDivisionError: division by zero",
            False,
            id="a backend that does not load",
        ),
        pytest.param(
            broken.info(load=lambda: object()),
            "error",
            "AttributeError: 'object' object has no attribute 'create'",
            False,
            id="a backend that makes no verbs",
        ),
    ],
)
def test_status(info, status: str, detail: str, agrees: bool) -> None:
    report = run(info)
    (record,) = report.checks
    assert (record.status, record.detail) == (status, detail)
    assert report.agrees is agrees


def test_how_it_ran_is_what_the_verbs_say() -> None:
    class Interpreted(broken.ReferenceOps):
        how = "cpu, Triton interpreter"

    class Silent(broken.ReferenceOps):
        how = ""

    assert run(broken.info(Interpreted)).checks[0].how == "cpu, Triton interpreter"
    assert run(broken.info(Silent)).checks[0].how == "cpu"
    assert run(broken.info(broken.Raises)).checks[0].how == "cpu"


def test_a_device_that_the_backend_lacks() -> None:
    (record,) = run(broken.info(), device="cuda:1").checks
    assert (record.status, record.detail) == ("unavailable", "runs on cpu, not on cuda")


def test_no_evidence_is_not_agreement() -> None:
    assert not run(broken.info(), check="no such check").agrees


def test_report_says_where_it_ran_and_by_what_rules(tmp_path) -> None:
    report = run(broken.info(), command="kvcore parity run")
    assert report.schema == "kvcore.parity/1"
    assert (report.spec.name, report.spec.digest) == ("one window", SPEC.digest)
    (ran,) = report.runs
    assert (ran.backend, ran.how, ran.device, ran.command) == ("broken", "cpu", "cpu", "kvcore parity run")
    assert {"numpy", "ml_dtypes", "msgspec"} <= set(ran.versions)
    assert ran.platform
    assert ran.python.count(".") == 2
    assert {bound.operation for bound in report.tolerances} >= {"pooling", "norm", "rope", "scores", "attention"}
    path = tmp_path / "report.json"
    path.write_bytes(parity.write(report))
    assert parity.read(path) == report


def test_records_are_frozen() -> None:
    record = run(broken.info()).checks[0]
    with pytest.raises(AttributeError):
        record.status = "disagree"
    assert msgspec.structs.replace(record, status="disagree").status == "disagree"


def test_progress_is_told_about_every_check() -> None:
    seen: list[tuple[int, int, str]] = []
    run(broken.info(), check="append_window/fp32/packed/*", progress=lambda *call: seen.append(call))
    assert [done for done, _, _ in seen] == list(range(7))
    assert {total for _, total, _ in seen} == {7}
    assert seen[0][2] == "append_window/fp32/packed/no_tokens"


def test_a_backend_forgets_its_programs_every_few_plans():
    forgotten = []
    subject = Subject(msgspec.structs.replace(broken.info(), forget=lambda: forgotten.append(True)))
    for number in range(2 * PLANS_REMEMBERED):
        plan = plan_cache(SPEC, max_requests=1 + number, max_tokens=8)
        assert subject.ops(plan) is subject.ops(plan)
    assert len(forgotten) == 2
