"""Checks of array arguments at the door: shape, dtype, device, finiteness. The verbs behind it trust what they get.

Which arrays a step gives a role of a layer is one table (``inputs_of``), for handles and for functional verbs.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kvcore.arrays import check_plain, is_a
from kvcore.counts import as_integer
from kvcore.errors import NonFiniteError, ShapeError
from kvcore.ops import Ops
from kvcore.plan import CachePlan, LayerPlan
from kvcore.spec import ROLES, TAIL_OF, Rope
from kvcore.spec.codes import CODES, RULES
from kvcore.spec.component import Component

Array = Any
FP32 = ("float32",)
FLOATS = (*FP32, "bfloat16")
INDEX_QUERIES = (*FLOATS, "float8_e4m3fn")
"""Of an indexer's queries: those in e4m3 come without scales, which are part of the weights."""
INTEGERS = ("int32", "int64")


@cache
def dtype_name(dtype: Any) -> str:
    """A dtype's name, the same in every framework: ``float32``, ``bfloat16``, ``int32`` and so on."""
    return str(dtype).removeprefix("torch.")


NUMBERS = frozenset({type(None), bool, int, float, Rope})
"""Classes of what is told by its value, of all that verbs are given."""

STRANGE = AttributeError, RuntimeError, TypeError, NotImplementedError
"""What an array raises that does not say what it is: nested, sparse, or of a framework of its own."""

MOST_PASSED = 1 << 13
"""Calls whose arguments are known to pass, at a time."""


def likes(values: Sequence[Any]) -> tuple[Any, ...] | None:
    """All that checks of arguments look at: calls that are equal in it pass or fail alike.

    None where an array does not even say what it is.
    """
    found: list[Any] = []
    try:
        for value in values:
            kind = value.__class__
            found.append(kind)
            if kind in NUMBERS:
                found.append(value)
            elif hasattr(value, "is_neg"):  # a tensor, whose class does not say all of it
                found += value.shape, value.dtype, value.device, value.layout, value.requires_grad, value.is_neg()
            else:
                shape = getattr(value, "shape", None)
                if shape.__class__ is not tuple:
                    return None
                found += shape, getattr(value, "dtype", None), getattr(value, "device", None)
    except STRANGE:
        return None
    return tuple(found)


def note_passed(passed: set[Any], key: Any, given: Iterable[Any], found: Iterable[Any]) -> None:
    """Note that a call's arguments passed its checks, where what those found is what was given."""
    if all(one is other for one, other in zip(given, found, strict=True)):
        if len(passed) >= MOST_PASSED:
            passed.clear()
        passed.add(key)


UNKNOWN: Any = object()
"""What ``again`` of a backend's ``known`` verbs gives of a call that must be checked, and run the long way."""


def are_same(given: Iterable[Any], found: Iterable[Any]) -> bool:
    """Whether what checks found is what was given, or the same without the gradient that is asked of it."""
    return all(one is other or _is_detached(one, other) for one, other in zip(given, found, strict=True))


def _is_detached(array: Any, found: Any) -> bool:
    if getattr(array, "requires_grad", False) is not True or getattr(found, "requires_grad", True):
        return False
    alike: bool = array.shape == found.shape and array.dtype == found.dtype
    return alike and array.data_ptr() == found.data_ptr()


def check_array(ops: Ops, array: Array, where: str, shape: tuple[int | None, ...], dtypes: tuple[str, ...]) -> Array:
    """The array on the ops' device, if its shape (None: any) and dtype fit.

    Raises:
        ShapeError: not an array, or another shape, dtype or device.
    """
    plain = getattr(ops, "plain_class", None)  # outside backends may have the required verbs alone
    if array.__class__ is not np.ndarray and array.__class__ is not plain:
        check_plain(array, where)
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise ShapeError(got=type(array).__name__, where=where, allowed="an array of the backend or of NumPy")
    got = tuple(array.shape)
    if got != shape and not _fits(got, shape):
        wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        raise ShapeError(got=f"shape {list(got)}", where=where, allowed=f"shape {wanted}")
    if dtype_name(array.dtype) not in dtypes:
        raise ShapeError(got=f"dtype {dtype_name(array.dtype)}", where=where, allowed=", ".join(dtypes))
    if array.__class__ is plain:
        return array
    try:
        return ops.asarray(array)
    except (TypeError, RuntimeError) as error:
        # What another framework raises where an array's data cannot be had: on a device without any, or freed.
        held = f"{type(array).__name__} on {getattr(array, 'device', 'an unknown device')}"
        tensor = hasattr(array, "requires_grad")
        raise ShapeError(
            got=f"{held}, {dtype_name(array.dtype)}{', recorded for gradients' * bool(tensor and array.requires_grad)}",
            where=where,
            allowed=f"an array of the backend on {ops.device}, or of NumPy",
            hint="Pass kvcore.to_numpy(tensor)." if tensor else "",
        ) from error


def _fits(got: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    return len(got) == len(shape) and all(want in (None, size) for size, want in zip(got, shape, strict=True))


def check_float(
    ops: Ops, array: Array, where: str, shape: tuple[int | None, ...], *, dtypes: tuple[str, ...] = FLOATS
) -> Array:
    """A float input to be stored or attended with, that no gradient is asked of."""
    found = check_array(ops, array, where, shape, dtypes)
    if found is not array:  # a backend's own array passes through, unless something is recorded of it
        check_constant(array, where)
    return found


class Input(NamedTuple):
    """One array that a step gives a role.

    Attributes:
        name: of it, for errors.
        where: it is, for errors of handles.
        shape: of one token's.
        exact: fp32 alone.
        minus_infinity: may be -inf, which as a score means no weight.
    """

    name: str
    where: str
    shape: tuple[int, ...]
    exact: bool = False
    minus_infinity: bool = False


def inputs_of(layer: LayerPlan, role: str) -> tuple[Input, ...]:
    """The arrays that a step gives a role of a layer, looked up once for a plan."""
    key = "inputs", role
    if key not in layer.memo:
        layer.memo[key] = tuple(_inputs(layer.component(role), role))
    return layer.memo[key]


def prepare(plan: CachePlan) -> None:
    """Look them up for every layer of a plan, so that no step has to."""
    for number, layer in enumerate(plan.layers):
        for role, component in plan.spec.all_layers[number].components():
            if component.written_by_step or component.given != component.parts:
                inputs_of(layer, role)


def _inputs(component: Any, role: str) -> Iterator[Input]:
    if role in TAIL_OF.values():
        for name in component.streams:
            yield Input(name, f"append_{role}: {name}", (component.width,), exact=True, minus_infinity=name == "score")
    elif role == "state":
        yield Input("states", "append_state: states", component.shape)
    else:
        own = role in ROLES
        for part in component.given:
            name, dim = part.name or "rows", part.format.dim or 0
            where = f"append_{role}: {name}" if own else f"append_rows: {role}" + f".{part.name}" * bool(part.name)
            apart = component.headed or (part.heads > 1 and not own)
            yield Input(name, where, (part.heads, dim) if apart else (part.heads * dim,))


def check_rows(ops: Ops, layer: LayerPlan, role: str, values: Sequence[Any], tokens: int) -> tuple[Array, ...]:
    """The step's rows of a role, [tokens, ...] each, as the backend's arrays.

    Raises:
        ShapeError: wrong number of arrays, shape, dtype or device.
    """
    inputs = inputs_of(layer, role)
    if len(values) != len(inputs):
        where = inputs[0].where.partition(":")[0]
        raise ShapeError(
            got=f"{len(values)} arrays", where=f"{where}: {role}", allowed=f"{len(inputs)}, one for each part"
        )
    return tuple(
        check_float(ops, value, given.where, (tokens, *given.shape), dtypes=FP32 if given.exact else FLOATS)
        for given, value in zip(inputs, values, strict=True)
    )


def check_constant(array: Array, where: str) -> None:
    """Refuse a tensor whose gradient would be lost in silence; under ``torch.no_grad()`` none is meant.

    Raises:
        ShapeError: torch records gradients, and the tensor requires them.
    """
    torch = sys.modules.get("torch")
    if getattr(array, "requires_grad", False) is True and torch is not None and torch.is_grad_enabled():
        raise ShapeError(
            got="a tensor that requires gradients",
            where=where,
            allowed="arrays that no gradient is asked of",
            hint="The cache is for inference: run the model under torch.no_grad(), or pass tensor.detach() where no "
            "gradient is meant to go through it.",
        )


def check_weight(ops: Ops, array: Array, where: str, size: int | None) -> Array:
    """A vector of ``size`` float weights: a model's parameters, which may require gradients that nobody asks for."""
    return check_array(ops, array, where, (size,), FLOATS)


def check_indices(ops: Ops, array: Array, where: str, tokens: int) -> Array:
    """Entry indices [tokens, k], int32 or int64."""
    return check_array(ops, array, where, (tokens, None), INTEGERS)


def check_integers(
    ops: Ops,
    value: Any,
    where: str,
    shape: tuple[int | None, ...],
    *,
    least: int | None = None,
    most: int | None = None,
    what: str = "",
) -> Array:
    """Integers as an array of the backend, int32 unless they are its own int64: of an array, or of lists of integers.

    Args:
        ops: the backend's verbs.
        value: any integer dtype; lists and tuples hold whatever ``operator.index`` takes.
        where: for errors.
        shape: None stands for any size.
        least: smallest of them; -1 is for none. ``most`` likewise. Told of integers that lie on the host, where a
            device need not be asked.
        most: largest of them.
        what: the integers' name.

    Raises:
        ShapeError: another shape, no integers, or one that is out of range.
    """
    if isinstance(value, (list, tuple, range)):
        value = _integers(value, where, len(shape))
    check_plain(value, where)
    name = dtype_name(getattr(value, "dtype", "none"))
    if not is_a(value, np.ndarray):
        narrow = name in ("int8", "int16", "uint8", "uint16")
        if narrow:
            value = value.to(_dtype_beside(value, "int32")) if hasattr(value, "to") else value.astype("int32")
        found = check_array(ops, value, where, shape, INTEGERS)
        held = on_host(found) if least is not None else None
    else:
        if value.dtype.kind not in "iu":
            raise ShapeError(got=f"dtype {value.dtype}", where=where, allowed="integers")
        if value.dtype.name not in INTEGERS or value.dtype.byteorder == ">":
            limits = np.iinfo(np.int32)
            value = value.clip(max(limits.min, np.iinfo(value.dtype).min), min(limits.max, np.iinfo(value.dtype).max))
            value = value.astype(np.int32)
        held, found = value, check_array(ops, value, where, shape, INTEGERS)
    if held is not None and held.size and least is not None and most is not None:
        low, high = int(held.min()), int(held.max())
        if low < least or high > most:
            raise ShapeError(got=high if high > most else low, where=where, allowed=f"{what} {least} to {most}")
    return found


def _integers(values: Any, where: str, axes: int) -> np.ndarray[Any, Any]:
    """Lists of integers, as deep as there are axes, as int64."""

    def plain(value: Any, depth: int) -> Any:
        if depth and is_a(value, list, tuple, range):
            return [plain(each, depth - 1) for each in value]
        number = None if depth else as_integer(value)
        if number is None:
            raise ShapeError(got=value, where=where, allowed=f"integers, in lists {axes} deep")
        return max(-(1 << 31), min(number, (1 << 31) - 1))

    lists = plain(values, axes)
    try:
        found = np.array(lists, np.int64)
    except ValueError as error:
        raise ShapeError(got="lists of several lengths", where=where, allowed="lists of one length") from error
    missing = axes - found.ndim
    return found.reshape(*found.shape, *[0] * missing) if missing else found


def _dtype_beside(array: Any, name: str) -> Any:
    """A dtype of a tensor's framework by its name."""
    return getattr(sys.modules[type(array.dtype).__module__], name)


def on_host(array: Any) -> np.ndarray[Any, Any] | None:
    """Integers that lie in the host's memory, None where a device, or a trace, has them."""
    if is_a(array, np.ndarray):
        return array
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return array.numpy() if array.device.type == "cpu" and not torch.compiler.is_compiling() else None
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return None
    return np.asarray(array) if all(device.platform == "cpu" for device in array.devices()) else None


def check_rope(ops: Ops, rope: Rope | Array | None, where: str, dim: int) -> Rope | Array | None:
    """A rotation of the last of ``dim`` channels: a Rope, or fp32 inverse frequencies; None for none."""
    if rope is None:
        return None
    given: Rope | Array = rope if isinstance(rope, Rope) else check_array(ops, rope, where, (None,), FLOATS[:1])
    turned = given.dim if isinstance(given, Rope) else 2 * len(given)
    if turned > dim:
        raise ShapeError(got=f"{turned} rotated channels", where=where, allowed=f"{dim} or fewer")
    return given


def check_number(value: object, where: str) -> float:
    """A finite number as a float; text, booleans and arrays with axes are none."""
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ShapeError(got=value, where=where, allowed="a finite number")
    return number


def check_seconds(value: object, where: str) -> float:
    """A time that ends: a finite number of seconds above 0."""
    seconds = check_number(value, where)
    if seconds <= 0:
        raise ShapeError(got=value, where=where, allowed="a finite number of seconds above 0")
    return seconds


def check_finite(host: np.ndarray[Any, Any], where: str, component: Component, *, minus_infinity: bool = False) -> None:
    """Refuse values that a format cannot hold faithfully: NaN, infinities, and what a two-level scale would clip.

    Args:
        minus_infinity: accept -inf, which as a score means no weight.

    Raises:
        NonFiniteError: with the first offending value.
    """
    values = host.astype(np.float32)
    limit = largest_value(component)
    bad = ~(np.abs(values) <= limit)
    if minus_infinity:
        bad &= ~np.isneginf(values)
    if bad.any():
        first = np.argwhere(bad)[0]
        raise NonFiniteError(
            got=f"{values[tuple(first)]} at {first.tolist()}",
            where=where,
            allowed=f"finite values up to {limit:g} in magnitude (check=True)",
        )


def largest_value(component: Component) -> float:
    """Largest magnitude that every format of a component stores without clipping."""
    limits = [CODES["fp32"].largest]
    for part in component.parts:
        for field in part.format.fields:
            if field.group is not None and field.rule in RULES and field.rule == "e4m3":
                scale = getattr(component, "global_scale", 1.0)
                limits.append(CODES[field.code].largest * CODES["e4m3"].largest * scale)
            elif field.is_value and field.group is None:
                limits.append(CODES[field.code].largest)
    return min(limits)
