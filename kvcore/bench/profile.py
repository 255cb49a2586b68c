"""What a profiler says of the rows that miss their goal: ``python -m kvcore.bench.profile bench.json``.

Nsight Compute (``ncu``) is run on one call of each, with a cold L2; its counters and the reason that they give go into
the record, under ``profile`` and ``why``.
"""

import argparse
import csv
import json
import subprocess
import sys
from typing import Any

from kvcore.bench.report import write_json

MISSED = 1.3
"""A row whose time is further above its goal is profiled."""

STALLS = {
    "memory": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "barriers": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "fences": "smsp__average_warps_issue_stalled_membar_per_issue_active.ratio",
    "results of arithmetic": "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",
    "shared memory": "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio",
}
COUNTERS = {
    "time_us": "gpu__time_duration.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_written_bytes": "dram__bytes_write.sum",
    "issue_percent": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.sum",
    "registers": "launch__registers_per_thread",
    "programs": "launch__grid_size",
    "threads": "launch__block_size",
    **{f"waits for {name}": counter for name, counter in STALLS.items()},
}
MARK = "_empty"
"""The kernel of ``timing`` that is launched before each row's call, to tell rows apart."""
SCALES = {"": 1.0, "ns": 1e-3, "us": 1.0, "ms": 1e3, "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def main() -> None:
    """Profile the rows of a record that miss their goal, and write the record back; or, inside ncu, call them."""
    parser = argparse.ArgumentParser(prog="python -m kvcore.bench.profile", description=__doc__)
    parser.add_argument("record", help="a record of kvcore bench, completed in place")
    parser.add_argument("--call", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call is not None:
        call(options.call)
        return
    with open(options.record, encoding="utf-8") as file:
        record = json.load(file)
    missed = [row for row in record["rows"] if misses(row, record)]
    found = profiles([row["name"] for row in missed], options.record)
    for row in missed:
        row["profile"] = found[row["name"]]
        row["why"] = reason(row, record["ceilings"]["empty_kernel_us"])
        print(f"{row['name']}: {row['why']}", flush=True)
    write_json(record, options.record)


def misses(row: dict[str, Any], record: dict[str, Any]) -> bool:
    """True if a row is far above its goal, scaled by the copy speed alone or as ``goal_here`` scales it."""
    if row["goal_us"] is None:
        return False
    scaled = row["goal_us"] * record["goals_measured_at"]["copy_gb_s"] / record["ceilings"]["copy_gb_s"]
    return bool(row["graph_us"] > MISSED * min(scaled, row["goal_here_us"]))


def profiles(names: list[str], record: str) -> dict[str, dict[str, float]]:
    """Counters of one launch of each row, by its name."""
    if not names:
        return {}
    line = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw"]
    line += ["--metrics", ",".join(COUNTERS.values())]
    line += [sys.executable, "-m", "kvcore.bench.profile", record, "--call", *names]
    said = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    called = [text.removeprefix("called ") for text in said.splitlines() if text.startswith("called ")]
    units, *rows = csv.DictReader(text for text in said.splitlines() if text.startswith('"'))
    launches: list[list[dict[str, float]]] = []
    for row in rows:
        if row["Kernel Name"] == MARK:
            launches.append([])
        else:
            launches[-1].append(counters_of(row, units))
    if len(launches) != len(called) or not all(launches):
        raise RuntimeError(f"{len(called)} rows were called, and launches of {len(launches)} profiled")
    # Of several launches the longest speaks for the row.
    return {
        name: {"launches": len(group), **max(group, key=lambda counters: counters["time_us"])}
        for name, group in zip(called, launches, strict=True)
    }


def counters_of(row: dict[str, str], units: dict[str, str]) -> dict[str, float]:
    """One launch's counters in the record's units."""
    return {
        key: round(float(row[counter].replace(",", "")) * SCALES.get(units[counter], 1.0), 3)
        for key, counter in COUNTERS.items()
        if row.get(counter)
    }


def call(names: list[str]) -> None:
    """Inside ncu: each row's verb once, compiled before and with a cold L2."""
    import torch

    from kvcore.bench import timing
    from kvcore.bench.reading import reading_workloads
    from kvcore.bench.workloads import all_workloads

    runtime: Any = torch.cuda.cudart()
    mark: Any = getattr(timing, MARK)
    place = torch.zeros(1, device="cuda")
    mark[(1,)](place)
    for make in (*all_workloads("cuda"), *reading_workloads("cuda")):
        work = make()
        if work.name in names:
            for verb in work.calls[:2]:
                verb()
            torch.empty(timing.FLUSH_BYTES, dtype=torch.uint8, device="cuda").zero_()
            torch.cuda.synchronize()
            runtime.cudaProfilerStart()
            mark[(1,)](place)
            work.calls[0]()
            torch.cuda.synchronize()
            runtime.cudaProfilerStop()
            print(f"called {work.name}", flush=True)
        del work
        torch.cuda.empty_cache()


def reason(row: dict[str, Any], empty_us: float) -> str:
    """What stands between a row and its goal, in one sentence from its counters."""
    profile = row["profile"]
    stall = max(STALLS, key=lambda name: profile.get(f"waits for {name}", 0.0))
    floor = f"a plain copy of as many bytes takes {row['copy_us']} µs here, an empty kernel {empty_us} µs"
    busy = f"DRAM is {profile['dram_percent']:.0f} % busy and {profile['issue_percent']:.0f} % of issue slots are used"
    if profile["issue_percent"] > 60:
        kind = f"bound by instructions ({profile['instructions']:,.0f} of a warp)"
    elif profile["dram_percent"] > 70:
        kind = "bound by memory"
    else:
        kind = f"bound by latency: warps mostly wait for {stall}, one dependent access after another"
    return f"{kind}; {busy}; {floor}"


if __name__ == "__main__":
    main()
