"""One layer in one step: the verbs that a model calls.

The handle is the door: arguments are checked, then the backend's verbs called with the step's index. What the layer was
given, and what of it is stored when, its ``RingWrites`` know.

Map: window, tails and entries of latent layers (``append_window`` to ``gather_all_index_keys``; ``compression`` has the
compressor's part); indexer and attention (``index_scores`` to ``attend``, in ``attending``) and all of a layer's step
(``decode``, with ``whole_layers``); keys and values of classic layers (``append_kv`` to ``visible_rows``); recurrent
layers (``read_state`` to ``gather_conv``); rows of any role (``append_rows``, ``gather_rows``); raw buffers (in
``views``) and digests (``window_view`` to ``digest``).
"""

from typing import Any, NoReturn

from kvcore import digest
from kvcore.arrays import to_numpy
from kvcore.cache import attending, compression, views, whole_layers
from kvcore.cache.far import Coming, fetch, fetched
from kvcore.cache.ring_writes import ROWS_OF_TOKENS, WRITERS, StepWrites
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
from kvcore.ops.arguments import UNKNOWN, check_float, check_indices
from kvcore.spec import DERIVED, KV, Conv, Entries, Rope, State, Window


class LayerHandle:
    """One layer's cache during one step, from ``step.layer(i)``; it ends with the step.

    T tokens of the step (padding included), Q requests, d row channels, C ring rows, H query heads, n columns.

    Raises:
        StepError: from every verb, after the step's end, of a layer that has no such component, or, from those that
            take rows, when it got them already.
        ShapeError: an array of another shape, dtype or device, or a number that is none.
        NonFiniteError: a row that is NaN or infinite, under ``check=True``.

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

    __slots__ = ("_context", "_index", "_layer", "_layers", "_ops", "_spec", "_writes")

    def __init__(self, layers: StepWrites, number: int) -> None:
        context = layers.context
        self._layers = layers
        self._writes = layers[number]
        self._context = context
        self._layer = number
        self._spec = self._writes.spec
        self._ops = context.ops
        self._index = context.index

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused, to ``pickle`` and ``copy``: one handle knows what a layer got in its step."""
        raise StepError(
            got="pickle or copy of a layer's handle",
            where=self._writes.where,
            allowed=f"{self._writes.where}, the same one each time",
        )

    def append_window(
        self, rows: Given, *, rope: Rope | Given | None = None, norm_weight: Given | None = None, eps: float = 1e-6
    ) -> None:
        """Encode and store the window rows of the step's tokens: rows [T, d], fp32 or bf16.

        Args:
            rows: as they are to be stored; or before their norm and rotation, if ``rope`` is given, which are then
                done on the way: on a GPU in one launch, with bf16 rounding as in ``flush``.
            rope: rotation of the last channels at every token's position: a Rope, or fp32 inverse frequencies.
            norm_weight: [d] weight of an RMS norm before the rotation; None for no norm.
            eps: of the norm.

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
        rotation = compression.rotation(self._writes, rope, norm_weight, eps)
        checked = self._writes.checked("window", (rows,))
        self._writes.append("window", checked, **rotation)
        self._writes.note("append_rotated_window", (rows,), given, (*checked, *rotation.values()))

    def append(self, **rows: Given | tuple[Given, ...]) -> None:
        """The ``append_`` verbs of the roles that are given, all of them or, if one is refused, none.

        Args:
            rows: by role, a tuple where the verb takes several: ``window=rows, tail=(kv, score),
                index_tail=(kv, score)``; ``kv=(k, v)``; roles of outside code as ``append_rows`` takes them.

        Raises:
            StepError: a role whose rows are not the step's to give.

        Example:
            >>> cache, step = cache_of(csa)
            >>> with step:
            ...     tails = {role: (rows(6, getattr(csa, role).width),) * 2 for role in ("tail", "index_tail")}
            ...     step.layer(0).append(window=rows(6, 512), **tails)
            ...     step.layer(0).flush(rope=Rope(dim=64, theta=160000.0))
        """
        checked: dict[str, tuple[Array, ...]] = {}
        for role, given in rows.items():
            component = self._writes.component(role)
            if role in DERIVED or not (component.written_by_step or component.given != component.parts):
                raise StepError(got=f"append({role}=...)", where=self._writes.where, allowed="roles of a step's tokens")
            self._writes.check_new(role)
            checked[role] = self._writes.checked(role, given if isinstance(given, tuple) else (given,))
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
        how = {"norm_weight": norm_weight, "eps": eps, "rope": rope, "index_norm_weight": index_norm_weight}
        compression.flush(self._writes, how)

    def store_entries(self, entries: Given, index_keys: Given | None = None) -> None:
        """Encode and store entries that the caller compressed: [closed, d], in the order of ``closed``.

        Args:
            entries: fp32 or bf16, one row for every entry that the step completes.
            index_keys: [closed, index d], likewise.
        """
        compression.store_entries(self._writes, entries, index_keys)

    def compress(self, norm_weight: Given | None = None, eps: float = 1e-6) -> Array:
        """The latents of the entries that close in this step: pooled, normed, not rotated, not stored; [closed, d].

        V4.1's index keys are made from these.
        """
        return compression.compress(self._writes, norm_weight, eps)

    @property
    def closed(self) -> Closed:
        """Entries that close in this step, in storing order: (request_index [n], entry_index [n]), int32."""
        ratio = self._writes.component("entries", Entries).ratio
        return self._ops.closed(self._layer, self._index, self._context.closed_count(ratio))

    def gather_window(self) -> WindowRows:
        """The last min(length, W) rows: values [Q, C, d], positions [Q, C]; the step's own once appended."""
        self._writes.component("window", Window)
        index, rows = self._writes.readable("window")
        return self._ops.gather_window(self._context.pools, self._layer, index, rows[0] if rows else None)

    def gather_entries(self, indices: Given) -> SelectedEntries:
        """Entries by index: indices [T, k] int32 or int64 -> values [T, k, d], valid [T, k]; invalid ones are zeros."""
        self._writes.component("entries", Entries)
        context, given = self._context, indices
        indices = check_indices(self._ops, indices, "gather_entries: indices", context.tokens)
        if context.far and context.is_far(owner := self._owner("entries")):
            indices = fetched(context, owner, given, f"{self._writes.where}.gather_entries")
        index = attending.index_of_entries(self._layers, self._writes, "entries")
        return self._ops.gather_entries(context.pools, self._layer, index, indices)

    def fetch(self, selected: Given) -> Coming:
        """Bring the entries that queries picked into the cache, where a request has them in the host's memory.

        Rows that are missing come over while others attend; ``attend`` and ``gather_entries`` wait for them, or
        ``wait`` of what this returns. Where all rows are there, nothing happens. The host looks at the picks.

        Args:
            selected: [T, k] int32 or int64, as for ``attend``, which is then given the same array.
        """
        self._writes.component("entries", Entries)
        checked = check_indices(self._ops, selected, "fetch: selected", self._context.tokens)
        return fetch(self._context, self._owner("entries"), selected, checked)

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
        return attending.index_scores(self._layers, self._writes, q, weights)

    def index_select(self, q: Given, weights: Given, k: int | None = None) -> Array:
        """``select(index_scores(q, weights), k)`` in one go, without all scores at once where the backend can: [T, k].

        Args:
            q: [T, H, d], as for ``index_scores``.
            weights: [T, H].
            k: entries for every token; as many as the spec says (``topk``) unless given.
        """
        return attending.index_select(self._layers, self._writes, q, weights, k)

    def select(self, scores: Given, k: int) -> Array:
        """Top-k entries of scores [T, n] -> [T, k] int32, highest first, ties to the lowest entry, -1 at the end.

        Example:
            >>> cache, step = cache_of(csa)
            >>> step.layer(0).select(np.array([[1.0, 3.0, 3.0]] * 6, np.float32), k=4)[0].tolist()
            [1, 2, 0, -1]
            >>> step.abort()
        """
        return attending.select(self._writes, scores, k)

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
        return attending.attend(self._layers, self._writes, q, selected, sink, scale, rope)

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
        asked = whole_layers.Decode(
            q, given, index, k, rope, rotate, window_norm_weight, norm_weight, index_norm_weight, eps, sink, scale
        )
        call = None
        if whole_layers.takes_whole(writes, asked):
            found = whole_layers.as_program(writes, asked)
            if found is not None:
                return found
            if context.known:
                call = whole_layers.call_of(writes, asked)
                found = whole_layers.again(writes, asked, call)
                if found is not UNKNOWN:
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
        if call is not None and context.gone_on - before == 2 + (tail is not None) + (index is not None):
            writes.learn("decode", *call)
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
        kv = self._writes.component("kv", KV)
        index, rows = self._writes.readable("kv")
        k, v = rows or (None, None)
        columns = self._context.kv_columns(kv, ended="kv" in self._writes.own)
        return self._ops.gather_kv(self._context.pools, self._layer, index, k, v, columns=columns)

    def kv_view(self) -> tuple[Array, Array] | None:
        """What ``gather_kv`` returns after the append, k and v [Q, n, heads, dim], without copying; None if it must be.

        The arrays are the pools' own memory: for reading, until the step ends. Possible on backends that have views,
        in a plain format, where all requests see equally many rows and each of them in one run: of blocks, of a slot,
        or of a ring that has not wrapped between them or lies there twice (``by_head``).
        """
        return views.kv_view(self._writes)

    def append_kv_view(self, k: Given, v: Given) -> tuple[Array, Array] | None:
        """``append_kv``, then ``kv_view``: all that a decode step does whose attention is the caller's."""
        found = views.append_kv_view(self._writes, k, v)
        if found is not UNKNOWN:
            return found
        self.append_kv(k, v)
        return self.kv_view()

    def mask(self) -> Array:
        """What each query may see of ``gather_kv``'s rows once the step's are appended: [T, n] bool.

        Example:
            >>> cache, step = cache_of(classic)
            >>> step.layer(0).append_kv(rows(6, 8, 128), rows(6, 8, 128))
            >>> step.layer(0).mask()[:2].astype(int).tolist()
            [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]
            >>> step.abort()
        """
        kv = self._writes.component("kv", KV)
        return self._ops.mask(self._layer, self._index, columns=self._context.kv_columns(kv, ended=True))

    def visible_rows(self) -> VisibleRows:
        """The mask with what it was made from: positions [Q, n] of the rows, -1 where there is none; valid [T, n]."""
        kv = self._writes.component("kv", KV)
        return self._ops.visible_rows(self._layer, self._index, columns=self._context.kv_columns(kv, ended=True))

    def read_state(self) -> Array:
        """The states that the step's tokens go on from, one a request: [Q, heads, key_dim, value_dim].

        Zeros for a request without tokens. In a step without tokens they are the states of the requests as they are.

        Raises:
            StepError: the layer has no state, its new one is written already, or a request's length has none.
        """
        views.check_state(self._writes, "read_state")
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
        return views.state_view(self._writes)

    def write_state(self, states: Given) -> None:
        """Store the state after each request's last token: [Q, heads, key_dim, value_dim], fp32 or bf16.

        The lengths in between get none, and ``truncate`` refuses them. Requests without new tokens keep theirs.
        """
        state = self._writes.component("state", State)
        states = check_float(self._ops, states, "write_state: states", (self._index.slots.shape[0], *state.shape))
        self._context.check_values(states, "write_state: states", state, rows=len(self._context.rows))
        self._writes.append_last("state", states)

    def append_state(self, states: Given) -> None:
        """Store the state after every token: [T, heads, key_dim, value_dim]; what drafts need to be rolled back.

        ``truncate`` then goes back to any of the last ``max_draft_tokens`` lengths.
        """
        self._append("state", states)

    def append_conv(self, rows: Given) -> None:
        """Store the step's inputs of the short convolution: rows [T, channels], fp32 or bf16."""
        self._append("conv", rows)

    def gather_conv(self) -> Array:
        """The inputs right before the step's, oldest first: [Q, width - 1, channels]; zeros before the first token.

        Before the step's own were appended and after that alike.
        """
        self._writes.component("conv", Conv)
        return self._ops.gather_conv(self._context.pools, self._layer, self._index)

    def append_rows(self, role: str, *values: Given) -> None:
        """Encode and store the step's rows of a component that outside code defined: the inverse of ``gather_rows``.

        Args:
            role: one that has no ``append_`` verb of its own.
            values: for every part of the component [T, dim], or [T, heads, dim] if it has heads; fp32 or bf16.

        Raises:
            StepError: the role has a verb of its own. ShapeError: another number of arrays.
        """
        component = self._writes.component(role)
        if role in WRITERS or role in DERIVED or not component.written_by_step:
            writer = WRITERS.get(DERIVED.get(role, role))
            allowed = writer if writer and role in self._spec.written else "a role whose rows are the step's tokens"
            raise StepError(got=f"append_rows({role!r})", where=self._writes.where, allowed=allowed)
        self._append(role, *values)

    def gather_rows(self, role: str) -> RawRows:
        """A role's live rows in position order as canonical bytes: rows [Q, n, row_bytes] uint8, positions [Q, n].

        Tail rows are fp32 kv then score; K-V rows are the key heads, then the value heads; entries are at position m·i.
        """
        component = self._writes.component(role)
        if component.written_by_step:
            index, rows = self._writes.readable(role)
            rows = None if rows is None else self._writes.parts(role)
        else:
            index, rows = attending.index_of_all(self._layers, self._writes, role), None
        columns = max((len(component.live(length)) for length in self._lengths(index)), default=0)
        return self._ops.gather_rows(self._context.pools, self._layer, role, index, rows, columns=columns)

    def window_view(self) -> RingView:
        """The window's raw buffers and slots, zero-copy, for outside kernels. Rows appended in this step are in it.

        Raises:
            StepError: the step brings more tokens than the ring has spare rows, so its rows wait for the commit.
        """
        return views.ring_view(self._writes)

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

    def _append(self, role: str, *values: Given) -> None:
        context, given = self._context, values
        context.check_open()
        if self._writes.append_again(role, values, {}):
            return
        key = None if context.check else context.key_of(role, self._layer, values)
        if key not in context.passed:
            self._writes.component(role)
            found = self._writes.checked(role, values)
            context.passes(key, values, found)
            values = found
        self._writes.append(role, values)
        if role in ROWS_OF_TOKENS:
            self._writes.note(WRITERS[role], given, {}, values)

    def _owner(self, role: str) -> int:
        """The layer that owns the pool a role reads."""
        return attending.owner(self._layers, self._writes, role).number

    def _gather_all(self, role: str) -> AllEntries:
        component = self._writes.component(role, Entries)
        index = attending.index_of_all(self._layers, self._writes, role)
        columns = max((length // component.ratio for length in self._lengths(index)), default=0)
        return self._ops.gather_all_entries(self._context.pools, self._layer, index, columns=columns, role=role)

    def _paged_view(self, role: str) -> PagedView:
        self._writes.component(role, Entries)
        return views.paged_view(self._writes, role, attending.index_of_all(self._layers, self._writes, role))

    def _lengths(self, index: StepIndex) -> list[int]:
        """Host lengths that match an index to read with."""
        ended = index.lengths is self._index.lengths
        return [row.length if ended else row.start for row in self._context.rows]
