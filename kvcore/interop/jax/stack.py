"""Layers of one kind as one array of layers, so that a model scans over them: one trace, whatever their number.

The sequences of all layers lie in the same pools, one layer's after another's, and a layer's number, which may be
traced, is arithmetic on slots and blocks. So a scan carries the pools and updates them in place.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcore.counts import check_count
from kvcore.errors import ShapeError, SpecError
from kvcore.interop.jax.layer_view import LayerView, numbers
from kvcore.interop.jax.rules import RULES, Table
from kvcore.interop.jax.view_kinds import Kind, held_by, rules_of
from kvcore.interop.jax.view_lengths import first_columns

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from kvcore.spec import CacheSpec

__all__ = ["LayerStack", "init_stack"]


@partial(jax.tree_util.register_dataclass, data_fields=["pools", "numbers"], meta_fields=["kind"])
class LayerStack:
    """Layers of one kind. Methods return new ones; nothing is changed in place.

    Attributes:
        pools: the buffers of all layers by name; over a mesh every shard has all layers of its sequences.
        numbers: ``lengths``, ``starts`` and, where layers are rings, ``floors``, [layers, B] each, as a view has them.
        kind: what the layers are; static.
    """

    def __init__(self, pools: dict[str, jax.Array], numbers: dict[str, jax.Array], kind: Kind) -> None:
        self.pools, self.numbers, self.kind = pools, numbers, kind

    def __len__(self) -> int:
        return self.kind.layers

    @property
    def lengths(self) -> jax.Array:
        """[layers, B] columns written so far."""
        return self.numbers["lengths"]

    def layer(self, number: Any) -> LayerView:
        """A layer's view, for a step of it; ``number`` may be traced, and one that is out of range is the nearest."""
        number = self._number(number)
        own = {name: lax.dynamic_index_in_dim(array, number, keepdims=False) for name, array in self.numbers.items()}
        return LayerView(self.pools, **own, kind=self.kind, number=number)

    def with_layer(self, number: Any, view: LayerView) -> LayerStack:
        """The same after a step of one layer: with the pools of its view, which are those of all layers."""
        number, now = self._number(number), numbers(view)
        found = {
            name: lax.dynamic_update_index_in_dim(array, now[name], number, 0) for name, array in self.numbers.items()
        }
        return LayerStack(view.pools, found, self.kind)

    def _number(self, number: Any) -> jax.Array:
        count = self.kind.layers
        if isinstance(number, int) and not 0 <= number < count:
            raise ShapeError(got=number, where="layer of a stack", allowed=f"0 to {count - 1}")
        return jnp.clip(jnp.asarray(number, jnp.int32), 0, count - 1)

    def __repr__(self) -> str:
        return f"LayerStack({self.kind.layers} of {self.kind.batch} sequences of {self.kind.length})"


def init_stack(
    spec: CacheSpec,
    *,
    batch: int,
    max_length: int,
    starts: Any = None,
    mesh: Mesh | None = None,
    rules: Table = RULES,
) -> LayerStack:
    """A fresh stack of a spec's layers, all of which must be of one kind; a model of several has a stack for each.

    Args:
        spec: as for ``init_views``.
        batch: likewise, and so are ``max_length``, ``starts``, ``mesh`` and ``rules``.

    Raises:
        SpecError: layers of several kinds, or none; otherwise as ``init_views``.
    """
    batch = check_count(SpecError, "init_stack: batch", batch, 1)
    max_length = check_count(SpecError, "init_stack: max_length", max_length, 1)
    kinds = dict.fromkeys(spec.layers)
    if len(kinds) != 1:
        got = f"{len(kinds)} kinds of layers"
        hint = "Make a stack of each, or scan over groups that repeat, with one stack for each of a group's layers."
        raise SpecError(got=got, where="init_stack: spec", allowed="layers of one kind", hint=hint)
    (layer,) = kinds
    held_by(layer, spec.path(0))
    table = rules_of(mesh, rules)
    kind = Kind(layer, batch, max_length, spec.block_tokens, table, layers=len(spec.layers))
    first = first_columns("init_stack: starts", starts, batch, max_length, spec.layers)
    shape = len(spec.layers), batch
    own = {"lengths": jnp.zeros(shape, jnp.int32), "starts": jnp.tile(first[None], (shape[0], 1))}
    if kind.ring_rows is not None:
        own["floors"] = jnp.zeros(shape, jnp.int32)
    own = {name: kind.put(array, kind.partition(None, "requests")) for name, array in own.items()}
    return LayerStack(kind.allocate(), own, kind)
