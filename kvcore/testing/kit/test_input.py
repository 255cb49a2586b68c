"""Bad input: a typed error, everything as it was before, and the next good step works."""

from collections.abc import Sequence

import pytest

import kvcore
from kvcore.errors import BackendError
from kvcore.testing.misuse import BETWEEN_STEPS, IN_A_STEP, Case, World, check_at_rest, check_in_step
from kvcore.testing.tagged_rows import life_spec


def table(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """One test a misuse."""
    return pytest.mark.parametrize("misuse", [pytest.param(case, id=case.name) for case in cases])


@table(BETWEEN_STEPS)
def test_bad_input(kv_backend: str, kv_device: str | None, misuse: Case) -> None:
    """A wrong call between steps."""
    check_at_rest(misuse, World(kv_backend, kv_device, check=misuse.check))


@table(IN_A_STEP)
def test_bad_input_in_a_step(kv_backend: str, kv_device: str | None, misuse: Case) -> None:
    """A wrong call inside a step."""
    check_in_step(misuse, World(kv_backend, kv_device, check=misuse.check))


def test_bad_input_device(kv_backend: str) -> None:
    """A device that there is not is refused, not replaced."""
    with pytest.raises(BackendError):
        kvcore.create_cache(life_spec(), backend=kv_backend, device="nowhere", max_requests=1, max_tokens=8)
