"""What a verb launches, found out without launching it: a verb is called once with ``Symbol`` in place of tensors.

Launches ask arrays for shapes and dtypes alone, so that what they do with symbols of some shapes, they do with all
tensors of these shapes: the same kernels with the same constants and numbers, in as many programs, on arrays that are
named by where they come from. Nothing of it is guessed from addresses: tensors that share memory stay apart.

Whatever is asked of a symbol that is not listed here raises ``Unbound``: such a call does more than launch.
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from kvcore.kernels.triton.launches.launching import Kernel

Source = tuple[str, Any]
"""Where an array comes from: (``given``, which argument), (``index``, which field), (``pool``, name), (``new``, n)."""


class Unbound(Exception):
    """A call that does more than launch, or asks tensors for more than shapes and dtypes."""


class New(NamedTuple):
    """An array that a verb allocates; ``value`` is what it is filled with, None: nothing."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: int | None = None


class Launched(NamedTuple):
    """One launch of a trace: arrays are symbols, or tensors that are the same in every call."""

    kernel: Kernel
    grid: tuple[int, ...]
    arrays: tuple[Any, ...]
    numbers: tuple[Any, ...]


class Current(threading.local):
    """The trace that this thread makes: a launch may be given no symbol, but arrays that are kept alone."""

    trace: "Trace | None" = None


CURRENT = Current()


class Trace:
    """What a verb did with symbols, in a ``with`` block: whatever is launched there is noted, and not run.

    Attributes:
        new: arrays that it allocated.
        launches: in order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.new: list[New] = []
        self.launches: list[Launched] = []

    def __enter__(self) -> "Trace":
        CURRENT.trace = self
        return self

    def __exit__(self, *_: object) -> None:
        CURRENT.trace = None

    def symbol(self, source: Source, shape: Sequence[int], dtype: torch.dtype) -> "Symbol":
        """An array from somewhere."""
        return Symbol(self, source, torch.Size(shape), dtype)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, value: int | None = None) -> "Symbol":
        """One that the verb made."""
        self.new.append(New(tuple(shape), dtype, value))
        return self.symbol(("new", len(self.new) - 1), shape, dtype)

    def launch(self, kernel: Kernel, grid: tuple[int, ...], arrays: Sequence[Any], numbers: Sequence[Any]) -> None:
        """Note a launch."""
        self.launches.append(Launched(kernel, grid, tuple(arrays), tuple(numbers)))


class Symbol:
    """Stands for a contiguous tensor that begins on a 16-byte boundary, with no values.

    Attributes:
        trace: that notes what is done with it.
        source: where it comes from.
        offset: bytes from there to where it begins.
        steps: how a tensor is made of the source: (``view``, dtype) or (``from``, first of its first axis).
    """

    __slots__ = ("dtype", "offset", "shape", "source", "steps", "trace")

    def __init__(
        self,
        trace: Trace,
        source: Source,
        shape: torch.Size,
        dtype: torch.dtype,
        offset: int = 0,
        steps: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        self.trace, self.source, self.shape, self.dtype = trace, source, shape, dtype
        self.offset, self.steps = offset, steps

    def __getattr__(self, name: str) -> NoReturn:
        raise Unbound(name)

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> NoReturn:
        raise Unbound(getattr(function, "__name__", "a function of torch"))

    def _refuse(self, *_: Any) -> NoReturn:
        raise Unbound("an operator")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = __mod__ = _refuse
    __pow__ = __matmul__ = __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = __neg__ = __invert__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __iter__ = __setitem__ = __int__ = __float__ = _refuse
    __eq__: Any = _refuse
    __ne__: Any = _refuse
    __hash__ = object.__hash__

    @property
    def device(self) -> torch.device:
        """Of the verbs."""
        return self.trace.device

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def numel(self) -> int:
        """Elements."""
        return self.shape.numel()

    def storage_offset(self) -> int:
        """Of a tensor on a boundary, as far as anybody asks."""
        return 0

    def contiguous(self) -> "Symbol":
        """Itself."""
        return self

    def to(self, dtype: torch.dtype) -> "Symbol":
        """Itself, where that is no conversion."""
        if dtype is not self.dtype:
            raise Unbound("to")
        return self

    def new_empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> "Symbol":
        """An array beside it."""
        return self.trace.allocate(shape, dtype or self.dtype)

    def new_full(self, shape: Sequence[int], value: int, dtype: torch.dtype) -> "Symbol":
        """One of one value."""
        return self.trace.allocate(shape, dtype, value)

    def view(self, dtype: torch.dtype) -> "Symbol":
        """The same bytes as elements of another dtype."""
        *others, last = self.shape
        shape = torch.Size([*others, last * self.itemsize // dtype.itemsize])
        return Symbol(self.trace, self.source, shape, dtype, self.offset, (*self.steps, ("view", dtype)))

    def __getitem__(self, some: slice) -> "Symbol":
        """From somewhere on."""
        if not isinstance(some, slice) or some.stop is not None or some.step is not None:
            raise Unbound("[]")
        first = some.start or 0
        shape = torch.Size([self.shape[0] - first, *self.shape[1:]])
        offset = self.offset + first * self.itemsize * self.shape[1:].numel()
        return Symbol(self.trace, self.source, shape, self.dtype, offset, (*self.steps, ("from", first)))
