"""The index of padded steps on the device: one copy a step, into buffers that stay where they are.

All arrays of an index lie in one buffer. Padded steps of the same shape use the same buffer, so that a captured graph
replayed after ``put`` sees the new positions, lengths and block tables. An index is good until the next of
its shape.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvcore.ops import StepIndex


class DeviceIndex:
    """Persistent buffers for step indices, one set for every shape."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._buffers: dict[tuple[tuple[int, ...], ...], _Buffer] = {}

    def put(self, host: StepIndex) -> StepIndex:
        """Copy an index of NumPy int32 arrays to the device, without waiting for the device."""
        # Left padding, the last, may be missing.
        arrays = host.arrays
        shape = tuple(array.shape for array in arrays)
        if shape not in self._buffers:
            # Buffers outlive the mode they are first used in; inference tensors could not be written outside it.
            with torch.inference_mode(False):
                self._buffers[shape] = _Buffer(shape, self._device)
        return self._buffers[shape].put(arrays)


class _Buffer:
    """One device buffer, and two pinned host buffers in turn, so that filling one never meets the copy of the other."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        sizes = [int(np.prod(shape)) for shape in shapes]
        # Every array starts on a 16-byte boundary, so that the compiler may use wide loads.
        padded = [-(-size // 4) * 4 for size in sizes]
        total = sum(padded)
        starts = [sum(padded[:n]) for n in range(len(padded))]
        cuda = device.type == "cuda"
        self._device = torch.empty(total, dtype=torch.int32, device=device)
        self._host = [torch.zeros(total, dtype=torch.int32, pin_memory=cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() if cuda else None for _ in range(2)]
        self._places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        pieces: list[Any] = [self._device[place].view(shape) for place, shape in zip(self._places, shapes, strict=True)]
        self.index = StepIndex(*pieces)
        self._turn = 0

    def put(self, host: Sequence[np.ndarray]) -> StepIndex:
        self._turn ^= 1
        buffer, copied = self._host[self._turn], self._copied[self._turn]
        if copied is not None:
            # Two copies ago: done long since, unless the host runs far ahead of the device.
            copied.synchronize()
        flat = buffer.numpy()
        for place, array in zip(self._places, host, strict=True):
            flat[place] = np.asarray(array, np.int32).reshape(-1)
        self._device.copy_(buffer, non_blocking=True)
        if copied is not None:
            copied.record()
        return self.index
