"""Dense caches as JAX models carry them: one pytree of layer views, appended to by pure functions, over kvcore's pools.

For a model that keeps its cache in its own state and jits its whole step, without requests or a host in between. Row b
of the batch is slot b with blocks of its own, so addresses need no table from outside. What kvcore promises holds here
too: rows are stored by position, rings included, in any K-V format, and old rows are never rounded again. Over a mesh
the batch is cut over data axes and heads over a model axis, by the table of rules that caches with an index have.

``docs/jax_views.md`` maps the names of EasyDeL's ``TransformerCache`` to these. Donate at the outermost ``jit``.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from kvcore.counts import check_count
from kvcore.errors import ShapeError, SnapshotError, SpecError
from kvcore.interop.jax.layer_view import (
    Appended,
    AppendedLatents,
    Attended,
    LayerView,
    check_range,
    numbers,
)
from kvcore.interop.jax.rules import RULES, Table
from kvcore.interop.jax.view_kinds import Kind, held_by, rules_of
from kvcore.interop.jax.view_lengths import check_lengths, check_unpadded, first_columns
from kvcore.spec import CacheSpec, LayerSpec, from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jax.sharding import Mesh

__all__ = ["Appended", "AppendedLatents", "Attended", "CacheViews", "LayerView", "init_views", "view_shapes"]


@partial(jax.tree_util.register_dataclass, data_fields=["views"], meta_fields=["spec"])
class CacheViews:
    """All layers' views. Methods return new ones; nothing is changed in place."""

    def __init__(self, views: list[LayerView], spec: CacheSpec) -> None:
        self.views, self.spec = views, spec

    def __len__(self) -> int:
        return len(self.views)

    def __iter__(self) -> Iterator[LayerView]:
        return iter(self.views)

    def __getitem__(self, layer: int) -> LayerView:
        return self.views[layer]

    def with_layer(self, layer: int, view: LayerView) -> CacheViews:
        """The same with one layer's view exchanged."""
        views = list(self.views)
        views[layer] = view
        return CacheViews(views, self.spec)

    def insert(self, other: CacheViews, slot: int) -> CacheViews:
        """The sequences of ``other`` in the place of those from ``slot`` on, with their lengths and starts.

        Raises:
            ShapeError: another length or batch that does not fit. SpecError: another spec, or another mesh or table.
        """
        mine, theirs = self.views[0].kind, other.views[0].kind
        if other.spec != self.spec:
            raise SpecError(got=other.spec.name or "another spec", where="insert: spec", allowed="an equal spec")
        if theirs.rules != mine.rules:
            raise SpecError(got=str(theirs.rules), where="insert: rules", allowed=str(mine.rules))
        if theirs.length != mine.length:
            raise ShapeError(got=theirs.length, where="insert: length", allowed=str(mine.length))
        self._check_slot("insert", slot, theirs.batch)
        return self._each(
            lambda view, layer: view.replace(
                pools=view.kind.placed(view.pools, other.views[layer].pools, slot),
                **{
                    name: view.kind.exchanged(getattr(view, name), getattr(other.views[layer], name), slot)
                    for name in numbers(view)
                },
            )
        )

    def insert_starts(self, starts: Any, slot: int) -> CacheViews:
        """Other first columns for the sequences from ``slot`` on.

        Raises:
            ShapeError: a slot that does not fit, or columns that are not 0 to ``max_length``; inside ``jit`` they are
                moved there. Any, where a layer compresses.
        """
        check_unpadded("insert_starts", [view.kind.holds for view in self.views])
        starts = self._inserted("insert_starts", starts, slot)
        length = self.views[0].kind.length
        if not isinstance(starts, Tracer):
            check_range("insert_starts: starts", starts, length)
        starts = jnp.clip(starts, 0, length)
        return self._each(lambda view, _: view.replace(starts=view.kind.exchanged(view.starts, starts, slot)))

    def insert_index(self, lengths: Any, slot: int) -> CacheViews:
        """Shorter lengths for the sequences from ``slot`` on; rows beyond a length are no longer seen.

        A ring of C rows at length L has the rows of L - C to L - 1. At a shorter length a query needs rows from its
        window's or chunk's first on: a window W goes back by up to C - W + 1 columns, or to where it needs nothing.
        Inside ``jit``, where nothing is known and nothing can be refused, a query sees those rows that are left, and a
        length beyond the present one is the present one.

        Raises:
            RollbackError: a ring no longer holds what the length needs.
            ShapeError: a slot that does not fit; a length below 0, or beyond what was written. All is as before.
        """
        lengths = self._inserted("insert_index", lengths, slot)
        found = [view.kind.exchanged(view.lengths, lengths, slot) for view in self.views]
        for number, (view, new) in enumerate(zip(self.views, found, strict=True)):
            check_lengths(view, f"insert_index: layer {number}", new)
        return self._each(lambda view, n: view.replace(lengths=jnp.clip(found[n], 0, view.lengths)))

    def to_pure(self) -> tuple[list[dict[str, jax.Array]], dict[str, Any]]:
        """(arrays of every layer by name, plain metadata): what ``from_pure`` makes the same cache of, on any mesh."""
        kind = self.views[0].kind
        arrays = [{**view.kind.joined(view.pools), **numbers(view)} for view in self.views]
        sizes = {"batch": kind.batch, "max_length": kind.length, "layout": kind.ops.plan.layout}
        return arrays, {"spec": json.loads(to_json(self.spec)), **sizes}

    @classmethod
    def from_pure(
        cls,
        arrays: Sequence[dict[str, Any]],
        metadata: dict[str, Any],
        *,
        mesh: Mesh | None = None,
        rules: Table = RULES,
    ) -> CacheViews:
        """The cache that ``to_pure`` took apart; arrays may have become NumPy's, and the mesh another one.

        Raises:
            SnapshotError: arrays of other names, shapes or dtypes than the metadata's spec has.
            SpecError: as ``init_views``.
        """
        try:
            text = json.dumps(metadata["spec"])
            missing = {"batch", "max_length", "layout"} - metadata.keys()
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise SnapshotError(got=str(error), where="from_pure", allowed="the metadata of to_pure") from error
        if missing:
            raise SnapshotError(got=f"no {min(missing)}", where="from_pure", allowed="the metadata of to_pure")
        spec = from_json(text)
        sizes = {"batch": metadata["batch"], "max_length": metadata["max_length"]}
        fresh = jax.eval_shape(lambda: init_views(spec, **sizes))
        layout = fresh.views[0].kind.ops.plan.layout
        if metadata["layout"] != layout or len(arrays) != len(fresh):
            got = f"{len(arrays)} layers, layout {metadata['layout']}"
            raise SnapshotError(got=got, where="from_pure", allowed=f"{len(fresh)} layers, layout {layout}")
        views = []
        for number, (kind, view, given) in enumerate(
            zip(_kinds(spec, **sizes, mesh=mesh, rules=rules), fresh.views, arrays, strict=True)
        ):
            wanted = {**view.pools, **numbers(view)}
            described = [
                {name: (tuple(array.shape), str(array.dtype)) for name, array in some.items()}
                for some in (given, wanted)
            ]
            if described[0] != described[1]:
                raise SnapshotError(got=described[0], where=f"from_pure: layer {number}", allowed=str(described[1]))
            # Copies: arrays of JAX may be in use elsewhere, and these are donated.
            put = {name: kind.put(jnp.array(array), kind.partition("requests")) for name, array in given.items()}
            own = {name: put.pop(name) for name in numbers(view)}
            views.append(LayerView(kind.shared_out(put), **own, kind=kind))
        return cls(views, spec)

    def __repr__(self) -> str:
        return "CacheViews(\n  " + "\n  ".join(map(repr, self.views)) + "\n)"

    def _inserted(self, verb: str, values: Any, slot: int) -> jax.Array:
        """Values of as many sequences from ``slot`` on."""
        values = jnp.atleast_1d(jnp.asarray(values, jnp.int32))
        self._check_slot(verb, slot, len(values))
        return values

    def _each(self, change: Any) -> CacheViews:
        return CacheViews([change(view, number) for number, view in enumerate(self.views)], self.spec)

    def _check_slot(self, verb: str, slot: int, count: int) -> None:
        batch = self.views[0].kind.batch
        if not 0 <= slot <= batch - count:
            raise ShapeError(got=slot, where=f"{verb}: slot", allowed=f"0 to {batch - count}, for {count} sequences")


def init_views(
    spec: CacheSpec,
    *,
    batch: int,
    max_length: int,
    starts: Any = None,
    mesh: Mesh | None = None,
    rules: Table = RULES,
) -> CacheViews:
    """Fresh views of a batch of sequences.

    Args:
        spec: layers of keys and values, of latents (MLA), that compress (DeepSeek-V4), or recurrent ones.
        batch: sequences.
        max_length: columns of each, padding included.
        starts: [B] first column that is a token, where the batch is padded on the left.
        mesh: devices that the arrays are made on, or None: the default one. Its axes may be Auto or Explicit.
        rules: logical axis -> axes of the mesh: the batch goes over those of ``requests``, heads over those of
            ``heads``; what does not divide is on every shard.

    Raises:
        SpecError: a layer that views do not hold, a table that cannot hold, or one that cuts ``blocks``; a batch or
            length that is not an integer of 1 or more.
        ShapeError: starts that do not fit, or any where a layer compresses.
    """
    batch = check_count(SpecError, "init_views: batch", batch, 1)
    max_length = check_count(SpecError, "init_views: max_length", max_length, 1)
    first = first_columns("init_views: starts", starts, batch, max_length, spec.layers)
    views = []
    for kind in _kinds(spec, batch, max_length, mesh, rules):
        # Arrays of its own for every layer, so that each can be donated.
        own = {"lengths": jnp.zeros(batch, jnp.int32), "starts": jnp.array(first)}
        if kind.ring_rows is not None:
            own["floors"] = jnp.zeros(batch, jnp.int32)
        placed = {name: kind.put(array, kind.partition("requests")) for name, array in own.items()}
        views.append(LayerView(kind.allocate(), **placed, kind=kind))
    return CacheViews(views, spec)


def view_shapes(
    spec: CacheSpec, *, batch: int, max_length: int, mesh: Mesh | None = None, rules: Table = RULES
) -> CacheViews:
    """What ``init_views`` makes, as shapes that say where they lie: to compile a step for devices that are not here.

    Args and errors are those of ``init_views``; the mesh may be one of ``kvcore.interop.jax.absent_mesh``.
    """
    views = jax.eval_shape(partial(init_views, spec, batch=batch, max_length=max_length, mesh=mesh, rules=rules))

    def lies(view: LayerView) -> LayerView:
        pools = {name: view.kind.shape_of(pool, view.kind.pools) for name, pool in view.pools.items()}
        others = {
            name: view.kind.shape_of(array, view.kind.partition("requests")) for name, array in numbers(view).items()
        }
        return view.replace(pools=pools, **others)

    return CacheViews([lies(view) for view in views], spec)


def _kinds(spec: CacheSpec, batch: int, max_length: int, mesh: Mesh | None, rules: Table) -> list[Kind]:
    """The kind of every layer; equal layers have the same."""
    table = rules_of(mesh, rules)
    kinds: dict[LayerSpec, Kind] = {}
    for number, layer in enumerate(spec.layers):
        held_by(layer, spec.path(number))
        if layer not in kinds:
            kinds[layer] = Kind(layer, batch, max_length, spec.block_tokens, table)
    return [kinds[layer] for layer in spec.layers]
