"""kvcore: one framework-neutral schema for the key-value caches of language models, on pluggable backends.

Names are loaded at first use, so that ``import kvcore`` imports neither numpy, torch nor jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_ERRORS = (
    "BackendError",
    "FaultError",
    "KvcoreError",
    "NonFiniteError",
    "OutOfBlocks",
    "OutOfSlots",
    "RequestError",
    "RollbackError",
    "ShapeError",
    "SnapshotError",
    "SpecError",
    "StepError",
    "TransferError",
)
_HOMES = {
    **dict.fromkeys(_ERRORS, "kvcore.errors"),
    "BackendInfo": "kvcore.plugins",
    "Cache": "kvcore.cache",
    "CacheSpec": "kvcore.spec",
    "LayerSpec": "kvcore.spec",
    "Periodic": "kvcore.requests.prefix",
    "Request": "kvcore.requests.manager",
    "adopt": "kvcore.adoption",
    "create_cache": "kvcore.cache",
    "hookimpl": "kvcore.plugins",
    "load": "kvcore.cache.loading",
    "to_numpy": "kvcore.arrays",
    "use_backend": "kvcore.plugins",
}
_MODULES = ("errors", "plan", "plugins", "spec")

__all__ = [
    "BackendError",
    "BackendInfo",
    "Cache",
    "CacheSpec",
    "FaultError",
    "KvcoreError",
    "LayerSpec",
    "NonFiniteError",
    "OutOfBlocks",
    "OutOfSlots",
    "Periodic",
    "Request",
    "RequestError",
    "RollbackError",
    "ShapeError",
    "SnapshotError",
    "SpecError",
    "StepError",
    "TransferError",
    "__version__",
    "adopt",
    "create_cache",
    "errors",
    "hookimpl",
    "load",
    "plan",
    "plugins",
    "spec",
    "to_numpy",
    "use_backend",
]

if TYPE_CHECKING:
    from kvcore import errors, plan, plugins, spec
    from kvcore.adoption import adopt
    from kvcore.arrays import to_numpy
    from kvcore.cache import Cache, create_cache
    from kvcore.cache.loading import load
    from kvcore.errors import (
        BackendError,
        FaultError,
        KvcoreError,
        NonFiniteError,
        OutOfBlocks,
        OutOfSlots,
        RequestError,
        RollbackError,
        ShapeError,
        SnapshotError,
        SpecError,
        StepError,
        TransferError,
    )
    from kvcore.plugins import BackendInfo, hookimpl, use_backend
    from kvcore.requests.manager import Request
    from kvcore.requests.prefix import Periodic
    from kvcore.spec import CacheSpec, LayerSpec


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"kvcore.{name}")
    raise AttributeError(f"module 'kvcore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
