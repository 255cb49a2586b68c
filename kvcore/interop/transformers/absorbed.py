"""Latent attention from the latents: a module's key and value projections are moved to the query and to the output.

Modules of latent attention expand latents to keys and values of every head before they call the attention function. The
expansion is linear, so a head's logit is the latent times that head's query times its key projection, and its output
the value projection of a sum of latents. ``seam`` says how latents come here unexpanded.
"""

# pyright: reportPrivateUsage=false

from functools import partial
from typing import Any

import torch

from kvcore.cache.inside import writes_of
from kvcore.interop.transformers.deferred import Deferred, deferred, made, outline
from kvcore.interop.transformers.handed import HandedOut, Shared
from kvcore.interop.transformers.projection import DIMS, Projection, absorbed, projection_of, valued
from kvcore.interop.transformers.seam import SEAM

MOST_SELECTED = 1 << 24
"""Numbers of rows that a step with padding lists; beyond it the model expands."""


class Latents(HandedOut):
    """Latents and rotary keys of a layer in a forward, new ones stored; good until the forward's end."""

    __slots__ = ("_module", "_rank")

    def __init__(self, layer: Any, handle: Any, forward: Any, latents: torch.Tensor, rotary: torch.Tensor) -> None:
        sizes = latents.shape[3], rotary.shape[3]
        shared = forward.memo.get(sizes)
        if shared is None:
            (batch, _, new, _), dtype = latents.shape, latents.dtype
            first, second = (outline((batch, 1, len(layer._visible(new)), dim), dtype) for dim in sizes)
            shared = forward.memo[sizes] = Shared(forward, latents, (first, second))
        super().__init__(layer, handle, shared)
        self._rank: int = sizes[0]
        self._module: Any = None

    def expanded(self, module: Any, latents: Deferred, rotary: Deferred) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, H, n, dim] of the module's heads, made from the latents if somebody looks at them."""
        heads, dim, value_dim = (getattr(module, name, None) for name in DIMS)
        own = getattr(type(module), SEAM)
        if heads is None or dim is None or value_dim is None:
            return own(module, latents.made(), rotary.made())
        self._module = module
        kept: list[Any] = []

        def make(which: int) -> torch.Tensor:
            if not kept:
                kept.extend(own(module, latents.made(), rotary.made()))
            return kept[which]

        batch, _, seen, rotary_dim = self._shared.outlines[1].shape
        return (
            self._deferred((batch, heads, seen, dim + rotary_dim), partial(make, 0)),
            self._deferred((batch, heads, seen, value_dim), partial(make, 1)),
        )

    def attend(self, module: Any, query: torch.Tensor, mask: Any, options: dict[str, Any]) -> torch.Tensor | None:
        """Attention of q [B, H, S, dim] -> [B, S, H, value dim]; None, and the reason noted: the model attends."""
        layer = self._layer
        found = self._what(module, query, mask, options)
        if isinstance(found, str):
            layer.owner.refuse(layer.number, found)
            return None
        projection, selected = found
        owner, context = layer.owner, writes_of(self._handle).context
        sink, scale = options.get("s_aux", options.get("sinks")), options.get("scaling")
        given = context.ops.attend(
            context.pools,
            layer.number,
            context.index,
            owner.give(absorbed(query, projection)),
            selected,
            sink=None if sink is None else owner.give(sink.detach().float()),
            # The default is that of the module's queries; those of latents are wider.
            scale=query.shape[3] ** -0.5 if scale is None else scale,
        ).out
        return valued(owner.take(given, query.dtype)[..., : self._rank], projection, query.shape[0])

    def _what(
        self, module: Any, query: torch.Tensor, mask: Any, options: dict[str, Any]
    ) -> tuple[Projection, Any] | str:
        """(what latents are multiplied with, rows that queries see [T, k] or None for all up to them); else why not."""
        if module is not self._module:
            return "keys and values that another module expanded"
        indices = options.get("indices")
        facts = self._facts(module, query, mask, options, selected=indices is not None)
        if isinstance(facts, str):
            return facts
        projection = projection_of(module, query, self._rank)
        if isinstance(projection, str):
            return projection
        if indices is not None:
            return projection, self._selected(indices, mask)
        if facts.left is None:
            return projection, None
        if query.shape[0] * query.shape[2] * self._shared.outlines[0].shape[2] > MOST_SELECTED:
            return "a long prompt with padding at the left"
        return projection, self._unpadded(facts.left)

    def _selected(self, indices: torch.Tensor, mask: Any) -> Any:
        """[T, k] int32: what an indexer picked, as far as the mask lets it be seen."""
        owner = self._layer.owner
        mask = made(mask)
        if mask is not None:
            batch, new, _ = indices.shape
            seen = mask if mask.dtype == torch.bool else mask == 0
            seen = seen[:, 0].expand(batch, new, -1).gather(-1, indices.long())
            indices = torch.where(seen, indices, -1)
        return owner.numbers(indices.flatten(0, 1).to(torch.int32))

    def _unpadded(self, left: tuple[int, ...]) -> Any:
        """[T, n] int32: every row of a request behind its padding."""
        shared, key = self._shared, ("unpadded", left)
        memo = shared.forward.memo
        if key not in memo:
            seen = shared.outlines[0].shape[2]
            number = torch.arange(seen, dtype=torch.int32, device=shared.device)
            padding = torch.tensor(left, dtype=torch.int32).to(shared.device, non_blocking=True)
            rows = torch.where(number >= padding[:, None], number, -1)
            memo[key] = self._layer.owner.numbers(rows.repeat_interleave(shared.new, dim=0))
        return memo[key]

    def _deferred(self, shape: tuple[int, ...], make: Any) -> Deferred:
        shared = self._shared
        memo, key = shared.forward.memo, (shape, shared.dtype)
        if key not in memo:
            memo[key] = outline(shape, shared.dtype)
        return deferred(memo[key], shared.device, make, self)

    def _made_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._layer.visible_rows(self._handle, self._shared.dtype, self._rank)
