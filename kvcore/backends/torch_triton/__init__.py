"""torch: the verbs in place on torch tensors, in plain operations that run on the CPU and on a GPU alike."""

from kvcore.backends.torch_triton.backend import TorchBackend, TorchOps

__all__ = ["TorchBackend", "TorchOps"]
