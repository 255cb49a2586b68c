"""Reports joined and summed up; what may not be joined is refused."""

from pathlib import Path

import msgspec
import pytest

from kvcore import parity
from kvcore.errors import SpecError
from kvcore.parity.show import cell_text, failure_text
from kvcore.spec import CacheSpec, LayerSpec, Window
from tests.conformance import broken


def spec(dim: int = 8) -> CacheSpec:
    window = Window(dim=dim, window=3, format="fp32")
    return CacheSpec(layers=(LayerSpec(window=window),), block_tokens=8, name="one window")


def report(info=None, *, dim: int = 8, check: str = "append_window/fp32/packed/*"):
    return parity.run(spec(dim), [info or broken.info()], only=check)


class OnAnotherMachine(broken.ReferenceOps):
    how = "cuda (NVIDIA H100)"


def test_merge_keeps_every_way_of_running() -> None:
    merged = parity.merge({"cpu.json": report(), "cuda.json": report(broken.info(OnAnotherMachine))})
    assert [(run.backend, run.how) for run in merged.runs] == [("broken", "cpu"), ("broken", "cuda (NVIDIA H100)")]
    assert len(merged.checks) == 14
    assert merged.agrees
    summary = parity.summarise(merged)
    assert [column.title for column in summary.columns] == ["broken\ncpu", "broken\ncuda (NVIDIA H100)"]
    assert [cell_text(cell) for cell in summary.verbs["append_window"]] == ["7", "7"]


def test_what_ran_somewhere_is_not_unavailable() -> None:
    elsewhere = report(broken.info(probe=lambda: "no such chip"))
    merged = parity.merge({"laptop.json": elsewhere, "host.json": report()})
    assert {record.status for record in merged.checks} == {"agree"}
    assert [run.reason for run in merged.runs] == ["no such chip", ""]


def test_an_error_without_a_way_of_running_is_kept() -> None:
    merged = parity.merge({"one.json": report(broken.info(load=lambda: object())), "two.json": report()})
    assert not merged.agrees
    assert [record.status for record in merged.checks].count("error") == 7


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["good first", "bad first"])
def test_the_worse_result_of_one_check_counts(order: tuple[int, int]) -> None:
    found = [report(), report(broken.info(broken.NothingWritten))]
    merged = parity.merge({f"{number}.json": found[number] for number in order})
    assert len(merged.checks) == 7
    assert [record.status for record in merged.checks].count("disagree") == 6  # no_tokens has nothing to write


def test_other_spec_is_refused() -> None:
    with pytest.raises(SpecError, match=r"two\.json: got spec one window .*allowed: spec one window .*one\.json"):
        parity.merge({"one.json": report(), "two.json": report(dim=9)})


def test_other_tolerances_are_refused() -> None:
    one = report(check="attend/*")
    looser = msgspec.structs.replace(one.tolerances[1], relative=1.0)
    other = msgspec.structs.replace(one, tolerances=(one.tolerances[0], looser, *one.tolerances[2:]))
    with pytest.raises(SpecError, match=r"two\.json: got another tolerance of pooling, bf16.*that of one\.json"):
        parity.merge({"one.json": one, "two.json": other})


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the older first", "the newer first"])
def test_a_bound_that_an_older_version_did_not_have_is_added(order: tuple[int, int]) -> None:
    newer = report(check="attend/*")
    older = msgspec.structs.replace(newer, tolerances=newer.tolerances[:-2])
    reports = [("older.json", older), ("newer.json", newer)]
    merged = parity.merge(dict(reports[number] for number in order))
    assert merged.tolerances == newer.tolerances


def test_bytes_are_equal_under_any_tolerances() -> None:
    values = report(check="attend/*")
    stored = msgspec.structs.replace(report(), tolerances=values.tolerances[1:])
    merged = parity.merge({"stored.json": stored, "values.json": values})
    assert merged.tolerances == values.tolerances
    assert len(merged.checks) == len(stored.checks) + len(values.checks)


def test_nothing_to_merge_is_refused() -> None:
    with pytest.raises(SpecError, match="no reports"):
        parity.merge({})


def test_summary_counts() -> None:
    summary = parity.summarise(report(broken.info(broken.NothingWritten), check="??????_window/*/packed/*"))
    assert summary.spec == f"one window ({spec().digest[:16]})"
    assert not summary.agrees
    assert [cell_text(cell) for cell in summary.verbs["append_window"]] == ["1 agree, 7 disagree"]
    assert [cell_text(cell) for cell in summary.verbs["gather_window"]] == ["8"]
    assert [cell_text(cell) for cell in summary.totals] == ["9 agree, 7 disagree"]


def test_a_failure_in_words() -> None:
    failure = report(broken.info(broken.NothingWritten), check="append_window/fp32/packed/one_token").failures[0]
    lines = failure_text(failure).splitlines()
    assert lines[0] == "disagree: append_window/fp32/packed/one_token on broken (cpu)"
    assert lines[1].startswith("    64 mismatches, the first in 1.window: unit ")
    assert lines[1].endswith("head 0, codes byte 0 (channel 0)")
    assert "got nan (bytes ffffffff)" in lines[2]
    assert lines[3] == "    likely cause: rows were not written"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(None, "No such file", id="no file"),
        pytest.param("{", "Input data was truncated", id="not JSON"),
        pytest.param("[]", "Expected `object`", id="not an object"),
        pytest.param('{"schema": "kvcore.parity/2"}', "schema 'kvcore.parity/2'", id="another schema"),
        pytest.param('{"schema": "kvcore.parity/1"}', "missing required field", id="a field is missing"),
    ],
)
def test_a_file_that_is_no_report(tmp_path, text: str | None, message: str) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SpecError, match=message):
        parity.read(path)


def test_a_packed_file_reads_like_the_plain_one(tmp_path: Path) -> None:
    one = report()
    plain, packed = tmp_path / "one.json", tmp_path / "one.json.gz"
    plain.write_bytes(parity.write(one))
    packed.write_bytes(parity.write(one, packed=True))
    assert parity.read(packed) == parity.read(plain) == one
    assert packed.stat().st_size < plain.stat().st_size / 3
    assert packed.read_bytes() == parity.write(one, packed=True)


@pytest.mark.parametrize("damage", [slice(0, -9), slice(0, 40)], ids=["without its end", "without its middle"])
def test_a_damaged_packed_file_is_refused(tmp_path: Path, damage: slice) -> None:
    path = tmp_path / "one.json.gz"
    path.write_bytes(parity.write(report(), packed=True)[damage])
    with pytest.raises(SpecError, match=r"one\.json\.gz: got .*allowed: a parity report"):
        parity.read(path)


def test_files_without_history_say_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_COMMIT", "0123abc")
    assert [run.commit for run in report().runs] == ["0123abc"]
