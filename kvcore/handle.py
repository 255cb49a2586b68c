"""One layer in one step: the verbs that a model calls.

The handle is the door: it checks every argument, then calls the backend's verbs with the step's index. It also keeps the
promise that a step reads old rows from the pools and new rows from itself: a ring row is written at once only while
nothing in the step can still need the row it overwrites, and at commit otherwise; what was overwritten at once is put
back if the step fails.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore import digest
from kvcore.arguments import check_array, check_finite, check_float, check_indices, check_weight
from kvcore.errors import ShapeError, StepError
from kvcore.ops import AllEntries, Attention, Closed, PagedView, RawRows, RingView, SelectedEntries, WindowRows
from kvcore.spec import KV, TAIL_OF, Component, Entries, LayerSpec, Rope, Tail, Window
from kvcore.step import at_start, closed_count

if TYPE_CHECKING:
    from kvcore.cache import Step

Array = Any


class LayerHandle:
    """One layer's cache during one step. Shapes: T tokens of the step (padding included), Q requests, H query heads."""

    def __init__(self, step: "Step", layer: int) -> None:
        self._step = step
        self._layer = layer
        self._spec: LayerSpec = step.cache.spec.all_layers[layer]
        self._ops = step.cache.ops
        # Role -> the step's own rows, one array a part, as given; present once the role was appended to.
        self._own: dict[str, tuple[Array, ...]] = {}
        # Roles whose ring rows wait for the commit; roles written at once -> what they overwrote.
        self._waiting: list[str] = []
        self._overwritten: dict[str, Array] = {}
        self._stored: set[str] = set()

    def append_window(self, rows: Array) -> None:
        """Encode and store the window rows of the step's tokens: rows [T, d], fp32 or bf16.

        Raises:
            ShapeError: wrong shape, dtype or device. StepError: the layer has no window, or already got its rows.
            NonFiniteError: a value is NaN or infinite, under ``check=True``.
        """
        window = self._component("window", Window)
        rows = check_float(self._ops, rows, "append_window: rows", (self._tokens, window.dim))
        self._check(rows, "append_window: rows", window)
        self._append("window", (rows,))

    def append_tail(self, kv: Array, score: Array) -> None:
        """Store the compressor's raw rows: kv and score [T, width] fp32, score with its positional bias.

        ``width`` is 2·dim with overlap (carry half first, then cur half), else dim.
        """
        self._append_tail("tail", kv, score)

    def append_index_tail(self, kv: Array, score: Array) -> None:
        """The same for the indexer's compressor."""
        self._append_tail("index_tail", kv, score)

    def flush(
        self,
        norm_weight: Array | None = None,
        eps: float = 1e-6,
        rope: Rope | Array | None = None,
        index_norm_weight: Array | None = None,
    ) -> None:
        """Compress and store every entry whose window closed in this step; then its index keys.

        Args:
            norm_weight: [d] weight of the RMS norm after pooling; None for no norm.
            eps: of both norms.
            rope: rotation of the last channels at position m·i: a Rope, or fp32 inverse frequencies; None for none.
            index_norm_weight: [d of the index keys], as ``norm_weight``.

        Raises:
            StepError: the step's tail rows were not appended first, or the pool belongs to another layer.
        """
        entries = self._own_entries("flush")
        streams: list[Array] = []
        weights = {"entries": norm_weight, "index_keys": index_norm_weight}
        for role, tail in TAIL_OF.items():
            if getattr(self._spec, tail) is None:
                streams += [None, None]
                continue
            if self._tokens and tail not in self._own:
                raise StepError(
                    got=f"flush before append_{tail}", where=self._where, allowed=f"append_{tail}, then flush"
                )
            streams += self._own.get(tail) or self._empty_tail(tail)
            if weights[role] is not None:
                weights[role] = check_weight(self._ops, weights[role], f"flush: {role} norm weight", self._dim(role))
        if self._spec.tail is None:
            raise StepError(got="no tail", where=self._where, allowed="store_entries", hint="flush compresses a tail.")
        closed = closed_count(self._step.rows, entries.ratio)
        pools = self._ops.flush(
            self._pools,
            self._layer,
            self._index,
            *streams,
            closed=closed,
            norm_weight=weights["entries"],
            eps=float(eps),
            rope=self._rope(rope),
            index_norm_weight=weights["index_keys"],
        )
        self._step.cache.replace_pools(pools)
        self._stored |= {role for role, tail in TAIL_OF.items() if getattr(self._spec, tail) is not None}

    def store_entries(self, entries: Array, index_keys: Array | None = None) -> None:
        """Encode and store entries that the caller compressed: [closed, d], in the order of ``closed``.

        Args:
            entries: fp32 or bf16, one row for every entry that the step completes.
            index_keys: [closed, index d], likewise.
        """
        spec = self._own_entries("store_entries")
        count = closed_count(self._step.rows, spec.ratio)
        entries = check_float(self._ops, entries, "store_entries: entries", (count, spec.dim))
        self._check(entries, "store_entries: entries", spec)
        if index_keys is not None:
            keys = self._component("index_keys", Entries)
            index_keys = check_float(self._ops, index_keys, "store_entries: index_keys", (count, keys.dim))
            self._check(index_keys, "store_entries: index_keys", keys)
        pools = self._ops.store_entries(self._pools, self._layer, self._index, entries, index_keys)
        self._step.cache.replace_pools(pools)
        self._stored |= {"entries"} if index_keys is None else {"entries", "index_keys"}

    def compress(self, norm_weight: Array | None = None, eps: float = 1e-6) -> Array:
        """The latents of the entries that close in this step: pooled, normed, not rotated, not stored; [closed, d]."""
        entries = self._own_entries("compress")
        self._component("tail", Tail)
        if self._tokens and "tail" not in self._own:
            raise StepError(got="compress before append_tail", where=self._where, allowed="append_tail, then compress")
        if norm_weight is not None:
            norm_weight = check_weight(self._ops, norm_weight, "compress: norm_weight", entries.dim)
        kv, score = self._own.get("tail") or self._empty_tail("tail")
        return self._ops.compress(
            self._pools,
            self._layer,
            self._index,
            kv,
            score,
            closed=closed_count(self._step.rows, entries.ratio),
            norm_weight=norm_weight,
            eps=float(eps),
        )

    @property
    def closed(self) -> Closed:
        """Entries that close in this step, in storing order: (request_index [n], entry_index [n]), int32."""
        ratio = self._component("entries", Entries).ratio
        return self._ops.closed(self._layer, self._index, closed_count(self._step.rows, ratio))

    def gather_window(self) -> WindowRows:
        """The last min(length, W) rows: values [Q, C, d], positions [Q, C]; the step's own once appended."""
        self._component("window", Window)
        return self._ops.gather_window(self._pools, self._layer, *self._ring_state("window"))

    def gather_entries(self, indices: Array) -> SelectedEntries:
        """Entries by index: indices [T, k] int32 or int64 -> values [T, k, d], valid [T, k]; invalid ones are zeros."""
        self._component("entries", Entries)
        indices = check_indices(self._ops, indices, "gather_entries: indices", self._tokens)
        return self._ops.gather_entries(self._pools, self._layer, self._paged_index("entries"), indices)

    def gather_all_entries(self) -> AllEntries:
        """Every entry: values [Q, n, d], counts [Q], positions [Q, n]."""
        return self._gather_all("entries")

    def gather_all_index_keys(self) -> AllEntries:
        """Every index key, decoded (rotated ones stay rotated): values [Q, n, d], counts [Q], positions [Q, n]."""
        return self._gather_all("index_keys")

    def gather_rows(self, role: str) -> RawRows:
        """A role's live rows in position order as canonical bytes: rows [Q, n, row_bytes] uint8, positions [Q, n]."""
        component = self._component(role, Component)
        if component.growth == "block" and role != "kv":
            index, rows = self._paged_index(role), None
        else:
            index, rows = self._ring_state(role, as_tuple=True)
        lengths = self._lengths(ended=role in self._own or (role in self._stored or self._shared(role)))
        columns = max((len(component.live(length)) for length in lengths), default=0)
        return self._ops.gather_rows(self._pools, self._layer, role, index, rows, columns=columns)

    def index_scores(self, q: Array, weights: Array) -> Array:
        """Indexer scores: q [T, H, d], weights [T, H] -> [T, n] fp32, -inf where an entry is not visible.

        ``sum_h weights_h * relu(q_h . key_s)``; rotated key formats have q rotated here, callers never rotate.
        """
        keys = self._component("index_keys", Entries)
        q = check_float(self._ops, q, "index_scores: q", (self._tokens, None, keys.dim))
        weights = check_float(self._ops, weights, "index_scores: weights", (self._tokens, q.shape[1]))
        columns = max((row.length // keys.ratio for row in self._step.rows), default=0)
        return self._ops.index_scores(self._pools, self._layer, self._index, q, weights, columns=columns)

    def select(self, scores: Array, k: int) -> Array:
        """Top-k entries of scores [T, n] -> [T, k] int32, highest first, ties to the lowest entry, -1 at the end."""
        scores = check_float(self._ops, scores, "select: scores", (self._tokens, None))
        if not isinstance(k, int) or isinstance(k, bool) or k < 0:
            raise ShapeError(got=k, where="select: k", allowed="an integer, 0 or more")
        return self._ops.select(scores, k)

    def attend(
        self, q: Array, selected: Array | None = None, sink: Array | None = None, scale: float | None = None
    ) -> Attention:
        """Attention of the step's queries to this layer's cache.

        Latent layers: q [T, H, d] against the window and the selected entries (None: every visible one; [T, 0]: none).
        Classic layers: q [T, H, key_dim], out [T, H, value_dim]; ``selected`` does not apply.

        Args:
            selected: [T, k] int32 or int64, distinct per token; -1 and invisible ones are ignored.
            sink: [H] fp32 logits that count in the denominator only.
            scale: of the logits; the key dim to the power -0.5 unless given.

        Returns:
            out in q's dtype, and lse [T, H] fp32 without the sink; 0 and -inf for a query without keys.
        """
        if self._spec.kv is not None:
            return self._attend_kv(q, selected, sink, scale)
        component = self._spec.window or self._component("entries", Entries)
        q = check_float(self._ops, q, "attend: q", (self._tokens, None, component.parts[0].format.dim))
        if selected is not None:
            self._component("entries", Entries)
            selected = check_indices(self._ops, selected, "attend: selected", self._tokens)
        rows = self._own_or_none("window")
        if self._spec.window is not None and self._tokens and "window" not in self._own:
            raise StepError(
                got="attend before append_window", where=self._where, allowed="append_window, then attend"
            )
        return self._ops.attend(
            self._pools,
            self._layer,
            self._index,
            q,
            selected,
            rows=rows[0] if rows else None,
            sink=None if sink is None else check_weight(self._ops, sink, "attend: sink", q.shape[1]),
            scale=scale,
        )

    def append_kv(self, k: Array, v: Array) -> None:
        """Encode and store the step's keys and values: k [T, key_heads, key_dim], v [T, value_heads, value_dim]."""
        kv = self._component("kv", KV)
        arrays = []
        for part, array in zip(kv.parts, (k, v), strict=True):
            shape = (self._tokens, part.heads, part.format.dim)
            arrays.append(check_float(self._ops, array, f"append_kv: {part.name}", shape))
            self._check(arrays[-1], f"append_kv: {part.name}", kv)
        self._append("kv", tuple(arrays))

    def gather_kv(self) -> tuple[Array, Array, Array]:
        """Rows that the step's queries may see, in position order: k, v [Q, n, heads, dim], positions [Q, n]."""
        kv = self._component("kv", KV)
        index, rows = self._ring_state("kv", as_tuple=True)
        k, v = rows or (None, None)
        return self._ops.gather_kv(self._pools, self._layer, index, k, v, columns=self._kv_columns(kv))

    def mask(self) -> Array:
        """What each query may see of ``gather_kv``'s rows: [T, n] bool."""
        kv = self._component("kv", KV)
        return self._ops.mask(self._layer, self._index, columns=self._kv_columns(kv, ended=True))

    def window_view(self) -> RingView:
        """The window's raw buffers and slots, zero-copy, for outside kernels. Rows appended in this step are in it.

        Raises:
            StepError: the step brings more tokens than the ring has spare rows, so its rows wait for the commit.
        """
        self._component("window", Window)
        if "window" in self._waiting:
            raise StepError(
                got=f"{max(row.new for row in self._step.rows)} new tokens",
                where=f"{self._where}.window_view",
                allowed="at most 1 + max_draft_tokens new tokens of a request",
                hint="Use attend, or commit first: a long step's rows overwrite what its own queries need.",
            )
        (region,) = self._step.cache.plan.region(self._layer, "window")
        index = self._index
        lengths = index.lengths if "window" in self._own else index.starts
        return RingView(
            region.format, region.unit, self._buffers(region), index.slots, region.rows, lengths
        )

    def entries_view(self) -> PagedView:
        """The entries' raw buffers and block table, zero-copy."""
        return self._paged_view("entries")

    def indexer_view(self) -> PagedView:
        """The index keys' raw buffers and block table, zero-copy."""
        return self._paged_view("index_keys")

    def digest(self) -> int:
        """One number for everything this layer holds of the step's requests; equal on every backend and layout."""
        lanes: list[list[tuple[int, int]]] = [[] for _ in self._step.rows]
        for role, _ in self._spec.components():
            salt = digest.region_salt(self._step.cache.spec.owner(self._layer, role), role)
            found = self._step.cache.to_host(self._ops.digest_rows(self.gather_rows(role), salt))
            for request, pair in enumerate(found[: len(lanes)]):
                lanes[request].append((int(pair[0]), int(pair[1])))
        return digest.combine([(row.length, lane) for row, lane in zip(self._step.rows, lanes, strict=True)])

    def missing(self) -> list[str]:
        """Roles that new tokens should have reached but did not: what a commit refuses."""
        needed = [role for role in ("window", "tail", "kv") if getattr(self._spec, role) is not None]
        return [role for role in needed if role not in self._own and not (role == "tail" and "entries" in self._stored)]

    def unflushed(self) -> list[str]:
        """Paged roles whose entries closed in this step but were not stored: refused under ``check=True``."""
        found = []
        for role in TAIL_OF:
            component = getattr(self._spec, role)
            if component is None or component.shared_from is not None or role in self._stored:
                continue
            if closed_count(self._step.rows, component.ratio):
                found.append(role)
        return found

    def commit(self) -> None:
        """Write the ring rows that had to wait."""
        for role in self._waiting:
            self._write(role)
        self._waiting.clear()

    def abort(self) -> None:
        """Put back the ring rows that were overwritten."""
        for role, saved in self._overwritten.items():
            pools = self._ops.restore_ring(self._pools, self._layer, role, self._index, saved)
            self._step.cache.replace_pools(pools)
        self._overwritten.clear()

    @property
    def _tokens(self) -> int:
        return len(self._index.positions)

    @property
    def _index(self) -> Any:
        return self._step.index

    @property
    def _pools(self) -> Any:
        self._step.check_open()
        return self._step.cache.pools

    @property
    def _where(self) -> str:
        return f"step.layer({self._layer})"

    def _component(self, role: str, kind: type) -> Any:
        self._step.check_open()
        component = getattr(self._spec, role, None) if role in LayerSpec.__struct_fields__ else None
        if not isinstance(component, kind):
            has = ", ".join(found for found, _ in self._spec.components())
            raise StepError(got=f"role {role!r}", where=self._where, allowed=f"the layer's components: {has}")
        return component

    def _own_entries(self, verb: str) -> Any:
        entries = self._component("entries", Entries)
        if entries.shared_from is not None:
            raise StepError(
                got=f"{verb} on a layer that shares layer {entries.shared_from}'s pool",
                where=self._where,
                allowed=f"{verb} on step.layer({entries.shared_from})",
            )
        return entries

    def _append(self, role: str, arrays: tuple[Array, ...]) -> None:
        if role in self._own:
            raise StepError(got=f"a second append to {role}", where=self._where, allowed="one append a step")
        component = getattr(self._spec, role)
        self._own[role] = arrays
        if component.span is None:
            self._write(role)
            return
        region = self._step.cache.plan.region(self._layer, role)[0]
        newest = max((row.new for row in self._step.rows), default=0)
        # A query of the step sees one row less than the span that an aborted step must leave readable: that one row is
        # saved and put back. A tail's span has no such slack.
        slack = 0 if isinstance(component, Tail) else 1
        if newest > region.rows - component.span + slack:
            self._waiting.append(role)
            return
        self._overwritten[role] = self._ops.read_ring(self._pools, self._layer, role, self._index)
        self._write(role)

    def _write(self, role: str) -> None:
        append = {
            "window": self._ops.append_window,
            "tail": self._ops.append_tail,
            "index_tail": self._ops.append_index_tail,
            "kv": self._ops.append_kv,
        }[role]
        pools = append(self._pools, self._layer, self._index, *self._own[role])
        self._step.cache.replace_pools(pools)

    def _append_tail(self, role: str, kv: Array, score: Array) -> None:
        tail = self._component(role, Tail)
        shape = (self._tokens, tail.width)
        kv = check_float(self._ops, kv, f"append_{role}: kv", shape, only_fp32=True)
        score = check_float(self._ops, score, f"append_{role}: score", shape, only_fp32=True)
        self._check(kv, f"append_{role}: kv", tail)
        self._append(role, (kv, score))

    def _empty_tail(self, role: str) -> tuple[Array, Array]:
        empty = self._ops.asarray(np.zeros((0, getattr(self._spec, role).width), np.float32))
        return empty, empty

    def _own_or_none(self, role: str) -> tuple[Array, ...] | None:
        """The step's own rows where the ring does not hold them yet, else None: the pools have everything."""
        return self._own[role] if role in self._waiting else None

    def _ring_state(self, role: str, *, as_tuple: bool = False) -> tuple[Any, Any]:
        """(index, own rows) for reading a role: the start of the step before its append, the end after it."""
        self._step.check_open()
        if role not in self._own:
            return at_start(self._index), None
        rows = self._own_or_none(role)
        if rows is not None and getattr(self._spec, role).growth == "slot" and role in ("tail", "index_tail"):
            rows = (self._ops.join(rows),)
        return self._index, rows if rows is None or as_tuple else rows[0]

    def _paged_index(self, role: str) -> Any:
        """The index for reading entries: at the start of the step until this step's entries are stored."""
        return self._index if role in self._stored or self._shared(role) else at_start_keep_tokens(self._index)

    def _shared(self, role: str) -> bool:
        """True for entries of another layer, if that layer stored this step's."""
        component = getattr(self._spec, role)
        if component.shared_from is None:
            return False
        return role in self._step.layer(component.shared_from)._stored

    def _lengths(self, *, ended: bool) -> list[int]:
        return [row.length if ended else row.start for row in self._step.rows]

    def _gather_all(self, role: str) -> AllEntries:
        component = self._component(role, Entries)
        index = self._paged_index(role)
        lengths = self._lengths(ended=index is self._index)
        columns = max((length // component.ratio for length in lengths), default=0)
        return self._ops.gather_all_entries(self._pools, self._layer, index, columns=columns, role=role)

    def _kv_columns(self, kv: KV, *, ended: bool | None = None) -> int:
        if "kv" in self._own or ended:
            return max((len(kv.visible(row.start, row.length)) for row in self._step.rows), default=0)
        return max((len(kv.visible(row.start, row.start)) for row in self._step.rows), default=0)

    def _attend_kv(self, q: Array, selected: Array | None, sink: Array | None, scale: float | None) -> Attention:
        kv = self._component("kv", KV)
        q = check_float(self._ops, q, "attend: q", (self._tokens, None, kv.key_dim))
        heads = q.shape[1]
        for part in kv.parts:
            if heads % part.heads:
                raise ShapeError(got=f"{heads} heads", where="attend: q", allowed=f"a multiple of {part.heads}")
        if selected is not None:
            raise ShapeError(got="selected", where="attend: selected", allowed="None on a classic layer")
        if self._tokens and "kv" not in self._own:
            raise StepError(got="attend before append_kv", where=self._where, allowed="append_kv, then attend")
        k, v = self._own_or_none("kv") or (None, None)
        return self._ops.attend_kv(
            self._pools,
            self._layer,
            self._index,
            q,
            k,
            v,
            columns=self._kv_columns(kv),
            sink=None if sink is None else check_weight(self._ops, sink, "attend: sink", heads),
            scale=scale,
        )

    def _paged_view(self, role: str) -> PagedView:
        component = self._component(role, Entries)
        (region,) = self._step.cache.plan.region(self._layer, role)
        index = self._paged_index(role)
        counts = index.lengths // component.ratio
        return PagedView(region.format, region.unit, self._buffers(region), index.block_table, region.rows, counts)

    def _buffers(self, region: Any) -> dict[str, Array]:
        return {buffer: self._pools[name] for buffer, (name, _) in region.buffers.items()}

    def _rope(self, rope: Rope | Array | None) -> Rope | Array | None:
        if rope is None or isinstance(rope, Rope):
            return rope
        return check_array(self._ops, rope, "flush: rope", (None,), ("float32",))

    def _dim(self, role: str) -> int:
        return getattr(self._spec, role).dim

    def _check(self, array: Array, where: str, component: Component) -> None:
        if self._step.cache.check:
            check_finite(self._step.cache, array, where, component)


def at_start_keep_tokens(index: Any) -> Any:
    """The index with its tokens but the lengths of before the step."""
    return index._replace(lengths=index.starts)
