"""Somebody's tensors as bytes at an address: what a view of theirs needs, whatever the framework."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvcore.arrays import host_view
from kvcore.errors import BackendError, ShapeError
from kvcore.spec.codes import CODES

DTYPES = {
    "fp32": ("float32",),
    "fp16": ("float16",),
    "bf16": ("bfloat16",),
    "int8": ("int8", "uint8"),
    "e4m3": ("float8_e4m3fn", "uint8"),
}
"""Code -> names of its elements' dtypes; those of other codes, and rows of several fields, are uint8."""


class Tensor(NamedTuple):
    """One of somebody's arrays.

    Attributes:
        array: itself.
        shape: its axes.
        strides: bytes from one to the next, of every axis.
        dtype: name, without the framework's.
        nbytes: from its first byte to behind its last.
        sealed: rows can be read there, and nobody writes.
    """

    array: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    nbytes: int
    sealed: bool = False


def tensors_of(given: Any) -> dict[str, Tensor]:
    """Tensors by name: keys of a mapping (dots as ``_``) or numbers; ``N.0``, ``N.1`` those of a list in it.

    Raises:
        ShapeError: something else. BackendError: arrays of JAX that only a device can read.
    """
    if isinstance(given, Mapping):
        named = [(str(name).replace(".", "_"), value) for name, value in given.items()]
    elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
        named = [(str(number), value) for number, value in enumerate(given)]
    else:
        named = [("", given)]
    found: dict[str, Tensor] = {}
    for name, value in named:
        if isinstance(value, tuple | list):
            found |= {f"{name}.{place}": _tensor(one) for place, one in enumerate(value)}
        else:
            found[name] = _tensor(value)
    if not found:
        raise ShapeError(got="no tensors", where="adopt: tensors", allowed="one or more")
    kinds = {framework(tensor.array) for tensor in found.values()}
    if len(kinds) > 1:
        raise ShapeError(got=f"arrays of {sorted(kinds)}", where="adopt: tensors", allowed="arrays of one framework")
    return found


def framework(array: Any) -> str:
    """``numpy``, ``torch`` …: where an array's type comes from."""
    return type(array).__module__.partition(".")[0].removesuffix("lib")


def _tensor(array: Any) -> Tensor:
    kind, sealed = framework(array), False
    if kind == "jax":
        seen = host_view(array)
        if seen is None:
            raise BackendError(
                got="arrays of JAX on a device",
                where="adopt: tensors",
                allowed="arrays of JAX on the CPU, which are read where they lie",
                hint="Copy its rows with export_request and import_request.",
            )
        array, kind, sealed = seen, "numpy", True
    if kind == "numpy":
        strides, writable = array.strides, array.flags.writeable
    elif kind == "torch":
        strides, writable = tuple(step * array.element_size() for step in array.stride()), not array.requires_grad
    else:
        raise ShapeError(got=type(array).__name__, where="adopt: tensors", allowed="arrays of NumPy, torch or JAX")
    if not (writable or sealed):
        raise ShapeError(got="an array that cannot be written to", where="adopt: tensors", allowed="writable memory")
    shape, size = tuple(array.shape), int(array.itemsize)
    if not all(shape) or any(step <= 0 for step, count in zip(strides, shape, strict=True) if count > 1):
        raise ShapeError(
            got=f"shape {shape}, strides {strides}", where="adopt: tensors", allowed="elements, at ascending addresses"
        )
    nbytes = sum((count - 1) * step for count, step in zip(shape, strides, strict=True)) + size
    return Tensor(array, shape, strides, str(array.dtype).rpartition(".")[2], nbytes, sealed)


def takes(code: str, dtype: str) -> bool:
    """Whether elements of a code may come in a dtype."""
    return dtype in DTYPES.get(code, ("uint8",)) or (dtype == "uint8" and CODES[code].bits <= 8)


def bytes_at(tensor: Tensor, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """A view uint8 of a tensor's bytes: of any shape, with those bytes from one to the next, from ``offset`` on."""
    array = tensor.array
    if framework(array) == "torch":
        torch: Any = sys.modules["torch"]
        first = array.storage_offset() * array.element_size() + offset
        with torch.inference_mode(False):
            flat = torch.empty(0, dtype=torch.uint8, device=array.device)
            return flat.set_(array.untyped_storage(), first, shape, strides)
    return np.asarray(_Bytes(array, offset, shape, strides))


def zeros_like(tensor: Tensor, shape: tuple[int, ...]) -> Any:
    """Bytes of our own beside a tensor's."""
    if framework(tensor.array) == "torch":
        torch: Any = sys.modules["torch"]
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=torch.uint8, device=tensor.array.device)
    return np.zeros(shape, np.uint8)


class _Bytes:
    """Bytes of an array, which it keeps alive."""

    def __init__(self, array: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self._array = array
        address, sealed = array.__array_interface__["data"]
        self.__array_interface__ = {
            "data": (address + offset, sealed),
            "shape": shape,
            "strides": strides,
            "typestr": "|u1",
            "version": 3,
        }


def device_of(tensors: Mapping[str, Tensor]) -> str:
    """Where they all lie, in torch's words.

    Raises:
        ShapeError: on several devices.
    """
    found = {str(getattr(tensor.array, "device", "cpu")) for tensor in tensors.values()}
    if len(found) > 1:
        raise ShapeError(got=f"tensors on {sorted(found)}", where="adopt: tensors", allowed="one device")
    return found.pop()
