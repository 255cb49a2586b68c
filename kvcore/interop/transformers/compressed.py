"""Attention from a window and compressed entries as they lie: DeepSeek-V4's layers.

The model puts entries behind its window, and behind the window's mask what its compressor says of entries: 0 of those
that a query sees, those that the indexer picked, -inf of all others. ``deferred`` has both stay outlines, and the
entries that a query sees are read from the compressor's part of the mask: no other knows which positions the model
counts from, which padding shifts. ``seam`` says how a token's index scores come from the keys where they lie.
"""

# pyright: reportPrivateUsage=false

from functools import partial
from typing import Any

import torch

from kvcore.cache.inside import writes_of
from kvcore.interop.transformers.attention import Facts, Forward
from kvcore.interop.transformers.deferred import Deferred, Joined, deferred, outline
from kvcore.interop.transformers.handed import HandedOut, Shared
from kvcore.interop.transformers.tensors import ACCEPTED, by_token


class WindowAndEntries(HandedOut):
    """Rows of a layer in a forward, new ones stored; good until the forward's end."""

    __slots__ = ("_latents",)

    def __init__(self, layer: Any, handle: Any, shared: Shared, latents: torch.Tensor) -> None:
        super().__init__(layer, handle, shared)
        self._latents = latents

    @classmethod
    def of(cls, layer: Any, handle: Any, forward: Forward, latents: torch.Tensor) -> "WindowAndEntries":
        """What a layer hands out of latents [B, 1, S, dim] that it has stored."""
        (batch, _, new, dim), key = latents.shape, ("window", layer.component)
        if key not in forward.memo:
            seen = outline((batch, 1, len(layer._visible(new)), dim), latents.dtype)
            forward.memo[key] = Shared(forward, latents, (seen, seen))
        # The forward has it until its end, and the layer does not.
        found = forward.memo["rows", layer.number] = cls(layer, handle, forward.memo[key], latents)
        return found

    @staticmethod
    def of_layer(layer: Any, forward: Forward) -> "WindowAndEntries":
        """The same, once more."""
        return forward.memo["rows", layer.number]

    def outlines(self) -> tuple[Deferred, Deferred]:
        """The window's rows, twice."""
        shared = self._shared
        found = deferred(shared.outlines[0], shared.device, self._first, self, joins=True)
        return found, found

    def entries(self) -> Deferred:
        """All entries, [B, n, dim]."""
        shared, (batch, _, _, dim) = self._shared, self._latents.shape
        seen = outline((batch, self._count(), dim), shared.dtype)
        return deferred(seen, shared.device, self._made_entries, self, joins=True)

    def index_keys(self, dim: int, dtype: torch.dtype) -> Deferred:
        """All keys of the indexer, [B, n, dim]."""
        seen = outline((self._latents.shape[0], self._count(), dim), dtype)
        return deferred(seen, self._shared.device, partial(self._made_index_keys, dtype), self)

    def scores(self, module: Any, q: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
        """What the indexer's module makes of queries [B, 1, H, dim] and its keys, [B, 1, n]; None: it does.

        A token sees every key that there is, and so none is left out here that the model might count.
        """
        shared, (batch, new, _, _) = self._shared, q.shape
        owner = self._layer.owner
        fits = new == shared.new == 1 and batch == self._latents.shape[0] and q.dtype in ACCEPTED
        if not fits or owner.attending is not shared.forward or not self._count():
            return None
        weights = module.weights_proj(hidden).float() * (module.weights_scaling * module.softmax_scale)
        found = self._handle.index_scores(owner.give(q.flatten(0, 1)), owner.give(weights.flatten(0, 1)))
        return owner.take(found, torch.float32).unsqueeze(1)

    def attend(
        self, module: Any, query: torch.Tensor, mask: Any, options: dict[str, Any], *, behind: Any = None
    ) -> torch.Tensor | None:
        """Attention of q [B, H, S, dim] -> [B, S, H, dim]; None, and the reason noted: the model attends.

        ``behind``: what the model put behind the window.
        """
        layer, handle = self._layer, self._handle
        owner, writes = layer.owner, writes_of(handle)
        context = writes.context
        found = self._what(module, query, mask, options, behind)
        if isinstance(found, str):
            owner.refuse(layer.number, found)
            return None
        facts, selected, known = found
        rows = writes.unwritten("window")
        sink = options.get("s_aux", options.get("sinks"))
        given = context.ops.attend(
            context.pools,
            layer.number,
            self._index(context.index, facts),
            owner.give(by_token(query)),
            selected,
            rows=rows[0] if rows else None,
            sink=None if sink is None else owner.give(sink.detach().float()),
            scale=options.get("scaling"),
        ).out
        out = owner.take(given, query.dtype)
        if known is not None:
            out = torch.where(known[:, None, None], out, torch.nan)
        return out.view(query.shape[0], self._shared.new, *out.shape[1:])

    def _what(
        self, module: Any, query: torch.Tensor, mask: Any, options: dict[str, Any], behind: Any
    ) -> tuple[Facts, Any, torch.Tensor | None] | str:
        """(what the window's mask says, and ``_seen`` of the entries); else why that is not known."""
        count = self._count()
        own = type(behind) is Deferred and behind.source is self
        if own == (self._layer.ratio is None) or (behind is not None) != own:
            return "a window with something else behind it than the layer's entries"
        bias: Any = None
        if count:
            if type(mask) is not Deferred or type(mask.source) is not Joined:
                return self._shared.forward.memo.get("refused", "a mask that says nothing of entries")
            mask, bias = mask.source
            if bias is None and self._shared.new > 1:
                return "several tokens that all see every entry"
            if bias is not None and bias.shape[3] != count:
                return f"a mask of {bias.shape[3]} entries where there are {count}"
        facts = self._facts(module, query, mask, options)
        if isinstance(facts, str) or bias is None:
            return facts if isinstance(facts, str) else (facts, None, None)
        indexer = getattr(getattr(module, "compressor", None), "indexer", None)
        found = self._seen(bias, getattr(indexer, "index_topk", count))
        return found if isinstance(found, str) else (facts, *found)

    def _seen(self, bias: torch.Tensor, most: int) -> tuple[Any, torch.Tensor | None] | str:
        """What a mask [B, 1, S, n] of entries says, ``most`` of which a query sees; else why that is not known.

        Returns:
            Entries that queries see, [T, k] int32, -1 for none; and whether the mask says no more than that, [T], of
            one token on a GPU, for which the host does not wait: where it does, NaN is the answer. None: it says no
            more.
        """
        owner, shared = self._layer.owner, self._shared
        bias = bias.flatten(0, 2)
        shown, count = bias == 0, bias.shape[1]
        allowed = shown
        if shared.new > 1:
            allowed = shown & self._closed(count).repeat(len(bias) // shared.new, 1)
        known = (allowed | (bias <= torch.finfo(bias.dtype).min)).all(dim=1)
        if (shared.new > 1 or not bias.is_cuda) and not bool(known.all()):
            return "a mask of entries that weighs them, or shows some that are still to come"
        if most < count:
            shown, number = bias.topk(most, sorted=False)
            selected = torch.where(shown == 0, number, -1).to(torch.int32)
        else:
            number = torch.arange(count, dtype=torch.int32, device=bias.device)
            selected = torch.where(shown, number, -1)
        return owner.numbers(selected), known if bias.is_cuda else None

    def _closed(self, count: int) -> torch.Tensor:
        """Which entries are closed where each of a row's new tokens is, [S, n]."""
        shared, ratio = self._shared, self._layer.ratio
        memo, key = shared.forward.memo, ("closed", ratio)
        if key not in memo:
            first = shared.forward.start + 1
            tokens = torch.arange(first, first + shared.new, device=shared.device)
            memo[key] = torch.arange(count, device=shared.device) < (tokens // ratio)[:, None]
        return memo[key]

    def _count(self) -> int:
        """Entries of a row, those that closed in the forward counted."""
        shared, ratio = self._shared, self._layer.ratio
        return 0 if ratio is None else (shared.forward.start + shared.new) // ratio

    def _made_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._layer.visible_rows(self._handle, self._latents)
        return found, found

    def _made_index_keys(self, dtype: torch.dtype) -> torch.Tensor:
        self._check_under_way()
        return self._layer.owner.take(self._handle.gather_all_index_keys().values, dtype)

    def _made_entries(self) -> torch.Tensor:
        self._check_under_way()
        return self._layer.owner.take(self._handle.gather_all_entries().values, self._shared.dtype)
