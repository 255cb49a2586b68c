"""Programs in processes of their own, since the number of JAX's devices is fixed when it starts."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    """A program of this folder, begun."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    line = [sys.executable, "-m", f"tests.jax_pallas.{program}", *map(str, arguments)]
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str], seconds: float = 400) -> str:
    """What it printed, once it has ended well."""
    try:
        out, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    return out
