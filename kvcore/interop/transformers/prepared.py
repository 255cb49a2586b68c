"""A model's linear layers on the CPU, from weights that oneDNN has put in the order in which it multiplies them.

torch's own products put the weights in order at every call, or go without. Ordered once, they are multiplied an eighth
to a third faster by few rows; by many rows only on processors with AVX-512, and elsewhere those are multiplied as torch
does it. Ordered weights are held once more, and a product is rounded another way.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from kvcore.errors import BackendError
from kvcore.interop.transformers.tensors import version_of

ROWS = 8
"""For as many rows an order is chosen; it serves others."""

MANY = 32
"""With AVX2 alone, as many rows at most are multiplied from ordered weights: with 64 torch's own product is as quick,
with 232 it takes nine tenths (an AMD EPYC of the third generation)."""


class Ordered(NamedTuple):
    """A layer's weight in oneDNN's order, and which weight that was."""

    weight: torch.Tensor
    of: tuple[int, int | None]


class PreparedProducts:
    """The linear layers of a model that are multiplied so while ``used`` is open; elsewhere they are what they were."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Order the weights of plain linear layers in fp32.

        Raises:
            BackendError: the model is not in fp32 on a CPU, or torch has no oneDNN.
        """
        parameter = next(model.parameters())
        known = torch.backends.mkldnn.is_available()
        if parameter.device.type != "cpu" or parameter.dtype != torch.float32 or not known:
            raise BackendError(
                got=f"{parameter.dtype} on {parameter.device.type}",
                where="PackedModel: prepared",
                allowed="a model in fp32 on a CPU, and torch with oneDNN",
            )
        self._layers = [layer for layer in model.modules() if type(layer) is torch.nn.Linear]
        self._ordered: dict[torch.nn.Linear, Ordered] = {}
        self._most = sys.maxsize if "AVX512" in torch.backends.cpu.get_cpu_capability() else MANY

    @contextmanager
    def used(self) -> Iterator[None]:
        """While this is open the model's linear layers use what was prepared, brought up to date before."""
        # A layer that somebody else has given a forward of its own, as accelerate does, keeps it.
        layers = [layer for layer in self._layers if "forward" not in layer.__dict__ and takes(layer.weight)]
        for layer in layers:
            layer.__dict__["forward"] = partial(product, layer, self._weight(layer), self._most)
        try:
            yield
        finally:
            for layer in layers:
                layer.__dict__.pop("forward", None)

    def _weight(self, layer: torch.nn.Linear) -> torch.Tensor:
        known, of = self._ordered.get(layer), (layer.weight.data_ptr(), version_of(layer.weight))
        if known is None or known.of != of:
            with torch.no_grad():
                ordered = torch.ops.mkldnn._reorder_linear_weight.default(layer.weight.detach(), ROWS)
            known = self._ordered[layer] = Ordered(ordered, of)
        return known.weight


def takes(weight: torch.Tensor) -> bool:
    """Whether a weight can be ordered, and it can be told when it changes."""
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and version_of(weight) is not None


def product(layer: Any, ordered: torch.Tensor, most: int, x: torch.Tensor) -> torch.Tensor:
    """Outputs [..., out] of x [..., in], from the ordered weight for up to ``most`` rows."""
    if not 0 < x.numel() <= most * x.shape[-1] or x.dtype != torch.float32:
        return torch.nn.functional.linear(x, layer.weight, layer.bias)
    return torch.ops.mkldnn._linear_pointwise.default(x, ordered, layer.bias, "none", [], "")
