"""torch: the verbs in place on torch tensors, with Triton kernels on CUDA and in plain operations everywhere.

The backend is imported when it is asked for: what its kernels are, ``kvcore.kernels`` says, which knows no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.backends.torch_triton.backend import TorchBackend, TorchOps

__all__ = ["TorchBackend", "TorchOps"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvcore.backends.torch_triton import backend

    return getattr(backend, name)
