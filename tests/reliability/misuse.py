"""R2: the catalogue of bad input on every backend: a typed error, all state unchanged; also under ``python -O``.

The cases are those of ``tests/bad_input``. The short form runs every tenth of them; ``--backends`` says on which, and
``--jobs`` in how many processes.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvcore.testing.misuse import Violation
from tests.bad_input.everything import AT_REST, BUILDING, IN_STEP, checks
from tests.reliability import command
from tests.reliability.replay import backends as installed

ONCE = """
import json
from tests.reliability.misuse import outcomes
print(json.dumps(outcomes({numbers!r}, {backends!r}, float({seconds!r}))))
"""


def outcomes(numbers: range, backends: str, seconds: float) -> dict[str, Any]:
    """Run the checks of these numbers; failures by name, and how many there was no time for."""
    failures = []
    done: Counter[str] = Counter()
    left = 0
    start = time.perf_counter()
    for number, (name, check) in enumerate(checks(backends.split(","))):
        if number not in numbers:
            continue
        if time.perf_counter() - start > seconds:
            left += 1
            continue
        backend, colon, _ = name.partition(": ")
        done[backend if colon and backend in backends.split(",") else "none, while building"] += 1
        try:
            check()
        except Violation as violation:
            failures.append(f"{name}: {violation}")
            print(failures[-1], file=sys.stderr)
    return {"checks": dict(done), "not_run": left, "failures": failures, "assertions": int(__debug__)}


def in_processes(every: int, backends: str, jobs: int, seconds: float, *flags: str) -> dict[str, Any]:
    """Run every n-th check, shared out among processes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    total = len(list(checks(backends.split(","))))

    def part(job: int) -> dict[str, Any]:
        text = ONCE.format(numbers=range(job * every, total, every * jobs), backends=backends, seconds=str(seconds))
        done = subprocess.run(
            [sys.executable, *flags, "-c", text], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(jobs) as pool:
        parts = list(pool.map(part, range(jobs)))
    summed: dict[str, Any] = {}
    for each in parts:
        summed = command.added(summed, {key: value for key, value in each.items() if key != "failures"})
    return {**summed, "failures": [failure for each in parts for failure in each["failures"]]}


def run(full: bool, seed: int, backends: str, jobs: str, limit: str) -> dict[str, Any]:
    """With assertions and without."""
    every = 1 if full else 10
    plain = in_processes(every, backends, int(jobs), float(limit))
    optimised = in_processes(every, backends, int(jobs), float(limit), "-O")
    wrong = len(plain["failures"]) + len(optimised["failures"]) + optimised["assertions"]
    return {
        "figure": "R2",
        "seed": seed,
        "cases": len(BUILDING) + len(AT_REST) + len(IN_STEP),
        "backends": backends.split(","),
        "plain": plain,
        "python -O": optimised,
        "divergences": wrong,
    }


if __name__ == "__main__":
    command.main(__doc__, run, {"backends": installed(), "jobs": "1", "limit": "inf"})
