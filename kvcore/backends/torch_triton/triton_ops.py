"""The verbs with Triton kernels: the write path and the gathers, one launch each where the kernels cover the format.

What they don't cover (a layout that splits bytes, a third party's format) runs in the plain operations of ``TorchOps``.
After a step's index is built nothing here allocates on the write path, asks the device for a value or looks at host
integers that change from step to step, so a decode step can be captured in a CUDA graph.
"""

import torch

from kvcore.backends.torch_triton import launch, reasons
from kvcore.backends.torch_triton.backend import recording_nothing
from kvcore.backends.torch_triton.reading import ReadingVerbs
from kvcore.backends.torch_triton.tail import frequencies_of
from kvcore.backends.torch_triton.triton_life import LifeOps
from kvcore.kernels.triton.record import power_of_two, recorded
from kvcore.kernels.triton.shape import tails_apart
from kvcore.kernels.triton.tail import tail_recorded
from kvcore.ops import AllEntries, Ops, SelectedEntries, WindowRows, bounds
from kvcore.ops.choices import Declined
from kvcore.spec import TAIL_OF


class TritonOps(ReadingVerbs, LifeOps):
    """``TorchOps`` with launches in place of the verbs that a step waits for."""

    def __init__(self, plan, device="cpu"):
        super().__init__(plan, device)
        self._bound = {}
        self._tails = {}
        self._unbound: dict[tuple[int, str], str] = {}
        self._scratch = None
        self._old_scratch = []
        self._bind_all()
        self.bind_readers()

    def decide(self, layer, verb):
        """Kernels where they cover the layer, else torch operations and why."""
        return reasons.decide(self, layer, verb)

    @property
    def how(self):
        """The GPU; or that kernels are interpreted, which is never taken for hardware."""
        return f"{self.device}, Triton interpreter" if launch.INTERPRETED else super().how

    @recording_nothing
    def append_window(self, pools, layer, index, rows):
        """Encode rows [T, d] and store them at slot·C + p mod C; only each ring's last C positions are written."""
        if not self._append(pools, layer, "window", index, (rows,)):
            return super().append_window(pools, layer, index, rows)
        return pools

    @recording_nothing
    def append_rotated_window(self, pools, layer, index, rows, *, rope, norm_weight=None, eps=1e-6):
        """Norm (if a weight is given) and rotate rows [T, d] at their positions, then ``append_window``, in one launch.

        Rounded to bf16 after the norm and after the rotation, unless the window's format decodes to fp32.
        """
        bound = self.bound(layer, "window")
        if bound is None:
            options = {"rope": rope, "norm_weight": norm_weight, "eps": eps}
            return super().append_rotated_window(pools, layer, index, rows, **options)
        frequencies = frequencies_of(rope, rows.device)
        ((record, names, _),) = bound
        launch.calls().append_rotated_rows(
            rows.contiguous(),
            index.positions,
            index.request_index,
            index.slots,
            index.lengths,
            index.block_table,
            norm_weight,
            frequencies,
            [pools[name] for name in names],
            record,
            float(eps),
        )
        return pools

    @recording_nothing
    def append_kv(self, pools, layer, index, k, v):
        """Encode and store k [T, key_heads, key_dim] and v [T, value_heads, value_dim]."""
        if not self._append(pools, layer, "kv", index, (k, v)):
            return super().append_kv(pools, layer, index, k, v)
        return pools

    append_kv_view = Ops.append_kv_view
    """The append is a launch."""

    def _append(self, pools, layer, role, index, parts):
        bound = self.bound(layer, role)
        if bound is None:
            return False
        for (record, names, paged), values in zip(bound, parts, strict=True):
            launch.calls().append_rows(
                values.contiguous(),
                index.positions,
                index.request_index,
                index.slots,
                index.stored if paged else index.lengths,
                index.block_table,
                [pools[name] for name in names],
                record,
            )
        return True

    @recording_nothing
    def append_tail(self, pools, layer, index, kv, score):
        """Store raw compressor rows kv and score, [T, width] each, at slot·R + p mod R."""
        return self._append_tail(pools, layer, index, kv, score, "tail")

    @recording_nothing
    def append_index_tail(self, pools, layer, index, kv, score):
        """The same for the indexer's compressor."""
        return self._append_tail(pools, layer, index, kv, score, "index_tail")

    def _append_tail(self, pools, layer, index, kv, score, role):
        bound = self.tail_bound(layer, role)
        if bound is None:
            plain = super().append_tail if role == "tail" else super().append_index_tail
            return plain(pools, layer, index, kv, score)
        record, names = bound
        launch.calls().append_tail_rows(
            kv.contiguous(),
            score.contiguous(),
            index.positions,
            index.request_index,
            index.slots,
            index.lengths,
            [pools[name] for name in names],
            record,
        )
        return pools

    @recording_nothing
    def store_role(self, pools, layer, role, index, values):
        """Store the entries that the step completes in the pool of one role."""
        bound = self.bound(layer, role)
        if bound is None:
            return super().store_role(pools, layer, role, index, values)
        ((record, names, _),) = bound
        launch.calls().store_rows(
            values.contiguous(),
            index.starts,
            index.lengths,
            index.stored,
            index.block_table,
            [pools[name] for name in names],
            record,
            self.component(layer, role).ratio,
        )
        return None

    @recording_nothing
    def flush(
        self,
        pools,
        layer,
        index,
        kv,
        score,
        index_kv=None,
        index_score=None,
        *,
        closed=None,
        norm_weight=None,
        eps=1e-6,
        rope=None,
        index_norm_weight=None,
    ):
        """Compress, rotate, encode and store every entry that the step completes, and its index key: one launch.

        ``closed`` only says that there may be work: which entries close is read from the index on the device.
        """
        if closed == 0 and not capturing():
            return pools
        weights = {"norm_weight": norm_weight, "index_norm_weight": index_norm_weight}
        if self._flush(pools, layer, index, kv, score, index_kv, index_score, eps, rope, append=False, **weights):
            return pools
        return super().flush(
            pools, layer, index, kv, score, index_kv, index_score, closed=closed, eps=eps, rope=rope, **weights
        )

    @recording_nothing
    def append_flush(
        self,
        pools,
        layer,
        index,
        kv,
        score,
        index_kv=None,
        index_score=None,
        *,
        newest=None,
        closed=None,
        norm_weight=None,
        eps=1e-6,
        rope=None,
        index_norm_weight=None,
    ):
        """``append_tail``, ``append_index_tail`` and ``flush`` together, in one launch unless that is slower.

        ``newest`` tells whether the rings have spare rows for the step's own: each token's program then writes them.
        """
        weights = {"norm_weight": norm_weight, "index_norm_weight": index_norm_weight}
        streams = kv, score, index_kv, index_score
        together = not self._tails_apart(layer, index, kv)
        if self._flush(pools, layer, index, *streams, eps, rope, append=together, newest=newest, **weights):
            if not together:
                self._append_last(pools, layer, index, *streams)
            return pools
        return super().append_flush(pools, layer, index, *streams, closed=closed, eps=eps, rope=rope, **weights)

    def _append_last(self, pools, layer, index, kv, score, index_kv, index_score):
        """What the tails keep of a long prefill, after its flush has read them."""
        for role, *rows in (("tail", kv, score), ("index_tail", index_kv, index_score)):
            if rows[0] is not None:
                record, names = self._tails[layer, role]
                numbers = index.slots, index.starts, index.lengths
                buffers = [pools[name] for name in names]
                launch.calls().append_last_rows(*(each.contiguous() for each in rows), *numbers, buffers, record)

    def _flush(
        self,
        pools,
        layer,
        index,
        kv,
        score,
        index_kv,
        index_score,
        eps,
        rope,
        *,
        append,
        newest=None,
        norm_weight,
        index_norm_weight,
    ):
        """Launch both streams; False where the kernels don't cover one of them."""
        bounds = [self.bound(layer, "entries"), self.tail_bound(layer, "tail")]
        if index_kv is not None:
            bounds += [self.bound(layer, "index_keys"), self.tail_bound(layer, "index_tail")]
        covered = [bound for bound in bounds if bound is not None]
        if len(covered) < len(bounds):
            return False
        if index_kv is not None and index_kv.dtype != kv.dtype:
            self.fall_back(layer, "flush", reasons.TWO_DTYPES)
            return False
        ((record, names, _),), (tail_record, tail_names), *others = covered
        records = [record, tail_record]
        index_names, index_tail_names = [], []
        if others:
            ((index_record, index_names, _),), (index_tail_record, index_tail_names) = others
            records += [index_record, index_tail_record]
        scratch, arrivals = self._scratch_for(layer, index)
        frequencies = frequencies_of(rope, kv.device)
        launch.calls().flush_rows(
            kv,
            score,
            [pools[name] for name in tail_names],
            [pools[name] for name in names],
            norm_weight,
            index_kv,
            index_score,
            [pools[name] for name in index_tail_names],
            [pools[name] for name in index_names],
            index_norm_weight,
            frequencies,
            index.positions,
            index.request_index,
            index.slots,
            index.starts,
            index.lengths,
            index.stored,
            index.block_table,
            scratch,
            arrivals,
            records,
            float(eps),
            append,
            append and (len(index.positions) if newest is None else newest) <= self._spare(layer),
        )
        return True

    @recording_nothing
    def gather_window(self, pools, layer, index, rows=None):
        """The last min(length, W) positions of every request at the end of the step, ascending from row 0."""
        bound = self.bound(layer, "window")
        if bound is None:
            return super().gather_window(pools, layer, index, rows)
        ((record, names, _),) = bound
        window = self.component(layer, "window").window
        buffers = [pools[name] for name in names]
        found = WindowRows(*launch.calls().gather_window_rows(index.slots, index.lengths, buffers, record, window))
        if rows is not None:
            self._put_own(found.values, rows, index, record, True, True, window, 0)
        return found

    def _put_own(self, out, values, index, record, *seen):
        """Replace gathered rows of the step's own positions by ``values``, as they read once they are stored."""
        step = index.positions, index.request_index, index.starts, index.lengths
        launch.calls().put_own_rows(out, values.contiguous(), *step, record, *seen)

    @recording_nothing
    def gather_entries(self, pools, layer, index, indices):
        """Entries by logical index, indices [T, k]; valid iff 0 <= i < the request's entries at the end of the step."""
        bound = self.bound(layer, "entries")
        if bound is None:
            return super().gather_entries(pools, layer, index, indices)
        ((record, names, _),) = bound
        found = launch.calls().gather_picked_rows(
            indices.contiguous(),
            index.request_index,
            index.lengths,
            index.block_table,
            [pools[name] for name in names],
            record,
            self.component(layer, "entries").ratio,
        )
        return SelectedEntries(*found)

    @recording_nothing
    def gather_all_entries(self, pools, layer, index, *, columns=None, role="entries"):
        """Every entry (``role`` entries or index_keys) of every request, as [Q, columns, d]."""
        bound = self.bound(layer, role)
        if bound is None:
            return super().gather_all_entries(pools, layer, index, columns=columns, role=role)
        ((record, names, _),) = bound
        columns = bounds.columns(self.plan, layer, role, index) if columns is None else columns
        ratio = self.component(layer, role).ratio
        buffers = [pools[name] for name in names]
        return AllEntries(
            *launch.calls().gather_all_rows(index.lengths, index.block_table, buffers, record, ratio, columns)
        )

    @recording_nothing
    def gather_kv(self, pools, layer, index, k=None, v=None, *, columns=None):
        """Every row that a query of the step may see: k, v [Q, columns, heads, dim], positions [Q, columns]."""
        bound = self.bound(layer, "kv")
        component = self.component(layer, "kv")
        seen = component.span is not None, component.window or 0, component.chunk or 0
        # The kernel's rings begin where the first query's window does, left padding or not.
        padded = seen[0] and index.left_padding is not None
        if bound is None or padded:
            if padded:
                self.fall_back(layer, "gather_kv", reasons.LEFT_PADDING)
            return super().gather_kv(pools, layer, index, k, v, columns=columns)
        columns = bounds.columns(self.plan, layer, "kv", index) if columns is None else columns
        place = index.slots, index.starts, index.lengths, index.block_table
        gathered, positions = [], None
        for (record, names, _), own in zip(bound, (k, v), strict=True):
            buffers = [pools[name] for name in names]
            rows, positions = launch.calls().gather_kv_rows(*place, buffers, record, columns, *seen)
            if own is not None:
                self._put_own(rows, own, index, record, False, *seen)
            gathered.append(rows)
        return *gathered, positions

    def bound(self, layer, role):
        """For each part of a role: (record number, names of its buffers, paged or not); None if not covered."""
        return self._bound.get((layer, role))

    def why_unbound(self, layer, role):
        """Why the kernels do not cover a role; "" where they do."""
        return self._unbound.get((layer, role), "")

    def tail_bound(self, layer, role):
        """(Record number, names of the buffers) of a tail; None if not covered."""
        return self._tails.get((layer, role))

    def _bind_all(self):
        """Look up what launches need to know of every pool, so that none has to while it is traced or captured."""
        for layer, role, _ in self.plan.spec.components():
            if role in TAIL_OF.values():
                self._tails[layer, role] = self._bind_tail(layer, role)
            else:
                self._bound[layer, role] = self._bind(layer, role)

    def _bind(self, layer, role):
        found = []
        for region in self.plan.region(layer, role):
            known = recorded(region, float(self.global_scale(layer, role)))
            if isinstance(known, Declined):
                self._unbound[layer, role] = known.reason
                return None
            record, buffers = known
            names = sorted(set(buffers))
            number = launch.bind(launch.Bound(record, *(names.index(name) for name in buffers)))
            found.append((number, names, record.paged))
        return found

    def _bind_tail(self, layer, role):
        (region,) = self.plan.region(layer, role)
        known = tail_recorded(region, self.component(layer, role))
        if isinstance(known, Declined):
            self._unbound[layer, role] = known.reason
            return None
        record, buffers = known
        names = sorted(set(buffers))
        return launch.bind_tail(launch.BoundTail(record, *(names.index(name) for name in buffers))), names

    def _tails_apart(self, layer, index, kv):
        bound = self.tail_bound(layer, "tail")
        count, requests = len(index.positions), len(index.slots)
        return bound is not None and tails_apart(launch.TAILS[bound[0]].record, count, requests, kv.itemsize)

    def _spare(self, layer):
        """New tokens of a request that overwrite nothing that a window closing in the same step still needs."""
        spare = []
        for role in ("tail", "index_tail"):
            component = self.component(layer, role)
            if component is not None:
                (region,) = self.plan.region(layer, role)
                spare.append(region.rows - component.span)
        return min(spare)

    def _scratch_for(self, layer, index):
        """(scratch, arrivals): rows of pooled channels, and zeroed counters, for every window that can close at once.

        They are kept for the next step, and so are smaller ones that were outgrown: a captured graph may use them.
        """
        ratio = self.component(layer, "entries").ratio
        rows = len(index.positions) // ratio + len(index.slots) + 1
        size = power_of_two(self.component(layer, "entries").dim)
        if self._scratch is None or self._scratch[0].numel() < rows * size or self._scratch[1].numel() < rows:
            if self._scratch is not None:
                self._old_scratch.append(self._scratch)
            rows = power_of_two(rows)
            self._scratch = (
                torch.empty(rows * size, dtype=torch.float32, device=self.device),
                torch.zeros(rows, dtype=torch.int32, device=self.device),
            )
        return self._scratch


def capturing():
    """True while launches are recorded for later steps, whose windows may close where this step's don't."""
    return torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
