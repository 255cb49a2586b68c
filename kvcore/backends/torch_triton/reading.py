"""The verbs that read with Triton kernels: indexer scores, selection, attention.

What the kernels don't cover runs in the plain operations of ``TorchOps``. Outputs come from torch's allocator, which a
CUDA graph gives a pool of its own; everything else that a call writes lies in workspaces that are kept.
"""

import torch

from kvcore.backends.torch_triton import flash, kv_reading, launch
from kvcore.backends.torch_triton.backend import TorchOps, recording_nothing
from kvcore.backends.torch_triton.tail import frequencies_of
from kvcore.kernels.triton.cut import (
    attended,
    own_record,
    plain_record,
    takes_whole,
)
from kvcore.kernels.triton.launches.attention import cut_of
from kvcore.kernels.triton.launches.indexer import MOST_BEST, RUN, best_workspace, runs_of
from kvcore.kernels.triton.lists import MOST_PICKS, select_workspace
from kvcore.kernels.triton.record import power_of_two
from kvcore.kernels.triton.score_cut import scored
from kvcore.ops import Attention, bounds
from kvcore.ops.choices import Declined

MOST_SCORES = 1 << 26
"""Scores that ``index_select`` keeps whole: 256 MiB. Up to there lists of the best save little and take longer."""

MOST_DECODED = 1 << 28
"""Bytes that decoded entries may take."""


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

    def buffers(self) -> list[torch.Tensor]:
        """All that are held."""
        return [*self._buffers.values(), *self._outgrown]


class ReadingVerbs(TorchOps):
    """The part of the verbs with kernels that reads.

    Attributes:
        workspaces: what its calls write beside their outputs.
        attention_kernels: whose attention it is where the shape fits, ``triton``, ``flash_mla`` (of latent layers;
            classic ones are then Triton's) or ``torch``.
        fewest_visits: entries that a step's queries read as often as this are decoded once for all of them.
    """

    fewest_visits = 8.0

    def __init__(self, plan, device="cpu"):
        super().__init__(plan, device)
        self.workspaces = Workspaces(device)
        self.attention_kernels = flash.chosen(device)
        # What ``bind_readers`` finds, and what it finds for calls that a kernel does not cover: (verb, layer) -> why.
        self._attended = {}
        self._keys = {}
        self.kv_covered = {}
        self.uncovered: dict[tuple[str, int], Declined] = {}

    def bound(self, layer, role):
        """For each part of a role: (record number, names of its buffers, paged or not); None if not covered."""
        raise NotImplementedError

    def why_unbound(self, layer, role) -> str:
        """Why ``bound`` is None."""
        raise NotImplementedError

    def bind_readers(self):
        """Look up, for every layer, what reading launches need beside its records; ``uncovered`` says why not."""
        for layer, spec in enumerate(self.plan.spec.all_layers):
            if spec.window is not None or spec.entries is not None:
                for bf16 in (True, False):
                    self._attended[layer, bf16] = self._or_none("attend", layer, self._attention_of(layer, bf16=bf16))
            if spec.index_keys is not None:
                self._keys[layer] = self._or_none("index_scores", layer, self._index_keys_of(layer))
            if spec.kv is not None:
                for case in kv_reading.CASES:
                    self.kv_covered[layer, case.bf16, case.own] = kv_reading.covered(self, layer, case)

    def _or_none(self, verb, layer, found):
        if isinstance(found, Declined):
            self.uncovered[verb, layer] = found
            return None
        return found

    @recording_nothing
    def attend(self, pools, layer, index, q, selected=None, *, rows=None, sink=None, scale=None, rope=None):
        """Attend from q [T, H, d] to the window and the selected (None: all visible) entries, where K = V."""
        frequencies = frequencies_of(rope, q.device)
        if self.attention_kernels == "flash_mla" and flash.fits(self, layer, q, selected, rows):
            found = flash.attend(self, pools, layer, index, q, selected, sink, _scale(q, scale))
            if frequencies is not None:
                launch.calls().turn_back_rows(found.out, index.positions, frequencies)
            return found
        # Whether rows are covered does not depend on the arguments.
        covered = self._attended[layer, q.dtype == torch.bfloat16]
        found = None if self.attention_kernels == "torch" else covered
        if found is None or not len(index.slots) or not q.numel():
            options = {"rows": rows, "sink": sink, "scale": scale, "rope": rope}
            return super().attend(pools, layer, index, q, selected, **options)
        window, entries, parts = found
        tokens, heads, dim = q.shape
        table, entry_buffers = index.block_table, [] if entries is None else [pools[name] for name in entries[1]]
        if parts.whole and self._visits(index, entries, tokens, selected) >= self.fewest_visits:
            entries, entry_buffers, table = self._decoded_entries(pools, layer, index, entries)
        w, e = (None if one is None else launch.BOUND[one[0]].record for one in (window, entries))
        whole = takes_whole(w, e, parts)
        own, own_number = None, -1
        if rows is not None and window is not None:
            own, own_number = self._own_rows(layer, window[0], rows, whole=whole)
        span = 0 if window is None else self.component(layer, "window").window
        ratio = 0 if entries is None else self.component(layer, "entries").ratio
        if entries is None:
            picks = 0
        elif selected is None:
            picks = index.block_table.shape[1] * self.plan.region(layer, "entries")[0].rows
        else:
            picks = selected.shape[1]
        keys, bf16 = span + picks, q.dtype == torch.bfloat16
        numbers = -1 if window is None else window[0], -1 if entries is None else entries[0]
        splits = cut_of(launch.chip_of(q.device), *numbers, bf16, tokens, heads, keys, selected is not None).splits
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
            table,
            [] if window is None else [pools[name] for name in window[1]],
            entry_buffers,
            frequencies,
            workspace,
            [*numbers, own_number],
            [span, ratio, splits, keys],
            _scale(q, scale),
            bf16,
        )
        return Attention(out, lse)

    @recording_nothing
    def attend_kv(self, pools, layer, index, q, k=None, v=None, *, columns=None, sink=None, scale=None):
        """Attend from q [T, H, key_dim] to the layer's K-V; H is a multiple of key_heads; out [T, H, value_dim]."""
        options = {"columns": columns, "sink": sink, "scale": scale}
        if self.attention_kernels != "torch" and len(index.slots) and q.numel():
            found = kv_reading.attend_kv(self, pools, layer, index, q, k, v, **options)
            if not isinstance(found, Declined):
                return found
            self.fall_back(layer, "attend_kv", found.reason)
        return super().attend_kv(pools, layer, index, q, k, v, **options)

    @recording_nothing
    def index_scores(self, pools, layer, index, q, weights, *, columns=None):
        """``sum_h weights[t,h] · relu(q[t,h] · key[s])`` -> [T, columns] fp32; -inf unless s < (t + 1) div m."""
        columns = bounds.columns(self.plan, layer, "index_keys", index) if columns is None else columns
        bound = self._keys[layer]
        if bound is None or not len(index.slots) or not q.numel() or not columns:
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

    @recording_nothing
    def select(self, scores, k):
        """Top k of scores [T, n] -> [T, k] int32: highest first, ties to the lowest index, -1 where score is -inf."""
        if k > MOST_PICKS or not k or not scores.numel():
            if k > MOST_PICKS:
                self.fall_back(None, "select", f"k > {MOST_PICKS}")
            return super().select(scores, k)
        room = select_workspace(len(scores), scores.shape[1], k)
        return launch.calls().select_rows(scores.to(torch.float32).contiguous(), *self._pairs(room), k)

    @recording_nothing
    def index_select(self, pools, layer, index, q, weights, k, *, columns=None, run=None):
        """``select(index_scores(...), k)``; beyond MOST_SCORES in one go, each program keeping its run's best.

        Args:
            run: entries of a program, in one go whatever there are.
        """
        columns = bounds.columns(self.plan, layer, "index_keys", index) if columns is None else columns
        bound = self._keys[layer]
        whole = run is None and len(q) * columns <= MOST_SCORES
        if whole or bound is None or not len(index.slots) or not q.numel() or not 0 < k <= MOST_BEST:
            return self.select(self.index_scores(pools, layer, index, q, weights, columns=columns), k)
        number, names = bound
        run = run or RUN
        *room, held = best_workspace(runs_of(launch.chip_of(q.device), len(q), columns, run, k), k)
        return launch.calls().score_select_rows(
            q.contiguous(),
            weights.contiguous(),
            index.positions,
            index.request_index,
            index.block_table,
            [pools[name] for name in names],
            self._rotated_room(number, q),
            *self._pairs(room),
            self.workspaces.take("scores", held),
            number,
            self.component(layer, "index_keys").ratio,
            columns,
            k,
            run,
        )

    def _index_keys_of(self, layer):
        """(record number, names of buffers) of the layer's index keys, or why they are not covered."""
        bound = self.bound(layer, "index_keys")
        if bound is None:
            return Declined(self.why_unbound(layer, "index_keys"))
        found = scored(launch.BOUND[bound[0][0]].record)
        return found if isinstance(found, Declined) else (bound[0][0], bound[0][1])

    def _rotated_room(self, number, q):
        rotated = launch.BOUND[number].record.hadamard
        return self.workspaces.take("queries", q.numel() if rotated else 1, torch.bfloat16)

    def _pairs(self, room):
        pairs, counts = room
        return self.workspaces.take("pairs", pairs, torch.int64), self.workspaces.take("counts", counts, torch.int32)

    def _attention_of(self, layer, *, bf16):
        """(window, entries, parts): (record number, names of buffers) of each or None; or why they are not covered."""
        found = []
        for role in ("window", "entries"):
            bound = self.bound(layer, role) if self.component(layer, role) is not None else ()
            if bound is None:
                return Declined(self.why_unbound(layer, role))
            found.append((bound[0][0], bound[0][1]) if bound else None)
        records = [None if one is None else launch.BOUND[one[0]].record for one in found]
        parts = attended(*records, bf16=bf16)
        return parts if isinstance(parts, Declined) else (*found, parts)

    def _own_rows(self, layer, number, rows, *, whole):
        """(the step's own window rows [T, bytes], number of their record): as the ring will hold them, or decoded."""
        (region,) = self.plan.region(layer, "window")
        record = own_record(launch.BOUND[number].record, region.format)
        number, tokens = launch.bind(launch.Bound(record, 0, 0, 0)), len(rows)
        zeros = torch.zeros(tokens + 1, dtype=torch.int32, device=rows.device)
        positions, length = torch.arange(tokens, dtype=torch.int32, device=rows.device), zeros[:1] + tokens
        own = torch.empty((tokens, region.format.row), dtype=torch.uint8, device=rows.device)
        # All are rows of one block.
        table = zeros[:1, None]
        launch.calls().append_rows(rows.contiguous(), positions, zeros[:-1], zeros[:1], zeros[:1], table, [own], number)
        if not whole:
            return own, number
        values, _, _ = launch.calls().gather_all_rows(length, table, [own], number, 1, tokens)
        return values[0].view(torch.uint8), launch.bind(launch.Bound(plain_record(record), 0, 0, 0))

    def _visits(self, index, entries, tokens, selected):
        """How often a step's queries read an entry on average; -1 where decoding them all is not worth it."""
        if entries is None:
            return -1
        record = launch.BOUND[entries[0]].record
        count = index.block_table.numel() * record.rows
        if not count or not record.quant or 2 * count * record.dim > MOST_DECODED:
            return -1
        return tokens / len(index.slots) if selected is None else selected.numel() / count

    def _decoded_entries(self, pools, layer, index, entries):
        """((number of the record, no names), buffers, block table) of entries decoded once for all queries."""
        number, names = entries
        table, ratio = index.block_table, self.component(layer, "entries").ratio
        record = launch.BOUND[number].record
        values, _, _ = launch.calls().gather_all_rows(
            index.lengths, table, [pools[name] for name in names], number, ratio, table.shape[1] * record.rows
        )
        blocks = torch.arange(table.numel(), dtype=torch.int32, device=table.device).view_as(table)
        decoded = launch.bind(launch.Bound(plain_record(record), 0, 0, 0))
        return (decoded, ()), [values.view(torch.uint8)], torch.where(table >= 0, blocks, -1)


def _scale(q, scale):
    """The scale of the logits: that of the key dim unless given."""
    return q.shape[2] ** -0.5 if scale is None else float(scale)
