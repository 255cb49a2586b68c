"""Tensors that are made when somebody looks at them: what a layer hands out while the cache attends itself.

A model passes keys, values and masks on to its attention function, and ours needs none of them. Whatever else takes one
up, the model's own attention or a hook of the user's, gets the numbers: they are made then, once.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

GETTERS: Any = torch.Tensor  # torch has types for the values of these, not for what gets them

QUIET = frozenset(
    {GETTERS.shape.__get__, GETTERS.dtype.__get__, GETTERS.ndim.__get__, GETTERS.layout.__get__}
    | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__, torch.Tensor.is_floating_point}
)
"""What is known of a tensor before it is made."""


class Deferred(torch.Tensor):
    """A tensor of known shape and dtype, whose numbers ``made`` makes.

    Attributes:
        source: whoever made it, for the attention function.
    """

    source: Any
    _outline: torch.Tensor
    _where: torch.device
    _make: Callable[[], torch.Tensor] | None
    _numbers: torch.Tensor | None

    def made(self) -> torch.Tensor:
        """The tensor with its numbers."""
        if self._numbers is None:
            assert self._make is not None
            self._numbers, self._make = self._make(), None
        return self._numbers

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer for the outline, or make the numbers and go on with them."""
        if func in QUIET:
            return func(args[0]._outline, *args[1:], **(kwargs or {}))
        if func == DEVICE:
            return args[0]._where
        return func(*_made(args), **_made(kwargs or {}))


DEVICE = GETTERS.device.__get__


def outline(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without numbers, of which any number of deferred ones can be made."""
    return number(dtype).expand(shape)


@cache
def number(dtype: torch.dtype) -> torch.Tensor:
    """One number that nobody knows."""
    with torch.inference_mode(False):
        return torch.empty((), dtype=dtype, device="meta")


def deferred(outline: torch.Tensor, device: torch.device, make: Callable[[], torch.Tensor], source: Any) -> Deferred:
    """A tensor like ``outline``, on a device, that ``make`` makes."""
    found = outline.as_subclass(Deferred)
    found._outline, found._where, found._make, found._numbers, found.source = outline, device, make, None, source
    return found


def made(tensor: Any) -> Any:
    """The tensor itself, made if it was deferred."""
    return tensor.made() if type(tensor) is Deferred else tensor


def _made(value: Any) -> Any:
    if type(value) is Deferred:
        return value.made()
    if type(value) in (tuple, list):
        return type(value)(_made(each) for each in value)
    if type(value) is dict:
        return {name: _made(each) for name, each in value.items()}
    return value
