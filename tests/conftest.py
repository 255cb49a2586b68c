"""Fixtures for the whole suite: the backends under test, seeds from check ids, repeatable property tests."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import settings

import kvcore
from tests.support.backends_under_test import BACKENDS, Codec, seed_of

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every",
        action="store_true",
        help="compile every kernel in every case for every GPU and TPU, not a sample that shows each pair once",
    )


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Name of the backend under test."""
    return request.param


@pytest.fixture
def build(backend: str) -> Callable[..., kvcore.Cache]:
    """``kvcore.create_cache`` with the backend under test."""
    return partial(kvcore.create_cache, backend=backend)


@pytest.fixture(scope="session", params=BACKENDS)
def codec(request: pytest.FixtureRequest) -> Codec:
    """Rows and pages of the backend under test, NumPy in and out."""
    return Codec(request.param)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the check's id alone."""
    return np.random.default_rng(seed_of(request.node.nodeid))
