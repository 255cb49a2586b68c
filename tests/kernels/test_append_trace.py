"""An append by kernels goes through no more files than a reader can keep in mind, those of the kernels among them."""

import os
import re
import subprocess
import sys

MOST_FILES = 11


def test_an_append_goes_through_few_files():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.append_trace", "--backend", "torch_triton"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = {verb: int(files) for verb, files in re.findall(r"torch_triton, (\w+): (\d+) files", done.stdout)}
    assert list(found) == ["append_window", "append_kv"]
    assert max(found.values()) <= MOST_FILES
    assert done.stdout.count("kernels/triton/append.py") == 2
