"""torch: the verbs in place on torch tensors, with Triton kernels on CUDA and in plain operations everywhere."""

from kvcore.backends.torch_triton.backend import TorchBackend, TorchOps

__all__ = ["TorchBackend", "TorchOps"]
