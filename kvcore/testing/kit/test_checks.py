"""Every check of the table, one test each: the same that ``kvcore parity run`` runs."""

import msgspec
import pytest

from kvcore.conformance.suite import Check
from kvcore.parity.records import FAILING
from kvcore.parity.run import Subject, check_backends
from kvcore.parity.show import failure_text
from kvcore.testing.plugin import RECORD


def test_check(kv_check: tuple[Check, Subject], request: pytest.FixtureRequest) -> None:
    """The backend does what the reference does, by the check's rule; a known gap is an expected failure."""
    check, subject = kv_check
    (record,) = check_backends(check, [subject])
    request.node.user_properties.append((RECORD, msgspec.json.encode(record).decode()))
    if record.status == "known_gap":
        pytest.xfail(record.detail)
    if record.status in FAILING:
        pytest.fail(failure_text(record), pytrace=False)
