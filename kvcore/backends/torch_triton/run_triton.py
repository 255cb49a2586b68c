"""How a kernel is launched on torch tensors: bound once to its constants, then by the shortest way that Triton has.

``kernel[grid](...)`` specialises every argument and looks up the compiled kernel by all of them, tens of microseconds
a launch. A ``Launcher`` knows its constants and keeps what was compiled by the little that may differ between its
calls: the device, dtypes, whether addresses are multiples of 16 bytes, and what Triton makes of the integers that it
specialises. Whatever is out of the ordinary (the interpreter, hooks of a profiler, integers of 64 bits) goes to Triton.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from kvcore.kernels.triton.device import INTERPRETED

MOST_INT32 = (1 << 31) - 1
ALIGNED = 16
"""Bytes that Triton asks whether an address, or an integer, is a multiple of."""


class Launcher:
    """One kernel with its constants.

    Args:
        kernel: what ``triton.jit`` made; its parameters are arrays, then numbers, then constants.
        constants: by the names of the kernel's ``constexpr`` parameters.
        warps: of a program.
        options: what else the compiler is told; products and sums are never contracted where ``fused`` is not set.

    Raises:
        TypeError: the constants' names are not the kernel's.
    """

    __slots__ = ("_by_kind", "_constants", "_kernel", "_options", "_specialised")

    def __init__(
        self, kernel: Any, constants: Mapping[str, Any], warps: int, *, fused: bool = False, **options: Any
    ) -> None:
        parameters = inspect.signature(kernel.fn).parameters.values()
        every = [parameter.name for parameter in parameters]
        names = [parameter.name for parameter in parameters if parameter.annotation is tl.constexpr]
        given = [name for name in every if name not in names]
        if set(names) != set(constants) or every != [*given, *names]:
            raise TypeError(f"{kernel.__name__} takes {names} behind its other parameters, not {[*constants]}")
        self._kernel = kernel
        self._constants = tuple(constants[name] for name in names)
        self._options = {"num_warps": warps, **options}
        if not fused and not INTERPRETED:
            # Stored bits are the same on every device.
            self._options["enable_fp_fusion"] = False
        numbers = [name for name in given if not name.endswith("_ptr")]
        plain = [] if INTERPRETED else kernel.do_not_specialize
        self._specialised = tuple(n for n, name in enumerate(numbers) if name not in plain)
        self._by_kind: dict[Any, Any] = {}

    def __call__(self, grid: tuple[int, ...], arrays: Sequence[Tensor], numbers: tuple[Any, ...]) -> None:
        """Launch ``grid`` programs on arrays and numbers, in the order of the kernel's parameters."""
        if INTERPRETED or _watched() or self._kernel.pre_run_hooks:
            self._kernel[grid](*arrays, *numbers, *self._constants, **self._options)
            return
        addresses = [array.data_ptr() for array in arrays]
        low = 0
        for address in addresses:
            low |= address
        active: Any = driver.active
        device = active.get_current_device()
        kind = (
            device,
            low % ALIGNED == 0 or tuple(address % ALIGNED == 0 for address in addresses),
            *[array.dtype for array in arrays],
            *[self._kind(numbers[n]) for n in self._specialised],
        )
        narrow = max(numbers, default=0) <= MOST_INT32
        compiled = self._by_kind.get(kind) if narrow else None
        if compiled is None:
            compiled = self._kernel[grid](*arrays, *numbers, *self._constants, **self._options)
            if narrow:
                self._by_kind[kind] = compiled
            return
        width, height = (*grid, 1)[:2]
        compiled.run(
            width,
            height,
            1,
            active.get_current_stream(device),
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *addresses,
            *numbers,
            *self._constants,
        )

    @staticmethod
    def _kind(number: Any) -> Any:
        """What Triton makes of a number that it specialises."""
        return type(number) is not int or (number == 1, number % ALIGNED == 0)


def _watched() -> bool:
    """Whether somebody is to be told of launches, as profilers are."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
