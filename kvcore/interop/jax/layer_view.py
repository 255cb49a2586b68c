"""One layer's view: its arrays, and what is appended to it; see ``kvcore.interop.jax.views``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec

from kvcore.backends.jax_pallas.gradients import constant
from kvcore.backends.jax_pallas.tail import frequencies_of
from kvcore.counts import check_count
from kvcore.errors import OutOfBlocks, ShapeError, StepError
from kvcore.interop.jax import view_compressed
from kvcore.interop.jax.view_kinds import VERBS
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
from kvcore.ops.arguments import FLOATS, check_array, check_float, check_number, check_rope, check_weight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array
    from jaxtyping import Bool, Float, Int

    from kvcore.interop.jax.view_kinds import Kind
    from kvcore.spec import Component, Rope


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


class Recalled(NamedTuple):
    """What a recurrent layer's step goes on from.

    Attributes:
        inputs: [B, width - 1 + S, channels] of a convolution: those before the step, oldest first, zeros before the
            first column, then the step's own; None without one.
        states: [B, heads, key dim, value dim], or without the last axis; zeros before the first token; None without.
        starts: [B] columns before the step.
        view: the layer with the new inputs and lengths; a layer with states goes on with what ``store`` returns.
    """

    inputs: Float[Array, "batch columns channels"] | None
    states: Float[Array, "batch heads ..."] | None
    starts: Int[Array, " batch"]
    view: LayerView

    def store(self, states: Float[Array, "batch heads ..."] | None = None) -> LayerView:
        """The layer with the states after each sequence's last new token; none where it has no state.

        Raises:
            ShapeError: states of another shape, missing ones, or those of a layer without; or, wherever JAX
                differentiates, states that a gradient is asked of.
        """
        component = self.view.kind.layer.state
        if (states is None) != (component is None):
            allowed = "None: the layer has no state" if component is None else f"[B, {component.shape}]"
            raise ShapeError(got=type(states).__name__, where="store: states", allowed=allowed)
        if states is None or component is None:
            return self.view
        shape = self.view.kind.batch, *component.shape
        states = constant("store: states", check_float(self.view.kind.ops, states, "store: states", shape))
        return _store(self.view, self.starts, states)


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
    def component(self) -> Component:
        """The layer's keys and values, its latent rows, its window, or its state: the first that it has."""
        return next(component for _, component in self.kind.layer.components())

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
        kv = self._holds("kv", "append").layer.kv
        assert kv is not None  # it holds them
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
        kv = self._holds("kv", "attend").layer.kv
        assert kv is not None  # it holds them
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

    def attend_compressed(
        self,
        query: Float[Array, "batch new heads dim"],
        rows: Float[Array, "batch new dim"],
        tail: tuple[Array, Array] | None = None,
        index_tail: tuple[Array, Array] | None = None,
        index: tuple[Array, Array] | None = None,
        new: Int[Array, " batch"] | Sequence[int] | None = None,
        *,
        sink: Float[Array, " heads"] | None = None,
        scale: float | Array | None = None,
        rope: Rope | Array | None = None,
        norm_weight: Array | None = None,
        index_norm_weight: Array | None = None,
        eps: float = 1e-6,
    ) -> Attended:
        """Store a window's rows, compress what closes of the tails, and attend: a layer of DeepSeek-V4.

        What a step of handles does with ``append``, ``flush``, ``index_select`` and ``attend``: a layer of a window
        alone attends to that, one with a tail also to all of its entries, and one with an indexer to those that it
        selects, as many as the spec says (``topk``).

        Args:
            query: fp32 or bf16, rotated already.
            rows: of the window, rotated already.
            tail: (kv, score), [B, S, width] each: raw compressor rows, of layers that have a tail.
            index_tail: likewise of the indexer's.
            index: (query [B, S, index heads, index dim], weights [B, S, index heads]) of the indexer.
            new: as for ``append``.
            sink: as for ``attend``, and so is ``scale``.
            rope: turns entries and index keys at their positions, and the last channels of out back by the query's: a
                Rope, or fp32 inverse frequencies; None: nothing is turned.
            norm_weight: [dim] of the entries' norm; None: none. ``index_norm_weight`` likewise; ``eps`` is of both.

        Raises:
            ShapeError: as ``append``; arrays that the layer needs or has no use for; a query that a gradient is asked
                of.
            OutOfBlocks: as ``append``.
            StepError: another kind of layer; the error names its verb.
        """
        layer, verb = self._holds("compressed", "attend_compressed").layer, "attend_compressed"
        window, given, shapes = layer.window, {"query": query, "rows": rows}, {}
        dim = window.dim  # type: ignore[union-attr]
        shapes.update(query=(None, dim), rows=(dim,))
        pairs = {"tail": ("kv", "score"), "index_tail": ("index_kv", "index_score")}
        pairs["index"] = "index_query", "index_weights"
        for name, pair in {"tail": tail, "index_tail": index_tail, "index": index}.items():
            component: Any = layer.index_keys if name == "index" else getattr(layer, name)
            if (pair is None) != (component is None):
                allowed = f"None: the layer has no {name}" if component is None else "a pair of arrays"
                raise ShapeError(got=type(pair).__name__, where=f"{verb}: {name}", allowed=allowed)
            if pair is None:
                continue
            given.update(zip(pairs[name], pair, strict=True))
            rows_of = [(component.heads, component.dim), (component.heads,)] if name == "index" else []
            shapes.update(zip(pairs[name], rows_of or [(component.width,)] * 2, strict=True))
        arrays = dict(zip(given, self._given(verb, given, tuple(shapes.values())), strict=True))
        # Entries are selected by an order, which has no gradient, and those of the query are not worked out.
        arrays = {name: constant(f"{verb}: {name}", array) for name, array in arrays.items()}
        ops, heads = self.kind.ops, arrays["query"].shape[2]
        weights: dict[str, Any] = {
            "sink": None if sink is None else check_float(ops, sink, f"{verb}: sink", (heads,)).astype(jnp.float32),
            "rope": frequencies_of(check_rope(ops, rope, f"{verb}: rope", dim)),
        }
        for name, weight, role in (
            ("norm_weight", norm_weight, "entries"),
            ("index_norm_weight", index_norm_weight, "index_keys"),
        ):
            size = None if weight is None else getattr(getattr(layer, role), "dim", 0)
            weights[name] = None if weight is None else check_weight(ops, weight, f"{verb}: {name}", size)
        options = {"eps": check_number(eps, f"{verb}: eps")}
        if isinstance(scale, jax.Array):
            weights["scale"] = scale.astype(jnp.float32)
        elif scale is not None:
            options["scale"] = check_number(scale, f"{verb}: scale")
        weights = {name: weight for name, weight in weights.items() if weight is not None}
        count = self._count(verb, arrays["query"].shape[1], new)
        return Attended(*_attend_compressed(self, arrays, weights, count, tuple(sorted(options.items()))))

    def recall(
        self,
        inputs: Float[Array, "batch new channels"] | None = None,
        new: Int[Array, " batch"] | Sequence[int] | None = None,
    ) -> Recalled:
        """What a recurrent layer's step goes on from: a convolution's last inputs, stored anew, and the states.

        ``view = view.recall(inputs).store(states)`` is a whole step: a layer that has a state goes on with what
        ``store`` returns.

        Args:
            inputs: [B, S, channels] of the convolution, fp32 or bf16; None where the layer has none.
            new: as for ``append``; a layer without a convolution needs it, since nothing else says how many.

        Raises:
            ShapeError: as ``append``; inputs that the layer needs or has no use for.
            OutOfBlocks: as ``append``.
            StepError: another kind of layer; the error names its verb.
        """
        conv = self._holds("recurrent", "recall").layer.conv
        if (inputs is None) != (conv is None):
            allowed = "None: the layer has no convolution" if conv is None else f"shape [B, S, {conv.channels}]"
            raise ShapeError(got=type(inputs).__name__, where="recall: inputs", allowed=allowed)
        if inputs is None or conv is None:
            if new is None:
                raise ShapeError(got="no new", where="recall: new", allowed="[B] tokens of each sequence")
            count, columns = self._count("recall", self.kind.length, new), 1
        else:
            (inputs,) = self._given("recall: inputs", {"inputs": inputs}, [(conv.channels,)])
            columns = inputs.shape[1]
            inputs = constant("recall: inputs", inputs)
            count = self._count("recall", columns, new)
        found, states, view = _recall(self, inputs, count, columns)
        return Recalled(found, states, self.lengths, view)

    def _holds(self, wanted: str, verb: str) -> Kind:
        """The view's kind, if it is one that has the verb."""
        held = self.kind.holds
        if held != wanted:
            alike = [name for name in VERBS[held] if name.startswith(verb.partition("_")[0])]
            raise StepError(got=verb, where=repr(self), allowed=", ".join(alike or VERBS[held]))
        return self.kind

    def _latents(self, verb: str, rows: Any, index_keys: Any) -> tuple[Array, ...]:
        """Latent rows, and index keys where the layer has them."""
        roles = self._holds("latents", verb).latent_roles
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
            held = kind.holds.removesuffix("s")
            return f"LayerView({kind.batch} sequences of {kind.length}, {held}, {rows})"
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


@jax.jit
def _append(view: LayerView, given: tuple[jax.Array, ...], count: jax.Array) -> Seen:
    """A step of every shard; the state that it leaves is a view."""
    kind = view.kind
    step = append_latents if kind.latent_roles else append_kv
    each: Any = kind.partition("requests")
    rows: Any = kind.partition("requests", None, "heads")

    def local(state: State, count: Any, *given: Any) -> Seen:
        return step(kind.local, state, given, count)

    outs = Seen((rows,) * len(given), each, each, _lies(kind))
    run = kind.on_shards(local, (_lies(kind), each, *[rows] * len(given)), outs)
    with jax.named_scope("kvcore.LayerView.append"):
        seen = run(_state(view), count, *given)
    return seen._replace(state=view.replace(**seen.state._asdict()))


@jax.jit
def _attend(view: LayerView, given: tuple[jax.Array, ...], count: jax.Array, asked: Asked) -> Answer:
    """The same with attention."""
    kind = view.kind
    step = attend_latents if kind.latent_roles else attend_kv
    each, heads = kind.partition("requests"), kind.partition("heads")
    rows: Any = kind.partition("requests", None, "heads")

    def local(state: State, count: Any, query: Any, scale: Any, sink: Any, *given: Any) -> Answer:
        return step(kind.local, state, given, count, Asked(query, scale, sink, asked.value_dim))

    outs = Answer(rows, rows, _lies(kind))
    inputs = _lies(kind), each, rows, PartitionSpec(), heads, *[rows] * len(given)
    run = kind.on_shards(local, inputs, outs)
    with jax.named_scope("kvcore.LayerView.attend"):
        found = run(_state(view), count, asked.query, asked.scale, asked.sink, *given)
    return found._replace(state=view.replace(**found.state._asdict()))


@partial(jax.jit, static_argnums=4)
def _attend_compressed(view: LayerView, streams: Any, weights: Any, count: jax.Array, options: Any) -> Answer:
    """A step of a layer that compresses, of every shard."""
    kind = view.kind
    each: Any = kind.partition("requests")

    def local(state: State, count: Any, streams: Any, weights: Any) -> Answer:
        return view_compressed.attend_compressed(kind.local, state, streams, weights, count, dict(options))

    outs = Answer(each, each, _lies(kind))
    run = kind.on_shards(local, (_lies(kind), each, each, PartitionSpec()), outs)
    with jax.named_scope("kvcore.LayerView.attend_compressed"):
        found = run(_state(view), count, streams, weights)
    return found._replace(state=view.replace(**found.state._asdict()))


@partial(jax.jit, static_argnums=3)
def _recall(view: LayerView, inputs: Any, count: jax.Array, columns: int) -> Any:
    """A recurrent layer's inputs, states and view, of every shard."""
    kind = view.kind
    each = kind.partition("requests")

    def local(state: State, count: Any, inputs: Any) -> Any:
        return view_compressed.recall(kind.local, state, inputs, count, columns)

    run = kind.on_shards(local, (_lies(kind), each, each), (each, each, _lies(kind)))
    with jax.named_scope("kvcore.LayerView.recall"):
        found, states, state = run(_state(view), count, inputs)
    return found, states, view.replace(**state._asdict())


@jax.jit
def _store(view: LayerView, before: jax.Array, states: jax.Array) -> LayerView:
    """The view with states, of every shard."""
    kind = view.kind
    each = kind.partition("requests")

    def local(state: State, before: Any, states: Any) -> Any:
        return view_compressed.store_states(kind.local, state, before, states)

    run = kind.on_shards(local, (_lies(kind), each, each), _lies(kind))
    with jax.named_scope("kvcore.LayerView.store"):
        return view.replace(**run(_state(view), before, states)._asdict())


def _state(view: LayerView) -> State:
    return State(view.pools, view.lengths, view.starts, view.floors, view.number)


def _lies(kind: Kind) -> Any:
    """The partition of a view's arrays."""
    pools, each, everywhere = kind.pools, kind.partition("requests"), PartitionSpec()
    lies: Any = (pools, each, each, each, everywhere)
    return State(*lies)
