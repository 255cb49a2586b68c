"""What a launch is made of, whichever framework's arrays it takes.

A launch is a function of ``to``, the framework, and of arrays and numbers: it says which kernel runs with which
constants in how many programs, on what, in the order of the kernel's parameters. ``to`` is a module that can do what
``Framework`` lists; torch's and JAX's are their backends' ``run_triton``. Arrays are asked for shapes and dtypes alone.

Records go into lists and travel as their place in them, since a custom operator of torch takes arrays and numbers.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import triton.language as tl

from kvcore.kernels.triton.device import DeviceProps
from kvcore.kernels.triton.groups import GroupsRecord, groups_recorded
from kvcore.kernels.triton.record import RowRecord, recorded
from kvcore.kernels.triton.tail import TailRecord, tail_recorded
from kvcore.ops.choices import Declined
from kvcore.plan import Region
from kvcore.spec import Tail


class Array(Protocol):
    """An array of any framework."""

    @property
    def shape(self) -> Any:
        """Its lengths."""

    @property
    def dtype(self) -> Any:
        """The framework's."""


class Framework(Protocol):
    """What launches ask of a framework of arrays; ``float32`` and its like are the framework's own dtypes.

    Attributes:
        flag: of bytes that are 0 or 1: bool, where a kernel may see those as bytes.
        gluon: kernels in Gluon can be launched, Triton's language of explicit layouts.
    """

    float32: Any
    bfloat16: Any
    e4m3: Any
    int64: Any
    int32: Any
    int8: Any
    flag: Any
    gluon: bool

    def native(self, array: Array) -> bool:
        """True where the array's device rounds to fp8 and bf16 itself; see ``device.native``."""

    def ahead(self, array: Array) -> int:
        """Warps of a launch at most that comes up before the one before it ends; see ``device.ahead``."""

    def props(self, array: Array) -> DeviceProps:
        """The array's device, as launches are cut for it."""

    def empty(self, shape: Sequence[int], dtype: Any, like: Array) -> Array:
        """An array that a kernel fills, on the device of another."""

    def empty_like(self, array: Array) -> Array:
        """An array that a kernel fills, like another."""

    def filled(self, shape: Sequence[int], value: int, dtype: Any, like: Array) -> Array:
        """An array of one value."""

    def part(self, room: Array, first: int, shape: Sequence[int], dtype: Any) -> Array:
        """Where an array of that shape begins in ``room``, at ``first`` of its first axis."""

    def view(self, array: Array, dtype: Any) -> Array:
        """The same bytes as elements of another dtype."""

    def words(self, pool: Array) -> Array:
        """Bytes [units, bytes] as int32 where units begin on multiples of 4 bytes, else as they are."""

    def dense(self, array: Array) -> Array:
        """The array without gaps."""

    def aligned(self, array: Array) -> Array:
        """The array without gaps, from a 16-byte boundary on, as wide loads need it."""

    def run(self, kernel: "Kernel", grid: tuple[int, ...], arrays: Sequence[Array], numbers: Sequence[Any]) -> None:
        """Launch ``grid`` programs on arrays and numbers, in the order of the kernel's parameters."""


class Kernel:
    """A kernel with its constants, to be launched any number of times.

    Args:
        kernel: what ``triton.jit`` made; its parameters are arrays, then numbers, then constants.
        constants: by the names of the kernel's ``constexpr`` parameters.
        warps: of a program.
        writes: parameters whose arrays the kernel writes.
        zeroed: those of them that must hold zeros before.
        fused: products and sums may become one operation; never where bits are stored.
        ahead: of kernels that say AHEAD: they are launched while the one before still runs, and wait for it themselves.
        options: what else the compiler is told.

    Attributes:
        names: of the arrays and numbers.
        launcher: for the framework that runs it.

    Raises:
        TypeError: the constants' names are not the kernel's, or it has no such array to write.
    """

    __slots__ = ("constants", "fused", "kernel", "launcher", "names", "options", "warps", "writes", "zeroed")

    def __init__(
        self,
        kernel: Any,
        constants: Mapping[str, Any],
        warps: int = 4,
        *,
        writes: Iterable[str] = (),
        zeroed: Iterable[str] = (),
        fused: bool = False,
        ahead: bool | None = None,
        **options: Any,
    ) -> None:
        if ahead is not None:
            constants = {**constants, "AHEAD": ahead}
            options |= {"launch_pdl": True} if ahead else {}
        parameters = inspect.signature(kernel.fn).parameters.values()
        every = [parameter.name for parameter in parameters]
        names = [parameter.name for parameter in parameters if parameter.annotation is tl.constexpr]
        given = [name for name in every if name not in names]
        if set(names) != set(constants) or every != [*given, *names]:
            raise TypeError(f"{kernel.__name__} takes {names} behind its other parameters, not {[*constants]}")
        self.kernel, self.warps, self.fused, self.options = kernel, warps, fused, options
        self.constants = {name: constants[name] for name in names}
        self.names = tuple(given)
        self.writes, self.zeroed = tuple(f"{name}_ptr" for name in writes), tuple(f"{name}_ptr" for name in zeroed)
        if not {*self.writes, *self.zeroed} <= set(given):
            raise TypeError(f"{kernel.__name__} takes {given}, and is said to write {self.writes}")
        self.launcher: Any = None


POOLS = ("codes", "scales", "plain")
"""What kernels call the buffers of a region."""


class Launch(NamedTuple):
    """A function that launches, and what a framework must know of it.

    Attributes:
        name: of torch's operator.
        function: of the framework, then of arrays and numbers.
        parameters: their names and types, without the framework.
        returns: the type of what it gives.
        writes: parameters whose arrays it writes.
        outputs: what it gives, from some of its parameters: allocated, not computed. None: it gives nothing.
    """

    name: str
    function: Callable[..., Any]
    parameters: dict[str, Any]
    returns: Any
    writes: tuple[str, ...]
    outputs: Callable[..., Any] | None

    def fresh(self, to: Framework, *given: Any) -> Any:
        """What a call would give, uncomputed."""
        if self.outputs is None:
            return None
        wanted = [*inspect.signature(self.outputs).parameters][1:]
        known = dict(zip(self.parameters, given, strict=True))
        return self.outputs(to, *(known[name] for name in wanted))


LAUNCHES: dict[str, Launch] = {}
"""Every launch by its name."""


def launch(*writes: str, outputs: Callable[..., Any] | None = None) -> Callable[[Any], Any]:
    """Enter a function in LAUNCHES; it stays as it is.

    Args:
        writes: parameters, arrays or lists of them, that it writes.
        outputs: allocates what it gives: a function of the framework and of parameters that are named as its own are.
    """

    def enter(function: Any) -> Any:
        signature = inspect.signature(function)
        _, *parameters = signature.parameters.values()
        types = {parameter.name: parameter.annotation for parameter in parameters}
        LAUNCHES[function.__name__] = Launch(
            function.__name__, function, types, signature.return_annotation, writes, outputs
        )
        return function

    return enter


class Bound(NamedTuple):
    """A record with the places of its codes, scales and plain buffers in the list that a launch is given."""

    record: RowRecord
    codes: int
    scales: int
    plain: int

    def given(self, buffers: Sequence[Array]) -> tuple[Array, Array, Array]:
        """What a kernel takes for codes, scales and plain channels."""
        return buffers[self.codes], buffers[self.scales], buffers[self.plain]


class BoundTail(NamedTuple):
    """A tail's record with the places of kv's buffer and score's in the list that a launch is given."""

    record: TailRecord
    kv: int
    score: int

    def given(self, to: Framework, buffers: Sequence[Array]) -> tuple[Array, Array]:
        """What a kernel takes for kv and score of the tail."""
        return to.view(buffers[self.kv], to.float32), to.view(buffers[self.score], to.float32)


class BoundGroups(NamedTuple):
    """A record of groups of tokens with the places of its codes, scales and offsets in the list a launch is given."""

    record: GroupsRecord
    codes: int
    scales: int
    offsets: int

    def given(self, buffers: Sequence[Array]) -> tuple[Array, Array, Array]:
        """What a kernel takes for codes, scales and offsets."""
        return buffers[self.codes], buffers[self.scales], buffers[self.offsets]


BOUND: list[Bound] = []
TAILS: list[BoundTail] = []
GROUPS: list[BoundGroups] = []


def bind(bound: Bound | BoundTail | BoundGroups, known: list[Any] = BOUND) -> int:
    """The number of a bound record among those ``known`` of its kind; equal ones share a number."""
    if bound not in known:
        known.append(bound)
    return known.index(bound)


def bound_record(number: int) -> RowRecord | None:
    """The record of a number; None of -1."""
    return BOUND[number].record if number >= 0 else None


class Part(NamedTuple):
    """One part of a role (keys and values are two) as launches know it.

    Attributes:
        number: of its record.
        names: of its buffers in the pools, in the order that launches take them.
        paged: its rows lie in blocks, else in slots.
    """

    number: int
    names: list[str]
    paged: bool


@cache
def bind_rows(region: Region, global_scale: float = 1.0) -> Part | Declined:
    """What launches know of a region's rows, or why the kernels do not cover its format or layout."""
    return _part(recorded(region, float(global_scale)), Bound, BOUND, paged=region.growth == "block")


def bind_groups(region: Region) -> Part | Declined:
    """What launches know of a part in groups of tokens, or why the kernels do not cover it."""
    return _part(groups_recorded(region), BoundGroups, GROUPS, paged=True)


def bind_ring(region: Region, component: Tail) -> Part | Declined:
    """The same of the raw rows of a tail."""
    return _part(tail_recorded(region, component), BoundTail, TAILS, paged=False)


def _part(
    recorded: tuple[Any, Sequence[str]] | Declined, kind: Callable[..., Any], known: list[Any], *, paged: bool
) -> Part | Declined:
    """A record and its buffers as a part, bound as a ``kind`` among those ``known``."""
    if isinstance(recorded, Declined):
        return recorded
    record, buffers = recorded
    names = sorted(set(buffers))
    return Part(bind(kind(record, *map(names.index, buffers)), known), names, paged)
