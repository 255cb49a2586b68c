"""The JAX backend's own suite. It needs jax; without it nothing here is collected, and its nox session fails."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

RACE = "RACE DETECTED"

collect_ignore_glob = [] if find_spec("jax") else ["test_*.py"]

if find_spec("jax"):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Compiling is most of this suite's time; what is checked is exact, so the optimiser's effort is not missed.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what is compiled for TPUs, a minute and more in a test: at the end one worker would wait for the other."""
    items.sort(key=lambda item: not item.path.name.startswith("test_tpu_"))


@pytest.fixture(autouse=True)
def no_race(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The interpreter of TPU kernels prints the races that it finds and goes on: here they fail the test."""
    yield
    assert RACE not in capsys.readouterr().out
