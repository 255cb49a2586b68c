"""Context shards under shard_map on forced host devices: what the reference stores and answers, on any number."""

import os
import subprocess
import sys

PROGRAM = "tests.jax_pallas.shards_on_devices"


def test_a_mesh_of_any_size_answers_what_one_device_does() -> None:
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", PROGRAM, "4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "4 shards: 1.entries.page: True",
        "4 shards: 0.window.page: True",
        "4 shards: 25 answers compared",
        "refused: mesh",
    ]
