"""How kernels run on arrays of JAX: what ``kernels.triton.launches`` asks of a framework, and launches, by jax-triton.

A launch updates arrays, and fills those that it makes; arrays of JAX never change. So ``call`` puts those that are
written into a ``Cell`` each, which holds what is there now.

jax-triton gives a kernel its inputs, then its numbers, then its outputs, each once; an array that is updated in place
comes twice, as an input and as the output that shares its memory. The project's kernels take their arguments in an
order of their own, some twice, and an updated array once. In between stands a function of one line, written here and
compiled with the kernel, which calls it with what it expects.
"""

import linecache
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax import lax

from kvcore.backends.jax_pallas import choice
from kvcore.kernels.triton import device
from kvcore.kernels.triton.launches import LAUNCHES
from kvcore.kernels.triton.launches.launching import Kernel

CACHE = "TRITON_CACHE_DIR"

float32, bfloat16, e4m3, int32, int8 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32, jnp.int8
int64 = "int64"
"""What JAX has only as two of 32 bits each."""
flag = jnp.int8
gluon = False  # jax-triton compiles what calls the kernel in Triton's own language
_FRAMEWORK: Any = sys.modules[__name__]


class Cell:
    """An array that launches write: the latest there is, or the shape and dtype of one that is yet to be filled."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of its axes."""
        return self.value.shape

    @property
    def dtype(self) -> Any:
        """Of its elements."""
        return self.value.dtype

    @property
    def fresh(self) -> bool:
        """No launch has filled it."""
        return isinstance(self.value, jax.ShapeDtypeStruct)


class As(NamedTuple):
    """An array of bytes that the kernel sees as elements of another type, named as Triton names it."""

    array: Any
    element: str


def capability() -> int:
    """CUDA's of the device, ten times the major number and the minor."""
    return choice.capability()


def native(array: Any) -> bool:
    """True where the device rounds to fp8 and bf16 itself."""
    return not device.INTERPRETED and device.native(capability())


def ahead(array: Any) -> int:
    """None: XLA orders launches itself."""
    return 0


def props(array: Any) -> device.DeviceProps:
    """The device, as launches are cut for it."""
    return choice.props()


def empty(shape: Sequence[int], dtype: Any, like: Any) -> Any:
    """An array that a kernel fills."""
    return Cell(jax.ShapeDtypeStruct(tuple(shape), dtype))


def empty_like(array: Any) -> Any:
    """An array that a kernel fills, like another."""
    return empty(array.shape, array.dtype, array)


def filled(shape: Sequence[int], value: int, dtype: Any, like: Any) -> Any:
    """An array of one value."""
    return Cell(jnp.full(tuple(shape), value, dtype))


def part(room: Any, first: int, shape: Sequence[int], dtype: Any) -> Any:
    """An array of that shape: XLA finds the room for it, unless it is the whole of one that is there."""
    if room is not None:
        return room[first:] if first else room
    return As(empty((*shape, 2), int32, None), dtype) if dtype == int64 else empty(shape, dtype, None)


def view(array: Any, dtype: Any) -> Any:
    """The same bytes as elements of another dtype."""
    return array if array.dtype == dtype else As(array, np.dtype(dtype).name)


def words(pool: Any) -> Any:
    """Bytes, as they are."""
    return pool


def dense(array: Any) -> Any:
    """The array: all are."""
    return array


aligned = dense


def run(kernel: Kernel, grid: tuple[int, ...], arrays: Sequence[Any], numbers: Sequence[Any]) -> None:
    """Launch ``grid`` programs on arrays and numbers, in the order of the kernel's parameters."""
    scalars = [np.float32(number) if isinstance(number, float) else number for number in numbers]
    given = dict(zip(kernel.names, [*arrays, *scalars], strict=True))
    cells = {name: value.array if isinstance(value, As) else value for name, value in given.items()}
    cells = {name: value for name, value in cells.items() if isinstance(value, Cell)}
    fresh = [*dict.fromkeys(cell for cell in cells.values() if cell.fresh)]
    written = [*dict.fromkeys(cell for name, cell in cells.items() if name in kernel.writes and not cell.fresh)]
    changed, filled = launch(
        kernel.kernel,
        grid,
        {name: _opened(value) for name, value in given.items()} | kernel.constants,
        warps=kernel.warps,
        written=[cell.value for cell in written],
        zeroed=kernel.zeroed,
        contracted=kernel.fused,
        capability=capability(),
    )
    # What stands in for an array that this kernel never looks at is not filled by it.
    kept = {id(cell) for name, cell in cells.items() if name in kernel.writes}
    for cell, value in zip([*written, *fresh], [*changed, *filled], strict=True):
        if id(cell) in kept:
            cell.value = value


def _opened(value: Any) -> Any:
    """What is in a cell, or in the cell that is viewed."""
    if isinstance(value, As):
        return As(_opened(value.array), value.element)
    return value.value if isinstance(value, Cell) else value


def call(name: str, *given: Any) -> tuple[Any, dict[str, Any]]:
    """A launch by its name -> (what it gives, what its parameters that are written hold then).

    Room that launches only work in may be None.
    """
    launched = LAUNCHES[name]
    cells: dict[int, Cell] = {}

    def held(value: Any) -> Any:
        if value is None:
            return None
        # The same pool may hold several fields.
        return [held(one) for one in value] if isinstance(value, list) else cells.setdefault(id(value), Cell(value))

    pairs = zip(launched.parameters, given, strict=True)
    boxed = {name: held(value) if name in launched.writes else value for name, value in pairs}
    found = launched.function(_FRAMEWORK, **boxed)
    return _taken(found), {name: _taken(boxed[name]) for name in launched.writes}


def _taken(found: Any) -> Any:
    """Arrays out of cells; zeros where nothing was launched, since there is nothing to fill."""
    if isinstance(found, (tuple, list)):
        return type(found)(_taken(one) for one in found)
    if not isinstance(found, Cell):
        return found
    return jnp.zeros(found.shape, found.dtype) if found.fresh else found.value


class Given(NamedTuple):
    """What a parameter of a kernel is given: ``x0`` an input, ``y0`` an output, ``n0`` a number, "" a constant."""

    parameter: str
    source: str
    element: str = ""


def launch(
    kernel: Any,
    grid: Sequence[int],
    arguments: Mapping[str, Any],
    *,
    warps: int,
    written: Sequence[Any] = (),
    zeroed: Sequence[str] = (),
    contracted: bool = False,
    capability: int | None = None,
) -> tuple[list[Any], list[Any]]:
    """Run a kernel; -> (``written`` as they are afterwards, fresh outputs in the kernel's order).

    Args:
        kernel: what ``triton.jit`` made.
        arguments: parameter -> array, ``As``, number, or a ``jax.ShapeDtypeStruct`` for a fresh output (the same object
            for the same output); what the kernel declares ``constexpr`` may be anything hashable.
        written: arrays among the arguments that are updated: in place where their memory is the caller's to give.
        zeroed: parameters whose fresh output is filled with zeros first.
        contracted: products and sums may become one operation; never where bytes are stored.
        capability: CUDA's of the device, ten times the major number and the minor; None: that of the first device.
    """
    inputs: list[Any] = []
    numbers: list[Any] = []
    outputs: list[Any] = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in written]
    constants: dict[str, Any] = {}
    cleared: list[int] = []
    order: list[Given] = []

    def place(held: list[Any], value: Any) -> int:
        known = next((n for n, one in enumerate(held) if one is value), None)
        if known is None:
            held.append(value)
        return len(held) - 1 if known is None else known

    for array in written:
        place(inputs, array)
    for parameter in kernel.params:
        value, element = arguments[parameter.name], ""
        if isinstance(value, As):
            value, element = value
        if parameter.is_constexpr:
            constants[parameter.name] = value
            source = ""
        elif isinstance(value, jax.ShapeDtypeStruct):
            where = place(outputs, value)
            source = f"y{where}"
            cleared += [where] * (parameter.name in zeroed)
        elif isinstance(value, (bool, int, float, np.floating)):
            numbers.append(value)
            source = f"n{len(numbers) - 1}"
        else:
            where = place(inputs, value)
            source = f"{'y' if where < len(written) else 'x'}{where}"
        order.append(Given(parameter.name, source, element))
    counts = len(inputs), len(numbers), len(outputs)
    found = _jax_triton().triton_call(
        *inputs,
        *numbers,
        kernel=adapter(kernel, tuple(order), counts),
        out_shape=outputs,
        grid=tuple(grid),
        name=kernel.fn.__name__,
        num_warps=warps,
        compute_capability=capability,
        enable_fp_fusion=contracted,
        input_output_aliases={n: n for n in range(len(written))},
        zeroed_outputs=tuple(cleared),
        **constants,
    )
    found = _varying(found, inputs)
    return found[: len(written)], found[len(written) :]


def _varying(found: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Results that differ from shard to shard where some input does, under a ``shard_map`` that checks what varies.

    jax-triton says nothing about it, which JAX takes for being the same everywhere.
    """
    axes = frozenset[str]().union(*map(_varies_over, inputs))
    more = [tuple(sorted(axes - _varies_over(one))) for one in found]
    return [lax.pcast(one, over, to="varying") if over else one for one, over in zip(found, more, strict=True)]


def _varies_over(array: Any) -> frozenset[str]:
    """Axes of the mesh that an array differs over, as far as JAX keeps count."""
    kind: Any = jax.typeof(array)
    return kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())


@cache
def adapter(kernel: Any, order: tuple[Given, ...], counts: tuple[int, int, int]) -> Any:
    """A kernel with jax-triton's parameters that calls ``kernel``."""
    arrays = [f"{letter}{n}" for letter, count in zip("xny", counts, strict=True) for n in range(count)]
    constants = [f"{one.parameter}: tl.constexpr" for one in order if not one.source]
    passed = [_passed(one) for one in order]
    name = kernel.fn.__name__
    text = f"def {name}({', '.join(arrays + constants)}):\n    kernel({', '.join(passed)})\n"
    # Triton reads the source of what it compiles; the cache of lines is where it looks for it first.
    path = f"<{name} for jax-triton, {len(linecache.cache)}>"
    linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path
    scope = {"kernel": kernel, "tl": tl, "__name__": __name__}
    exec(compile(text, path, "exec"), scope)
    return triton.jit(scope[name])


def _passed(given: Given) -> str:
    if given.element:
        return f"{given.source}.to(tl.pointer_type(tl.{given.element}))"
    return given.source or given.parameter


@cache
def _jax_triton() -> Any:
    """jax-triton, without what its import does to the environment: it turns Triton's cache off for everybody."""
    before = os.environ.get(CACHE)
    import jax_triton  # type: ignore[import-not-found]

    if before is None:
        os.environ.pop(CACHE, None)
    else:
        os.environ[CACHE] = before
    return jax_triton
