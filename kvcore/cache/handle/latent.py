"""Verbs of latent layers: the window, the tails, compressed entries and index keys."""

# pyright: reportPrivateUsage=false

import numpy as np

from kvcore.cache.handle.state import LayerState
from kvcore.errors import StepError
from kvcore.ops import AllEntries, Array, Closed, SelectedEntries, WindowRows
from kvcore.ops.arguments import check_float, check_indices, check_number, check_rope, check_weight
from kvcore.spec import TAIL_OF, Entries, IndexKeys, Rope, Tail, Window
from kvcore.step import closed_count


class LatentVerbs(LayerState):
    """T tokens of the step (padding included), Q requests, d row channels, C ring rows."""

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
        self._step.cache._check_outside("flush", (norm_weight, rope, index_norm_weight))
        self._component("tail", Tail)
        weights = {"entries": norm_weight, "index_keys": index_norm_weight}
        streams: list[Array] = []
        flushed: set[str] = set()
        for role, tail in TAIL_OF.items():
            if getattr(self._spec, tail) is None or getattr(self._spec, role) is None:
                streams += [None, None]
                continue
            streams += self._tail_rows(tail, "flush")
            flushed.add(role)
            if weights[role] is not None:
                dim = getattr(self._spec, role).dim
                weights[role] = check_weight(self._ops, weights[role], f"flush: norm weight of {role}", dim)
        narrowest = min(getattr(self._spec, role).dim for role in flushed)
        pools = self._ops.flush(
            self._pools,
            self._layer,
            self._index,
            *streams,
            closed=closed_count(self._step._rows, entries.ratio),
            norm_weight=weights["entries"],
            eps=check_number(eps, "flush: eps"),
            rope=check_rope(self._ops, rope, "flush: rope", narrowest),
            index_norm_weight=weights["index_keys"],
        )
        self._replace(pools)
        self._stored |= flushed

    def store_entries(self, entries: Array, index_keys: Array | None = None) -> None:
        """Encode and store entries that the caller compressed: [closed, d], in the order of ``closed``.

        Args:
            entries: fp32 or bf16, one row for every entry that the step completes.
            index_keys: [closed, index d], likewise.
        """
        spec = self._own_entries("store_entries")
        self._step.cache._check_outside("store_entries", (entries, index_keys))
        count = closed_count(self._step._rows, spec.ratio)
        entries = check_float(self._ops, entries, "store_entries: entries", (count, spec.dim))
        self._check(entries, "store_entries: entries", spec)
        if index_keys is not None:
            keys = self._component("index_keys", IndexKeys)
            index_keys = check_float(self._ops, index_keys, "store_entries: index_keys", (count, keys.dim))
            self._check(index_keys, "store_entries: index_keys", keys)
        self._replace(self._ops.store_entries(self._pools, self._layer, self._index, entries, index_keys))
        self._stored |= {"entries"} if index_keys is None else {"entries", "index_keys"}

    def compress(self, norm_weight: Array | None = None, eps: float = 1e-6) -> Array:
        """The latents of the entries that close in this step: pooled, normed, not rotated, not stored; [closed, d].

        V4.1's index keys are made from these.
        """
        entries = self._own_entries("compress")
        self._component("tail", Tail)
        kv, score = self._tail_rows("tail", "compress")
        if norm_weight is not None:
            norm_weight = check_weight(self._ops, norm_weight, "compress: norm_weight", entries.dim)
        closed = closed_count(self._step._rows, entries.ratio)
        return self._ops.compress(
            self._pools,
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
        return self._ops.closed(self._layer, self._index, closed_count(self._step._rows, ratio))

    def gather_window(self) -> WindowRows:
        """The last min(length, W) rows: values [Q, C, d], positions [Q, C]; the step's own once appended."""
        self._component("window", Window)
        index, rows = self._state("window")
        return self._ops.gather_window(self._pools, self._layer, index, rows[0] if rows else None)

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

    def _append_tail(self, role: str, kv: Array, score: Array) -> None:
        tail = self._component(role, Tail)
        shape = (self._tokens, tail.width)
        kv = check_float(self._ops, kv, f"append_{role}: kv", shape, only_fp32=True)
        score = check_float(self._ops, score, f"append_{role}: score", shape, only_fp32=True)
        self._check(kv, f"append_{role}: kv", tail)
        self._check(score, f"append_{role}: score", tail, minus_infinity=True)
        self._append(role, (kv, score))

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
        if role in self._own:
            return self._own[role]
        empty = self._ops.asarray(np.zeros((0, getattr(self._spec, role).width), np.float32))
        return empty, empty

    def _gather_all(self, role: str) -> AllEntries:
        component = self._component(role, Entries)
        index = self._paged_index(role)
        columns = max((length // component.ratio for length in self._lengths(index)), default=0)
        return self._ops.gather_all_entries(self._pools, self._layer, index, columns=columns, role=role)
