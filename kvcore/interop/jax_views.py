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
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from kvcore.errors import OutOfBlocks, ShapeError, SnapshotError, SpecError
from kvcore.interop.jax_rules import RULES, Rules, Table
from kvcore.interop.jax_view_kinds import Kind, index_of
from kvcore.spec import KV, CacheSpec, LayerSpec, from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jax import Array
    from jax.sharding import Mesh
    from jaxtyping import Bool, Float, Int


class Appended(NamedTuple):
    """What a layer attends to after an append.

    Attributes:
        keys: [B, n, key heads, dim]: rows that some query may see, in position order, the new ones among them.
        values: [B, n, value heads, dim].
        mask: [B, S, n] bool: what each query sees: causal, window or chunk, starts and padding.
        positions: [B, n] int32 column of each row, -1 where there is none; ``positions >= 0`` says which are valid.
        view: the layer with the new rows.
    """

    keys: Float[Array, "batch columns key_heads key_dim"]
    values: Float[Array, "batch columns value_heads value_dim"]
    mask: Bool[Array, "batch new columns"]
    positions: Int[Array, "batch columns"]
    view: LayerView


@partial(jax.tree_util.register_dataclass, data_fields=["pools", "lengths", "starts"], meta_fields=["kind"])
class LayerView:
    """One layer's cache of a batch of B sequences.

    Attributes:
        pools: the layer's buffers by name.
        lengths: [B] int32 columns written so far, left padding included.
        starts: [B] int32 first column that is a token; those before it are left padding, which no query sees, and
            chunks begin with it.
        kind: what the layer is; static.
    """

    def __init__(
        self, pools: dict[str, Array], lengths: Int[Array, " batch"], starts: Int[Array, " batch"], kind: Kind
    ) -> None:
        self.pools, self.lengths, self.starts, self.kind = pools, lengths, starts, kind

    @property
    def component(self) -> KV:
        """The layer's K-V component."""
        kv = self.kind.layer.kv
        assert kv is not None
        return kv

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written yet; not to be asked inside ``jit``."""
        return not bool(self.lengths.any())

    @property
    def overflowed(self) -> Bool[Array, " batch"]:
        """[B] bool: more columns were appended than there is room for; those beyond were dropped."""
        return self.lengths > self.kind.length

    def append(
        self,
        keys: Float[Array, "batch new key_heads key_dim"],
        values: Float[Array, "batch new value_heads value_dim"],
        new: Int[Array, " batch"] | Sequence[int] | None = None,
    ) -> Appended:
        """Store keys [B, S, key heads, dim] and values, and return all that the S queries may see.

        Args:
            keys: fp32 or bf16.
            values: likewise.
            new: [B] tokens of each sequence where the batch is padded on the right: columns from there on are neither
                stored nor counted, and their queries see nothing. None: all S.

        Raises:
            ShapeError: of another batch or of other heads.
            OutOfBlocks: no room; nothing is stored. Inside ``jit`` what has no room is dropped: see ``overflowed``.
        """
        kv = self.component
        for name, array, part in zip(("keys", "values"), (keys, values), kv.parts, strict=True):
            wanted = (self.kind.batch, keys.shape[1], part.heads, part.format.dim)
            if array.shape != wanted:
                raise ShapeError(got=list(array.shape), where=f"append: {name}", allowed=f"shape {list(wanted)}")
        count = jnp.full(self.kind.batch, keys.shape[1], jnp.int32) if new is None else jnp.asarray(new, jnp.int32)
        count = self.kind.put(count, self.kind.partition("requests"))
        if not isinstance(self.lengths, Tracer) and not isinstance(count, Tracer):
            longest = int((self.lengths + count).max())
            if longest > self.kind.length:
                raise OutOfBlocks(got=f"{longest} columns", where="append", allowed=f"{self.kind.length} or fewer")
        return _append(self, keys, values, count)

    def replace(self, **changed: Any) -> LayerView:
        """The view with some of ``pools``, ``lengths``, ``starts`` exchanged."""
        return LayerView(
            **{"pools": self.pools, "lengths": self.lengths, "starts": self.starts, "kind": self.kind, **changed}
        )

    def __repr__(self) -> str:
        kv, kind = self.component, self.kind
        reach = f"window {kv.window}" if kv.window else f"chunk {kv.chunk}" if kv.chunk else "full"
        sizes = f"{kv.key_heads} × {kv.key_dim} {kv.key_format}"
        return f"LayerView({kind.batch} sequences of {kind.length}, {reach}, {kv.storage}, keys {sizes})"


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
                lengths=view.kind.exchanged(view.lengths, other.views[layer].lengths, slot),
                starts=view.kind.exchanged(view.starts, other.views[layer].starts, slot),
            )
        )

    def insert_starts(self, starts: Any, slot: int) -> CacheViews:
        """Other first columns for the sequences from ``slot`` on."""
        return self._exchanged("insert_starts", "starts", starts, slot)

    def insert_index(self, lengths: Any, slot: int) -> CacheViews:
        """Other lengths for the sequences from ``slot`` on; rows beyond a shorter length are no longer seen.

        A ring that has wrapped does not hold the rows that a shorter length would need; nothing here can know.
        """
        return self._exchanged("insert_index", "lengths", lengths, slot)

    def to_pure(self) -> tuple[list[dict[str, jax.Array]], dict[str, Any]]:
        """(arrays of every layer by name, plain metadata): what ``from_pure`` makes the same cache of, on any mesh."""
        kind = self.views[0].kind
        arrays = [
            {**view.kind.joined(view.pools), "lengths": view.lengths, "starts": view.starts} for view in self.views
        ]
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
        spec = from_json(json.dumps(metadata["spec"]))
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
            wanted = {**view.pools, "lengths": view.lengths, "starts": view.starts}
            described = [
                {name: (tuple(array.shape), str(array.dtype)) for name, array in some.items()}
                for some in (given, wanted)
            ]
            if described[0] != described[1]:
                raise SnapshotError(got=described[0], where=f"from_pure: layer {number}", allowed=str(described[1]))
            put = {name: kind.put(array, kind.partition("requests")) for name, array in given.items()}
            lengths, starts = put.pop("lengths"), put.pop("starts")
            views.append(LayerView(kind.shared_out(put), lengths, starts, kind))
        return cls(views, spec)

    def __repr__(self) -> str:
        return "CacheViews(\n  " + "\n  ".join(map(repr, self.views)) + "\n)"

    def _exchanged(self, verb: str, name: str, values: Any, slot: int) -> CacheViews:
        values = jnp.atleast_1d(jnp.asarray(values, jnp.int32))
        self._check_slot(verb, slot, len(values))
        return self._each(
            lambda view, _: view.replace(**{name: view.kind.exchanged(getattr(view, name), values, slot)})
        )

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
        spec: classic layers; ``presets.classic``, ``from_hf_config``, or composed of ``KV``.
        batch: sequences.
        max_length: columns of each, padding included.
        starts: [B] first column that is a token, where the batch is padded on the left.
        mesh: devices that the arrays are made on, or None: the default one. Its axes may be Auto or Explicit.
        rules: logical axis -> axes of the mesh: the batch goes over those of ``requests``, heads over those of
            ``heads``; what does not divide is on every shard.

    Raises:
        SpecError: a layer is not classic, a table that cannot hold, or one that cuts ``blocks``.
    """
    views = []
    for kind in _kinds(spec, batch, max_length, mesh, rules):
        lengths, first = (kind.put(array, kind.partition("requests")) for array in _begin(batch, starts))
        views.append(LayerView(kind.allocate(), lengths, first, kind))
    return CacheViews(views, spec)


def _begin(batch: int, starts: Any) -> tuple[jax.Array, jax.Array]:
    none = jnp.zeros(batch, jnp.int32)
    return none, none if starts is None else jnp.asarray(starts, jnp.int32)


def _kinds(spec: CacheSpec, batch: int, max_length: int, mesh: Mesh | None, rules: Table) -> list[Kind]:
    """The kind of every layer; equal layers have the same."""
    table = None if mesh is None else Rules(mesh, rules)
    if table is not None and table.shards("blocks") > 1:
        hint = "Sharded (kvcore.interop.jax_sharding) cuts them."
        allowed = "none: a view's columns are together"
        raise SpecError(got=str(table.axes("blocks")), where="rules: blocks", allowed=allowed, hint=hint)
    kinds: dict[LayerSpec, Kind] = {}
    for number, layer in enumerate(spec.layers):
        if layer.kv is None:
            raise SpecError(got="no kv", where=spec.path(number), allowed="classic layers")
        if layer not in kinds:
            kinds[layer] = Kind(layer, batch, max_length, spec.block_tokens, table)
    return [kinds[layer] for layer in spec.layers]


@jax.jit
def _append(view: LayerView, keys: jax.Array, values: jax.Array, count: jax.Array) -> Appended:
    kind = view.kind

    def append(pools: Any, lengths: Any, starts: Any, *new: Any) -> Any:
        return tuple(_append_local(LayerView(pools, lengths, starts, kind.local), *new))

    each, rows = kind.partition("requests"), kind.partition("requests", None, "heads")
    after = LayerView(kind.pools, each, each, kind.local)  # type: ignore[arg-type]
    run = kind.on_shards(append, (kind.pools, each, each, rows, rows, each), (rows, rows, each, each, after))
    keys, values, mask, positions, local = run(view.pools, view.lengths, view.starts, keys, values, count)
    return Appended(keys, values, mask, positions, LayerView(local.pools, local.lengths, local.starts, kind))


def _append_local(view: LayerView, keys: jax.Array, values: jax.Array, count: jax.Array) -> Appended:
    kind, kv = view.kind, view.component
    new = keys.shape[1]
    with jax.named_scope("kvcore.LayerView.append"):
        start = jnp.minimum(view.lengths, kind.length)
        end = jnp.minimum(view.lengths + count, kind.length)
        index = index_of(kind, start, end, view.starts, new)
        rows = [kind.ops.from_batch(index, array) for array in (keys, values)]
        most = kind.length if kv.span is None else min(kind.length, kv.span + new)
        # A ring's new rows may overwrite what the first queries still see: read it as it was, and the new rows beside.
        k, v, positions = kind.ops.gather_kv(view.pools, 0, index, *rows, columns=most)
        mask = kind.ops.to_batch(index, kind.ops.mask(0, index, columns=most), new)
        pools = kind.ops.append_kv(view.pools, 0, index, *rows)
        return Appended(k, v, mask, positions, view.replace(pools=dict(pools), lengths=view.lengths + count))
