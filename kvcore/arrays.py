"""Arrays of any framework as NumPy arrays, without importing a framework that is not there."""

import sys
from functools import cache
from typing import Any

import numpy as np

from kvcore.errors import ShapeError

BITS_OF = {"bfloat16": "int16", "float8_e4m3fn": "uint8"}
"""Dtypes that torch and ml_dtypes have by these names, and NumPy has not -> those by which their bits are exchanged."""


def to_numpy(array: Any) -> np.ndarray[Any, Any]:
    """Copy an array of any backend to the host as NumPy; bf16 and e4m3 come as ml_dtypes'.

    Raises:
        ShapeError: an array that means more than its values: masked, sparse, quantised, without data.

    Example:
        >>> import kvcore
        >>> kvcore.to_numpy([1.0, 2.0]).tolist()  # or tensors of torch and arrays of JAX
        [1.0, 2.0]
    """
    check_plain(array, "to_numpy")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        array = array.detach().cpu()
        name = str(array.dtype).removeprefix("torch.")
        if name in BITS_OF:
            import ml_dtypes

            return array.view(getattr(torch, BITS_OF[name])).numpy().copy().view(getattr(ml_dtypes, name))
        return array.numpy().copy()
    return np.array(array)


def host_view(array: Any) -> np.ndarray[Any, Any] | None:
    """An array's own memory as NumPy, without a copy; None where it lies on a device or on several, or is traced.

    That of a torch tensor can be written to; that of a JAX array cannot, and is let go before the array is donated.
    """
    kind: Any = array.__class__
    if kind in PLAIN_NUMPY:
        return array
    torch: Any = sys.modules.get("torch")
    if torch is not None and kind is torch.Tensor:
        plain = array.device.type == "cpu" and array.layout is torch.strided and not array.requires_grad
        return array.numpy() if plain and not array.is_neg() else None
    jax: Any = sys.modules.get("jax")
    if jax is not None and isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        device, *others = array.devices()
        return None if others or device.platform != "cpu" else np.asarray(array)
    return None


PLAIN_NUMPY = (np.ndarray, np.memmap)
MEANING = {
    "MaskedArray": ("a mask", "Fill what is masked: array.filled(value)."),
    "matrix": ("products of its own", "Pass np.asarray(array)."),
    "MaskedTensor": ("a mask", "Fill what is masked: tensor.to_tensor(value)."),
    "DTensor": ("its place in a mesh", "Pass this rank's part, tensor.to_local(), or tensor.full_tensor()."),
    "NestedTensor": ("lengths", "Pad it: torch.nested.to_padded_tensor(tensor, 0.0), or pass its values one by one."),
    "Series": ("labels", "Pass series.to_numpy()."),
    "DataFrame": ("labels", "Pass frame.to_numpy()."),
    "DataArray": ("labels", "Pass array.to_numpy()."),
}
"""Kinds of arrays that mean more than their values, by their class's name: what beside, and what to do."""
LAYOUTS = {"jagged": MEANING["NestedTensor"]}
SPARSE = ("places", "Pass tensor.to_dense().")


def is_a(value: object, *kinds: type) -> bool:
    """``isinstance``, for values of a type that is not told."""
    return isinstance(value, kinds)


def check_plain(array: Any, where: str) -> Any:
    """The array as it is, unless it means more than its values, which a verb would not see.

    Raises:
        ShapeError: with advice that makes a plain array of it.
    """
    meaning = _meaning(array.__class__)
    if meaning is _TORCH:
        meaning = _meaning_of_tensor(array)
    if meaning is None:
        return array
    beside, advice = meaning
    raise ShapeError(
        got=f"{type(array).__name__} with {beside}",
        where=where,
        allowed="a plain array of the backend or of NumPy",
        hint=advice,
    )


_TORCH = ("", "")


@cache
def _meaning(kind: type) -> tuple[str, str] | None:
    """What arrays of a class mean beside their values, and the way out; None for plain ones, _TORCH for tensors."""
    if kind in PLAIN_NUMPY:
        return None
    for base in kind.__mro__:
        if base.__name__ in MEANING:
            return MEANING[base.__name__]
    if np.ndarray in kind.__mro__:
        return "what its class adds", "Pass np.asarray(array)."
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        if hasattr(kind, "__tensor_flatten__"):
            return "what its class adds", "Pass a plain tensor: tensor.dequantize(), or what the class offers."
        return _TORCH
    if kind.__module__.startswith("jax.experimental.sparse"):
        return "places", "Pass array.todense()."
    return None


def _meaning_of_tensor(tensor: Any) -> tuple[str, str] | None:
    """The same of a tensor, whose class does not tell."""
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        return LAYOUTS.get(str(tensor.layout).removeprefix("torch."), SPARSE)
    if tensor.is_nested:
        return MEANING["NestedTensor"]
    if tensor.is_quantized:
        return "a scale", "Pass tensor.dequantize()."
    if tensor.is_meta:
        return (
            "no data, on meta",
            "Build what made it on a device, or give it memory with to_empty(device='cpu'), and load it.",
        )
    return None
