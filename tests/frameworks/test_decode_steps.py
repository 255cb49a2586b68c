"""A model's decode steps on kernels: most layers go a short way, and give what the model's attention gives."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytest.importorskip("transformers")


def test_layers_like_the_ones_before_go_the_short_way():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.frameworks.interpreted_decode"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(worst < 2e-6 for worst, _ in found.values()), found
    # The first step's layers learn, the second's repeat; without a mask all of the third begin where those ended.
    (_, alone), (_, padded) = found.values()
    assert alone >= 2, found
    assert padded >= 1, found
