"""Modules of vLLM, SGLang and LMCache out of their wheels, on a CPU and without what they depend on.

``KVCORE_ENGINES`` names a folder of the wheels; ``nox -s engines`` downloads them. Of each only the modules of ``OWN``
are the package's own; whatever else they import is stood in for by names without behaviour.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OWN = {
    "vllm": (
        "distributed.kv_events",
        "distributed.kv_transfer.kv_connector.v1.base",
        "model_executor.layers.mamba.abstract",
        "model_executor.layers.mamba.mamba_utils",
        "platforms.interface",
        "utils.math_utils",
        "utils.torch_utils",
        "v1.core.block_pool",
        "v1.core.kv_cache_utils",
        "v1.core.single_type_kv_cache_manager",
        "v1.kv_cache_interface",
        "v1.kv_cache_layout",
        "v1.kv_cache_spec_registry",
    ),
    "sglang": (
        "kernels.ops.attention.dsv4.kv_layout",
        "srt.layers.quantization.fp4_kv_cache_quant_method",
        "srt.layers.quantization.nvfp4_kv_cache",
        "srt.mem_cache.allocator.base",
        "srt.mem_cache.allocator.paged",
        "srt.mem_cache.allocator.swa",
        "srt.mem_cache.allocator.token",
        "srt.mem_cache.allocator.unified_hybrid_swa",
        "srt.mem_cache.allocator.unified_sub_pool",
        "srt.mem_cache.base_swa_memory_pool",
        "srt.mem_cache.deepseek_v4_compress_state",
        "srt.mem_cache.deepseek_v4_memory_pool",
        "srt.mem_cache.hicache_storage",
        "srt.mem_cache.layout.token_major",
        "srt.mem_cache.memory_pool",
        "srt.mem_cache.swa_memory_pool",
        "srt.mem_cache.unified_memory_pool",
    ),
    "lmcache": ("v1.storage_backend.abstract_backend",),
}
"""Modules that are a package's own in every test: which test comes first in a process makes no difference."""

OTHERS = {"vllm": ("cbor2", "zmq", "prometheus_client"), "lmcache": ("prometheus_client",)}
"""What is stood in for as well where it is not installed."""

HIDDEN = {"sglang": ("triton",)}
"""Installed modules that are stood in for while a package is imported: their decorators ask for files."""


class _Named(type):
    """The type of names without behaviour: whatever is asked of them is another."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (_Nothing,), {})

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())


class _Nothing(metaclass=_Named):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __call__(self, *given: Any, **_: Any) -> Any:
        # As a decorator it changes nothing.
        return given[0] if len(given) == 1 and callable(given[0]) else _Nothing()

    def __bool__(self) -> bool:
        return False

    def __float__(self) -> float:
        return 0.0


class _Stub(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing() if name[0].islower() else _Named(name, (_Nothing,), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a package's own modules in its wheel, and stands in for the rest of it."""

    def __init__(self, package: str, wheel: Path, own: Sequence[str], others: Sequence[str] = ()) -> None:
        self._package = package
        self._others = tuple(others)
        self._own = {f"{package}.{name}": f"{package}/{name.replace('.', '/')}.py" for name in own}
        self._wheel = zipfile.ZipFile(wheel)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Of the package, and of others that are not installed."""
        del path, target
        if fullname.partition(".")[0] in (self._package, *self._others):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname not in self._own)
        return None

    def create_module(self, spec: Any) -> Any:
        """A module of the wheel's, or a name."""
        return None if spec.name in self._own else _Stub(spec.name)

    def exec_module(self, module: Any) -> None:
        """Run a module of the wheel's."""
        if module.__name__ in self._own:
            name = self._own[module.__name__]
            exec(compile(self._wheel.read(name), f"{self._package}!{name}", "exec"), vars(module))


def wheel_of(package: str) -> Path:
    """Its wheel."""
    folder = Path(os.environ["KVCORE_ENGINES"])
    (found,) = folder.glob(f"{package}-*.whl")
    return found


def own_modules(package: str, *names: str) -> list[Any]:
    """Modules of a package out of its wheel, for the rest of the process; all of them are in ``OWN``."""
    hidden = HIDDEN.get(package, ())
    known = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in hidden}
    sys.modules |= {name: _Stub(name) for name in hidden}
    sys.modules |= {f"{name}.language": _Stub(f"{name}.language") for name in hidden}
    try:
        _found(package)
        return [importlib.import_module(f"{package}.{name}") for name in names]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
            del sys.modules[name]
        sys.modules.update(known)


@functools.cache
def _found(package: str) -> None:
    """Have a package found from now on."""
    missing = [name for name in OTHERS.get(package, ()) if importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, Finder(package, wheel_of(package), OWN[package], missing))
