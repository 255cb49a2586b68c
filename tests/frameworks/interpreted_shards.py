"""The two-GPU benchmark's kernels on two forced devices, Triton launches interpreted; in a process of its own.

python interpreted_shards.py RECORD

Launches are part of a program over both devices: each interprets its own, on its own shards.
"""

import sys

import interpreted_launches  # first: it says how kernels are to be defined

from kvcore.backends.jax_pallas.cuda import arguments, attend, indexer
from kvcore.backends.torch_triton.kernels.cut import INTERPRETER


def main(record: str) -> int:
    sys.argv = ["two_gpus_jax.py", "--tiny"]  # read when the benchmark is imported
    from benchmarks import two_gpus_jax

    arguments.launch = interpreted_launches.launch
    arguments.capability = lambda: 80
    attend.chip = indexer.chip = lambda: INTERPRETER
    status = two_gpus_jax.main(
        ["--tiny", "--parts", "kernels", "--kernels", "triton", "--seconds", "500", "--out", record]
    )
    print(*sorted(interpreted_launches.LAUNCHED))
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
