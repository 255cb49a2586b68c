"""Whether the project's Triton kernels run on a CUDA device under JAX, or ``jax.numpy`` does.

The choice is made when the verbs are created and can be forced with the environment variable KVCORE_JAX_KERNELS:
``auto``, ``triton`` or ``portable``.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax

from kvcore.errors import BackendError

VARIABLE = "KVCORE_JAX_KERNELS"
CHOICES = ("auto", "triton", "portable")
NEEDED = ("jax_triton", "triton")


def chosen(device: str) -> str:
    """``triton`` or ``portable``, for a device in kvcore's words.

    Raises:
        BackendError: KVCORE_JAX_KERNELS is something else, or asks for kernels where jax-triton is not installed.
    """
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in CHOICES:
        raise BackendError(got=wanted, where=VARIABLE, allowed=", ".join(CHOICES))
    if device != "cuda":
        return "portable"
    missing = [name for name in NEEDED if find_spec(name) is None]
    if wanted == "triton" and missing:
        raise BackendError(
            got=wanted,
            where=VARIABLE,
            allowed=f"auto or portable: {', '.join(missing)} is not installed",
            hint='pip install "kvcore[jax-triton]"',
        )
    return "portable" if missing or wanted == "portable" else "triton"


def verbs(kernels: str) -> Any:
    """The verbs that are Triton launches where those are the kernels that run, else None."""
    return import_module("kvcore.backends.jax_pallas.cuda") if kernels == "triton" else None


SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99}
"""KiB of shared memory that a program may have, by compute capability (CUDA C++ programming guide, table 30)."""


def chip() -> Any:
    """The first device of this process, as kernels are cut for it: a ``Chip``."""
    from kvcore.kernels.triton.device import Chip

    known = max(known for known in SHARED if known <= max(capability(), min(SHARED)))
    return Chip(capability(), jax.local_devices(backend="cuda")[0].core_count, SHARED[known] << 10)


@cache
def capability() -> int:
    """CUDA's compute capability of the first device of this process, ten times the major number and the minor.

    jax-triton compiles for that one, too: devices of one process are taken to be alike.
    """
    major, minor = jax.local_devices(backend="cuda")[0].compute_capability.split(".")
    return 10 * int(major) + int(minor)
