"""The whole catalogue without pytest: ``python -O -m bad_input.everything`` must give the same answers."""

import sys
from collections.abc import Callable, Iterator

from backends_under_test import BACKENDS

from bad_input import at_rest, building, in_step
from bad_input.world import Violation, check_at_rest, check_building, check_caught_in_step, check_in_step


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, check) of every case on every backend."""
    for case in building.CASES:
        yield case.name, lambda case=case: check_building(case)
    for backend in BACKENDS:
        for case in at_rest.CASES:
            yield f"{backend}: {case.name}", lambda case=case, backend=backend: check_at_rest(case, backend)
        for case in in_step.CASES:
            yield f"{backend}: {case.name}", lambda case=case, backend=backend: check_in_step(case, backend)
        for case in CAUGHT:
            yield f"{backend}, caught: {case.name}", lambda case=case, backend=backend: check_caught_in_step(case, backend)


CAUGHT = [case for case in in_step.CASES if case.prepare is None and case.tokens is None and not case.ends_step]
"""Misuse after which the same step can go on."""


def main() -> int:
    """Run every check; the number of failures is the exit status."""
    failures = 0
    total = 0
    for name, check in checks():
        total += 1
        try:
            check()
        except Violation as violation:
            failures += 1
            print(f"{name}: {violation}")
    print(f"{total} checks, {failures} failures, __debug__ is {__debug__}")
    return min(failures, 100)


if __name__ == "__main__":
    sys.exit(main())
