"""The verb for components that have none of their own: rows of any role, stored by what the component declares."""

# pyright: reportPrivateUsage=false

from kvcore.cache.handle.state import WRITERS, LayerState
from kvcore.errors import ShapeError, StepError
from kvcore.ops import Array
from kvcore.ops.arguments import check_float


class RowVerbs(LayerState):
    """T tokens of the step (padding included), Q requests."""

    def append_rows(self, role: str, *values: Array) -> None:
        """Encode and store the step's rows of a component that outside code defined: the inverse of ``gather_rows``.

        Args:
            role: one that has no ``append_`` verb of its own.
            values: for every part of the component [T, dim], or [T, heads, dim] if it has heads; fp32 or bf16.

        Raises:
            StepError: the layer has no such role, or already got its rows, or the role has a verb of its own.
            ShapeError: wrong number of arrays, shape, dtype or device.
            NonFiniteError: a value is NaN or infinite, under ``check=True``.
        """
        component = self._component(role)
        if role in WRITERS or not component.written_by_step:
            allowed = WRITERS[role] if role in self._spec.written else "a role whose rows are the step's tokens"
            raise StepError(got=f"append_rows({role!r})", where=self._where, allowed=allowed)
        parts = component.parts
        if len(values) != len(parts):
            allowed = f"{len(parts)}, one for each part"
            raise ShapeError(got=f"{len(values)} arrays", where=f"append_rows: {role}", allowed=allowed)
        checked: list[Array] = []
        for part, given in zip(parts, values, strict=True):
            where = f"append_rows: {role}" + (f".{part.name}" if part.name else "")
            heads = (part.heads,) if component.headed or part.heads > 1 else ()
            checked.append(check_float(self._ops, given, where, (self._tokens, *heads, part.format.dim)))
            self._check(checked[-1], where, component)
        self._append(role, tuple(checked))
