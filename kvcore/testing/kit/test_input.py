"""Bad input: a typed error, everything as it was before, and the next good step works."""

from collections.abc import Mapping

import pytest

import kvcore
from kvcore.errors import BackendError, OutOfSlots
from kvcore.testing.misuse import BETWEEN_STEPS, IN_A_STEP, Fixture, Misuse
from kvcore.testing.tagged_rows import life_spec


def table(cases: Mapping[str, Misuse]) -> pytest.MarkDecorator:
    """One test a misuse."""
    return pytest.mark.parametrize("misuse", list(cases.values()), ids=list(cases))


def undisturbed(backend: str, device: str | None, misuse: Misuse) -> int:
    """What the same cache holds where nobody did anything wrong."""
    return Fixture(backend, device, check=misuse.check).proceed()


@table(BETWEEN_STEPS)
def test_bad_input(kv_backend: str, kv_device: str | None, misuse: Misuse) -> None:
    """A wrong call between steps."""
    fixture = Fixture(kv_backend, kv_device, check=misuse.check)
    before = fixture.state()
    with pytest.raises(misuse.error) as caught:
        misuse.call(fixture)
    assert type(caught.value) is misuse.error
    if misuse.error is OutOfSlots:
        # Getting there took a slot.
        fixture.cache.release(fixture.cache.requests[-1])
    assert fixture.state() == before
    assert fixture.proceed() == undisturbed(kv_backend, kv_device, misuse)


@table(IN_A_STEP)
def test_bad_input_in_a_step(kv_backend: str, kv_device: str | None, misuse: Misuse) -> None:
    """A wrong call inside a step: the error ends the step, which is undone."""
    fixture = Fixture(kv_backend, kv_device, check=misuse.check)
    before = fixture.state()
    with pytest.raises(misuse.error) as caught, fixture.open() as step:
        misuse.call(fixture, step)
    assert type(caught.value) is misuse.error
    assert fixture.state() == before
    assert fixture.proceed() == undisturbed(kv_backend, kv_device, misuse)


def test_bad_input_device(kv_backend: str) -> None:
    """A device that there is not is refused, not replaced."""
    with pytest.raises(BackendError):
        kvcore.create_cache(life_spec(), backend=kv_backend, device="nowhere", max_requests=1, max_tokens=8)
