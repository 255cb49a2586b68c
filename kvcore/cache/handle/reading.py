"""Verbs that read: indexer scores, selection, attention; and the classic layers' keys and values."""

# pyright: reportPrivateUsage=false

from kvcore.cache.handle.state import AT_ONCE, LayerState
from kvcore.counts import check_count
from kvcore.errors import ShapeError
from kvcore.ops import Array, Attention, VisibleRows
from kvcore.ops.arguments import FLOATS, check_array, check_float, check_indices, check_number, check_rope, like
from kvcore.spec import KV, Entries, IndexKeys, Rope


class ReadingVerbs(LayerState):
    """T tokens of the step (padding included), Q requests, H query heads, n columns."""

    def index_scores(self, q: Array, weights: Array) -> Array:
        """Indexer scores: q [T, H, d], weights [T, H] -> [T, n] fp32, -inf where an entry is not visible.

        ``sum_h weights_h * relu(q_h . key_s)``; rotated key formats have q rotated here, callers never rotate.
        """
        keys = self._component("index_keys", IndexKeys)
        self._require_entries("index_keys", "index_scores")
        q = check_float(self._ops, q, "index_scores: q", (self._tokens, None, keys.dim))
        weights = check_float(self._ops, weights, "index_scores: weights", (self._tokens, q.shape[1]))
        columns = max((row.length // keys.ratio for row in self._step._rows), default=0)
        return self._ops.index_scores(self._pools, self._layer, self._index, q, weights, columns=columns)

    def select(self, scores: Array, k: int) -> Array:
        """Top-k entries of scores [T, n] -> [T, k] int32, highest first, ties to the lowest entry, -1 at the end."""
        self._step._check_open()
        # No gradient comes from an order.
        scores = check_array(self._ops, scores, "select: scores", (self._tokens, None), FLOATS)
        k = check_count(ShapeError, "select: k", k, 0)
        return self._ops.select(scores, k)

    def attend(
        self,
        q: Array,
        selected: Array | None = None,
        sink: Array | None = None,
        scale: float | None = None,
        *,
        rope: Rope | Array | None = None,
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
        """
        self._step._check_open()
        if self._spec.kv is not None:
            return self._attend_kv(q, selected, sink, scale, rope)
        component = self._spec.window or self._component("entries", Entries)
        q = check_float(self._ops, q, "attend: q", (self._tokens, None, component.dim))
        if selected is not None:
            self._component("entries", Entries)
            selected = check_indices(self._ops, selected, "attend: selected", self._tokens)
        if self._spec.window is not None:
            self._require("window", "attend")
        if self._spec.entries is not None:
            self._require_entries("entries", "attend")
        rows = self._unwritten("window")
        return self._ops.attend(
            self._pools,
            self._layer,
            self._index,
            q,
            selected,
            rows=rows[0] if rows else None,
            sink=None if sink is None else check_float(self._ops, sink, "attend: sink", (q.shape[1],)),
            scale=None if scale is None else check_number(scale, "attend: scale"),
            rope=check_rope(self._ops, rope, "attend: rope", component.dim),
        )

    def append_kv(self, k: Array, v: Array) -> None:
        """Encode and store the step's keys and values: k [T, key_heads, key_dim], v [T, value_heads, value_dim]."""
        kv = self._component("kv", KV)
        self._append("kv", self._checked_kv(kv, k, v))

    def _checked_kv(self, kv: KV, k: Array, v: Array) -> tuple[Array, Array]:
        tokens, (keys, values) = self._tokens, self._step.cache.plan.region(self._layer, "kv")
        k = check_float(self._ops, k, "append_kv: key", (tokens, keys.heads, keys.format.dim))
        v = check_float(self._ops, v, "append_kv: value", (tokens, values.heads, values.format.dim))
        if self._step.cache._check:
            self._check(k, "append_kv: key", kv)
            self._check(v, "append_kv: value", kv)
        return k, v

    def gather_kv(self) -> tuple[Array, Array, Array]:
        """Rows that the step's queries may see, in position order: k, v [Q, n, heads, dim], positions [Q, n]."""
        kv = self._component("kv", KV)
        index, rows = self._state("kv")
        k, v = rows or (None, None)
        columns = self._kv_columns(kv, ended="kv" in self._own)
        return self._ops.gather_kv(self._pools, self._layer, index, k, v, columns=columns)

    def borrow_kv(self) -> tuple[Array, Array] | None:
        """What ``gather_kv`` returns after the append, k and v [Q, n, heads, dim], without copying; None if it must be.

        The arrays are the pools' own memory: for reading, until the step ends. Possible on backends that have views,
        in a plain format, where all requests see equally many rows and each of them in one run: of blocks, of a slot,
        or of a ring that has not wrapped between them or lies there twice (``by_head``).
        """
        kv = self._component("kv", KV)
        if "kv" not in self._own or "kv" in self._waiting:
            return None
        step, columns = self._step, self._kv_columns(kv, ended=True)
        return self._ops.borrow_kv(step.cache.pools, self._layer, step._device_index, columns=columns)

    def append_borrow_kv(self, k: Array, v: Array) -> tuple[Array, Array] | None:
        """``append_kv``, then ``borrow_kv``: all that a decode step does whose attention is the caller's."""
        kv, step = self._component("kv", KV), self._step
        cache, key = step.cache, ("append_borrow", kv)
        if cache._traced is not None:
            cache._check_outside("append_borrow_kv", (k, v))
        if key not in step._kept:
            step._kept[key] = self._writing("kv", kv) == AT_ONCE, self._kv_columns(kv, ended=True), []
        at_once, columns, passed = step._kept[key]
        if not at_once or "kv" in self._own:
            self.append_kv(k, v)
            return self.borrow_kv()
        # Arrays like those that passed as they are for another layer pass here: a decode step is many small ones.
        likes = like(k), like(v)
        if likes not in passed or cache._check:
            checked = self._checked_kv(kv, k, v)
            if checked[0] is k and checked[1] is v and self._ops.in_place:
                passed.append(likes)
            k, v = checked
        pools, lent = self._ops.append_borrow_kv(cache.pools, self._layer, step._device_index, k, v, columns=columns)
        cache._replace_pools(pools)
        self._own["kv"] = k, v
        return lent

    def mask(self) -> Array:
        """What each query may see of ``gather_kv``'s rows once the step's are appended: [T, n] bool."""
        kv = self._component("kv", KV)
        return self._ops.mask(self._layer, self._index, columns=self._kv_columns(kv, ended=True))

    def visible_rows(self) -> VisibleRows:
        """The mask with what it was made from: positions [Q, n] of the rows, -1 where there is none; valid [T, n]."""
        kv = self._component("kv", KV)
        return self._ops.visible_rows(self._layer, self._index, columns=self._kv_columns(kv, ended=True))

    def _kv_columns(self, kv: KV, *, ended: bool) -> int:
        kept, key = self._step._kept, ("columns", kv, ended)
        if key not in kept:
            spans = ((row.start, row.length if ended else row.start, row.left_padding or 0) for row in self._step._rows)
            kept[key] = max((len(kv.visible(*span)) for span in spans), default=0)
        return kept[key]

    def _attend_kv(
        self, q: Array, selected: Array | None, sink: Array | None, scale: float | None, rope: Rope | Array | None
    ) -> Attention:
        kv = self._component("kv", KV)
        q = check_float(self._ops, q, "attend: q", (self._tokens, None, kv.key_dim))
        heads = q.shape[1]
        for region in self._step.cache.plan.region(self._layer, "kv"):
            if heads % region.heads:
                raise ShapeError(got=f"{heads} heads", where="attend: q", allowed=f"a multiple of {region.heads}")
        if selected is not None:
            raise ShapeError(got="selected entries", where="attend: selected", allowed="None on a classic layer")
        if rope is not None:
            raise ShapeError(got="a rotation", where="attend: rope", allowed="None on a classic layer")
        self._require("kv", "attend")
        k, v = self._unwritten("kv") or (None, None)
        return self._ops.attend_kv(
            self._pools,
            self._layer,
            self._index,
            q,
            k,
            v,
            columns=self._kv_columns(kv, ended=True),
            sink=None if sink is None else check_float(self._ops, sink, "attend: sink", (heads,)),
            scale=None if scale is None else check_number(scale, "attend: scale"),
        )
