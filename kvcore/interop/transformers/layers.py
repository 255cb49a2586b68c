"""One layer of the cache as ``transformers`` models call it.

A model calls ``update`` once a layer and forward, and attends to what it returns: the rows that its new tokens may see,
in position order, new ones last. How many there are and where they begin it asked before, through ``get_mask_sizes``;
both answers come from the component's ``visible``. New rows come back as stored, so a quantised cache quantises them
for the forward that writes them too, and a prompt's logits do not depend on how it was cut into chunks.
"""
# ruff: noqa: ARG002 - the signatures are those that models call

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvcore.interop.transformers.static import stored_keys_and_values
from kvcore.interop.transformers.tensors import by_head, by_token
from kvcore.spec import KV, Entries, LayerSpec, Tail, Window

if TYPE_CHECKING:
    from kvcore.interop.transformers.cache import KVCache

Pair = tuple[torch.Tensor, torch.Tensor]


class Layer(CacheLayerMixin):
    """What all layers answer alike. B rows of the batch, S new tokens each."""

    is_compileable = False
    supports_early_init = False

    def __init__(self, owner: "KVCache", number: int, component: KV | Window | Entries) -> None:
        super().__init__()
        self.owner = owner
        self.number = number
        self.component = component
        self.is_initialized = True
        self.is_sliding = component.span is not None or getattr(component, "window", None) is not None

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` can undo tokens: always where nothing is overwritten, else up to ``max_draft_tokens``."""
        return self.owner.can_undo

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: pools are allocated with the cache."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows that ``update`` will return, position of the first)."""
        visible = self._visible(query_length)
        return len(visible), visible.start

    def get_seq_length(self) -> int:
        """Tokens of every row before the forward that is under way, if one is."""
        return self.owner.length

    def get_max_length(self) -> int:
        """Most tokens that a row can hold."""
        return self.owner.max_length

    def _visible(self, new: int) -> range:
        start, end = self.owner.length, self.owner.length + new
        # Where every position is kept, what the queries see is less than what there is.
        first = max(self.component.visible(start, end).start, self.component.first_visible(start))
        return range(first, end)


class ClassicLayer(Layer):
    """Keys and values of full, sliding or chunked attention."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store keys and values [B, heads, S, dim]; return the visible ones [B, heads, n, dim].

        Copies, or with ``lend`` the cache's own memory where it lies evenly.
        """
        owner = self.owner
        handle = owner.begin(self.number, key_states)
        try:
            append = handle.append_borrow_kv if owner.lend else handle.append_kv
            lent = append(owner.give(by_token(key_states)), owner.give(by_token(value_states)))
            k, v = lent or handle.gather_kv()[:2]
            first = self._first(key_states.shape[2]) if self.component.span is None else 0
            if first:
                k, v = k[:, first:], v[:, first:]
            keys = by_head(owner.take(k, key_states.dtype))
            values = by_head(owner.take(v, value_states.dtype))
            owner.finish(self.number)
        except BaseException:
            owner.abort()
            raise
        return keys, values

    def _first(self, new: int) -> int:
        """First position that ``update`` hands out."""
        return self._visible(new).start


class StaticLayer(ClassicLayer):
    """The same with shapes that do not depend on how many tokens there are, for ``torch.compile``.

    A full layer returns ``max_length`` rows, a sliding one its window before the new tokens and those; rows that there
    are none of are zeros, which the model's mask leaves out.
    """

    is_compileable = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store keys and values [B, heads, S, dim]; return a fixed number of rows [B, heads, n, dim]."""
        columns = self._columns(key_states.shape[2])
        return stored_keys_and_values(key_states, value_states, self.owner.number, self.number, columns)

    def store(self, key_states: torch.Tensor, value_states: torch.Tensor, columns: int) -> Pair:
        """What ``update`` does once compiled code runs."""
        keys, values = super().update(key_states, value_states)
        missing = (0, 0, 0, columns - keys.shape[2])
        return torch.nn.functional.pad(keys, missing), torch.nn.functional.pad(values, missing)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows that ``update`` will return, position of the first)."""
        window = self.component.span
        return self._columns(query_length), 0 if window is None else max(self.owner.length - window + 1, 0)

    def _first(self, new: int) -> int:
        """Whoever keeps every position hands out every one."""
        return 0

    def _columns(self, new: int) -> int:
        """Rows that ``update`` returns; compiled code depends on it, so it must not depend on the length."""
        window = self.component.span
        return self.owner.max_length if window is None else window - 1 + new


class MlaLayer(Layer):
    """Latent attention: one row a token for all heads, the compressed latent and the rotary key side by side.

    With an indexer (V3.2) the model asks for its keys after ``update``, and the forward's part ends there.
    """

    component: Entries

    def __init__(self, owner: "KVCache", number: int, spec: LayerSpec) -> None:
        assert spec.entries is not None
        super().__init__(owner, number, spec.entries)
        self._has_indexer = spec.index_keys is not None
        self._rows: Any = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store latents [B, 1, S, rank] and rotary keys [B, 1, S, rotary dim]; return all of both."""
        owner, rank = self.owner, key_states.shape[-1]
        with owner.forward(self.number, key_states) as handle:
            self._rows = owner.give(torch.cat([key_states, value_states], dim=-1).flatten(0, 2))
            handle.store_entries(self._rows)
            found = owner.take(handle.gather_all_entries().values, key_states.dtype).unsqueeze(1)
            if not self._has_indexer:
                owner.finish(self.number)
        return found[..., :rank], found[..., rank:]

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store the indexer's keys [B, S, dim]; return all of them [B, n, dim]."""
        owner = self.owner
        with owner.forward_part(self.number) as handle:
            handle.store_entries(self._rows, owner.give(indexer_key_states.flatten(0, 1)))
            keys = owner.take(handle.gather_all_index_keys().values, indexer_key_states.dtype)
            owner.finish(self.number)
        return keys


class LatentLayer(Layer):
    """A window of latent rows that serve as key and value: DeepSeek-V4's sliding layers."""

    component: Window

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store latent rows [B, 1, S, dim]; return the visible ones [B, 1, n, dim], twice."""
        with self.owner.forward(self.number, key_states) as handle:
            rows = self._append(handle, key_states)
            self.owner.finish(self.number)
        return rows, rows

    def _append(self, handle: Any, latents: torch.Tensor) -> torch.Tensor:
        owner, (batch, _, new, _) = self.owner, latents.shape
        held = min(owner.length, self.component.window)  # the window's rows are those of the last `held` positions
        first = self._visible(new).start - (owner.length - held)
        before = owner.take(handle.gather_window().values[:, first:held], latents.dtype)
        rows = owner.give(latents.flatten(0, 2))
        handle.append_window(rows)
        ops, form = owner.kv.ops, self.component.parts[0].format
        stored = owner.take(ops.decode(form, ops.encode(form, rows)), latents.dtype)
        return torch.cat([before, stored.unflatten(0, (batch, new))], dim=1).unsqueeze(1)


class CompressedLayer(LatentLayer):
    """A window, compressed entries and, with an indexer, its keys: DeepSeek-V4's CSA and HCA layers.

    The model compresses and rotates: it asks for the tokens of the windows that close (``store_compression_weights``),
    for the window before them (``update_overlap_state``), and hands over finished entries
    (``update_compressor_states``). Tokens wait in the tails, whose score holds the positional bias as everywhere in
    kvcore; the model adds the bias itself, so it is taken off again on the way out. In fp32 that may move a waiting
    token's score by one rounding.
    """

    def __init__(self, owner: "KVCache", number: int, spec: LayerSpec, compressor: Any) -> None:
        assert spec.window is not None
        assert spec.tail is not None
        super().__init__(owner, number, spec.window)
        # transformers' names for the two compressors -> role, component and [ratio, width] bias of its tail.
        self.tails: dict[str, tuple[str, Tail, torch.Tensor]] = {
            "compressor": ("tail", spec.tail, compressor.position_bias)
        }
        if spec.index_tail is not None:
            self.tails["indexer"] = ("index_tail", spec.index_tail, compressor.indexer.position_bias)
        self._carry: dict[str, tuple[torch.Tensor, torch.Tensor] | tuple[None, None]] = {}
        self._entries: Any = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store latent rows [B, 1, S, dim]; return the visible ones [B, 1, n, dim], twice. The compressor follows."""
        with self.owner.forward(self.number, key_states) as handle:
            rows = self._append(handle, key_states)
        return rows, rows

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Add new projections [B, S, width]; return those of the windows that close, and the first one's position."""
        role, tail, bias = self.tails[name]
        start, ratio = self.owner.length, tail.ratio
        with self.owner.forward_part(self.number) as handle:
            raw = self.owner.take(handle.gather_rows(role).rows)
            live = raw.clone(memory_format=torch.contiguous_format).view(torch.float32)
            old_kv, old_score = live.split(tail.width, dim=-1)
            positions = torch.arange(start, start + kv.shape[1], device=kv.device)
            score = gate.float() + bias[positions % ratio]
            append = handle.append_tail if role == "tail" else handle.append_index_tail
            append(self.owner.give(kv.float().flatten(0, 1)), self.owner.give(score.flatten(0, 1)))
        waiting = start % ratio
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
        rows = self.owner.give(compressed.flatten(0, 1))
        with self.owner.forward_part(self.number) as handle:
            if name == "compressor":
                self._entries = rows
                handle.store_entries(rows)
                gathered = handle.gather_all_entries()
            else:
                handle.store_entries(self._entries, rows)
                gathered = handle.gather_all_index_keys()
            values = self.owner.take(gathered.values, compressed.dtype)
            if name == next(reversed(self.tails)):
                self.owner.finish(self.number)
        return values
