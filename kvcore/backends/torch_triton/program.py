"""What calls of one kind launch: worked out once of a trace, launched on whichever tensors."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcore.backends.torch_triton import run_triton
from kvcore.backends.torch_triton.run_triton import ALIGNED, INTERPRETED
from kvcore.backends.torch_triton.symbols import New, Symbol, Trace, Unbound

NONE: list[Tensor] = []


class Launch(NamedTuple):
    """A launch of a program.

    Attributes:
        kernel: what runs.
        grid: of its programs.
        dtypes: of the arrays.
        take: from all the places of a call, those of the arrays.
        numbers: behind them.
        steps: how tensors are made of what is taken, under the interpreter.
    """

    kernel: Any
    grid: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    take: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    numbers: tuple[Any, ...]
    steps: tuple[tuple[tuple[str, Any], ...], ...]


class Program:
    """What calls of one kind launch, on whichever tensors.

    Attributes:
        new: arrays to allocate.
        answer: what a call gives, of them; None: the pools that it was given.
        pools: which of the layer's pools it takes.
    """

    __slots__ = ("_constants", "_launches", "_offsets", "_ready", "answer", "new", "pools")

    def __init__(self, trace: Trace, answer: Callable[[Any], Any] | None, given: int, index: int) -> None:
        self.new: tuple[New, ...] = tuple(trace.new)
        self.answer = answer
        arrays = [array for launched in trace.launches for array in launched.arrays]
        symbols = [array for array in arrays if isinstance(array, Symbol)]
        self.pools = tuple(dict.fromkeys(each.source[1] for each in symbols if each.source[0] == "pool"))
        constants = [array for array in arrays if not isinstance(array, Symbol)]
        self._constants = tuple({id(array): array for array in constants}.values())
        sources: list[Any] = [("given", n) for n in range(given)]
        sources += [("index", n) for n in range(index)]
        sources += [("pool", name) for name in self.pools]
        sources += [id(array) for array in self._constants]
        sources += [("new", n) for n in range(len(self.new))]
        places = {source: n for n, source in enumerate(sources)}
        # What begins within an array has a place of its own, behind the others.
        self._offsets: list[tuple[int, int]] = []

        def place_of(array: Any) -> int:
            if not isinstance(array, Symbol):
                return places[id(array)]
            if array.offset % ALIGNED:
                raise Unbound("an array off a boundary")
            if INTERPRETED or not array.offset:
                return places[array.source]
            if (array.source, array.offset) not in places:
                places[array.source, array.offset] = len(places)
                self._offsets.append((places[array.source], array.offset))
            return places[array.source, array.offset]

        self._launches = tuple(
            Launch(
                launched.kernel,
                launched.grid,
                tuple(array.dtype for array in launched.arrays),
                _taking([place_of(array) for array in launched.arrays]),
                launched.numbers,
                tuple(array.steps if isinstance(array, Symbol) else () for array in launched.arrays),
            )
            for launched in trace.launches
        )
        self._ready: Any = None

    def ready(self, device: int) -> Any:
        """What launches it on a device, once Triton has compiled all of it; else None."""
        found = []
        for launch in self._launches:
            launcher = launch.kernel.launcher
            bound = None if launcher is None else launcher.bound(device, launch.grid, launch.dtypes, launch.numbers)
            if bound is None:
                return None
            found.append((launch.take, *bound))
        addresses = tuple([array.data_ptr() for array in self._constants])
        if any(address % ALIGNED for address in addresses):
            return None
        active: Any = run_triton.driver.active
        hooks = [launch.kernel.kernel.pre_run_hooks for launch in self._launches]
        self._ready = device, addresses, hooks, found, active.get_current_stream
        return self._ready

    def run(
        self, given: list[Any], index: tuple[Any, ...], pools: tuple[Any, ...], like: Tensor, kept: list[Tensor] = NONE
    ) -> Any:
        """Launch it; the arrays that it allocated, or False where it cannot be launched like that.

        Args:
            given: the call's tensors, as launches take them; ``index`` and ``pools`` likewise.
            like: a tensor on the device, where it allocates.
            kept: of an earlier run, which nobody reads any more: they take the place of the last of ``new``.
        """
        if INTERPRETED:
            return self._interpret(given, index, pools, like, kept)
        ready = self._ready
        device = 0 if only_device() else run_triton.current_device()
        if ready is None or ready[0] != device:
            ready = self.ready(device)
            if ready is None:
                return False
        if run_triton.watched() or any(ready[2]):
            return False
        new: list[Tensor] = []
        places = (*given, *index, *pools, *ready[1])
        if self.new:
            new = self._allocate(like, kept)
            places += tuple([array.data_ptr() for array in new])
        for place, offset in self._offsets:
            places += (places[place] + offset,)
        stream = ready[4](device)
        for take, run, told, width, height, rest in ready[3]:
            run(width, height, 1, stream, *told, *take(places), *rest)
        return new

    def launch(self, places: tuple[Any, ...], one: Tensor, two: Tensor) -> bool:
        """``run``, a moment later, into both of its new arrays; False where it was not launched on this device yet."""
        ready = self._ready
        device = 0 if only_device() else run_triton.current_device()
        if ready is None or ready[0] != device:
            return False
        places = (*places, *ready[1], one.data_ptr(), two.data_ptr())
        for place, offset in self._offsets:
            places += (places[place] + offset,)
        stream = ready[4](device)
        for take, run, told, width, height, rest in ready[3]:
            run(width, height, 1, stream, *told, *take(places), *rest)
        return True

    def ends_with(self, array: Tensor) -> bool:
        """Whether arrays like this one are the last of ``new``, and no other of those is like it."""
        alike = [new.shape == tuple(array.shape) and new.dtype == array.dtype for new in self.new]
        return bool(alike) and alike[-1] and sum(alike) == 1 and self.new[-1].value is None

    def _allocate(self, like: Any, kept: list[Tensor]) -> list[Tensor]:
        return [
            like.new_empty(shape, dtype=dtype) if value is None else like.new_full(shape, value, dtype=dtype)
            for shape, dtype, value in (self.new[: -len(kept)] if kept else self.new)
        ] + kept

    def _interpret(
        self, given: list[Any], index: tuple[Any, ...], pools: tuple[Any, ...], like: Any, kept: list[Tensor]
    ) -> list[Tensor]:
        new = self._allocate(like, kept)
        places = (*given, *index, *pools, *self._constants, *new)
        for launch in self._launches:
            arrays = [_made(array, steps) for array, steps in zip(launch.take(places), launch.steps, strict=True)]
            run_triton.run(launch.kernel, launch.grid, arrays, launch.numbers)
        return new


@cache
def only_device() -> bool:
    """Whether there is one GPU, which is then the one that launches go to."""
    return torch.cuda.device_count() == 1


class NamedPools(Mapping[str, Any]):
    """Pools of a trace: by name, where they lie among a layer's."""

    def __init__(self, trace: Trace, pools: Mapping[str, Any], names: Sequence[str]) -> None:
        self._trace, self._pools, self._names = trace, pools, names

    def __getitem__(self, name: str) -> Symbol:
        pool = self._pools[name]
        return self._trace.symbol(("pool", self._names.index(name)), pool.shape, pool.dtype)

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def answer_of(found: Any, pools: Any) -> Callable[[Any], Any] | None:
    """What makes a call's answer of the arrays that it allocated."""

    def number(array: Any) -> int:
        if not isinstance(array, Symbol) or array.source[0] != "new" or array.steps:
            raise Unbound("an answer that is no new array")
        return array.source[1]

    if found is None or found is pools:
        return None
    if isinstance(found, Symbol):
        (place,) = (number(found),)
        return itemgetter(place)
    if not isinstance(found, tuple):
        raise Unbound("an answer that is no array")
    numbers, kind = [number(array) for array in found], type(found)
    if kind is tuple:
        return _taking(numbers)
    take = _taking(numbers)
    return lambda new: kind(*take(new))


def _taking(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that takes these places of a tuple."""
    if len(places) == 1:
        (place,) = places
        return lambda every: (every[place],)
    return itemgetter(*places)


def _made(array: Tensor, steps: tuple[tuple[str, Any], ...]) -> Tensor:
    for step, what in steps:
        array = array.view(what) if step == "view" else array[what:]
    return array
