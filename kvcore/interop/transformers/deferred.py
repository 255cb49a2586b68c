"""Tensors that are made when somebody looks at them: what a layer hands out while the cache attends itself.

A model passes keys, values and masks on to its attention function, and ours needs none of them. Whatever else takes one
up, the model's own attention or a hook of the user's, gets the numbers: they are made then, once. A tensor stays
deferred where a model puts something behind it and does no more (DeepSeek-V4: entries behind a window): see ``Joined``.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch

GETTERS: Any = torch.Tensor  # torch has types for the values of these, not for what gets them

QUIET = frozenset(
    {GETTERS.shape.__get__, GETTERS.dtype.__get__, GETTERS.ndim.__get__, GETTERS.layout.__get__}
    | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__, torch.Tensor.is_floating_point}
)
"""What is known of a tensor before it is made."""

ALIKE = frozenset({torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full, torch.Tensor.new_empty})
"""What makes tensors of other numbers, and of the same dtype on the same device."""


class Deferred(torch.Tensor):
    """A tensor of known shape and dtype, whose numbers ``made`` makes.

    Attributes:
        source: whoever made it, for the attention function.
        joins: whether it stays one where something is put behind it.
    """

    source: Any
    joins: bool = False
    _outline: torch.Tensor
    _where: torch.device
    _make: Callable[[], torch.Tensor] | None
    _numbers: torch.Tensor | None = None

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
        if func in ALIKE:
            return func(torch.empty(0, dtype=args[0].dtype, device=args[0]._where), *args[1:], **(kwargs or {}))
        if func in BEHIND:
            found = BEHIND[func](*args, **(kwargs or {}))
            if found is not None:
                return found
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


def deferred(
    outline: torch.Tensor, device: torch.device, make: Callable[[], torch.Tensor], source: Any, *, joins: bool = False
) -> Deferred:
    """A tensor like ``outline``, on a device, that ``make`` makes."""
    found = outline.as_subclass(Deferred)
    found._outline, found._where, found._make, found.source = outline, device, make, source
    if joins:
        found.joins = True
    return found


def made(tensor: Any) -> Any:
    """The tensor itself, made if it was deferred."""
    return tensor.made() if type(tensor) is Deferred else tensor


class Joined(NamedTuple):
    """The source of a tensor that a model made of two.

    Attributes:
        first: what it begins with.
        behind: what is behind that; None: zeros.
    """

    first: Deferred
    behind: torch.Tensor | None

    def attend(self, module: Any, query: torch.Tensor, mask: Any, options: dict[str, Any]) -> torch.Tensor | None:
        """Attention to keys and values that were joined, as ``first`` gives it."""
        return self.first.source.attend(module, query, mask, options, behind=self.behind)


def _joined(tensors: Any, dim: int = 0, *, out: Any = None) -> Deferred | None:
    """``torch.cat`` of two, the first of which joins; None: it is for torch to do."""
    first = tensors[0]
    if len(tensors) != 2 or type(first) is not Deferred or not first.joins or out is not None:
        return None
    behind = tensors[1]
    sizes, more = list(first.shape), list(behind.shape)
    if behind.dtype != first.dtype or len(sizes) != len(more) or not -len(sizes) <= dim < len(sizes):
        return None
    longer = sizes.copy()
    longer[dim] += more[dim]
    more[dim] = sizes[dim]
    return None if more != sizes else _longer(longer, first, behind, partial(_cat, first, behind, dim))


def _cat(first: Deferred, behind: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([first.made(), made(behind)], dim=dim)


def _padded(input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Deferred | None:
    """``pad`` of the last dimension's end with zeros, of what joins; None: it is for torch to do."""
    if type(input) is not Deferred or not input.joins or len(pad) != 2 or pad[0] or mode != "constant" or value:
        return None
    sizes = [*input.shape[:-1], input.shape[-1] + pad[1]]
    return _longer(sizes, input, None, lambda: torch.nn.functional.pad(input.made(), pad))


def _longer(sizes: list[int], first: Deferred, behind: Any, make: Callable[[], torch.Tensor]) -> Deferred:
    return deferred(outline(tuple(sizes), first.dtype), first._where, make, Joined(first, behind))


def _unsqueezed(input: Any, dim: int) -> Deferred | None:
    """``unsqueeze`` of what joins; None: it is for torch to do."""
    if not input.joins:
        return None
    shape = input._outline.unsqueeze(dim).shape
    make = lambda: input.made().unsqueeze(dim)  # noqa: E731
    return deferred(outline(shape, input.dtype), input._where, make, input.source, joins=True)


BEHIND: dict[Any, Callable[..., Deferred | None]] = {
    torch.cat: _joined,
    torch.nn.functional.pad: _padded,
    torch.Tensor.unsqueeze: _unsqueezed,
}


def _made(value: Any) -> Any:
    if type(value) is Deferred:
        return value.made()
    if type(value) in (tuple, list):
        return type(value)(_made(each) for each in value)
    if type(value) is dict:
        return {name: _made(each) for name, each in value.items()}
    return value
