"""The kernels, interpreted, against the reference: bytes for storage, a tolerance for arithmetic."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

GROUPS = [
    "attention",
    "classic attention",
    "indexer",
    "flush of fp32",
    "flush of bf16",
    "rotated append",
    "whole units",
    "pages of exports",
    "strips in the kit",
    "merge of shards",
    "torch.compile",
    *(f"formats {n}" for n in range(4)),
]


@pytest.mark.parametrize("group", GROUPS)
def test_interpreted_kernels_agree_with_the_reference(group):
    script = Path(__file__).with_name("interpreted.py")
    # Triton decides when a kernel is defined whether it is interpreted, so the checks need a process of their own.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", str(script), group]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
