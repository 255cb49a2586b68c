"""R2: the catalogue of bad input on every backend: a typed error, all state unchanged; also under ``python -O``.

The cases are those of ``tests/bad_input``. The short form runs every tenth of them.
"""

import json
import os
import subprocess
import sys
from typing import Any

from backends_under_test import BACKENDS
from bad_input.everything import AT_REST, BUILDING, IN_STEP, checks
from bad_input.world import Violation

from benchmarks.reliability import command

ONCE = """
import json
from benchmarks.reliability.misuse import outcomes
print(json.dumps(outcomes({every})))
"""


def outcomes(every: int) -> dict[str, Any]:
    """Run every n-th check; failures by name."""
    failures = []
    done = 0
    for number, (name, check) in enumerate(checks()):
        if number % every or command.spent():
            continue
        done += 1
        try:
            check()
        except Violation as violation:
            failures.append(f"{name}: {violation}")
            print(failures[-1], file=sys.stderr)
    return {"checks": done, "failures": failures, "assertions": __debug__}


def run(full: bool, seed: int) -> dict[str, Any]:
    """In this process, and in one without assertions."""
    every = 1 if full else 10
    plain = outcomes(every)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    command_line = [sys.executable, "-O", "-c", ONCE.format(every=every)]
    done = subprocess.run(command_line, env=environment, capture_output=True, text=True, check=True)
    optimised = json.loads(done.stdout.splitlines()[-1])
    return {
        "figure": "R2",
        "seed": seed,
        "cases": len(BUILDING) + len(AT_REST) + len(IN_STEP),
        "backends": list(BACKENDS),
        "plain": plain,
        "python -O": optimised,
        "divergences": len(plain["failures"]) + len(optimised["failures"]) + optimised["assertions"],
    }


if __name__ == "__main__":
    command.run_whole(__doc__, run)
