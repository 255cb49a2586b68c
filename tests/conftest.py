"""Fixtures for the whole suite: the backends under test, seeds from check ids, repeatable property tests."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import settings

import kvcore
from tests.support import samples
from tests.support.backends_under_test import BACKENDS, Codec, seed_of

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every",
        action="store_true",
        help="compile every kernel in every case for every GPU and TPU, and run every case of what is marked sampled, "
        "not a sample that shows each pair or each word once",
    )


def pytest_configure(config: pytest.Config) -> None:
    rule = "of its cases those are run that show a word of an id, on a backend, which none before does"
    config.addinivalue_line("markers", f"sampled: {rule}; --every and -k take all")
    samples.EVERY = config.getoption("every")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave cases of marked tests out, unless all were asked for, or some by name."""
    if config.getoption("every") or config.option.keyword:
        return
    tests: dict[str, list[str]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item.nodeid)
    left = {id for ids in tests.values() for id in set(ids) - set(samples.quick(ids))}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]


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
