"""Kernels in Triton's interpreter: which it is to be is decided as they are defined, so in a process of their own."""

import os
import subprocess
import sys


def interpreted(*arguments: str, **options) -> str:
    """What Python prints that is started so, with these arguments."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
