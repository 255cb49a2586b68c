"""torch: the verbs in place on torch tensors, with Triton kernels on CUDA and in plain operations everywhere.

Here a device is looked at and gets its verbs. torch is imported when a backend is made: what kernels are,
``kvcore.kernels`` says, which knows no torch.
"""

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvcore.errors import BackendError
from kvcore.plan import CachePlan
from kvcore.spec.codes import check_known
from kvcore.spec.layout import FOREIGN

if TYPE_CHECKING:
    from kvcore.backends.torch_triton.backend import TorchOps

__all__ = ["TorchBackend", "TorchOps"]


class TorchBackend:
    """Creates ``TorchOps``."""

    name = "torch_triton"

    def __init__(self) -> None:
        # Where torch is broken, the backend cannot be loaded.
        from kvcore.backends.torch_triton import backend

        self._known = backend.encoding.KNOWN

    def create(self, plan: CachePlan, *, device: str | None = None) -> "TorchOps":
        """Bind the verbs to a plan and a device: the CPU, or a CUDA device by its torch name.

        Raises:
            BackendError: another device, or one that is not there; an element code that the encoders do not know.
        """
        name = checked_device(device)
        check_known((region.format for region in plan.regions), self._known, self.name)
        ops = ops_for(name, plan.layout)(plan, name)
        ops.check_if_strict()
        return ops

    def default_layout(self, device: str | None) -> str:
        """Packed, like the engines."""
        del device
        return "packed"


def ops_for(device: str, layout: str = "packed") -> "type[TorchOps]":
    """The verbs for a device: Triton kernels on CUDA, and interpreted on the CPU under TRITON_INTERPRET=1.

    Kernels take units as the library lays them out, and none of layout ``foreign``.
    """
    from kvcore.backends.torch_triton.backend import ForeignOps, TorchOps

    if layout == FOREIGN:
        return ForeignOps
    wanted = device != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"
    if not wanted or find_spec("triton") is None:
        return TorchOps
    from kvcore.backends.torch_triton.triton_ops import TritonOps

    return TritonOps


def checked_device(device: object) -> str:
    """The device's full name; ``cuda`` is torch's current CUDA device."""
    import torch

    name = "cpu" if device is None else str(device)
    kind, colon, number = name.partition(":")
    if name == "cpu":
        return name
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise BackendError(got=device, where="device", allowed="None, 'cpu', 'cuda' or 'cuda:N' for 'torch_triton'")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found or int(number or 0) >= found:
        raise BackendError(
            got=device,
            where="device",
            allowed=f"'cpu', or one of {found} CUDA devices" if found else "'cpu': torch finds no CUDA device",
            hint="" if found else f"This is torch {torch.__version__}.",
        )
    return f"cuda:{int(number) if number else torch.cuda.current_device()}"


def __getattr__(name: str) -> Any:
    if name != "TorchOps":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvcore.backends.torch_triton.backend import TorchOps

    return TorchOps
