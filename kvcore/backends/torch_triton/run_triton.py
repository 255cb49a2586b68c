"""How kernels run on torch tensors: what ``kernels.triton.launches`` asks of a framework, and launches themselves.

``kernel[grid](...)`` specialises every argument and looks up the compiled kernel by all of them, tens of microseconds
a launch. A ``Launcher`` keeps what was compiled for a kernel and its constants by the little that may differ between
its calls: the device, dtypes, whether addresses are multiples of 16 bytes, and what Triton makes of the integers that
it specialises. Whatever is out of the ordinary (the interpreter, hooks of a profiler, integers of 64 bits) goes to
Triton.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from kvcore.backends.torch_triton.symbols import CURRENT
from kvcore.kernels.triton import device
from kvcore.kernels.triton.device import INTERPRETED, INTERPRETER, DeviceProps
from kvcore.kernels.triton.launches.launching import Kernel

_ADDRESS, _DTYPE = Tensor.data_ptr, attrgetter("dtype")
MOST_INT32 = (1 << 31) - 1
ALIGNED = 16
"""Bytes that Triton asks whether an address, or an integer, is a multiple of."""

RELEASE = ".".join(triton.__version__.split(".")[:2])
"""Of Triton, major and minor."""

float32, bfloat16, e4m3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
int64, int32, int8, flag = torch.int64, torch.int32, torch.int8, torch.bool
gluon = device.GLUON


@cache
def props_of(device: torch.device) -> DeviceProps:
    """A device as the cuts know it."""
    if INTERPRETED:
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    major, minor = torch.cuda.get_device_capability(device)
    return DeviceProps(10 * major + minor, found.multi_processor_count, found.shared_memory_per_block_optin)


@cache
def is_native(where: torch.device) -> bool:
    """``device.native``, looked up once a device."""
    if INTERPRETED or where.type != "cuda":
        return False
    return device.native(props_of(where).capability)


def ahead(array: Tensor) -> int:
    """``device.ahead`` of the device of a tensor."""
    return device.ahead(props(array))


def props(array: Tensor) -> DeviceProps:
    """The device of a tensor, as the cuts know it."""
    return props_of(array.device)


def native(array: Tensor) -> bool:
    """``is_native`` of the device of a tensor."""
    return is_native(array.device)


def empty_like(array: Tensor) -> Tensor:
    """A tensor that a kernel fills, of the shape of one without gaps."""
    return array.new_empty(array.shape)


def empty(shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """A tensor that a kernel fills, on the device of another."""
    return like.new_empty(shape, dtype=dtype)


def filled(shape: Sequence[int], value: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    """A tensor of one value."""
    return like.new_full(shape, value, dtype=dtype)


def part(room: Tensor, first: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``room`` from ``first`` on: kernels know how much of it they take."""
    return room[first:] if first else room


def view(array: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes as elements of another dtype."""
    return array.view(dtype)


def words(pool: Tensor) -> Tensor:
    """Bytes [units, bytes] as int32 where units begin on multiples of 4 bytes, else as they are."""
    return pool.view(int32) if pool.shape[1] % 4 == 0 and pool.data_ptr() % 4 == 0 else pool


def dense(array: Tensor) -> Tensor:
    """The tensor without gaps."""
    return array.contiguous()


def aligned(array: Tensor) -> Tensor:
    """Contiguous values that start on a 16-byte boundary, as wide loads need; a copy only where they don't.

    Asked inside an operator: while ``torch.compile`` traces, nobody knows where a tensor starts.
    """
    array = array.contiguous()
    return array.clone() if array.storage_offset() * array.itemsize % ALIGNED else array


def run(kernel: Kernel, grid: tuple[int, ...], arrays: Sequence[Tensor], numbers: tuple[Any, ...]) -> None:
    """Launch ``grid`` programs on tensors and numbers, in the kernel's order; in a trace, note that."""
    trace = CURRENT.trace
    if trace is not None:
        trace.launch(kernel, grid, arrays, numbers)
        return
    launcher = kernel.launcher
    if launcher is None:
        launcher = kernel.launcher = Launcher(kernel)
    launcher(grid, arrays, numbers)


class Launcher:
    """Launches one kernel with its constants.

    Products and sums are never contracted where the kernel is not ``fused``: stored bits are the same on every device.
    """

    __slots__ = ("_by_kind", "_constants", "_kernel", "_options", "_specialised")

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel.kernel
        self._constants = tuple(kernel.constants.values())
        self._options = {"num_warps": kernel.warps, **kernel.options}
        if not kernel.fused and not INTERPRETED:
            self._options["enable_fp_fusion"] = False
        numbers = [name for name in kernel.names if not name.endswith("_ptr")]
        plain = [] if INTERPRETED else self._kernel.do_not_specialize
        self._specialised = tuple(n for n, name in enumerate(numbers) if name not in plain)
        self._by_kind: dict[Any, Any] = {}

    def __call__(self, grid: tuple[int, ...], arrays: Sequence[Tensor], numbers: tuple[Any, ...]) -> None:
        """Launch ``grid`` programs on arrays and numbers, in the order of the kernel's parameters."""
        if INTERPRETED or watched() or self._kernel.pre_run_hooks:
            self._kernel[grid](*arrays, *numbers, *self._constants, **self._options)
            return
        addresses = [*map(_ADDRESS, arrays)]
        low = 0
        for address in addresses:
            low |= address
        active: Any = driver.active
        device = active.get_current_device()
        whole = low % ALIGNED == 0 or tuple([address % ALIGNED == 0 for address in addresses])
        kind = self._kind(device, whole, map(_DTYPE, arrays), numbers)
        narrow = max(numbers, default=0) <= MOST_INT32
        compiled = self._by_kind.get(kind) if narrow else None
        if compiled is None:
            compiled = self._kernel[grid](*arrays, *numbers, *self._constants, **self._options)
            if narrow:
                self._by_kind[kind] = compiled
            return
        width, height = grid if len(grid) == 2 else (grid[0], 1)
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

    def _kind(self, device: int, whole: Any, dtypes: Iterable[Any], numbers: tuple[Any, ...]) -> tuple[Any, ...]:
        """All that compiled kernels differ by; ``whole``: whether addresses are multiples of 16 bytes, or which."""
        kind = (device, whole, *dtypes)
        for n in self._specialised:
            # What Triton makes of a number that it specialises.
            number = numbers[n]
            kind += ((number == 1, number % ALIGNED == 0) if type(number) is int else True,)
        return kind

    def bound(self, device: int, grid: tuple[int, ...], dtypes: Sequence[Any], numbers: tuple[Any, ...]) -> Any:
        """What launches that on addresses of whole 16 bytes: (function, width, height, behind the stream, last of all).

        None where it was not compiled yet, or must go to Triton.
        """
        if max(numbers, default=0) > MOST_INT32:
            return None
        compiled = self._by_kind.get(self._kind(device, True, dtypes, numbers))
        if compiled is None:
            return None
        width, height = grid if len(grid) == 2 else (grid[0], 1)
        rest = *numbers, *self._constants
        return *called(compiled), width, height, rest


def called(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """(function, what it is given behind the grid and the stream) that launches a compiled kernel without hooks.

    Triton's launcher is a class around a function in C, which asks on every call for scratch memory that our kernels
    have none of. Of the release that this was read of, the function is called itself.
    """
    run, handle, metadata = compiled.run, compiled.function, compiled.packed_metadata
    if RELEASE == "3.6" and all(
        getattr(run, name, None) == 0 for name in ("global_scratch_size", "profile_scratch_size")
    ):
        cooperative, dependent = run.launch_cooperative_grid, run.launch_pdl
        return run.launch, (handle, cooperative, dependent, None, None, metadata, None, None, None)
    return run, (handle, metadata, None, None, None)


def current_device() -> int:
    """The GPU that launches go to."""
    active: Any = driver.active
    return active.get_current_device()


def current_stream(device: int) -> int:
    """The number of the stream that a GPU's launches go to, without an object for it."""
    active: Any = driver.active
    return active.get_current_stream(device)


def watched() -> bool:
    """Whether somebody is to be told of launches, as profilers are."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
