"""The whole catalogue without pytest: ``python -O -m tests.bad_input.everything`` must give the same answers."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvcore.testing.misuse import Case, Violation, check_at_rest, check_in_step
from tests.bad_input import arguments, plans, pools, requests, specs, turns
from tests.bad_input.world import World, check_building
from tests.support.backends_under_test import BACKENDS

BUILDING = [*specs.CASES, *plans.CASES]
AT_REST = [*requests.CASES, *pools.CASES]
IN_STEP = [*arguments.CASES, *turns.CASES]


def checks(backends: Sequence[str] = BACKENDS) -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, check) of every case on every backend."""
    for case in BUILDING:
        yield case.name, lambda case=case: check_building(case)
    for backend in backends:
        for check, cases in ((check_at_rest, AT_REST), (check_in_step, IN_STEP)):
            for case in cases:
                yield f"{backend}: {case.name}", partial(_check, check, case, backend)


def _check(check: Callable[[Case, World], None], case: Case, backend: str) -> None:
    check(case, World(backend, check=case.check))


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
