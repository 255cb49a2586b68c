"""The kit in many processes: every check once, one run in the report, what is left of a run that was cut off."""

import queue

import msgspec
import pytest

from kvcore import parity
from kvcore.conformance.specs import conformance_spec
from kvcore.parity.records import Record, Report
from kvcore.parity.run import report_of
from tests.conformance import kit_in_parts

CHOSEN = "*/bf16.m4/packed/*"


def run(monkeypatch: pytest.MonkeyPatch, out: str, *options: str) -> int:
    line = ["kit_in_parts", "--backend", "reference", "--jobs", "2", "--only", CHOSEN, "--out", out]
    monkeypatch.setattr("sys.argv", [*line, *options])
    return kit_in_parts.main()


def interrupted_once():
    """``parity.write`` whose first call is interrupted."""
    real, calls = parity.write, []

    def write(report, **options):
        calls.append(report)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(report, **options)

    return write


@pytest.fixture(scope="module")
def blank() -> Report:
    return report_of(conformance_spec(), [], [], command="")


def test_a_run_that_was_cut_off_is_resumed(monkeypatch, tmp_path, capsys):
    out = tmp_path / "kit.json.gz"
    assert run(monkeypatch, str(out), "--seconds", "0") == 2
    assert "0 of 54 checks ended" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(kit_in_parts, "EVERY", 0.01)
        patch.setattr(kit_in_parts.parity, "write", interrupted_once())
        with pytest.raises(KeyboardInterrupt):
            run(monkeypatch, str(out), "--resume")
    ended = len(parity.read(out).checks)
    assert ended
    assert run(monkeypatch, str(out), "--resume") == 0
    assert f"{54 - ended} of {54 - ended} checks ended" in capsys.readouterr().out
    report = parity.read(out)
    ids = [record.check for record in report.checks]
    assert len(ids) == len(set(ids)) == 54
    assert {record.status for record in report.checks} == {"agree"}
    typed = f"python -m tests.conformance.kit_in_parts --backend reference --jobs 2 --only '{CHOSEN}' --out kit.json.gz"
    assert all(one.command.startswith(typed) for one in report.runs)
    assert run(monkeypatch, str(out), "--resume") == 0
    assert "0 of 0 checks ended" in capsys.readouterr().out


def record(check, status, backend="reference", rule="storage"):
    return Record(check=check, backend=backend, how="cpu", status=status, rule=rule)


def test_what_ended_in_an_error_is_run_again_and_so_is_what_only_another_backend_did(blank):
    ids = [f"append_kv/bf16/packed/{shape}" for shape in ("a", "b", "c", "d", "e")]
    statuses = ("agree", "error", "disagree", "unavailable")
    mine = [record(check, status) for check, status in zip(ids, statuses, strict=False)]
    others = [record(check, "error", "torch_triton") for check in ids]
    before = msgspec.structs.replace(blank, checks=(*mine, *others))
    kept, known = kit_in_parts.to_go_on_from(before, blank, "reference", ids)
    assert known == {ids[0], ids[2]}
    assert [one for one in kept.checks if one.backend == "reference"] == [mine[0], mine[2]]
    assert [one for one in kept.checks if one.backend != "reference"] == others
    # What is not chosen is not run, and stays.
    kept, known = kit_in_parts.to_go_on_from(before, blank, "reference", [ids[4]])
    assert kept == before
    assert known == set(ids[:4])


def test_a_report_of_another_spec_or_other_tolerances_is_refused_before_the_work(blank, monkeypatch, tmp_path, capsys):
    digest = msgspec.structs.replace(blank.spec, digest="0" * 64)
    (first, *rest) = blank.tolerances
    bounds = (msgspec.structs.replace(first, share=first.share + 0.5), *rest)
    arithmetic = (record("attend/bf16/packed/a", "agree", rule="arithmetic"),)
    for other in (
        msgspec.structs.replace(blank, spec=digest),
        msgspec.structs.replace(blank, tolerances=bounds, checks=arithmetic),
    ):
        out = tmp_path / "kit.json"
        out.write_bytes(parity.write(other))
        with pytest.raises(SystemExit, match="2"):
            run(monkeypatch, str(out), "--resume")
        assert "error: --resume: " in capsys.readouterr().err
        assert parity.read(out) == other


def test_a_race_that_is_only_printed_fails_its_check(monkeypatch):
    def loud(check, subjects):
        print(f"{kit_in_parts.RACE} on device 0")
        return real(check, subjects)

    real = kit_in_parts.check_backends
    monkeypatch.setattr(kit_in_parts, "check_backends", loud)
    kit_in_parts.begin("reference", "")
    (text,), gone = kit_in_parts.run("append_window/bf16/packed/ragged")
    assert not gone
    assert b'"status":"error"' in text
    assert b"RACE DETECTED on device 0" in text


def test_who_loses_the_device_leaves_the_rest_to_another(monkeypatch):
    def failing(check, subjects):
        return [msgspec.structs.replace(record, status="error") for record in real(check, subjects)]

    real, ids = kit_in_parts.check_backends, [f"append_window/bf16/packed/{shape}" for shape in ("ragged", "one_token")]
    monkeypatch.setattr(kit_in_parts, "check_backends", failing)
    for lost, ended in ((True, 1), (False, 2)):
        monkeypatch.setattr(kit_in_parts, "lost", lambda lost=lost: lost)
        groups, found = queue.Queue(), queue.Queue()
        for group in (ids, None):
            groups.put(group)
        kit_in_parts.work(groups, found, "reference", "")
        told = [found.get_nowait() for _ in range(ended)]
        assert [len(records) for records, *_ in told] == [1] * ended
        assert told[-1][1:3] == (ids[ended:], lost)
        assert found.empty()
        assert groups.empty() is not lost
