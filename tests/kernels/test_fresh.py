"""Slots are reset alike, whether what a fresh one holds is kept on the device or not."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")


def test_large_slots_are_reset_as_small_ones_and_nothing_is_kept():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.fresh"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    small, large = json.loads(done.stdout.splitlines()[-1])
    assert (small["kept"], large["kept"]) == (True, False)
    assert small["pools"] == large["pools"]
    # One slot of every pool that has them, of two and the one that nobody owns, holds something else than before.
    changed = [[any(byte != 0xFF for byte in unit) for unit in pool] for pool in small["pools"].values()]
    assert {sum(units) for units in changed} == {0, 1}
