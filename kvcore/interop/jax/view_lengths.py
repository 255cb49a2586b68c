"""What views check of lengths and starts: how long sequences may be, where they may begin, how far back they can go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.core import Tracer

from kvcore.errors import RollbackError, ShapeError
from kvcore.interop.jax.layer_view import check_range
from kvcore.interop.jax.view_kinds import held_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jax

    from kvcore.interop.jax.layer_view import LayerView
    from kvcore.spec import LayerSpec


def first_columns(where: str, starts: Any, batch: int, max_length: int, layers: Sequence[LayerSpec]) -> jax.Array:
    """[B] int32 first column that is a token, 0 unless given; a range is looked at where it is known: not in ``jit``.

    Raises:
        ShapeError: another shape, a column that is not 0 to ``max_length``, or any where a layer compresses.
    """
    if starts is None:
        return jnp.zeros(batch, jnp.int32)
    check_unpadded(where, [held_by(layer, where) for layer in dict.fromkeys(layers)])
    first = jnp.asarray(starts, jnp.int32)
    if first.shape != (batch,):
        raise ShapeError(got=list(first.shape), where=where, allowed=f"shape {[batch]}")
    if not isinstance(first, Tracer):
        check_range(where, first, max_length)
    return first


def check_unpadded(where: str, held: Sequence[str]) -> None:
    """Whether sequences may begin with padding.

    Raises:
        ShapeError: one of the layers compresses: its windows are counted from column 0.
    """
    if "compressed" in held:
        hint = "Pad on the right: new=[B] says how many tokens each sequence has."
        raise ShapeError(got="left padding", where=where, allowed="none where a layer compresses", hint=hint)


def check_lengths(view: LayerView, where: str, lengths: jax.Array) -> None:
    """Whether a view's sequences may be so long [B], where that is known: not inside ``jit``.

    Raises:
        ShapeError: below 0, or beyond what was written. RollbackError: a ring no longer holds what is needed; or a
            layer that compresses or has a state is to go back, inside ``jit`` too.
    """
    if not view.kind.goes_back:
        known = not isinstance(lengths, Tracer) and not isinstance(view.lengths, Tracer)
        if not known or bool(((lengths < view.lengths) & (lengths != 0)).any()):
            raise RollbackError(
                got="a shorter length" if known else "lengths inside jit",
                where=where,
                allowed=f"the present length, or 0: {view!r} keeps no rows that closed, and no states of before",
                hint="Keep the views of before, which hold them.",
            )
    if isinstance(lengths, Tracer) or isinstance(view.lengths, Tracer):
        return
    beyond = int((lengths - view.lengths).max())
    if beyond > 0:
        got = f"a length {beyond} beyond the present one"
        raise ShapeError(got=got, where=where, allowed="the present length or less: no other columns were written")
    if int(lengths.min()) < 0:
        raise ShapeError(got=int(lengths.min()), where=where, allowed="0 or more")
    if view.floors is None:
        return
    # Where the next query has nothing before it, nothing is needed.
    needed = view.component.first_visible(lengths, view.starts, jnp.maximum)
    lost = jnp.minimum(view.floors, lengths) - needed
    if int(jnp.where(lengths < view.lengths, lost, 0).max()) > 0:
        back = int((view.lengths - lengths).max())
        raise RollbackError(
            got=f"{back} columns back",
            where=where,
            allowed=f"a length that needs no row that a ring of {view.kind.ring_rows} no longer holds",
            hint="Keep the views of before, which hold them, or append those columns anew.",
        )
