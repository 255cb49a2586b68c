"""The cache's own attention in compiled code: one operator a layer stores new rows and attends.

While a decoder is traced with a static cache that attends itself, its configuration names ours, as it does elsewhere
while one runs. A layer's ``update`` then hands the new rows back as they are and notes itself; the attention function
takes up the note, so that nothing is gathered and no shape depends on how many rows there are. What is noted is looked
at while code is traced; PyTorch sees that it ends as it began.
"""

from typing import Any, NamedTuple

import torch

from kvcore.errors import StepError
from kvcore.interop.transformers.projection import absorbed, traced_projection, valued
from kvcore.interop.transformers.static import CACHES, stored_keys_and_values


class Noted(NamedTuple):
    """A layer that has handed its new rows back.

    Attributes:
        cache, layer: their numbers.
        columns: rows that it hands out where the model attends.
        first, second: the new rows, [B, heads, S, dim] each: keys and values, or latents and rotary keys.
        latent: whether they are the latter.
    """

    cache: int
    layer: int
    columns: int
    first: torch.Tensor
    second: torch.Tensor
    latent: bool


ATTENDING: list[tuple[int, str]] = []
"""(number of the cache, attention that the configuration names otherwise) of decoders that are traced."""

NOTED: list[Noted] = []
"""Layers whose module's attention function is still to be called."""


def begin(config: Any, cache: Any, base: str, name: str) -> None:
    """A decoder begins that attends with the cache: its configuration names ours."""
    ATTENDING.append((cache.number, base))
    config._attn_implementation_internal = name


def end(config: Any) -> None:
    """It has ended: its configuration names what it named."""
    _, base = ATTENDING.pop()
    config._attn_implementation_internal = base
    if NOTED:
        refuse(NOTED[-1].layer)


@torch.compiler.assume_constant_result
def refuse(layer: int) -> None:
    """End tracing: a layer's rows were not attended to by our function, so that the model saw the new ones alone.

    Raises:
        StepError: always.
    """
    raise StepError(
        got=f"layer {layer}, whose module called another attention function",
        where="KVCache, in compiled code",
        allowed="modules that look their attention up in transformers' registry",
        hint="attention='model' hands out rows for any function.",
    )


def notes(owner: Any, layer: int, columns: int, first: torch.Tensor, second: torch.Tensor, *, latent: bool) -> bool:
    """Whether a layer's new rows will be attended to by our function, which is noted then."""
    if not ATTENDING or ATTENDING[-1][0] != owner.number:
        return False
    NOTED.append(Noted(owner.number, layer, columns, first, second, latent))
    return True


def attend(
    noted: Noted, module: Any, query: torch.Tensor, mask: torch.Tensor | None, sink: Any, scale: float | None
) -> torch.Tensor | None:
    """Attention of q [B, H, 1, dim] -> [B, 1, H, value dim]; None: the model attends to ``rows_of``."""
    if mask is not None and (mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != 1):
        return None
    if not noted.latent:
        return attended(query, noted.first, noted.second, mask, sink, noted.cache, noted.layer, scale)
    projection = traced_projection(module, noted.first.shape[3])
    if projection is None:
        return None
    rows, scale = absorbed(query, projection), query.shape[3] ** -0.5 if scale is None else scale
    out = attended_latents(rows, noted.first, noted.second, mask, sink, noted.cache, noted.layer, scale)
    return valued(out, projection, query.shape[0])


def shown_by(mask: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a mask [B or 1, 1, 1, n] shows.

    Returns:
        Which columns every row sees, [B, n]; and whether a mask of summands says no more than that, [B].
    """
    mask = mask[:, 0, 0].expand(batch, -1)
    if mask.dtype == torch.bool:
        return mask, None
    shown = mask == 0
    return shown, (shown | (mask <= torch.finfo(mask.dtype).min)).all(dim=1)


def rows_of(noted: Noted, module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the module's attention function is handed where the model attends, once rows are stored."""
    first, second = stored_keys_and_values(noted.first, noted.second, noted.cache, noted.layer, noted.columns)
    return module.expand_kv(first, second) if noted.latent else (first, second)


@torch.library.custom_op("kvcore::attended", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sink: torch.Tensor | None,
    cache: int,
    layer: int,
    scale: float | None,
) -> torch.Tensor:
    """Store a layer's new keys and values [B, heads, 1, dim]; attend from q [B, H, 1, dim] -> [B, 1, H, value dim].

    What a query sees follows from the mask [B, 1, 1, columns] on the device, which nobody waits for: everything behind
    the padding at its left. A row whose mask says something else gets NaN.
    """
    return CACHES[cache].layers[layer].stored_and_attended(query, keys, values, mask, sink, scale)


@attended.register_fake
def _(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sink: torch.Tensor | None,
    cache: int,
    layer: int,
    scale: float | None,
) -> torch.Tensor:
    del keys, mask, sink, cache, layer, scale
    batch, heads, new, _ = query.shape
    return query.new_empty(batch, new, heads, values.shape[3])


@torch.library.custom_op("kvcore::attended_latents", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def attended_latents(
    query: torch.Tensor,
    latents: torch.Tensor,
    rotary: torch.Tensor,
    mask: torch.Tensor | None,
    sink: torch.Tensor | None,
    cache: int,
    layer: int,
    scale: float,
) -> torch.Tensor:
    """Store a layer's new latents and rotary keys [B, 1, 1, dim]; attend from q [B, H, dim] -> [B, H, rank].

    Queries are those of latent rows. Each sees what the mask [B, 1, 1, columns] lets it see; NaN if it adds anything.
    """
    return CACHES[cache].layers[layer].stored_and_attended(query, latents, rotary, mask, sink, scale)


@attended_latents.register_fake
def _(
    query: torch.Tensor,
    latents: torch.Tensor,
    rotary: torch.Tensor,
    mask: torch.Tensor | None,
    sink: torch.Tensor | None,
    cache: int,
    layer: int,
    scale: float,
) -> torch.Tensor:
    del rotary, mask, sink, cache, layer, scale
    return query.new_empty(*query.shape[:2], latents.shape[3])
