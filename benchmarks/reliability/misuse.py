"""R2: the catalogue of bad input on every backend: a typed error, all state unchanged; also under ``python -O``.

The cases are those of ``tests/bad_input``. The short form runs every tenth of them; ``--backends`` says on which.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

from bad_input.everything import AT_REST, BUILDING, IN_STEP, checks
from bad_input.world import Violation

from benchmarks.reliability import command
from benchmarks.reliability.replay import backends as installed

ONCE = """
import json
from benchmarks.reliability.misuse import outcomes
print(json.dumps(outcomes({every}, {backends!r})))
"""


def outcomes(every: int, backends: str) -> dict[str, Any]:
    """Run every n-th check; failures by name."""
    failures = []
    done: Counter[str] = Counter()
    for number, (name, check) in enumerate(checks(backends.split(","))):
        if number % every or command.spent():
            continue
        backend, colon, _ = name.partition(": ")
        done[backend if colon and backend in backends.split(",") else "none, while building"] += 1
        try:
            check()
        except Violation as violation:
            failures.append(f"{name}: {violation}")
            print(failures[-1], file=sys.stderr)
    return {"checks": dict(done), "failures": failures, "assertions": __debug__}


def run(full: bool, seed: int, backends: str) -> dict[str, Any]:
    """In this process, and in one without assertions."""
    every = 1 if full else 10
    plain = outcomes(every, backends)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    command_line = [sys.executable, "-O", "-c", ONCE.format(every=every, backends=backends)]
    done = subprocess.run(command_line, env=environment, capture_output=True, text=True, check=True)
    optimised = json.loads(done.stdout.splitlines()[-1])
    return {
        "figure": "R2",
        "seed": seed,
        "cases": len(BUILDING) + len(AT_REST) + len(IN_STEP),
        "backends": backends.split(","),
        "plain": plain,
        "python -O": optimised,
        "divergences": len(plain["failures"]) + len(optimised["failures"]) + optimised["assertions"],
    }


if __name__ == "__main__":
    command.run_whole(__doc__, run, {"backends": installed()})
