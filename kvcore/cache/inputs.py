"""What a step gives a layer: shape, dtype, device, and under ``check=True`` finiteness, of every role by one table."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcore.arrays import to_numpy
from kvcore.cache.ring_writes import ENTRIES_OF, WRITERS, StepContext
from kvcore.errors import ShapeError
from kvcore.ops import Array
from kvcore.ops.arguments import check_finite, check_float
from kvcore.plan import LayerPlan
from kvcore.spec import Component


class Input(NamedTuple):
    """One array of a role.

    Attributes:
        where: it is, for errors.
        shape: of one token's.
        exact: fp32 alone.
        minus_infinity: may be -inf, which as a score means no weight.
    """

    where: str
    shape: tuple[int, ...]
    exact: bool = False
    minus_infinity: bool = False


def inputs_of(layer: LayerPlan, role: str) -> tuple[Input, ...]:
    """The arrays that a step gives a role of a layer, looked up once for a plan."""
    key = "inputs", role
    if key not in layer.memo:
        layer.memo[key] = tuple(_inputs(layer, role))
    return layer.memo[key]


def _inputs(layer: LayerPlan, role: str) -> Sequence[Input]:
    component, verb = layer.component(role), WRITERS.get(role, "append_rows")
    if role in ENTRIES_OF:
        streams: tuple[str, ...] = component.streams
        return [
            Input(f"{verb}: {name}", (component.width,), exact=True, minus_infinity=name == "score") for name in streams
        ]
    if role == "state":
        return [Input(f"{verb}: states", component.shape)]
    found: list[Input] = []
    for part in component.parts:
        name = part.name or "rows" if role in WRITERS else role + (f".{part.name}" if part.name else "")
        dim = part.format.dim or 0
        apart = component.headed or (part.heads > 1 and role not in WRITERS)
        found.append(Input(f"{verb}: {name}", (part.heads, dim) if apart else (part.heads * dim,)))
    return found


class LayerInputs:
    """Checks of what one layer is given in one step."""

    __slots__ = ("_context", "_plan")

    def __init__(self, context: StepContext, plan: LayerPlan) -> None:
        self._context = context
        self._plan = plan

    def rows(self, role: str, values: Sequence[Any]) -> tuple[Array, ...]:
        """The step's rows of a role, [T, ...] each, as the backend's arrays.

        Raises:
            ShapeError: wrong number of arrays, shape, dtype or device.
            NonFiniteError: a value is NaN or infinite, under ``check=True``.
        """
        context, inputs = self._context, inputs_of(self._plan, role)
        if len(values) != len(inputs):
            raise ShapeError(
                got=f"{len(values)} arrays",
                where=f"{WRITERS.get(role, 'append_rows')}: {role}",
                allowed=f"{len(inputs)}, one for each part",
            )
        tokens: int = context.index.positions.shape[0]
        found: list[Array] = []
        for given, value in zip(inputs, values, strict=True):
            checked = check_float(context.ops, value, given.where, (tokens, *given.shape), only_fp32=given.exact)
            if context.check:
                self.finite(checked, given.where, self._plan.component(role), minus_infinity=given.minus_infinity)
            found.append(checked)
        return tuple(found)

    def finite(
        self,
        array: Array,
        where: str,
        component: Component,
        *,
        minus_infinity: bool = False,
        rows: int | None = None,
    ) -> None:
        """Under ``check=True``, refuse what is not finite.

        Args:
            array: whose first rows are looked at.
            where: for errors.
            component: that is to hold it.
            minus_infinity: as of ``Input``.
            rows: how many are not padding, which comes last and is ignored; the step's new tokens unless given.
        """
        if self._context.check:
            self._context.check_outside(where, (array,))
            given = to_numpy(array)[: self._context.numbers.tokens if rows is None else rows]
            check_finite(given, where, component, minus_infinity=minus_infinity)
