"""The built-in backends and what each can: the same file names and functions in the same order in every one.

Nothing here imports a framework.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvcore.plugins import CAPABILITIES, BackendInfo, hookimpl

if TYPE_CHECKING:
    from kvcore.ops import Backend

EVERYTHING = CAPABILITIES


def _load_reference() -> "Backend":
    from kvcore.backends.reference import ReferenceBackend

    return ReferenceBackend()


def _load_torch() -> "Backend":
    from kvcore.backends.torch_triton import TorchBackend

    return TorchBackend()


def _load_jax() -> Any:
    from kvcore.backends.jax_pallas import JaxBackend

    return JaxBackend()


def _forget_jax() -> None:
    import jax

    jax.clear_caches()


def _runs() -> None:
    return None


@hookimpl
def kvcore_backends() -> Iterator[BackendInfo]:
    """The backends that come with kvcore."""
    yield BackendInfo(
        name="reference",
        summary="NumPy, written to be read; what every other backend is checked against",
        requires=("numpy", "ml_dtypes"),
        devices=("cpu",),
        capabilities=EVERYTHING,
        priority=None,
        install="pip install kvcore",
        probe=_runs,
        load=_load_reference,
    )
    yield BackendInfo(
        name="torch_triton",
        summary="torch, in place: Triton kernels on CUDA, plain operations on the CPU",
        requires=("torch",),
        devices=("cpu", "cuda"),
        capabilities=EVERYTHING,
        priority=50,
        install='pip install "kvcore[torch]"',
        probe=_runs,
        load=_load_torch,
    )
    yield BackendInfo(
        name="jax_pallas",
        summary="JAX, functional, for use inside jit: jax.numpy on every device, Pallas kernels on TPU, Triton on CUDA",
        requires=("jax",),
        devices=("tpu", "cuda", "cpu"),
        capabilities=EVERYTHING,
        priority=40,
        install='pip install "kvcore[jax]"',
        probe=_runs,
        load=_load_jax,
        forget=_forget_jax,
    )
