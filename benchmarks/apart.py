"""Parts of a benchmark in processes of their own: what JAX and libtpu are told they take once, and they may abort."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def printed(line: Sequence[str], **variables: str) -> list[dict[str, Any]]:
    """What a program printed as lines of JSON.

    Raises:
        RuntimeError: it died.
    """
    return _printed(line, {**os.environ, **variables})


def compiled_for_tpu(module: str, *arguments: str, **variables: str) -> list[dict[str, Any]]:
    """The same of a module that compiles for TPUs, none of which need be here."""
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    env |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return _printed([sys.executable, "-m", module, *arguments], env | variables)


def _printed(line: Sequence[str], env: Mapping[str, str]) -> list[dict[str, Any]]:
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return [json.loads(each) for each in done.stdout.splitlines() if each.startswith("{")]
