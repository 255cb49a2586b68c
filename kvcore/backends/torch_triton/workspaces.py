"""Workspaces of kernels: what calls write and nobody reads after them."""

import torch

from kvcore.kernels.triton.record import power_of_two


class Workspaces:
    """Buffers by name, grown when a call needs more; outgrown ones are kept, since a captured graph may use them."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def take(self, name: str, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """At least ``elements`` elements, zero when new."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < elements:
            if buffer is not None:
                self._outgrown.append(buffer)
            buffer = torch.zeros(power_of_two(max(elements, 1)), dtype=dtype, device=self._device)
            self._buffers[name] = buffer
        return buffer

    def buffers(self) -> list[torch.Tensor]:
        """All that are held."""
        return [*self._buffers.values(), *self._outgrown]
