"""The two-GPU benchmark on two forced devices of the CPU: it ends, and both meshes hold and answer the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_devices_answer_what_one_does(tmp_path: Path) -> None:
    env = {**os.environ, "KVCORE_COMMIT": "0" * 40, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    line = [
        sys.executable,
        "-m",
        "benchmarks.two_gpus_jax",
        "--tiny",
        "--parts",
        "decode",
        "--seconds",
        "500",
        "--out",
        tmp_path / "two.json",
    ]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "two.json").read_text())
    record = record["decode"]
    assert record["complete"]
    assert record["command"].startswith("python -m benchmarks.two_gpus_jax --tiny")
    assert record["commit"] == "0" * 40
    lengths = [record[f"decode at {length}"] for length in (2048, 4096)]
    assert all(one["digests_equal"] and one["selections_equal"] == "2 of 2" for one in lengths)
    assert lengths[0]["digest"] != lengths[1]["digest"]
    # Windows and tails are on both, history on one each.
    one, two = record["pool_bytes_a_device"].values()
    assert one / 2 < two < one
