"""Every misuse is a typed error with all state unchanged, and the next good step works."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore import errors
from kvcore.testing.misuse import BUILT_IN, check_at_rest, check_in_step
from tests.bad_input.everything import AT_REST, BUILDING, IN_STEP
from tests.bad_input.world import World, check_building

ROOT = Path(__file__).parents[2]


def table(cases):
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


@table(BUILDING)
def test_building(case):
    check_building(case)


@table(AT_REST)
def test_at_rest(backend, case):
    check_at_rest(case, World(backend, check=case.check))


@table(IN_STEP)
def test_in_step(backend, case):
    check_in_step(case, World(backend, check=case.check))


def test_the_same_without_assertions():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-O", "-m", "tests.bad_input.everything"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.endswith(" 0 failures, __debug__ is False\n")


def test_the_catalogue_is_large_and_each_misuse_is_named_once():
    names = [case.name for case in (*BUILDING, *AT_REST, *IN_STEP)]
    assert len(names) > 300
    assert len(set(names)) == len(names)


def test_every_error_occurs():
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__base__ is not Exception}
    # What happens between processes has its cases in tests/portable; memory that changed, in tests/cache/test_canary.
    elsewhere = {errors.TransferError, errors.FaultError}
    kinds = {kind for kind in kinds if issubclass(kind, errors.KvcoreError)} - elsewhere
    assert kinds == set(BUILT_IN)
    assert {case.error for case in (*BUILDING, *AT_REST, *IN_STEP)} == kinds
