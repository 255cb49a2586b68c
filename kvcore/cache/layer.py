"""One layer in one step: the verbs that a model calls.

The handle is the door: it checks every argument, then calls the backend's verbs with the step's index. What the layer
was given, and what of it is stored when, its ``RingWrites`` know.

Map: window, tails and entries of latent layers (``append_window`` to ``gather_all_index_keys``); indexer and attention
(``index_scores``, ``select``, ``attend``); keys and values of classic layers (``append_kv`` to ``visible_rows``);
recurrent layers (``read_state`` to ``gather_conv``); rows of any role (``append_rows``, ``gather_rows``); raw buffers
and digests (``window_view`` to ``digest``).
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from kvcore import digest
from kvcore.arrays import to_numpy
from kvcore.cache import whole_layers
from kvcore.cache.far import Coming, fetch, fetched
from kvcore.cache.ring_writes import AT_ONCE, DOOR, NO_STREAMS, NONE, ROWS_OF_TOKENS, WRITERS, RingWrites, StepWrites
from kvcore.counts import check_count
from kvcore.errors import ShapeError, StepError
from kvcore.ops import (
    AllEntries,
    Array,
    Attention,
    Closed,
    Given,
    PagedView,
    RawRows,
    RingView,
    SelectedEntries,
    StepIndex,
    VisibleRows,
    WindowRows,
)
from kvcore.ops.arguments import (
    FLOATS,
    INDEX_QUERIES,
    UNKNOWN,
    check_array,
    check_finite,
    check_float,
    check_indices,
    check_number,
    check_rope,
    check_rows,
    check_weight,
    inputs_of,
)
from kvcore.ops.records import Compression, WholeLayer
from kvcore.plan import Region
from kvcore.spec import DERIVED, KV, TAIL_OF, Component, Conv, Entries, IndexKeys, Rope, State, Tail, Window

HOW = "sink", "scale", "rope"
"""Options of ``attend``, in its order."""

NO_SHAPE: tuple[int, ...] = ()


class LayerHandle:
    """One layer's cache during one step, from ``step.layer(i)``; it ends with the step.

    T tokens of the step (padding included), Q requests, d row channels, C ring rows, H query heads, n columns.

    Example:
        >>> import numpy as np
        >>> import kvcore
        >>> from kvcore.spec import CacheSpec, Rope, presets
        >>> random = np.random.default_rng(0)
        >>> def rows(*shape):
        ...     return random.standard_normal(shape, dtype=np.float32)
        >>> def cache_of(layer):  # one layer, one request, and a step of six tokens
        ...     spec = CacheSpec(layers=[layer])
        ...     cache = kvcore.create_cache(spec, backend="reference", max_requests=1, max_tokens=256)
        ...     return cache, cache.step({cache.admit(): 6})
        >>> classic = presets.llama_3_8b(key_format="int8_row").layers[0]  # keys and values
        >>> csa = presets.deepseek_v4_flash().layers[2]  # window, entries of four tokens each, indexer
        >>> swa = presets.deepseek_v4_flash().layers[0]  # window alone
    """

    __slots__ = ("_context", "_index", "_layer", "_layers", "_ops", "_plan", "_spec", "_writes")

    def __init__(self, layers: StepWrites, number: int) -> None:
        context = layers.context
        self._layers = layers
        self._writes = layers[number]
        self._context = context
        self._layer = number
        self._spec = self._writes.spec
        self._plan = context.plan.layers[number]
        self._ops = context.ops
        self._index = context.index

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused, to ``pickle`` and ``copy``: one handle knows what a layer got in its step."""
        raise StepError(
            got="pickle or copy of a layer's handle",
            where=self._where,
            allowed=f"{self._where}, the same one each time",
        )

    def append_window(
        self,
        rows: Given,
        *,
        rope: Rope | Given | None = None,
        norm_weight: Given | None = None,
        eps: float = 1e-6,
    ) -> None:
        """Encode and store the window rows of the step's tokens: rows [T, d], fp32 or bf16.

        Args:
            rows: as they are to be stored; or before their norm and rotation, if ``rope`` is given, which are then
                done on the way: on a GPU in one launch, with bf16 rounding as in ``flush``.
            rope: rotation of the last channels at every token's position: a Rope, or fp32 inverse frequencies.
            norm_weight: [d] weight of an RMS norm before the rotation; None for no norm.
            eps: of the norm.

        Raises:
            ShapeError: wrong shape, dtype or device. StepError: the layer has no window, or already got its rows.
            NonFiniteError: a value is NaN or infinite, under ``check=True``.

        Example:
            >>> cache, step = cache_of(swa)
            >>> with step:
            ...     step.layer(0).append_window(rows(6, 512))
            ...     window = step.layer(0).gather_window()
            >>> window.values.shape[2], window.positions[0, :7].tolist()
            (512, [0, 1, 2, 3, 4, 5, -1])
        """
        if rope is None:
            if norm_weight is not None:
                raise ShapeError(got="a norm without a rotation", where="append_window: norm_weight", allowed="rope")
            self._append("window", rows)
            return
        self._context.check_open()
        given: dict[str, Any] = {"rope": rope}
        if norm_weight is not None:
            given |= {"norm_weight": norm_weight, "eps": eps}
        if self._writes.append_again("window", (rows,), given):
            return
        rotation = self._rotation(rope, norm_weight, eps)
        checked = self._rows("window", (rows,))
        self._writes.append("window", checked, **rotation)
        self._writes.note("append_rotated_window", (rows,), given, (*checked, *rotation.values()))

    def _rotation(self, rope: Any, norm_weight: Any, eps: Any) -> dict[str, Any]:
        """How window rows are rotated on their way, checked."""
        dim = self._component("window", Window).dim
        self._context.check_outside("append_window", (rope, norm_weight))
        rotation = {"rope": check_rope(self._ops, rope, "append_window: rope", dim)}
        if norm_weight is not None:
            rotation["norm_weight"] = check_weight(self._ops, norm_weight, "append_window: norm_weight", dim)
            rotation["eps"] = check_number(eps, "append_window: eps")
        return rotation

    def append(self, **rows: Given | tuple[Given, ...]) -> None:
        """The ``append_`` verbs of the roles that are given, all of them or, if one is refused, none.

        Args:
            rows: by role, a tuple where the verb takes several: ``window=rows, tail=(kv, score),
                index_tail=(kv, score)``; ``kv=(k, v)``; roles of outside code as ``append_rows`` takes them.

        Raises:
            StepError: the layer has no such role, it already got its rows, or they are not the step's to give.
            ShapeError, NonFiniteError: as the verbs.

        Example:
            >>> cache, step = cache_of(csa)
            >>> with step:
            ...     tails = {role: (rows(6, getattr(csa, role).width),) * 2 for role in ("tail", "index_tail")}
            ...     step.layer(0).append(window=rows(6, 512), **tails)
            ...     step.layer(0).flush(rope=Rope(dim=64, theta=160000.0))
        """
        checked: dict[str, tuple[Array, ...]] = {}
        for role, given in rows.items():
            component = self._component(role)
            if role in DERIVED or not (component.written_by_step or component.given != component.parts):
                raise StepError(got=f"append({role}=...)", where=self._where, allowed="roles of a step's tokens")
            self._writes.check_new(role)
            checked[role] = self._rows(role, given if isinstance(given, tuple) else (given,))
        for role, arrays in checked.items():
            self._writes.append(role, arrays)

    def append_tail(self, kv: Given, score: Given) -> None:
        """Store the compressor's raw rows: kv and score [T, width] fp32, score with its positional bias.

        ``width`` is 2·dim with overlap (carry half first, then cur half), else dim.
        """
        self._append("tail", kv, score)

    def append_index_tail(self, kv: Given, score: Given) -> None:
        """The same for the indexer's compressor."""
        self._append("index_tail", kv, score)

    def flush(
        self,
        norm_weight: Given | None = None,
        eps: float = 1e-6,
        rope: Rope | Given | None = None,
        index_norm_weight: Given | None = None,
    ) -> None:
        """Compress and store every entry whose window closed in this step; then its index keys.

        Args:
            norm_weight: [d] weight of the RMS norm after pooling; None for no norm.
            eps: of both norms.
            rope: rotation of the last channels at position m·i: a Rope, or fp32 inverse frequencies; None for none.
            index_norm_weight: [d of the index keys], as ``norm_weight``.

        Raises:
            StepError: the step's tail rows were not appended first, or the pool belongs to another layer.

        Example:
            >>> cache, step = cache_of(csa)
            >>> with step:
            ...     layer = step.layer(0)
            ...     layer.append_window(rows(6, 512))
            ...     layer.append_tail(rows(6, csa.tail.width), rows(6, csa.tail.width))
            ...     layer.append_index_tail(rows(6, csa.index_tail.width), rows(6, csa.index_tail.width))
            ...     layer.flush(norm_weight=np.ones(512, np.float32), rope=Rope(dim=64, theta=160000.0))
            ...     entries = layer.gather_all_entries()
            >>> entries.counts.tolist(), entries.positions.tolist()  # tokens 0 to 3; 4 and 5 wait in the tail
            ([1], [[0]])
        """
        context = self._context
        context.check_open()
        flushed, tails = self._flushed
        given = {"norm_weight": norm_weight, "eps": eps, "rope": rope, "index_norm_weight": index_norm_weight}
        if self._writes.flush_again(tails, given):
            self._writes.stored.update(flushed)
            return
        how = norm_weight, eps, rope, index_norm_weight
        key = context.key_of("flush", self._layer, how)
        if key not in context.passed:
            entries = self._own_entries("flush")
            context.check_outside("flush", (norm_weight, rope, index_norm_weight))
            self._component("tail", Tail)
            checked = self._flush_options(entries, *how)
            context.passes(key, how, checked)
            how = checked
        streams: list[Array | None] = []
        for tail in TAIL_OF.values():
            streams += self._tail_rows(tail, "flush") if tail in tails else (None, None)
        closed = context.closed_count(self._spec.entries.ratio)  # type: ignore[union-attr]
        at_once = self._writes.flush(tails, streams, closed=closed, **dict(zip(given, how, strict=True)))
        self._writes.stored.update(flushed)
        if at_once:
            options = self._writes.flush_options(given)
            self._writes.note("append_flush", tuple(streams), options, (*streams, context.most_new, None, *how))

    @property
    def _flushed(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Roles that a flush stores, and the tails that it reads."""
        memo = self._plan.memo
        if "flushed" not in memo:
            roles = tuple(
                role
                for role, tail in TAIL_OF.items()
                if getattr(self._spec, tail) is not None and getattr(self._spec, role) is not None
            )
            memo["flushed"] = roles, tuple(TAIL_OF[role] for role in roles)
        return memo["flushed"]

    def _flush_options(
        self, entries: Entries, norm_weight: Any, eps: Any, rope: Any, index_norm_weight: Any
    ) -> tuple[Any, ...]:
        """The same as ``flush`` passes on, checked."""
        weights = {"entries": norm_weight, "index_keys": index_norm_weight}
        narrowest = entries.dim
        for role in self._flushed[0]:
            dim = getattr(self._spec, role).dim
            narrowest = min(narrowest, dim)
            if weights[role] is not None:
                weights[role] = check_weight(self._ops, weights[role], f"flush: norm weight of {role}", dim)
        eps, rope = check_number(eps, "flush: eps"), check_rope(self._ops, rope, "flush: rope", narrowest)
        return weights["entries"], eps, rope, weights["index_keys"]

    def store_entries(self, entries: Given, index_keys: Given | None = None) -> None:
        """Encode and store entries that the caller compressed: [closed, d], in the order of ``closed``.

        Args:
            entries: fp32 or bf16, one row for every entry that the step completes.
            index_keys: [closed, index d], likewise.
        """
        spec = self._own_entries("store_entries")
        self._context.check_outside("store_entries", (entries, index_keys))
        count = self._context.closed_count(spec.ratio)
        entries = check_float(self._ops, entries, "store_entries: entries", (count, spec.dim))
        self._check(entries, "store_entries: entries", spec)
        if index_keys is not None:
            keys = self._component("index_keys", IndexKeys)
            index_keys = check_float(self._ops, index_keys, "store_entries: index_keys", (count, keys.dim))
            self._check(index_keys, "store_entries: index_keys", keys)
        self._context.replace(
            self._ops.store_entries(self._context.pools, self._layer, self._index, entries, index_keys)
        )
        self._writes.stored |= {"entries"} if index_keys is None else {"entries", "index_keys"}
        self._writes.settle()

    def compress(self, norm_weight: Given | None = None, eps: float = 1e-6) -> Array:
        """The latents of the entries that close in this step: pooled, normed, not rotated, not stored; [closed, d].

        V4.1's index keys are made from these.
        """
        entries = self._own_entries("compress")
        self._component("tail", Tail)
        kv, score = self._tail_rows("tail", "compress")
        if norm_weight is not None:
            norm_weight = check_weight(self._ops, norm_weight, "compress: norm_weight", entries.dim)
        closed = self._context.closed_count(entries.ratio)
        return self._ops.compress(
            self._context.pools,
            self._layer,
            self._index,
            kv,
            score,
            closed=closed,
            norm_weight=norm_weight,
            eps=check_number(eps, "compress: eps"),
        )

    @property
    def closed(self) -> Closed:
        """Entries that close in this step, in storing order: (request_index [n], entry_index [n]), int32."""
        ratio = self._component("entries", Entries).ratio
        return self._ops.closed(self._layer, self._index, self._context.closed_count(ratio))

    def gather_window(self) -> WindowRows:
        """The last min(length, W) rows: values [Q, C, d], positions [Q, C]; the step's own once appended."""
        self._component("window", Window)
        index, rows = self._writes.readable("window")
        return self._ops.gather_window(self._context.pools, self._layer, index, rows[0] if rows else None)

    def gather_entries(self, indices: Given) -> SelectedEntries:
        """Entries by index: indices [T, k] int32 or int64 -> values [T, k, d], valid [T, k]; invalid ones are zeros."""
        self._component("entries", Entries)
        context, given = self._context, indices
        indices = check_indices(self._ops, indices, "gather_entries: indices", self._tokens)
        if context.far and context.is_far(owner := self._owner("entries").number):
            indices = fetched(context, owner, given, f"{self._where}.gather_entries")
        return self._ops.gather_entries(context.pools, self._layer, self._index_of_entries("entries"), indices)

    def fetch(self, selected: Given) -> Coming:
        """Bring the entries that queries picked into the cache, where a request has them in the host's memory.

        Rows that are missing come over while others attend; ``attend`` and ``gather_entries`` wait for them, or
        ``wait`` of what this returns. Where all rows are there, nothing happens. The host looks at the picks.

        Args:
            selected: [T, k] int32 or int64, as for ``attend``, which is then given the same array.
        """
        self._component("entries", Entries)
        self._context.check_open()
        checked = check_indices(self._ops, selected, "fetch: selected", self._tokens)
        return fetch(self._context, self._owner("entries").number, selected, checked)

    def gather_all_entries(self) -> AllEntries:
        """Every entry: values [Q, n, d], counts [Q], positions [Q, n]."""
        return self._gather_all("entries")

    def gather_all_index_keys(self) -> AllEntries:
        """Every index key, decoded (rotated ones stay rotated): values [Q, n, d], counts [Q], positions [Q, n]."""
        return self._gather_all("index_keys")

    def index_scores(self, q: Given, weights: Given) -> Array:
        """Indexer scores: q [T, H, d], weights [T, H] -> [T, n] fp32, -inf where an entry is not visible.

        ``sum_h weights_h * relu(q_h . key_s)``; rotated key formats have q rotated here, callers never rotate. Queries
        may be e4m3, which FP8 tensor cores multiply with e4m3 keys as they are stored: their scales are then part of
        the weights.
        """
        found = self._index_again("index_scores", (q, weights))
        if found is not UNKNOWN:
            return found
        given = q, weights
        _, q, weights, columns = self._indexed("index_scores", q, weights)
        found = self._ops.index_scores(self._context.held, self._layer, self._index, q, weights, columns=columns)
        self._writes.note("index_scores", given, {"columns": columns}, (q, weights, columns))
        return found

    def index_select(self, q: Given, weights: Given, k: int | None = None) -> Array:
        """``select(index_scores(q, weights), k)`` in one go, without all scores at once where the backend can: [T, k].

        Args:
            q: [T, H, d], as for ``index_scores``.
            weights: [T, H].
            k: entries for every token; as many as the spec says (``topk``) unless given.
        """
        if k is None and self._spec.index_keys is not None:
            k = self._spec.index_keys.topk
        found = self._index_again("index_select", (q, weights, k))
        if found is not UNKNOWN:
            return found
        given = q, weights, k
        _, q, weights, columns = self._indexed("index_select", q, weights)
        if type(k) is not int or k < 0:
            k = check_count(ShapeError, "index_select: k", k, 0)
        at = self._context.held, self._layer, self._index
        found = self._ops.index_select(*at, q, weights, k, columns=columns)
        self._writes.note("index_select", given, {"columns": columns}, (q, weights, k, columns))
        return found

    def select(self, scores: Given, k: int) -> Array:
        """Top-k entries of scores [T, n] -> [T, k] int32, highest first, ties to the lowest entry, -1 at the end.

        Example:
            >>> cache, step = cache_of(csa)
            >>> step.layer(0).select(np.array([[1.0, 3.0, 3.0]] * 6, np.float32), k=4)[0].tolist()
            [1, 2, 0, -1]
            >>> step.abort()
        """
        context = self._context
        context.check_open()
        known = context.known.get(None, NONE).get("select")
        if known is not None and getattr(scores, "shape", NO_SHAPE)[:1] == (self._tokens,):
            found = known.again(DOOR, None, None, (scores, k), {})
            if found is not UNKNOWN:
                return found
        given = scores, k
        key = context.key_of("select", self._layer, (scores, k))
        if key not in context.passed:
            # No gradient comes from an order.
            found = check_array(self._ops, scores, "select: scores", (self._tokens, None), FLOATS)
            count = check_count(ShapeError, "select: k", k, 0)
            context.passes(key, (scores, k), (found, count))
            scores, k = found, count
        selected = self._ops.select(scores, k)
        if known is not None:
            known.note(DOOR, None, given, {}, (scores, k))
        return selected

    def attend(
        self,
        q: Given,
        selected: Given | None = None,
        sink: Given | None = None,
        scale: float | None = None,
        *,
        rope: Rope | Given | None = None,
    ) -> Attention:
        """Attention of the step's queries to this layer's cache.

        Latent layers: q [T, H, d] against the window and the selected entries (None: every visible one; [T, 0]: none).
        Classic layers: q [T, H, key_dim], out [T, H, value_dim]; ``selected`` and ``rope`` do not apply.

        Args:
            q: fp32 or bf16, already rotated.
            selected: [T, k] int32 or int64, distinct per token; -1 and invisible ones are ignored.
            sink: [H] fp32 logits that count in the denominator only.
            scale: of the logits; the key dim to the power -0.5 unless given.
            rope: turns the last channels of out back by the query's position, as models do whose values are rotated
                keys: a Rope, or fp32 inverse frequencies; None leaves them. See ``kvcore.ops`` for the rounding.

        Returns:
            out in q's dtype, and lse [T, H] fp32 without the sink; 0 and -inf for a query without keys.

        Example:
            >>> cache, step = cache_of(classic)
            >>> with step:
            ...     step.layer(0).append_kv(rows(6, 8, 128), rows(6, 8, 128))
            ...     out, lse = step.layer(0).attend(rows(6, 32, 128))  # four query heads for each key head
            >>> out.shape, lse.shape
            ((6, 32, 128), (6, 32))
        """
        context, spec, given, named = self._context, self._spec, (q, selected, sink, scale, rope), selected
        context.check_open()
        classic = spec.kv is not None
        found = self._attend_again(*given)
        if found is not UNKNOWN:
            return found
        key = context.key_of("attend", self._layer, given)
        if key not in context.passed:
            checked = self._attend_kv_arguments(*given) if classic else self._attend_arguments(*given)
            context.passes(key, given, checked)
            q, selected, sink, scale, rope = checked
        at = context.held, self._layer, self._index
        if classic:
            self._require("kv", "attend")
            k, v = self._writes.unwritten("kv") or (None, None)
            columns = self._kv_columns(spec.kv, ended=True)  # type: ignore[arg-type]
            how: dict[str, Any] = {"columns": columns, "sink": sink, "scale": scale}
            found = self._ops.attend_kv(*at, q, k, v, **how)
            as_given = {**how, "sink": given[2], "scale": given[3]}
            self._writes.note("attend_kv", (given[0], k, v), as_given, (q, k, v, *how.values()))
            return found
        if spec.window is not None:
            self._require("window", "attend")
        if spec.entries is not None:
            self._require_entries("entries", "attend")
            if context.far and context.is_far(owner := self._owner("entries").number):
                selected, at = fetched(context, owner, named, f"{self._where}.attend"), (context.held, *at[1:])
        rows = self._writes.unwritten("window")
        how: dict[str, Any] = {"rows": rows[0] if rows else None, "sink": sink, "scale": scale, "rope": rope}
        found = self._ops.attend(*at, q, selected, **how)
        if not context.far:
            as_given = {"rows": how["rows"], **dict(zip(HOW, given[2:], strict=True))}
            self._writes.note("attend", given[:2], as_given, (q, selected, *how.values()))
        return found

    def _attend_again(self, q: Any, selected: Any, sink: Any, scale: Any, rope: Any) -> Any:
        """``attend``, where its arguments are known to pass; ``UNKNOWN``, with nothing done, else."""
        context, spec, writes = self._context, self._spec, self._writes
        if not context.known or context.far:
            return UNKNOWN
        if spec.kv is not None:
            if selected is not None or rope is not None or ("kv" not in writes.own and self._tokens):
                return UNKNOWN
            how = {"columns": self._kv_columns(spec.kv, ended=True), "sink": sink, "scale": scale}
            return writes.again("attend_kv", (q, *(writes.unwritten("kv") or NO_STREAMS)), how)
        if spec.window is not None:
            self._require("window", "attend")
        if spec.entries is not None:
            self._require_entries("entries", "attend")
        rows = writes.unwritten("window")
        how = {"rows": rows[0] if rows else None, "sink": sink, "scale": scale, "rope": rope}
        return writes.again("attend", (q, selected), how)

    def _decode_options(self, index: Any, k: int | None, *, rotate: bool) -> dict[str, Any]:
        """Of ``decode``, what the step tells."""
        keys, columns = self._spec.index_keys, None
        if index is not None and keys is not None:
            k, columns = keys.topk if k is None else k, self._context.within(keys.ratio)
        return {"rotate": rotate, "newest": self._context.most_new, "k": k, "columns": columns}

    def _takes_whole(self, given: dict[str, Any], index: Any) -> bool:
        """Whether a layer that shares nothing is given all of its rows, with nothing to fetch or settle before."""
        memo, context = self._plan.memo, self._context
        if "whole" not in memo:
            spec = self._spec
            roles = {role for role in ("window", "tail", "index_tail") if getattr(spec, role) is not None}
            alone = all(getattr(component, "shared_from", None) is None for _, component in spec.components())
            memo["whole"] = roles if alone and (spec.entries is None or spec.tail is not None) else None
        if given.keys() != memo["whole"] or (index is not None and self._spec.index_keys is None):
            return False
        return not context.far and (context.unflushed is None or context.unflushed is self._writes)

    def _asked_of_whole(
        self, given: dict[str, Any], index: Any, k: Any, flushing: tuple[Any, ...], attending: tuple[Any, ...]
    ) -> WholeLayer:
        """Of ``decode``, what its verbs are given by all but the window's rotation, checked as they do."""
        context, keys, columns = self._context, self._spec.index_keys, 0
        rows: dict[str, tuple[Array, ...]] = {}
        for role, arrays in given.items():
            rows[role] = self._rows(role, arrays)
            context.check_outside(f"append_{role}", rows[role])
        compression, closed = Compression(), 0
        if "tail" in given:
            context.check_outside("flush", flushing)
            entries = self._own_entries("flush")
            compression, closed = (
                Compression(*self._flush_options(entries, *flushing)),
                context.closed_count(entries.ratio),
            )
        if index is not None and keys is not None:
            index, columns = self._index_queries("index_select", *index), self._columns("index_select", keys)
            k = keys.topk if k is None else check_count(ShapeError, "index_select: k", k, 0)
        q, _, sink, scale, rope = self._attend_arguments(*attending)
        return WholeLayer(
            q=q,
            rows=rows,
            rotation=NONE,
            now=NONE,
            compression=compression,
            closed=closed,
            newest=context.most_new,
            indexer=index,
            k=k or 0,
            columns=columns,
            sink=sink,
            scale=scale,
            rope=rope,
        )

    def _attend_arguments(self, q: Any, selected: Any, sink: Any, scale: Any, rope: Any) -> tuple[Any, ...]:
        """Arguments of ``attend`` of a latent layer, checked."""
        component = self._spec.window or self._component("entries", Entries)
        q = check_float(self._ops, q, "attend: q", (self._tokens, None, component.dim))
        if selected is not None:
            self._component("entries", Entries)
            selected = check_indices(self._ops, selected, "attend: selected", self._tokens)
        sink = None if sink is None else check_float(self._ops, sink, "attend: sink", (q.shape[1],))
        scale = None if scale is None else check_number(scale, "attend: scale")
        return q, selected, sink, scale, check_rope(self._ops, rope, "attend: rope", component.dim)

    def decode(
        self,
        q: Given,
        window: Given,
        *,
        tail: tuple[Given, Given] | None = None,
        index_tail: tuple[Given, Given] | None = None,
        index: tuple[Given, Given] | None = None,
        k: int | None = None,
        rope: Rope | Given | None = None,
        rotate: bool = False,
        window_norm_weight: Given | None = None,
        norm_weight: Given | None = None,
        index_norm_weight: Given | None = None,
        eps: float = 1e-6,
        sink: Given | None = None,
        scale: float | None = None,
    ) -> Attention:
        """All that a latent layer does with its cache in a step: its verbs one by one, in less of the host's time.

        That is ``append_window``, ``append_tail``, ``append_index_tail``, ``flush``, ``index_select`` and ``attend``,
        of which those in the middle go by what is given. Raises as they do; what came before may then be done. JAX
        compiles one program for it, a prompt's steps as well as a decode's.

        Args:
            q: [T, H, d], as for ``attend``.
            window: rows [T, d], as for ``append_window``.
            tail: (kv, score), as for ``append_tail``; a flush follows.
            index_tail: likewise.
            index: (q [T, H, d], weights [T, H]) of the indexer; None attends to every entry.
            k: entries that the indexer picks; as many as the spec says unless given.
            rope: of the entries that close, and back, of what attention gives.
            rotate: whether the window's rows are rotated on their way, too, and normed if there is a
                ``window_norm_weight``.
            norm_weight: of the flush, as ``index_norm_weight``.
            eps: of all norms.
            sink: as for ``attend``, as ``scale``.

        Example:
            >>> cache, step = cache_of(swa)
            >>> with step:
            ...     out, lse = step.layer(0).decode(rows(6, 4, 512), rows(6, 512))
            >>> out.shape
            (6, 4, 512)
        """
        context, writes = self._context, self._writes
        context.check_open()
        if rotate and rope is None:
            raise ShapeError(got="rotate without a rotation", where="decode: rotate", allowed="rope")
        rows = {"window": (window,), "tail": tail, "index_tail": index_tail}
        given = {role: arrays for role, arrays in rows.items() if arrays is not None}
        whole, arguments, options = self._takes_whole(given, index), (), {}
        if whole and context.whole is not None and (rotate or window_norm_weight is None):
            rotation = self._rotation(rope, window_norm_weight, eps) if rotate else NONE
            flushing = norm_weight, eps, rope, index_norm_weight
            asked = self._asked_of_whole(given, index, k, flushing, (q, None, sink, scale, rope))
            found = whole_layers.store_and_attend(writes, asked._replace(rotation=rotation), self._flushed[0])
            if found is not None:
                return found
        whole = whole and bool(context.known)
        if whole:
            arguments = q, window, *(tail or NO_STREAMS), *(index_tail or NO_STREAMS), *(index or NO_STREAMS)
            options = self._decode_options(index, k, rotate=rotate) | {
                "window_norm_weight": window_norm_weight,
                "rope": rope,
                "eps": eps,
                "norm_weight": norm_weight,
                "index_norm_weight": index_norm_weight,
                "sink": sink,
                "scale": scale,
            }
            found = writes.decode_again(given, arguments, options)
            if found is not UNKNOWN:
                writes.stored.update(self._flushed[0] if tail is not None else ())
                return found
        before = context.gone_on
        self.append_window(window, rope=rope if rotate else None, norm_weight=window_norm_weight, eps=eps)
        if tail is not None:
            self.append_tail(*tail)
        if index_tail is not None:
            self.append_index_tail(*index_tail)
        if tail is not None:
            self.flush(norm_weight, eps, rope, index_norm_weight)
        selected = None if index is None else self.index_select(*index, k)
        found = self.attend(q, selected, sink, scale, rope=rope)
        if whole and context.gone_on - before == 2 + (tail is not None) + (index is not None):
            writes.learn("decode", arguments, options)
        return found

    def append_kv(self, k: Given, v: Given) -> None:
        """Encode and store the step's keys and values: k [T, key_heads, key_dim], v [T, value_heads, value_dim].

        Example:
            >>> cache, step = cache_of(classic)
            >>> with step:
            ...     step.layer(0).append_kv(rows(6, 8, 128), rows(6, 8, 128))
            ...     k, v, positions = step.layer(0).gather_kv()
            >>> k.shape, positions.tolist()
            ((1, 6, 8, 128), [[0, 1, 2, 3, 4, 5]])
        """
        self._append("kv", k, v)

    def gather_kv(self) -> tuple[Array, Array, Array]:
        """Rows that the step's queries may see, in position order: k, v [Q, n, heads, dim], positions [Q, n]."""
        kv = self._component("kv", KV)
        index, rows = self._writes.readable("kv")
        k, v = rows or (None, None)
        columns = self._kv_columns(kv, ended="kv" in self._writes.own)
        return self._ops.gather_kv(self._context.pools, self._layer, index, k, v, columns=columns)

    def kv_view(self) -> tuple[Array, Array] | None:
        """What ``gather_kv`` returns after the append, k and v [Q, n, heads, dim], without copying; None if it must be.

        The arrays are the pools' own memory: for reading, until the step ends. Possible on backends that have views,
        in a plain format, where all requests see equally many rows and each of them in one run: of blocks, of a slot,
        or of a ring that has not wrapped between them or lies there twice (``by_head``).
        """
        kv = self._component("kv", KV)
        if "kv" not in self._writes.own or self._writes.unwritten("kv") is not None:
            return None
        columns = self._kv_columns(kv, ended=True)
        return self._ops.kv_view(self._context.pools, self._layer, self._index, columns=columns)

    def append_kv_view(self, k: Given, v: Given) -> tuple[Array, Array] | None:
        """``append_kv``, then ``kv_view``: all that a decode step does whose attention is the caller's."""
        kv, context = self._component("kv", KV), self._context
        memo, key = context.memo, ("append_kv_view", kv)
        if context.traced is not None:
            context.check_outside("append_kv_view", (k, v))
        if key not in memo:
            at_once = kv.tail is None and self._writes.writing("kv") == AT_ONCE
            memo[key] = at_once, self._kv_columns(kv, ended=True)
        at_once, columns = memo[key]
        if not at_once or "kv" in self._writes.own:
            self.append_kv(k, v)
            return self.kv_view()
        passes = None if context.check else context.key_of("kv", self._layer, (k, v))
        if passes not in context.passed:
            checked = self._rows("kv", (k, v))
            context.passes(passes, (k, v), checked)
            k, v = checked
        pools, views = self._ops.append_kv_view(context.pools, self._layer, self._index, k, v, columns=columns)
        context.replace(pools)
        self._writes.own["kv"] = k, v
        return views

    def mask(self) -> Array:
        """What each query may see of ``gather_kv``'s rows once the step's are appended: [T, n] bool.

        Example:
            >>> cache, step = cache_of(classic)
            >>> step.layer(0).append_kv(rows(6, 8, 128), rows(6, 8, 128))
            >>> step.layer(0).mask()[:2].astype(int).tolist()
            [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]
            >>> step.abort()
        """
        kv = self._component("kv", KV)
        return self._ops.mask(self._layer, self._index, columns=self._kv_columns(kv, ended=True))

    def visible_rows(self) -> VisibleRows:
        """The mask with what it was made from: positions [Q, n] of the rows, -1 where there is none; valid [T, n]."""
        kv = self._component("kv", KV)
        return self._ops.visible_rows(self._layer, self._index, columns=self._kv_columns(kv, ended=True))

    def read_state(self) -> Array:
        """The states that the step's tokens go on from, one a request: [Q, heads, key_dim, value_dim].

        Zeros for a request without tokens. In a step without tokens they are the states of the requests as they are.

        Raises:
            StepError: the layer has no state, its new one is written already, or a request's length has none.
        """
        self._check_state("read_state")
        return self._ops.read_state(self._context.pools, self._layer, self._index)

    def state_view(self) -> Array:
        """What ``read_state`` gives, where it lies if that can be: for reading alone, and only until the write.

        The pool's own memory on backends that work in place, in a plain format, where the requests lie in slots that
        follow each other, have tokens, and their states are in the same row of the ring, as they always are without
        drafts. Else it is gathered. Raises as ``read_state``.

        Example:
            >>> from kvcore.spec import State
            >>> import numpy as np
            >>> cache, step = cache_of(kvcore.spec.LayerSpec(state=State(heads=2, key_dim=3)))
            >>> with step:
            ...     step.layer(0).write_state(np.ones((1, 2, 3), np.float32))
            >>> with cache.step({cache.requests[0]: 0}) as step:
            ...     np.shares_memory(step.layer(0).state_view(), cache.pools["0.state.page"])
            True
        """
        self._check_state("state_view")
        rows, (region,) = self._context.rows, self._plan.regions["state"]
        view = getattr(self._ops, "state_view", None)
        if view is not None and rows and len(rows) == self._index.slots.shape[0]:
            first, ring = rows[0], region.rows
            place = (first.start - 1) % ring
            if all(
                row.start and row.slot == first.slot + number and (row.start - 1) % ring == place
                for number, row in enumerate(rows)
            ):
                found = view(self._context.pools, self._layer, first.slot, len(rows), place)
                if found is not None:
                    return found
        return self._ops.read_state(self._context.pools, self._layer, self._index)

    def _check_state(self, verb: str) -> None:
        """Refuse to read a state that is written already, or that belongs to no length."""
        self._component("state", State)
        if "state" in self._writes.own:
            raise StepError(got=f"{verb} after the write", where=self._where, allowed=f"{verb}, then write_state")
        if self._context.stateless:
            request = self._context.stateless[0]
            raise StepError(
                got=f"request {request.id}, of whose {request.length} tokens there is no state",
                where=self._where,
                allowed="a request whose last step wrote this layer's state",
                hint="Truncate it to a length that main layers were stepped to.",
            )

    def write_state(self, states: Given) -> None:
        """Store the state after each request's last token: [Q, heads, key_dim, value_dim], fp32 or bf16.

        The lengths in between get none, and ``truncate`` refuses them. Requests without new tokens keep theirs.

        Raises:
            ShapeError: wrong shape, dtype or device. StepError: no state, or it was written already.
            NonFiniteError: a value is NaN or infinite, under ``check=True``.
        """
        state = self._component("state", State)
        states = check_float(self._ops, states, "write_state: states", (self._index.slots.shape[0], *state.shape))
        self._check(states, "write_state: states", state, rows=len(self._context.rows))
        self._writes.append_last("state", states)

    def append_state(self, states: Given) -> None:
        """Store the state after every token: [T, heads, key_dim, value_dim]; what drafts need to be rolled back.

        ``truncate`` then goes back to any of the last ``max_draft_tokens`` lengths. Raises as ``write_state``.
        """
        self._append("state", states)

    def append_conv(self, rows: Given) -> None:
        """Store the step's inputs of the short convolution: rows [T, channels], fp32 or bf16.

        Raises:
            ShapeError: wrong shape, dtype or device. StepError: no convolution, or it already got its inputs.
            NonFiniteError: a value is NaN or infinite, under ``check=True``.
        """
        self._append("conv", rows)

    def gather_conv(self) -> Array:
        """The inputs right before the step's, oldest first: [Q, width - 1, channels]; zeros before the first token.

        Before the step's own were appended and after that alike.
        """
        self._component("conv", Conv)
        return self._ops.gather_conv(self._context.pools, self._layer, self._index)

    def append_rows(self, role: str, *values: Given) -> None:
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
        if role in WRITERS or role in DERIVED or not component.written_by_step:
            writer = WRITERS.get(DERIVED.get(role, role))
            allowed = writer if writer and role in self._spec.written else "a role whose rows are the step's tokens"
            raise StepError(got=f"append_rows({role!r})", where=self._where, allowed=allowed)
        self._append(role, *values)

    def gather_rows(self, role: str) -> RawRows:
        """A role's live rows in position order as canonical bytes: rows [Q, n, row_bytes] uint8, positions [Q, n].

        Tail rows are fp32 kv then score; K-V rows are the key heads, then the value heads; entries are at position m·i.
        """
        component = self._component(role)
        if component.written_by_step:
            index, rows = self._writes.readable(role)
            rows = None if rows is None else self._writes.parts(role)
        else:
            index, rows = self._paged_index(role), None
        columns = max((len(component.live(length)) for length in self._lengths(index)), default=0)
        return self._ops.gather_rows(self._context.pools, self._layer, role, index, rows, columns=columns)

    def window_view(self) -> RingView:
        """The window's raw buffers and slots, zero-copy, for outside kernels. Rows appended in this step are in it.

        Raises:
            StepError: the step brings more tokens than the ring has spare rows, so its rows wait for the commit.
        """
        self._component("window", Window)
        if "window" in self._writes.waiting:
            raise StepError(
                got=f"{max(row.new for row in self._context.rows)} new tokens of one request",
                where=f"{self._where}.window_view",
                allowed="at most 1 + max_draft_tokens",
                hint="Use attend, or commit first: a long step's rows overwrite what its own queries need.",
            )
        (region,) = self._plan.regions["window"]
        index, _ = self._writes.readable("window")
        return RingView(region.format, region.unit, self._buffers(region), index.slots, region.rows, index.lengths)

    def entries_view(self) -> PagedView:
        """The entries' raw buffers and block table, zero-copy."""
        return self._paged_view("entries")

    def indexer_view(self) -> PagedView:
        """The index keys' raw buffers and block table, zero-copy."""
        return self._paged_view("index_keys")

    def digest(self) -> int:
        """One number for everything this layer holds of the step's requests; equal on every backend and layout."""
        lanes: list[list[tuple[int, int]]] = [[] for _ in self._context.rows]
        for role, _ in self._spec.components():
            salt = digest.region_salt(self._context.plan.spec.owner(self._layer, role), role)
            found = to_numpy(self._ops.digest_rows(self.gather_rows(role), salt))
            for lane, pair in zip(lanes, found, strict=False):
                lane.append((int(pair[0]), int(pair[1])))
        return digest.combine([(row.length, lane) for row, lane in zip(self._context.rows, lanes, strict=True)])

    @property
    def _tokens(self) -> int:
        """Token rows of every input, padding included."""
        return self._context.tokens

    @property
    def _where(self) -> str:
        return f"step.layer({self._layer})"

    def _component(self, role: str, kind: type = Component) -> Any:
        """The layer's component of that role and kind, or a StepError that lists what the layer has."""
        self._context.check_open()
        component = getattr(self._spec, role) if role in self._spec.roles else None
        if not isinstance(component, kind):
            has = ", ".join(found for found, _ in self._spec.components())
            raise StepError(got=f"role {role!r}", where=self._where, allowed=f"a component of the layer: {has}")
        return component

    def _require(self, role: str, verb: str) -> None:
        """Verbs that see the step's new tokens need them appended first."""
        if self._tokens and role not in self._writes.own:
            raise StepError(
                got=f"{verb} before append_{role}", where=self._where, allowed=f"append_{role}, then {verb}"
            )

    def _require_entries(self, role: str, verb: str) -> None:
        """Verbs that let a query see the entries it completes need those stored first."""
        owner = self._owner(role)
        if role not in owner.stored and owner.awaits_entries(role):
            raise StepError(
                got=f"{verb} while entries that close in this step are not stored",
                where=self._where,
                allowed=f"step.layer({owner.number}).flush or store_entries, then {verb}",
            )

    def _owner(self, role: str) -> RingWrites:
        """What the layer got that owns the pool a role reads."""
        memo = self._plan.memo
        number = memo.get(role)
        if number is None:
            number = memo[role] = self._context.plan.spec.owner(self._layer, role)
        return self._layers[number]

    def _rows(self, role: str, values: Sequence[Given]) -> tuple[Array, ...]:
        """The step's rows of a role that the layer has, checked."""
        found = check_rows(self._ops, self._plan, role, values, self._tokens)
        if self._context.check:
            component = self._plan.component(role)
            for given, array in zip(inputs_of(self._plan, role), found, strict=True):
                self._check(array, given.where, component, minus_infinity=given.minus_infinity)
        return found

    def _append(self, role: str, *values: Given) -> None:
        context, given = self._context, values
        context.check_open()
        if self._writes.append_again(role, values, {}):
            return
        key = None if context.check else context.key_of(role, self._layer, values)
        if key not in context.passed:
            self._component(role)
            found = self._rows(role, values)
            context.passes(key, values, found)
            values = found
        self._writes.append(role, values)
        if role in ROWS_OF_TOKENS:
            self._writes.note(WRITERS[role], given, {}, values)

    def _index_again(self, verb: str, given: tuple[Any, ...]) -> Any:
        """What a verb of the indexer gives whose arguments are known to pass; ``UNKNOWN``, with nothing done, else."""
        self._context.check_open()
        keys = self._spec.index_keys
        if keys is None or not self._context.known:
            return UNKNOWN
        self._require_entries("index_keys", verb)
        return self._writes.again(verb, given, {"columns": self._columns(verb, keys)})

    def _columns(self, verb: str, keys: IndexKeys) -> int:
        """Keys that are looked at: those of the longest request; some more by a verb that does not give all numbers."""
        context = self._context
        return context.longest(keys.ratio) if verb == "index_scores" else context.within(keys.ratio)

    def _indexed(self, verb: str, q: Given, weights: Given) -> tuple[IndexKeys, Array, Array, int]:
        """The layer's keys, queries and weights that fit them, and how many keys the longest request has."""
        context = self._context
        context.check_open()
        key = context.key_of("index_scores", self._layer, (q, weights))
        if key not in context.passed:
            given = q, weights
            q, weights = self._index_queries(verb, q, weights)
            context.passes(key, given, (q, weights))
        keys: Any = self._spec.index_keys
        self._require_entries("index_keys", verb)
        return keys, q, weights, self._columns(verb, keys)

    def _index_queries(self, verb: str, q: Given, weights: Given) -> tuple[Array, Array]:
        """The indexer's queries and weights, checked."""
        keys: IndexKeys = self._component("index_keys", IndexKeys)
        q = check_float(self._ops, q, f"{verb}: q", (self._tokens, None, keys.dim), dtypes=INDEX_QUERIES)
        return q, check_float(self._ops, weights, f"{verb}: weights", (self._tokens, q.shape[1]))

    def _own_entries(self, verb: str) -> Entries:
        entries: Entries = self._component("entries", Entries)
        if entries.shared_from is not None:
            raise StepError(
                got=f"{verb} on a layer that shares layer {entries.shared_from}'s pool",
                where=self._where,
                allowed=f"{verb} on step.layer({entries.shared_from})",
            )
        return entries

    def _tail_rows(self, role: str, verb: str) -> tuple[Array, ...]:
        """The step's own tail rows (kv, score); empty ones in a step without tokens."""
        self._require(role, verb)
        if role in self._writes.own:
            return self._writes.own[role]
        empty = self._ops.asarray(np.zeros((0, getattr(self._spec, role).width), np.float32))
        return empty, empty

    def _gather_all(self, role: str) -> AllEntries:
        component = self._component(role, Entries)
        index = self._paged_index(role)
        columns = max((length // component.ratio for length in self._lengths(index)), default=0)
        return self._ops.gather_all_entries(self._context.pools, self._layer, index, columns=columns, role=role)

    def _kv_columns(self, kv: KV, *, ended: bool) -> int:
        memo, key = self._context.memo, ("columns", kv, ended)
        if key not in memo:
            spans = (
                (row.start, row.length if ended else row.start, row.left_padding or 0) for row in self._context.rows
            )
            memo[key] = max((len(kv.visible(*span)) for span in spans), default=0)
        return memo[key]

    def _attend_kv_arguments(self, q: Any, selected: Any, sink: Any, scale: Any, rope: Any) -> tuple[Any, ...]:
        """The same of a classic layer."""
        kv = self._component("kv", KV)
        q = check_float(self._ops, q, "attend: q", (self._tokens, None, kv.key_dim))
        heads = q.shape[1]
        for region in self._plan.regions["kv"]:
            if heads % region.heads:
                raise ShapeError(got=f"{heads} heads", where="attend: q", allowed=f"a multiple of {region.heads}")
        if selected is not None:
            raise ShapeError(got="selected entries", where="attend: selected", allowed="None on a classic layer")
        if rope is not None:
            raise ShapeError(got="a rotation", where="attend: rope", allowed="None on a classic layer")
        sink = None if sink is None else check_float(self._ops, sink, "attend: sink", (heads,))
        return q, None, sink, None if scale is None else check_number(scale, "attend: scale"), None

    def _paged_view(self, role: str) -> PagedView:
        component = self._component(role, Entries)
        (region,) = self._plan.regions[role]
        index = self._paged_index(role)
        counts = index.lengths // component.ratio
        return PagedView(region.format, region.unit, self._buffers(region), index.block_table, region.rows, counts)

    def _buffers(self, region: Region) -> dict[str, Array]:
        return {buffer: self._context.pools[name] for buffer, (name, _) in region.buffers.items()}

    def _paged_index(self, role: str) -> StepIndex:
        """The index to read all entries with, which must be there."""
        if self._context.far and role == "entries" and self._context.is_far(owner := self._owner(role).number):
            fetched(self._context, owner, None, self._where)
        return self._index_of_entries(role)

    def _index_of_entries(self, role: str) -> StepIndex:
        """The index to read entries with: their count of before the step until the step's entries are stored."""
        if self._owner(role).awaits_entries(role):
            return self._index._replace(lengths=self._index.starts)
        return self._index

    def _lengths(self, index: StepIndex) -> list[int]:
        """Host lengths that match an index from ``readable`` or ``_paged_index``."""
        ended = index.lengths is self._index.lengths
        return [row.length if ended else row.start for row in self._context.rows]

    def _check(
        self, array: Array, where: str, component: Component, *, minus_infinity: bool = False, rows: int | None = None
    ) -> None:
        """Under ``check=True``, refuse what is not finite in the first ``rows``, those of tokens unless given."""
        if self._context.check:
            self._context.check_outside(where, (array,))
            # Padding comes last, and its rows are ignored.
            given = to_numpy(array)[: self._context.numbers.tokens if rows is None else rows]
            check_finite(given, where, component, minus_infinity=minus_infinity)
