"""What a launch must know of a GPU, whichever framework of arrays asks."""

from typing import NamedTuple

import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run under Triton's interpreter, on the CPU."""
GLUON = not INTERPRETED and (*map(int, triton.__version__.split(".")[:2]),) >= (3, 6)
"""Kernels in Gluon can be launched."""
MOST_WARPS = 8
"""Of a launch that comes up ahead, for a multiprocessor."""
LARGE = 160 << 10
"""Bytes of shared memory of a block, as large GPUs have."""


class DeviceProps(NamedTuple):
    """What a launch must know of a GPU.

    Attributes:
        capability: CUDA's compute capability, ten times the major number and the minor.
        multiprocessors: programs that run at once.
        shared: bytes of shared memory that a program may have.
    """

    capability: int
    multiprocessors: int
    shared: int


INTERPRETER = DeviceProps(capability=90, multiprocessors=5, shared=LARGE)
"""What Triton's interpreter passes for: its number of multiprocessors makes small cases split."""


def native(capability: int) -> bool:
    """True where the hardware rounds to fp8 and bf16 itself; elsewhere kernels round by integer arithmetic.

    ``capability`` is CUDA's, ten times the major number and the minor.
    """
    return capability >= 89


def ahead(props: DeviceProps) -> int:
    """Warps of a launch at most that comes up before the one before it ends, see ``begin``; 0: none does.

    Larger ones take longer by it on an H200. It needs Triton 3.6 and compute capability 9.0.
    """
    return MOST_WARPS * props.multiprocessors if GLUON and props.capability >= 90 else 0


def hopper(props: DeviceProps) -> bool:
    """True where what is written for Hopper's warp-group products runs."""
    return props.capability == 90
