"""The parts that ``on_device.sh`` left in the current folder, as one record.

    python -m tests.device.merge_checks OUT_FOLDER

Exit status 1 if anything failed or a part is missing.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from kvcore import environment

SUMMARIES = {"memcheck": r"ERROR SUMMARY: .*", "racecheck": r"RACECHECK SUMMARY: .*"}
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards displayed"}
SOURCES = Path(__file__).parents[2] / "kvcore" / "kernels" / "triton"
KERNEL = re.compile(r"^def (\w+_kernel)\(", re.MULTILINE)


def main() -> None:
    out = Path(sys.argv[1])
    missing = [log.stem for log in sorted(Path().glob("*-*.log")) if not log.with_suffix(".json").exists()]
    runs = [json.loads(path.read_text()) for path in sorted(Path().glob("check-*.json"))]
    kit = merged_kit(out / "kit.json")
    merge_compiled(out / "compile_triton.json")
    sanitizer = sanitized()
    results = [result for run in runs for result in run.pop("results")]
    failures = [failure for run in runs for failure in run["failures"]]
    record = {
        "kind": "check",
        "commit": environment.commit(),
        "device": torch.cuda.get_device_name(),
        "versions": environment.versions(),
        "checks": len(results),
        "failures": failures,
        "missing": missing,
        "passed_beyond_formats": [result["what"] for result in results if result["ok"] and "format" not in result],
        "conformance_kit": kit,
        "compute_sanitizer": sanitizer,
        "runs": runs,
    }
    (out / "check.json").write_text(json.dumps(record, indent=1) + "\n")
    dirty = any(found["not_clean"] or found["kernels_that_did_not_run"] for found in sanitizer.values())
    print(f"{len(results)} checks, {len(failures)} failures, missing: {missing or 'nothing'}; kit: {kit}; {sanitizer}")
    print("\n".join(failures[:40]))
    nothing = not (runs or kit or sanitizer)
    sys.exit(bool(failures or missing or nothing or set(kit) - {"agree"} or dirty))


def sanitized() -> dict[str, dict[str, Any]]:
    """By tool: parts of ``small_run.py`` that it found clean, what it said of the others, kernels that none ran."""
    kernels = {name for path in SOURCES.glob("*.py") for name in KERNEL.findall(path.read_text())}
    found: dict[str, dict[str, Any]] = {}
    for tool, pattern in SUMMARIES.items():
        logs = sorted(Path().glob(f"{tool}.*.log"))
        if not logs:
            continue
        said = {log.suffixes[0][1:]: last(log, pattern) for log in logs}
        ran = {name for log in logs for name in last(log, r"(?m)^kernels: .*$").split()}
        found[tool] = {
            "clean": [part for part, text in said.items() if text.startswith(CLEAN[tool])],
            "not_clean": {part: text for part, text in said.items() if not text.startswith(CLEAN[tool])},
            "kernels": len(kernels & ran),
            "kernels_that_did_not_run": sorted(kernels - ran),
        }
    return found


def merged_kit(path: Path) -> dict[str, int]:
    """Merge the kit's reports into one; how many of its checks have which status."""
    parts = [str(part) for part in sorted(Path().glob("kit-*.json"))]
    if not parts:
        return {}
    # 1: some check disagrees, which the counts say.
    line = [sys.executable, "-m", "kvcore", "parity", "merge", *parts, "--out", str(path)]
    if subprocess.run(line, check=False, stdout=subprocess.DEVNULL).returncode not in (0, 1):
        return {"not merged": len(parts)}
    counts: dict[str, int] = {}
    for check in json.loads(path.read_text())["checks"]:
        counts[check["status"]] = counts.get(check["status"], 0) + 1
    return counts


def merge_compiled(path: Path) -> None:
    """The rows of all ahead-of-time compilations, one a line, in order."""
    parts = [json.loads(part.read_text()) for part in sorted(Path().glob("compile-*.json"))]
    if parts:
        rows = sorted((row for part in parts for row in part["rows"]), key=lambda row: tuple(map(str, row.values())))
        head = json.dumps({"kind": parts[0]["kind"], "triton": parts[0]["triton"]})[:-1]
        path.write_text(head + ', "rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n")


def last(log: Path, pattern: str) -> str:
    """The last match in a log, or what is left of it if there is none."""
    text = log.read_text(errors="replace") if log.exists() else ""
    found = re.findall(pattern, text)
    return found[-1] if found else f"no summary: {text[-200:]!r}"


if __name__ == "__main__":
    main()
