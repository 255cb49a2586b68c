"""The kit in parts: every check once, one run in the report, and word of parts that did not end."""

import pytest

from benchmarks import kit_in_parts
from kvcore import parity

CHOSEN = "bf16.m4 and packed and ragged"


def run(monkeypatch: pytest.MonkeyPatch, out: str, *options: str) -> int:
    line = ["kit_in_parts", "--backend", "reference", "--jobs", "2", "--parts", "3", "-k", CHOSEN, "--out", out]
    monkeypatch.setattr("sys.argv", [*line, *options])
    return kit_in_parts.main()


def test_parts_together_are_the_whole(monkeypatch, tmp_path):
    assert run(monkeypatch, str(tmp_path / "kit.json.gz")) == 0
    report = parity.read(tmp_path / "kit.json.gz")
    ids = [record.check for record in report.checks]
    assert len(ids) == len(set(ids)) >= 5
    assert {one.split("/", 1)[1] for one in ids} >= {"bf16.m4/packed/ragged"}
    (ran,) = report.runs
    assert (
        ran.command
        == f"python -m benchmarks.kit_in_parts --backend reference --jobs 2 --parts 3 -k '{CHOSEN}' --out kit.json.gz"
    )


def test_parts_that_do_not_end_are_named(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, str(tmp_path / "kit.json"), "--seconds", "0") == 2
    assert "no part has a report" in capsys.readouterr().out
