"""Every misuse is a typed error with all state unchanged, and the next good step works."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bad_input import at_rest, building, in_step
from bad_input.everything import CAUGHT
from bad_input.world import BUILT_IN, check_at_rest, check_building, check_caught_in_step, check_in_step
from kvcore import errors

TESTS = Path(__file__).parents[1]


def table(cases):
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


@table(building.CASES)
def test_building(case):
    check_building(case)


@table(at_rest.CASES)
def test_at_rest(backend, case):
    check_at_rest(case, backend)


@table(in_step.CASES)
def test_in_step(backend, case):
    check_in_step(case, backend)


@table(CAUGHT)
def test_caught_in_step(backend, case):
    check_caught_in_step(case, backend)


def test_the_same_without_assertions():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    done = subprocess.run(
        [sys.executable, "-O", "-m", "bad_input.everything"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.endswith("0 failures, __debug__ is False\n")


def test_the_catalogue_is_large_named_once_and_complete():
    tables = (building.CASES, at_rest.CASES, in_step.CASES)
    names = [case.name for cases in tables for case in cases]
    assert len(names) > 300
    assert len(set(names)) == len(names)
    assert {case.error for cases in tables for case in cases} == set(BUILT_IN)
    raised = {kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__base__ is errors.KvcoreError}
    assert {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KvcoreError)} - {
        errors.KvcoreError
    } == set(BUILT_IN)
    assert raised <= set(BUILT_IN)
