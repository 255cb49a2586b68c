"""Layers whose keys and values are one row a token: latent attention, and DeepSeek-V4's windows and entries."""
# ruff: noqa: ARG002 - the signatures are those that models call
# pyright: reportPrivateUsage=false

from typing import Any

import torch

from kvcore.cache.inside import writes_of
from kvcore.interop.transformers.absorbed import Latents
from kvcore.interop.transformers.compiled import notes, shown_by
from kvcore.interop.transformers.compressed import WindowAndEntries
from kvcore.interop.transformers.handed import Captured
from kvcore.interop.transformers.layers import Layer, Pair, captured_step
from kvcore.interop.transformers.masked import REASON, attended_under
from kvcore.interop.transformers.owner import Owner
from kvcore.interop.transformers.static import padded, stored_keys_and_values
from kvcore.interop.transformers.tensors import check_inference, to_torch
from kvcore.spec import Entries, LayerSpec, Tail, Window
from kvcore.step import at_start


class LatentRows(Layer):
    """A layer of one row a token, to which the model attends or the cache itself."""

    _attended = False

    def _end(self) -> None:
        """The layer has what it needs; what is attended to must last as long as the model's forward."""
        if self._attended:
            self.owner.hand_out(self.number)
        else:
            self.owner.finish(self.number)


class MlaLayer(LatentRows):
    """Latent attention: one row a token for all heads, the compressed latent and the rotary key side by side.

    With an indexer (V3.2) the model asks for its keys after ``update``, and the forward's part ends there.
    """

    component: Entries

    def __init__(self, owner: Owner, number: int, spec: LayerSpec, rank: int | None) -> None:
        assert spec.entries is not None
        super().__init__(owner, number, spec.entries)
        self._has_indexer = spec.index_keys is not None
        self._rank = rank
        self._rows: Any = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store latents [B, 1, S, rank] and rotary keys [B, 1, S, rotary dim]; return all of both."""
        check_inference(key_states, value_states)
        owner, rank, dtype = self.owner, key_states.shape[-1], key_states.dtype
        with owner.forward(self.number, key_states) as handle:
            self._rows = owner.give(torch.cat([key_states, value_states], dim=-1).flatten(0, 2))
            handle.store_entries(self._rows)
            self._rank = rank
            if owner.attending is not None and self.attends(key_states.shape[2]):
                self._attended = True
                found = Latents(self, handle, owner.attending, key_states, value_states).outlines()
            else:
                self._attended = False
                found = self.visible_rows(handle, dtype, rank)
            if not self._has_indexer:
                self._end()
        return found

    def visible_rows(self, handle: Any, dtype: torch.dtype, rank: int) -> Pair:
        """All latents and rotary keys [B, 1, n, dim]."""
        found = self.owner.take(handle.gather_all_entries().values, dtype).unsqueeze(1)
        return found[..., :rank], found[..., rank:]

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store the indexer's keys [B, S, dim]; return all of them [B, n, dim]."""
        check_inference(indexer_key_states)
        owner = self.owner
        with owner.forward_part(self.number) as handle:
            handle.store_entries(self._rows, owner.give(indexer_key_states.flatten(0, 1)))
            keys = owner.take(handle.gather_all_index_keys().values, indexer_key_states.dtype)
            self._end()
        return keys

    @property
    def indexer_keys(self) -> torch.Tensor | None:
        """A copy of the indexer's keys that are stored, [B, n, dim]; None if there are none."""
        if not self._has_indexer or not self.is_initialized:
            return None
        with self.owner.reading(self.number) as handle:
            return self.owner.take(handle.gather_all_index_keys().values, self.owner.dtype)

    def _read(self, handle: Any) -> Pair:
        rows = self._last(self.owner.take(handle.gather_all_entries().values, self.owner.dtype).unsqueeze(1))
        return rows[..., : self._rank], rows[..., self._rank :]


class StaticMlaLayer(MlaLayer):
    """The same with ``max_length`` rows whatever there is, zeros after the last, for ``torch.compile``."""

    is_compileable = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store latents and rotary keys; return ``max_length`` rows of both [B, 1, max_length, dim]."""
        check_inference(key_states, value_states)
        owner, columns = self.owner, self.owner.max_length
        if self.attends(key_states.shape[2]) and notes(
            owner, self.number, columns, key_states, value_states, latent=True
        ):
            return key_states, value_states
        return stored_keys_and_values(key_states, value_states, owner.number, self.number, columns)

    def stored_and_attended(
        self,
        query: torch.Tensor,
        latents: torch.Tensor,
        rotary: torch.Tensor,
        mask: torch.Tensor | None,
        sink: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """What ``update`` and attention do together once compiled code runs: q [B, H, dim] -> [B, H, rank]."""
        owner, rank = self.owner, latents.shape[3]
        with owner.forward(self.number, latents) as handle:
            self._rank = rank
            handle.store_entries(owner.give(torch.cat([latents, rotary], dim=-1).flatten(0, 2)))
            selected, listed = None, None
            if mask is not None:
                shown, listed = shown_by(mask[..., : owner.length + 1], len(query))
                number = torch.arange(shown.shape[1], dtype=torch.int32, device=shown.device)
                selected = owner.numbers(torch.where(shown, number, -1))
                # What adds to scores, or shows a row nothing, is no list of rows.
                listed = shown.any(dim=1) if listed is None else listed & shown.any(dim=1)
            if mask is not None and listed is not None and not listed.all():
                owner.refuse(self.number, REASON)
                rows = owner.take(handle.gather_all_entries().values, query.dtype).unsqueeze(1)
                rows = padded(rows, mask.shape[3])
                found = attended_under(mask, query.unsqueeze(2), rows, rows[..., :rank], sink, scale).squeeze(1)
            else:
                context = writes_of(handle).context
                out = context.ops.attend(
                    context.pools,
                    self.number,
                    context.index,
                    owner.give(query),
                    selected,
                    sink=None if sink is None else owner.give(sink.detach().float()),
                    scale=scale,
                ).out
                found = owner.take(out, query.dtype)[..., :rank].contiguous()
            owner.finish(self.number)
        # Where nobody could look, NaN says that a row saw something else.
        return found

    def captured_and_attended(
        self,
        query: torch.Tensor,
        latents: torch.Tensor,
        rotary: torch.Tensor,
        selected: torch.Tensor | None,
        sink: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """The same in a step that is open, of the rows ``selected`` [B, n] or of all, without the host's numbers."""
        owner, number, rank = self.owner, self.number, latents.shape[3]
        ops, pools, index, _ = captured_step(owner, number)
        ops.store_entries(pools, number, index, owner.give(torch.cat([latents, rotary], dim=-1).flatten(0, 2)))
        out = ops.attend(
            pools,
            number,
            index,
            owner.give(query),
            selected,
            sink=None if sink is None else owner.give(sink.detach().float()),
            scale=scale,
        ).out
        return owner.take(out, query.dtype)[..., :rank].contiguous()

    def prepare_captured(self, captured: Captured, batch: int, heads: int) -> None:
        """Do that once outside of a graph, with zeros, for a step of ``batch`` rows and queries of ``heads`` heads."""
        owner, dim = self.owner, self.component.dim
        rows, query = (
            owner.give(torch.zeros(shape, dtype=owner.dtype, device=owner.device))
            for shape in ((batch, dim), (batch, heads, dim))
        )
        ops, pools, index, _ = captured
        ops.store_entries(pools, self.number, index, rows)
        for selected in (None, torch.zeros((batch, owner.max_length), dtype=torch.int32, device=owner.device)):
            ops.attend(pools, self.number, index, query, selected)

    def store(self, key_states: torch.Tensor, value_states: torch.Tensor, columns: int) -> Pair:
        """What ``update`` does once compiled code runs."""
        keys, values = super().update(key_states, value_states)
        return padded(keys, columns), padded(values, columns)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows that ``update`` will return, position of the first)."""
        return self.owner.max_length, 0

    def _last(self, rows: torch.Tensor) -> torch.Tensor:
        return padded(rows, self.owner.max_length)


class LatentLayer(LatentRows):
    """A window of latent rows that serve as key and value: DeepSeek-V4's sliding layers.

    Attributes:
        ratio: tokens of an entry; None: the layer has none.
    """

    component: Window
    ratio: int | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store latent rows [B, 1, S, dim]; return the visible ones [B, 1, n, dim], twice."""
        check_inference(key_states)
        with self.owner.forward(self.number, key_states) as handle:
            rows = self._append(handle, key_states)
            self._end()
        return rows, rows

    def _append(self, handle: Any, latents: torch.Tensor) -> torch.Tensor:
        """Store rows; hand out the visible ones, as an outline if the cache attends itself."""
        owner = self.owner
        handle.append_window(owner.give(latents.flatten(0, 2)))
        self._attended = owner.attending is not None and self.attends(latents.shape[2])
        if self._attended and owner.attending is not None:
            return WindowAndEntries.of(self, handle, owner.attending, latents).outlines()[0]
        return self.visible_rows(handle, latents)

    def visible_rows(self, handle: Any, latents: torch.Tensor) -> torch.Tensor:
        """Rows that a forward's queries see, [B, 1, n, dim]: those before it, and its latents as they are stored.

        What these have overwritten none of the queries sees.
        """
        owner, (batch, _, new, _), context = self.owner, latents.shape, writes_of(handle).context
        held = min(owner.length, self.component.window)  # the window's rows are those of the last `held` positions
        first = self._visible(new).start - (owner.length - held)
        found = context.ops.gather_window(context.pools, self.number, at_start(context.index))
        ops, form = context.ops, self.component.parts[0].format
        stored = owner.take(ops.decode(form, ops.encode(form, owner.give(latents.flatten(0, 2)))), latents.dtype)
        before = owner.take(found.values[:, first:held], latents.dtype)
        return torch.cat([before, stored.unflatten(0, (batch, new))], dim=1).unsqueeze(1)

    def _read(self, handle: Any) -> Pair:
        found = handle.gather_window()
        held = int((to_torch(found.positions[0], device=torch.device("cpu")) >= 0).sum())
        rows = self._last(self.owner.take(found.values, self.owner.dtype)[:, :held].unsqueeze(1))
        return rows, rows


class CompressedLayer(LatentLayer):
    """A window, compressed entries and, with an indexer, its keys: DeepSeek-V4's CSA and HCA layers.

    The model compresses and rotates: it asks for the tokens of the windows that close (``store_compression_weights``),
    for the window before them (``update_overlap_state``), and hands over finished entries
    (``update_compressor_states``). Tokens wait in the tails, whose score holds the positional bias as everywhere in
    kvcore; the model adds the bias itself, so it is taken off again on the way out. In fp32 that may move a waiting
    token's score by one rounding.
    """

    def __init__(self, owner: Owner, number: int, spec: LayerSpec, biases: dict[str, torch.Tensor]) -> None:
        assert spec.window is not None
        assert spec.tail is not None
        super().__init__(owner, number, spec.window)
        # transformers' names for the two compressors -> role, component and [ratio, width] bias of its tail.
        self.tails: dict[str, tuple[str, Tail, torch.Tensor]] = {
            "compressor": ("tail", spec.tail, biases["compressor"])
        }
        if spec.index_tail is not None:
            self.tails["indexer"] = ("index_tail", spec.index_tail, biases["indexer"])
        self.ratio = spec.tail.ratio
        self._carry: dict[str, tuple[torch.Tensor, torch.Tensor] | tuple[None, None]] = {}
        self._entries: Any = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store latent rows [B, 1, S, dim]; return the visible ones [B, 1, n, dim], twice. The compressor follows."""
        check_inference(key_states)
        with self.owner.forward(self.number, key_states) as handle:
            rows = self._append(handle, key_states)
        return rows, rows

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Add new projections [B, S, width]; return those of the windows that close, and the first one's position."""
        check_inference(kv, gate)
        role, tail, bias = self.tails[name]
        start, ratio, live = self.owner.length, tail.ratio, None
        waiting = start % ratio
        with self.owner.forward_part(self.number) as handle:
            if waiting + kv.shape[1] >= ratio:
                raw = self.owner.take(handle.gather_rows(role).rows)
                live = raw.clone(memory_format=torch.contiguous_format).view(torch.float32)
            if waiting + kv.shape[1] <= ratio:
                added = bias[waiting : waiting + kv.shape[1]]
            else:
                added = bias[torch.arange(start, start + kv.shape[1], device=kv.device) % ratio]
            score = gate.float() + added
            append = handle.append_tail if role == "tail" else handle.append_index_tail
            append(self.owner.give(kv.float().flatten(0, 1)), self.owner.give(score.flatten(0, 1)))
        if live is None:  # no window closes
            return kv[:, :0], gate[:, :0], start - waiting
        old_kv, old_score = live.split(tail.width, dim=-1)
        carried = live.shape[1] - waiting
        self._carry[name] = (
            (old_kv[:, :carried, : tail.dim], old_score[:, :carried, : tail.dim]) if carried else (None, None)
        )
        kv = torch.cat([old_kv[:, carried:].to(kv.dtype), kv], dim=1)
        gate = torch.cat([(old_score[:, carried:] - bias[:waiting]).to(gate.dtype), gate], dim=1)
        usable = kv.shape[1] // ratio * ratio
        return kv[:, :usable], gate[:, :usable], start - waiting

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """What the window before the closing ones adds to the first: kv and biased score [B, ratio, dim], or Nones."""
        return self._carry[name]

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Store finished entries (or index keys) [B, closed, dim]; return all of them [B, n, dim]."""
        check_inference(compressed)
        rows, closed = self.owner.give(compressed.flatten(0, 1)), compressed.shape[1]
        with self.owner.forward_part(self.number) as handle:
            if name == "compressor":
                self._entries = rows
                if closed:
                    handle.store_entries(rows)
                values = self._all_entries(handle, compressed.dtype)
            else:
                if closed:
                    handle.store_entries(self._entries, rows)
                values = self._all_index_keys(handle, compressed)
            if name == next(reversed(self.tails)):
                self._end()
        return values

    def _all_index_keys(self, handle: Any, closed: torch.Tensor) -> torch.Tensor:
        if self._attended and self.owner.attending is not None:
            return WindowAndEntries.of_layer(self, self.owner.attending).index_keys(closed.shape[2], closed.dtype)
        return self.owner.take(handle.gather_all_index_keys().values, closed.dtype)

    def _all_entries(self, handle: Any, dtype: torch.dtype) -> torch.Tensor:
        if self._attended and self.owner.attending is not None:
            return WindowAndEntries.of_layer(self, self.owner.attending).entries()
        return self.owner.take(handle.gather_all_entries().values, dtype)
