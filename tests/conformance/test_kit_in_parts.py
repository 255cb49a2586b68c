"""The kit in many processes: every check once, one run in the report, what is left of a run that was cut off."""

import queue

import msgspec
import pytest

from kvcore import parity
from tests.conformance import kit_in_parts

CHOSEN = "*/bf16.m4/packed/*"


def run(monkeypatch: pytest.MonkeyPatch, out: str, *options: str) -> int:
    line = ["kit_in_parts", "--backend", "reference", "--jobs", "2", "--only", CHOSEN, "--out", out]
    monkeypatch.setattr("sys.argv", [*line, *options])
    return kit_in_parts.main()


def test_a_run_that_was_cut_off_is_resumed(monkeypatch, tmp_path, capsys):
    out = tmp_path / "kit.json.gz"
    assert run(monkeypatch, str(out), "--seconds", "0") == 2
    assert "0 of 54 checks ended" in capsys.readouterr().out
    assert run(monkeypatch, str(out), "--resume") == 0
    report = parity.read(out)
    ids = [record.check for record in report.checks]
    assert len(ids) == len(set(ids)) == 54
    assert {record.status for record in report.checks} == {"agree"}
    typed = f"python -m tests.conformance.kit_in_parts --backend reference --jobs 2 --only '{CHOSEN}' --out kit.json.gz"
    assert all(one.command.startswith(typed) for one in report.runs)
    assert run(monkeypatch, str(out), "--resume") == 0
    assert "0 of 0 checks ended" in capsys.readouterr().out


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
