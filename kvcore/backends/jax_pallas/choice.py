"""Whether the project's Triton kernels run on a CUDA device under JAX, or ``jax.numpy`` does.

The choice is made when the verbs are created and can be forced with the environment variable KVCORE_JAX_KERNELS:
``auto``, ``triton`` or ``portable``.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import jax

from kvcore.errors import BackendError
from kvcore.ops.choices import refused, strict

if TYPE_CHECKING:
    from kvcore.plan import CachePlan

VARIABLE = "KVCORE_JAX_KERNELS"
CHOICES = ("auto", "triton", "portable")
INTERPRETED = "cpu:interpret"
"""The device that runs the TPU's kernels in an interpreter, slowly, and looks for their faults."""
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
    absent = missing()
    if wanted == "triton" and absent:
        raise BackendError(
            got=wanted,
            where=VARIABLE,
            allowed=f"auto or portable: {', '.join(absent)} is not installed",
            hint='pip install "kvcore[jax-triton]"',
        )
    return "portable" if absent or wanted == "portable" else "triton"


def kernels_of(plan: "CachePlan", device: str) -> str:
    """Pallas where it runs and rows are whole tiles, Triton on CUDA where it is installed, else jax.numpy."""
    if plan.layout != "tpu_tile":
        return chosen(device)
    return {"tpu": "tpu", INTERPRETED: "interpret"}.get(device, "portable")


def word(device: Any) -> str:
    """JAX's platform in kvcore's words."""
    return "cuda" if device.platform == "gpu" else device.platform


def why_portable(layout: str, device: str) -> str:
    """Why no kernels run on a device, in kvcore's words, where none do."""
    if device == "tpu":
        return f"Pallas kernels read layout tpu_tile, this is {layout}"
    if device != "cuda":
        return "there are no kernels for a CPU"
    if layout == "tpu_tile":
        return "layout tpu_tile is for a TPU"
    if os.environ.get(VARIABLE) == "portable":
        return f"{VARIABLE}=portable"
    return f"{' and '.join(missing()) or 'a module'} is not installed"


def missing() -> list[str]:
    """Modules that Triton kernels need and that are not installed."""
    return [name for name in NEEDED if find_spec(name) is None]


def fall_back(kernels: str, verb: str, reason: str) -> None:
    """Called in a trace whose arguments make it leave out a kernel that other arguments run.

    Raises:
        BackendError: KVCORE_STRICT=1.
    """
    if kernels != "portable" and strict():
        raise refused(verb, None, "jax.numpy", reason)


def verbs(kernels: str) -> Any:
    """The verbs that are Triton launches where those are the kernels that run, else None."""
    return import_module("kvcore.backends.jax_pallas.cuda") if kernels == "triton" else None


SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99}
"""KiB of shared memory that a program may have, by compute capability (CUDA C++ programming guide, table 30)."""


def props() -> Any:
    """The first device of this process, as kernels are cut for it: a ``DeviceProps``."""
    from kvcore.kernels.triton.device import DeviceProps

    known = max(known for known in SHARED if known <= max(capability(), min(SHARED)))
    return DeviceProps(capability(), jax.local_devices(backend="cuda")[0].core_count, SHARED[known] << 10)


@cache
def capability() -> int:
    """CUDA's compute capability of the first device of this process, ten times the major number and the minor.

    jax-triton compiles for that one, too: devices of one process are taken to be alike.
    """
    major, minor = jax.local_devices(backend="cuda")[0].compute_capability.split(".")
    return 10 * int(major) + int(minor)
