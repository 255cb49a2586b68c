"""Memory of outputs that nobody holds any more, written again for the next ones.

A decode step copies every layer's rows in turn. Memory that was just read by attention is in the processor's cache;
fresh memory is not, and writing to it costs as much as all the rest.
"""

import math
from typing import Any

import torch

users: Any = getattr(torch._C, "_storage_Use_Count", None)
"""Storage -> how many tensors, views included, share it. Without it memory is never used again."""


class Spare:
    """One buffer for every name, handed out again only when every tensor on it is gone."""

    def __init__(self) -> None:
        # Name -> memory, what names its storage, and the users of it when nobody else is one.
        self._kept: dict[str, tuple[torch.Tensor, int, int]] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with any content, that shares its memory with no other tensor in use."""
        size = math.prod(shape) * dtype.itemsize
        flat, storage, alone = self._kept.get(name, (None, 0, 0))
        if flat is None or not size <= flat.nbytes <= 4 * size or users(storage) != alone:
            # An eighth more, since a history grows by every step. Tensors of inference mode can't be written outside.
            with torch.inference_mode(False):
                flat = torch.empty(size + size // 8, dtype=torch.uint8)
            if users is not None:
                storage = flat.untyped_storage()._cdata
                self._kept[name] = flat, storage, users(storage)
        return flat[:size].view(dtype).view(shape)
