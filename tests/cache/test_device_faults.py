"""A backend whose calls fail: rows are as before, or the request is lost and says so."""

import pytest

from kvcore.ops.fused import FUSED, REQUIRED
from tests.support import faulty


@pytest.mark.sampled
@pytest.mark.parametrize("late", [False, True], ids=["before its work", "after it"])
@pytest.mark.parametrize("verb", faulty.VERBS)
def test_a_verb_of_the_backend_that_fails_once(backend: str, verb: str, late: bool) -> None:
    faulty.check_one_fault(backend, verb, late=late)


def test_rows_that_a_commit_overwrote_are_put_back(backend: str) -> None:
    faulty.check_a_commit(backend)


def test_a_request_whose_rows_cannot_be_put_back_is_lost_and_says_so(backend: str) -> None:
    faulty.check_a_loss(backend)


def test_a_fault_is_planted_at_every_verb_of_the_protocol(backend: str) -> None:
    assert set(faulty.NOT_PLANTED) | set(faulty.PLANTED) == {*REQUIRED, *FUSED, "how"}
    assert set(faulty.PLANTED) - faulty.planted_calls(backend) == set()
