"""A backend whose calls fail on JAX: rows are as before, or the request is lost and says so."""

import pytest

from tests.support import faulty


@pytest.mark.sampled
@pytest.mark.parametrize("late", [False, True], ids=["before its work", "after it"])
@pytest.mark.parametrize("verb", faulty.VERBS)
def test_a_verb_of_the_backend_that_fails_once(verb: str, late: bool) -> None:
    faulty.check_one_fault("jax_pallas", verb, late=late)


def test_rows_that_a_commit_overwrote_are_put_back() -> None:
    faulty.check_a_commit("jax_pallas")


def test_a_request_whose_rows_cannot_be_put_back_is_lost_and_says_so() -> None:
    faulty.check_a_loss("jax_pallas")
