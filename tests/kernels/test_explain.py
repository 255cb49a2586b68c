"""``ops.explain()`` of interpreted kernels: tables of four specs, that they agree with what runs, and strict mode."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")


@pytest.mark.parametrize(("what", "strict"), [("tables", "0"), ("ran", "0"), ("strict", "1")])
def test_what_is_said_is_what_runs(what, strict):
    given = {"TRITON_INTERPRET": "1", "KVCORE_STRICT": strict, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {name: value for name, value in os.environ.items() if name != "KVCORE_ATTENTION"} | given
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.explained", what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
