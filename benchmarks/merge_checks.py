"""The parts that ``on_device.sh`` left in the current folder, as one record: python merge_checks.py OUT_FOLDER.

Exit status 1 if anything failed or a part is missing.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from kvcore.parity import environment

SUMMARIES = {"memcheck": r"ERROR SUMMARY: .*", "racecheck": r"RACECHECK SUMMARY: .*"}
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards displayed"}


def main() -> None:
    out = Path(sys.argv[1])
    missing = [log.stem for log in sorted(Path().glob("*-*.log")) if not log.with_suffix(".json").exists()]
    runs = [json.loads(path.read_text()) for path in sorted(Path().glob("check-*.json"))]
    kit = merged_kit(out / "kit.json")
    merge_compiled(out / "compile_triton.json")
    sanitizer = {
        f"{tool}{which}": last(Path(f"{tool}{which}.log"), pattern)
        for tool, pattern in SUMMARIES.items()
        for which in ("", "_reading")
    }
    results = [result for run in runs for result in run.pop("results")]
    failures = [failure for run in runs for failure in run["failures"]]
    record = {
        "kind": "check",
        "commit": environment.commit(),
        "device": runs[0]["device"] if runs else None,
        "versions": runs[0]["versions"] if runs else None,
        "checks": len(results),
        "failures": failures,
        "missing": missing,
        "passed_beyond_formats": [result["what"] for result in results if result["ok"] and "format" not in result],
        "conformance_kit": kit,
        "compute_sanitizer": sanitizer,
        "runs": runs,
    }
    (out / "check.json").write_text(json.dumps(record, indent=1) + "\n")
    clean = all(text.startswith(CLEAN[tool.split("_")[0]]) for tool, text in sanitizer.items())
    print(f"{len(results)} checks, {len(failures)} failures, missing: {missing or 'nothing'}; kit: {kit}; {sanitizer}")
    print("\n".join(failures[:40]))
    sys.exit(bool(failures or missing or not runs or set(kit) != {"agree"} or not clean))


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
