"""Which rows of a benchmark are profiled, and what is made of the profiler's numbers; the profiler itself is played."""

import json
import os
import sys
from pathlib import Path

import pytest

from kvcore.bench import profile

RECORD = {
    "goals_measured_at": {"copy_gb_s": 4000.0, "empty_kernel_us": 0.8},
    "ceilings": {"copy_gb_s": 3000.0, "empty_kernel_us": 1.2},
}


def row(**changed):
    return {"name": "store, T = 8", "graph_us": 20.0, "goal_us": 10.0, "goal_here_us": 14.0, "copy_us": 9.5, **changed}


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        pytest.param({"graph_us": 17.3}, False, id="within 1.3 of the goal at this copy speed"),
        pytest.param({"graph_us": 17.5}, True, id="beyond it"),
        pytest.param({"goal_here_us": 12.0, "graph_us": 16.0}, True, id="beyond the goal carried over"),
        pytest.param({"goal_us": None, "goal_here_us": None}, False, id="no goal"),
    ],
)
def test_which_rows_miss_their_goal(changed, missed):
    assert profile.misses(row(**changed), RECORD) is missed


@pytest.mark.parametrize(
    ("dram", "issue", "kind"),
    [(85.0, 30.0, "bound by memory"), (40.0, 75.0, "bound by instructions"), (20.0, 10.0, "bound by latency")],
)
def test_the_reason_follows_from_the_counters(dram, issue, kind):
    counters = {"dram_percent": dram, "issue_percent": issue, "instructions": 1e6, "waits for fences": 9.0}
    text = profile.reason(row(profile={**counters, "waits for memory": 3.0}), 1.2)
    assert text.startswith(kind)
    assert "copy of as many bytes takes 9.5 µs" in text
    assert ("fences" in text) == (kind == "bound by latency")


def test_a_record_is_completed_in_place(tmp_path, monkeypatch):
    """A program called ncu that prints two launches of one row: what was not missed stays as it is."""
    counters = list(profile.COUNTERS.values())
    units = ["us" if name.startswith("gpu__time") else "Mbyte" if "bytes" in name else "" for name in counters]
    launches = [(profile.MARK, "0.5"), ("first_kernel", "7"), ("second_kernel", "1,234.5")]
    table = [["Kernel Name", *counters], ["", *units]]
    table += [[name, *[value] * len(counters)] for name, value in launches]
    said = "\n".join(
        ["==PROF== starts", "called store, T = 8"] + [",".join(f'"{cell}"' for cell in cells) for cells in table]
    )
    player = tmp_path / "ncu"
    player.write_text(f"#!{sys.executable}\nprint({said!r})\n")
    player.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    path = Path(tmp_path, "bench.json")
    path.write_text(json.dumps({**RECORD, "rows": [row(), row(name="fine", graph_us=9.0)]}))
    monkeypatch.setattr(sys, "argv", ["profile", str(path)])
    profile.main()
    slow, fine = json.loads(path.read_text())["rows"]
    assert slow["profile"]["launches"] == 2
    assert slow["profile"]["time_us"] == 1234.5
    assert slow["profile"]["dram_read_bytes"] == 1234.5e6
    assert "copy of as many bytes" in slow["why"]
    assert fine == row(name="fine", graph_us=9.0)
