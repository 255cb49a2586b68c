"""torch and JAX in one environment: requests move between them in mid-generation. ``nox -s frameworks`` has both."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("script", "promise"),
    [
        pytest.param(
            "move_a_request.py jax_pallas",
            "both went on to 28 tokens; digests equal: True",
            id="a request moves from torch to JAX",
        ),
        pytest.param(
            "hand_off.py --shards 4",
            "on 4 shards: digests equal: True",
            id="JAX prefills, torch decodes, on one process and on four",
        ),
    ],
)
def test_example_runs(script: str, promise: str) -> None:
    name, *options = script.split()
    line = [sys.executable, "-W", "error", EXAMPLES / name, *options]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert promise in done.stdout
    assert "False" not in done.stdout
