"""One layer's view: its arrays, and what is appended to it; see ``kvcore.interop.jax.views``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec

from kvcore.backends.jax_pallas.gradients import constant
from kvcore.counts import check_count
from kvcore.errors import OutOfBlocks, RollbackError, ShapeError, SpecError, StepError
from kvcore.interop.jax.view_steps import (
    Answer,
    Asked,
    Seen,
    State,
    append_kv,
    append_latents,
    attend_kv,
    attend_latents,
)
from kvcore.ops.arguments import FLOATS, check_array, check_float

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array
    from jaxtyping import Bool, Float, Int

    from kvcore.interop.jax.view_kinds import Kind
    from kvcore.spec import KV, Entries, LayerSpec


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


class AppendedLatents(NamedTuple):
    """The same for latent rows: ``rows`` [B, n, dim], and ``index_keys`` [B, n, index dim] where the layer has them."""

    rows: Float[Array, "batch columns dim"]
    mask: Bool[Array, "batch new columns"]
    positions: Int[Array, "batch columns"]
    view: LayerView
    index_keys: Float[Array, "batch columns index_dim"] | None


class Attended(NamedTuple):
    """What attention gives.

    Attributes:
        out: [B, S, heads, value dim], of the queries' dtype; zeros for padding.
        lse: [B, S, heads] fp32 log-sum-exp of the logits, without the sink; -inf where a query sees nothing.
        view: the layer with the new rows.
    """

    out: Float[Array, "batch new heads value_dim"]
    lse: Float[Array, "batch new heads"]
    view: LayerView


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["pools", "lengths", "starts", "floors", "number"],
    meta_fields=["kind"],
)
class LayerView:
    """One layer's cache of a batch of B sequences.

    Attributes:
        pools: the layer's buffers by name.
        lengths: [B] int32 columns written so far, left padding included.
        starts: [B] int32 first column that is a token; those before it are left padding, which no query sees, and
            chunks begin with it.
        floors: [B] int32 first column whose row a ring still holds, which a shorter length does not bring back; None
            where no column's row is ever overwritten by another's.
        number: which layer of a stack it is; None outside of one.
        kind: what the layer is; static.
    """

    def __init__(
        self,
        pools: dict[str, Array],
        lengths: Int[Array, " batch"],
        starts: Int[Array, " batch"],
        kind: Kind,
        floors: Int[Array, " batch"] | None = None,
        number: Int[Array, ""] | None = None,
    ) -> None:
        self.pools, self.lengths, self.starts, self.floors, self.kind = pools, lengths, starts, floors, kind
        self.number = number

    @property
    def component(self) -> KV | Entries:
        """The layer's keys and values, or its latent rows."""
        return component_of(self.kind.layer, "layer")

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
                stored nor counted, and their queries see nothing. None: all S. Inside ``jit`` more than S is S.

        Raises:
            ShapeError: of another batch or of other heads; ``new`` that is not 0 to S; or, wherever JAX differentiates,
                keys or values that a gradient is asked of.
            OutOfBlocks: no room; nothing is stored. Inside ``jit`` what has no room is dropped: see ``overflowed``.
            StepError: a latent layer, which has ``append_latents``.
        """
        kv = self.kind.layer.kv
        if kv is None:
            raise StepError(got="append", where=repr(self), allowed="append_latents")
        rows = [(part.heads, part.format.dim) for part in kv.parts]
        given = self._given("append", {"keys": keys, "values": values}, rows)
        (keys, values), mask, positions, view = _append(self, given, self._count("append", given[0].shape[1], new))
        return Appended(keys, values, mask, positions, view)

    def append_latents(
        self,
        rows: Float[Array, "batch new dim"],
        index_keys: Float[Array, "batch new index_dim"] | None = None,
        new: Int[Array, " batch"] | Sequence[int] | None = None,
    ) -> AppendedLatents:
        """``append`` for latent attention (MLA): rows [B, S, dim], one a token for all heads.

        Args:
            rows: fp32 or bf16: the compressed latent and the rotary key side by side, as the spec's ``dim`` has them.
            index_keys: likewise, [B, S, index dim]: of every token, if the layer has an indexer.
            new: as for ``append``.

        Raises:
            ShapeError: as ``append``; also index keys that are missing, or of a layer without an indexer.
            OutOfBlocks: as ``append``.
            StepError: a layer of keys and values, which has ``append``.
        """
        arrays = self._latents("append_latents", rows, index_keys)
        count = self._count("append_latents", arrays[0].shape[1], new)
        parts, mask, positions, view = _append(self, arrays, count)
        return AppendedLatents(parts[0], mask, positions, view, parts[1] if len(parts) == 2 else None)

    def attend(
        self,
        query: Float[Array, "batch new heads key_dim"],
        keys: Float[Array, "batch new key_heads key_dim"],
        values: Float[Array, "batch new value_heads value_dim"],
        new: Int[Array, " batch"] | Sequence[int] | None = None,
        *,
        sink: Float[Array, " heads"] | None = None,
        scale: float | Array | None = None,
    ) -> Attended:
        """Store keys and values as ``append`` does, and attend to all that the queries may see, where it lies.

        Blocks are read one after another as far as the longest sequence goes, and nothing of a pool's size is made. It
        is causal, within the layer's window or chunk, and sees neither left padding nor padding on the right.

        Args:
            query: [B, S, H, key dim], fp32 or bf16, rotated already; H is a multiple of the heads of keys and values,
                which are shared by neighbours.
            keys: as for ``append``, and so are ``values`` and ``new``.
            sink: [H] one logit a head in the denominator, or None.
            scale: of the logits; 1 / √(key dim) unless given.

        Raises:
            ShapeError: as ``append``; also a query of another batch or dim, or heads that do not divide.
            OutOfBlocks: as ``append``.
            StepError: a latent layer, which has ``attend_latents``.
        """
        kv = self.kind.layer.kv
        if kv is None:
            raise StepError(got="attend", where=repr(self), allowed="attend_latents")
        rows = [(part.heads, part.format.dim) for part in kv.parts]
        given = self._given("attend", {"keys": keys, "values": values}, rows)
        groups = [part.heads for part in kv.parts]
        asked = self._asked("attend", query, given[0].shape[1], rows[0][1], groups, sink, scale, None)
        return Attended(*_attend(self, given, self._count("attend", given[0].shape[1], new), asked))

    def attend_latents(
        self,
        query: Float[Array, "batch new heads dim"],
        rows: Float[Array, "batch new dim"],
        index_keys: Float[Array, "batch new index_dim"] | None = None,
        new: Int[Array, " batch"] | Sequence[int] | None = None,
        *,
        sink: Float[Array, " heads"] | None = None,
        scale: float | Array | None = None,
        value_dim: int | None = None,
    ) -> Attended:
        """``attend`` for latent attention: a query [B, S, H, dim] in the latents' own space, to all rows so far.

        Args:
            query: of H heads, each beside the same rows.
            rows: as for ``append_latents``, and so are ``index_keys`` and ``new``.
            sink: as for ``attend``.
            scale: of the logits; 1 / √dim unless given: models say the one of the dim before it was compressed.
            value_dim: channels that are values, from the first on (a model's ``kv_lora_rank``); all unless given.

        Raises:
            ShapeError: as ``append_latents``; a query of another batch or dim, or one that a gradient is asked of.
            OutOfBlocks: as ``append``.
            StepError: a layer of keys and values, which has ``attend``.
        """
        given = self._latents("attend_latents", rows, index_keys)
        dim, columns = given[0].shape[2], given[0].shape[1]
        if value_dim is not None:
            value_dim = check_count(ShapeError, "attend_latents: value_dim", value_dim, 1)
            if value_dim > dim:
                raise ShapeError(got=value_dim, where="attend_latents: value_dim", allowed=f"1 to {dim}")
        query = constant("attend_latents: query", query, "append_latents gives the rows, for attention of your own.")
        asked = self._asked("attend_latents", query, columns, dim, [1], sink, scale, value_dim)
        return Attended(*_attend(self, given, self._count("attend_latents", columns, new), asked))

    def _latents(self, verb: str, rows: Any, index_keys: Any) -> tuple[Array, ...]:
        """Latent rows, and index keys where the layer has them."""
        roles = self.kind.latent_roles
        if not roles:
            raise StepError(got=verb, where=repr(self), allowed=verb.removesuffix("_latents"))
        given = {"rows": rows} if index_keys is None else {"rows": rows, "index_keys": index_keys}
        if len(given) != len(roles):
            allowed = "rows and index_keys" if len(roles) == 2 else "rows alone: the layer has no indexer"
            raise ShapeError(got=", ".join(given), where=verb, allowed=allowed)
        dims = [(component.parts[0].format.dim,) for _, component in self.kind.layer.components()]
        return self._given(verb, given, dims)

    def _asked(
        self,
        verb: str,
        query: Any,
        columns: int,
        dim: int | None,
        groups: Sequence[int],
        sink: Any,
        scale: Any,
        value_dim: int | None,
    ) -> Asked:
        """The queries' part of a step, looked at."""
        query = check_array(self.kind.ops, query, f"{verb}: query", (self.kind.batch, columns, None, dim), FLOATS)
        heads = query.shape[2]
        if not heads or any(heads % group for group in groups):
            allowed = f"a multiple of {' and '.join(map(str, dict.fromkeys(groups)))}"
            raise ShapeError(got=f"{heads} heads", where=f"{verb}: query", allowed=allowed)
        if sink is not None:
            sink = check_array(self.kind.ops, sink, f"{verb}: sink", (heads,), FLOATS).astype(jnp.float32)
        factor = query.shape[3] ** -0.5 if scale is None else scale
        return Asked(query, jnp.asarray(factor, jnp.float32), sink, value_dim)

    def _given(self, verb: str, arrays: dict[str, Any], rows: Sequence[tuple[int | None, ...]]) -> tuple[Array, ...]:
        """Arrays [B, S, *row], all of the first one's S."""
        found: list[Array] = []
        for (name, array), row in zip(arrays.items(), rows, strict=True):
            columns = found[0].shape[1] if found else None
            shape = (self.kind.batch, columns, *row)
            found.append(check_float(self.kind.ops, array, f"{verb}: {name}", shape))
        return tuple(found)

    def _count(self, verb: str, columns: int, new: Any) -> jax.Array:
        """[B] tokens of each sequence, checked where their values are known."""
        batch, length = self.kind.batch, self.kind.length
        count = jnp.full(batch, columns, jnp.int32) if new is None else jnp.asarray(new, jnp.int32)
        if count.shape != (batch,):
            raise ShapeError(got=list(count.shape), where=f"{verb}: new", allowed=f"shape {[batch]}")
        count = self.kind.put(count, self.kind.partition("requests"))
        if isinstance(count, Tracer):
            return jnp.clip(count, 0, columns)
        if new is not None:
            check_range(f"{verb}: new", count, columns)
        if not isinstance(self.lengths, Tracer):
            longest = int((self.lengths + count).max())
            if longest > length:
                raise OutOfBlocks(got=f"{longest} columns", where=verb, allowed=f"{length} or fewer")
        return count

    def replace(self, **changed: Any) -> LayerView:
        """The view with some of ``pools``, ``lengths``, ``starts``, ``floors`` exchanged; nothing is looked at."""
        names = "pools", "lengths", "starts", "floors", "number"
        now = {name: getattr(self, name) for name in names}
        return LayerView(**{**now, "kind": self.kind, **changed})

    def __repr__(self) -> str:
        kind, kv = self.kind, self.kind.layer.kv
        if kv is None:
            formats = [(role, component.parts[0].format) for role, component in kind.layer.components()]
            rows = ", ".join(f"{role} {format.dim} {format.name}" for role, format in formats)
            return f"LayerView({kind.batch} sequences of {kind.length}, latent, {rows})"
        reach = f"window {kv.window}" if kv.window else f"chunk {kv.chunk}" if kv.chunk else "full"
        sizes = f"{kv.key_heads} × {kv.key_dim} {kv.key_format}"
        return f"LayerView({kind.batch} sequences of {kind.length}, {reach}, {kv.storage}, keys {sizes})"


def numbers(view: LayerView) -> dict[str, jax.Array]:
    """The view's [B] arrays by name."""
    found = {"lengths": view.lengths, "starts": view.starts}
    return found if view.floors is None else {**found, "floors": view.floors}


def check_range(where: str, given: jax.Array, most: int) -> None:
    """Whether integers are 0 to ``most``.

    Raises:
        ShapeError: one is not.
    """
    least, largest = (int(given.min()), int(given.max())) if given.size else (0, 0)
    if least < 0 or largest > most:
        raise ShapeError(got=f"{least} to {largest}", where=where, allowed=f"0 to {most}")


def first_columns(where: str, starts: Any, batch: int, max_length: int) -> jax.Array:
    """[B] int32 first column that is a token, 0 unless given; a range is looked at where it is known: not in ``jit``.

    Raises:
        ShapeError: another shape, or a column that is not 0 to ``max_length``.
    """
    if starts is None:
        return jnp.zeros(batch, jnp.int32)
    first = jnp.asarray(starts, jnp.int32)
    if first.shape != (batch,):
        raise ShapeError(got=list(first.shape), where=where, allowed=f"shape {[batch]}")
    if not isinstance(first, Tracer):
        check_range(where, first, max_length)
    return first


def check_lengths(view: LayerView, where: str, lengths: jax.Array) -> None:
    """Whether a view's sequences may be so long [B], where that is known: not inside ``jit``.

    Raises:
        ShapeError: below 0, or beyond what was written. RollbackError: a ring no longer holds what is needed.
    """
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
    needed = component_of(view.kind.layer, where).first_visible(lengths, view.starts, jnp.maximum)
    lost = jnp.minimum(view.floors, lengths) - needed
    if int(jnp.where(lengths < view.lengths, lost, 0).max()) > 0:
        back = int((view.lengths - lengths).max())
        raise RollbackError(
            got=f"{back} columns back",
            where=where,
            allowed=f"a length that needs no row that a ring of {view.kind.ring_rows} no longer holds",
            hint="Keep the views of before, which hold them, or append those columns anew.",
        )


def component_of(layer: LayerSpec, where: str) -> KV | Entries:
    """Keys and values, or latent rows.

    Raises:
        SpecError: a layer that has more than views hold.
    """
    if layer.kv is not None and layer.roles == ("kv",):
        return layer.kv
    latents, others = layer.entries, set(layer.roles) - {"entries", "index_keys"}
    plain = all(part.tokens_per_row == 1 and part.shared_from is None for _, part in layer.components())
    if latents is None or others or not plain:
        raise SpecError(
            got=", ".join(layer.roles) or "no component",
            where=where,
            allowed="kv alone, or entries of one token each (MLA), with index keys or without",
            hint="kvcore.create_cache(spec, backend='jax_pallas') has every layer; its ops run inside jit.",
        )
    return latents


@jax.jit
def _append(view: LayerView, given: tuple[jax.Array, ...], count: jax.Array) -> Seen:
    """A step of every shard; the state that it leaves is a view."""
    kind = view.kind
    step = append_latents if kind.latent_roles else append_kv
    each, rows = kind.partition("requests"), kind.partition("requests", None, "heads")

    def local(pools: Any, lengths: Any, starts: Any, floors: Any, count: Any, *given: Any) -> Seen:
        # A stack lies on no mesh: there the number needs no partition.
        return step(kind.local, State(pools, lengths, starts, floors, view.number), given, count)

    lies = State(kind.pools, each, each, each)  # type: ignore[arg-type]
    outs = Seen((rows,) * len(given), each, each, lies)  # type: ignore[arg-type]
    run = kind.on_shards(local, (kind.pools, each, each, each, each, *[rows] * len(given)), outs)
    with jax.named_scope("kvcore.LayerView.append"):
        seen = run(view.pools, view.lengths, view.starts, view.floors, count, *given)
    return seen._replace(state=view.replace(**seen.state._asdict()))


@jax.jit
def _attend(view: LayerView, given: tuple[jax.Array, ...], count: jax.Array, asked: Asked) -> Answer:
    """The same with attention."""
    kind = view.kind
    step = attend_latents if kind.latent_roles else attend_kv
    each, rows = kind.partition("requests"), kind.partition("requests", None, "heads")
    heads = kind.partition("heads")

    def local(
        pools: Any, lengths: Any, starts: Any, floors: Any, count: Any, query: Any, scale: Any, sink: Any, *given: Any
    ) -> Answer:
        state = State(pools, lengths, starts, floors, view.number)
        return step(kind.local, state, given, count, Asked(query, scale, sink, asked.value_dim))

    lies = State(kind.pools, each, each, each)  # type: ignore[arg-type]
    outs = Answer(rows, rows, lies)  # type: ignore[arg-type]
    inputs = kind.pools, each, each, each, each, rows, PartitionSpec(), heads, *[rows] * len(given)
    run = kind.on_shards(local, inputs, outs)
    with jax.named_scope("kvcore.LayerView.attend"):
        arrays = view.lengths, view.starts, view.floors, count, asked.query, asked.scale, asked.sink, *given
        found = run(view.pools, *arrays)
    return found._replace(state=view.replace(**found.state._asdict()))
