"""The verbs that read with Triton kernels: indexer scores, selection, attention.

What the kernels don't cover runs in the plain operations of ``TorchOps``. Outputs come from torch's allocator, which a
CUDA graph gives a pool of its own; everything else that a call writes lies in workspaces that are kept.
"""

import torch

from kvcore import bounds
from kvcore.backends.torch_triton import flash, kv_reading
from kvcore.backends.torch_triton.backend import TorchOps
from kvcore.backends.torch_triton.kernels import launch
from kvcore.backends.torch_triton.kernels.attention import own_record, parts_of, splits_for
from kvcore.backends.torch_triton.kernels.indexer import MOST_ROWS, ranking, score_parts
from kvcore.backends.torch_triton.kernels.record import power_of_two
from kvcore.ops import Attention

SCORES_AT_ONCE = 1 << 22
"""Scores that ``index_select`` keeps at a time: 16 MiB, which stay in a large GPU's L2."""


class Workspaces:
    """Buffers by name, grown when a call needs more; outgrown ones are kept, since a captured graph may use them."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def take(self, name: str, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """At least ``elements`` elements, zero when new."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < elements:
            if buffer is not None:
                self._outgrown.append(buffer)
            buffer = torch.zeros(power_of_two(max(elements, 1)), dtype=dtype, device=self._device)
            self._buffers[name] = buffer
        return buffer


class ReadingVerbs(TorchOps):
    """The part of the verbs with kernels that reads.

    Attributes:
        workspaces: what its calls write beside their outputs.
        attention_kernels: whose attention it is where the shape fits, ``triton``, ``flash_mla`` (of latent layers;
            classic ones are then Triton's) or ``torch``.
    """

    def __init__(self, plan, device="cpu"):
        super().__init__(plan, device)
        self.workspaces = Workspaces(device)
        self.attention_kernels = flash.chosen(device)

    def bound(self, layer, role):
        """For each part of a role: (record number, names of its buffers, paged or not); None if not covered."""
        raise NotImplementedError

    @torch.no_grad()
    def attend(self, pools, layer, index, q, selected=None, *, rows=None, sink=None, scale=None):
        """Attend from q [T, H, d] to the window and the selected (None: all visible) entries, where K = V."""
        if self.attention_kernels == "flash_mla" and flash.fits(self, layer, q, selected, rows):
            return flash.attend(self, pools, layer, index, q, selected, sink, _scale(q, scale))
        found = None if self.attention_kernels == "torch" else self._attention(layer, q)
        if found is None or not len(index.slots):
            return super().attend(pools, layer, index, q, selected, rows=rows, sink=sink, scale=scale)
        window, entries, parts = found
        own, own_number = None, -1
        if rows is not None and window is not None:
            own, own_number = self._own_rows(layer, window[0], rows)
        tokens, heads, dim = q.shape
        span = 0 if window is None else self.component(layer, "window").window
        ratio = 0 if entries is None else self.component(layer, "entries").ratio
        if entries is None:
            picks = 0
        elif selected is None:
            picks = index.block_table.shape[1] * self.plan.region(layer, "entries")[0].rows
        else:
            picks = selected.shape[1]
        splits = splits_for(torch.device(self.device), tokens, heads, span + picks, parts.full)
        workspace = self.workspaces.take("attention", splits * tokens * heads * (dim + 1) if splits > 1 else 1)
        out, lse = launch.calls().attend_rows(
            q.contiguous(),
            None if selected is None or entries is None else selected.contiguous(),
            None if sink is None else sink.contiguous(),
            own,
            index.positions,
            index.request_index,
            index.slots,
            index.starts,
            index.block_table,
            [] if window is None else [pools[name] for name in window[1]],
            [] if entries is None else [pools[name] for name in entries[1]],
            workspace,
            [-1 if window is None else window[0], -1 if entries is None else entries[0], own_number],
            [span, ratio, splits],
            _scale(q, scale),
            q.dtype == torch.bfloat16,
        )
        return Attention(out, lse)

    @torch.no_grad()
    def attend_kv(self, pools, layer, index, q, k=None, v=None, *, columns=None, sink=None, scale=None):
        """Attend from q [T, H, key_dim] to the layer's K-V; H is a multiple of key_heads; out [T, H, value_dim]."""
        options = {"columns": columns, "sink": sink, "scale": scale}
        found = None
        if self.attention_kernels != "torch" and len(index.slots):
            found = kv_reading.attend_kv(self, pools, layer, index, q, k, v, **options)
        return super().attend_kv(pools, layer, index, q, k, v, **options) if found is None else found

    @torch.no_grad()
    def index_scores(self, pools, layer, index, q, weights, *, columns=None):
        """``sum_h weights[t,h] · relu(q[t,h] · key[s])`` -> [T, columns] fp32; -inf unless s < (t + 1) div m."""
        columns = bounds.columns(self.plan, layer, "index_keys", index) if columns is None else columns
        bound = self._index_keys(layer)
        if bound is None or not len(index.slots):
            return super().index_scores(pools, layer, index, q, weights, columns=columns)
        number, names = bound
        return launch.calls().score_rows(
            q.contiguous(),
            weights.contiguous(),
            index.positions,
            index.request_index,
            index.block_table,
            [pools[name] for name in names],
            self._rotated_room(number, q),
            number,
            self.component(layer, "index_keys").ratio,
            columns,
        )

    @torch.no_grad()
    def select(self, scores, k):
        """Top k of scores [T, n] -> [T, k] int32: highest first, ties to the lowest index, -1 where score is -inf."""
        return launch.calls().select_rows(
            scores.to(torch.float32).contiguous(), *self._ranking_room(len(scores), k, scores.shape[1]), k
        )

    @torch.no_grad()
    def index_select(self, pools, layer, index, q, weights, k, *, columns=None, run=None):
        """``select(index_scores(...), k)`` with scores in a buffer that does not grow with the context.

        ``run`` entries are scored at a time; from run to run the best k are carried on.
        """
        columns = bounds.columns(self.plan, layer, "index_keys", index) if columns is None else columns
        run = run or max(4096, SCORES_AT_ONCE // max(len(q), 1))
        bound = self._index_keys(layer)
        if bound is None or not len(index.slots) or columns <= run or not k:
            return self.select(self.index_scores(pools, layer, index, q, weights, columns=columns), k)
        number, names = bound
        return launch.calls().score_select_rows(
            q.contiguous(),
            weights.contiguous(),
            index.positions,
            index.request_index,
            index.block_table,
            [pools[name] for name in names],
            self._rotated_room(number, q),
            self.workspaces.take("scores", len(q) * (k + run)),
            *self._ranking_room(len(q), k, k + run),
            number,
            self.component(layer, "index_keys").ratio,
            columns,
            k,
            run,
        )

    def _index_keys(self, layer):
        """(record number, names of buffers) of the layer's index keys; None if not covered."""
        bound = self.bound(layer, "index_keys")
        if bound is None or score_parts(launch.BOUND[bound[0][0]].record) is None:
            return None
        return bound[0][0], bound[0][1]

    def _rotated_room(self, number, q):
        rotated = launch.BOUND[number].record.hadamard
        return self.workspaces.take("queries", q.numel() if rotated else 1, torch.bfloat16)

    def _ranking_room(self, tokens, k, columns):
        hands, room = ranking(max(k, 1), max(columns, 1))
        rows = min(tokens, MOST_ROWS)
        return (
            self.workspaces.take("hands", rows * (hands + 1), torch.int32),
            self.workspaces.take("pairs", rows * room, torch.int64),
        )

    def _attention(self, layer, q):
        """(window, entries, parts): (record number, names of buffers) of each or None; None if not covered."""
        found = []
        for role in ("window", "entries"):
            bound = self.bound(layer, role) if self.component(layer, role) is not None else ()
            if bound is None:
                return None
            found.append((bound[0][0], bound[0][1]) if bound else None)
        records = [None if one is None else launch.BOUND[one[0]].record for one in found]
        parts = parts_of(*records, bf16=q.dtype == torch.bfloat16)
        return None if parts is None else (*found, parts)

    def _own_rows(self, layer, number, rows):
        """(canonical rows [T, row_bytes] of the step's own window rows, number of their record)."""
        (region,) = self.plan.region(layer, "window")
        bound = launch.BOUND[number]
        record = own_record(bound.record, region.format)
        return self.encode_rows(region, rows)[:, 0].contiguous(), launch.bind(launch.Bound(record, 0, 0, 0))


def _scale(q, scale):
    """The scale of the logits: that of the key dim unless given."""
    return q.shape[2] ** -0.5 if scale is None else float(scale)
