"""Triton launches under ``shard_map`` on two forced devices, interpreted, beside jax.numpy; in a process of its own.

python interpreted_shards.py AXIS [AXIS ...]

Launches are part of a program over both devices: each interprets its own, on its own shards.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
# A device's thread that waits for the interpreter must not be the one that the interpreter waits for.
os.environ["NPROC"] = "16"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 " + os.environ.get("XLA_FLAGS", "")

from benchmarks import two_gpus_kernels
from kvcore.backends.jax_pallas import run_triton
from kvcore.kernels.triton.device import INTERPRETER
from tests.frameworks import interpreted_launches


def main(axes: list[str]) -> None:
    run_triton.launch = interpreted_launches.launch
    run_triton.capability = lambda: 80
    run_triton.props = lambda _: INTERPRETER
    for axis in axes:
        interpreted_launches.LAUNCHED.clear()
        found = two_gpus_kernels.measured(axis, "triton", two_gpus_kernels.TINY)
        # A callback's results are new arrays.
        faults = [fault for fault in found["faults"] if fault != "pools have moved"]
        print(axis, *sorted(interpreted_launches.LAUNCHED), "faults:", *faults, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
