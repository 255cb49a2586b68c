"""A launch of one of the project's Triton kernels as an operation of JAX, through jax-triton.

jax-triton gives a kernel its inputs, then its numbers, then its outputs, each once; an array that is updated in place
comes twice, as an input and as the output that shares its memory. The project's kernels take their arguments in an
order of their own, some twice, and an updated array once. In between stands a function of one line, written here and
compiled with the kernel, which calls it with what it expects.
"""

import linecache
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import triton
import triton.language as tl
from jax import lax

CACHE = "TRITON_CACHE_DIR"


class As(NamedTuple):
    """An array of bytes that the kernel sees as elements of another type, named as Triton names it."""

    array: Any
    element: str


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
