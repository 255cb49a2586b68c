"""The kit's checks on one backend until the first that fails: what judges planted faults, without pytest's collection.

    python -m tests.reliability.kit_once torch_triton
    python -m tests.reliability.kit_once jax_pallas --device cpu:interpret --checks "flush and tpu_tile and ragged"

The exit code is 1 if one fails, whose id is printed; 3 if the backend cannot run here or no check is chosen.
"""

import argparse
import re
import sys
import zlib

from kvcore.conformance.specs import conformance_spec
from kvcore.conformance.suite import Check, checks_of
from kvcore.parity.records import FAILING
from kvcore.parity.run import Subject, check_backends
from kvcore.plugins import registry

OPERATORS = ("and", "or", "not")


def chosen(expression: str, id: str) -> bool:
    """Whether an expression of words, ``and``, ``or``, ``not`` and parentheses holds for the words in an id."""
    if not expression:
        return True

    def value(word: re.Match[str]) -> str:
        return word[0] if word[0] in OPERATORS else str(word[0] in id)

    return bool(eval(re.sub(r"[\w.]+", value, expression)))


def order(check: Check) -> tuple[bool, int]:
    """The shape with most in it first, otherwise mixed: any kind of fault is met soon."""
    return not check.id.endswith(("/ragged", "/any_bytes", "/edges")), zlib.crc32(check.id.encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("backend")
    parser.add_argument("--device")
    parser.add_argument("--checks", default="", help="an expression of words that ids contain, and, or, not")
    parser.add_argument("--by-plan", action="store_true", help="checks of a plan together, for backends that compile")
    given = parser.parse_args()
    subject = Subject(registry().backends[given.backend], given.device)
    checks = [check for check in checks_of(conformance_spec()) if chosen(given.checks, check.id)]
    if subject.reason or not checks:
        print(subject.reason or "no check is chosen")
        return 3
    for check in checks if given.by_plan else sorted(checks, key=order):
        (record,) = check_backends(check, [subject])
        if record.status in FAILING:
            print(f"FAILED {check.id}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
