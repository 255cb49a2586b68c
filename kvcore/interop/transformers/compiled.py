"""The cache's own attention in compiled code: one operator a layer stores new rows and attends.

While a decoder is traced with a static cache that attends itself, its configuration names ours, as it does elsewhere
while one runs. A layer's ``update`` then hands the new rows back as they are and notes itself; the attention function
takes up the note, so that nothing is gathered and no shape depends on how many rows there are. What is noted is looked
at while code is traced; PyTorch sees that it ends as it began.

On a GPU these operators can be part of a CUDA graph. Then nothing of Python runs in them: a step's numbers lie on the
device, always in the same place, where ``begun`` has put them before, and ``ended`` makes the step part of the rows.
"""

from typing import Any, NamedTuple

import torch

from kvcore.errors import StepError
from kvcore.interop.transformers.projection import Projection, absorbed, traced_projection, valued
from kvcore.interop.transformers.static import CACHES, stored_keys_and_values, stored_tokens


class Attending(NamedTuple):
    """A decoder that is traced.

    Attributes:
        cache: its number.
        base: the attention that the configuration names otherwise.
        ends: [B] int32 tokens of every row with the forward's, of a step that ``begun`` opened; None: layers open it.
        left: numbers of the layers that have not attended yet.
        looked: windows of layers whose masks somebody looks at.
    """

    cache: int
    base: str
    ends: torch.Tensor | None
    left: set[int]
    looked: set[int | None]


class Noted(NamedTuple):
    """A layer that has handed its new rows back.

    Attributes:
        cache, layer: their numbers.
        columns: rows that it hands out where the model attends.
        first, second: the new rows, [B, heads, S, dim] each: keys and values, or latents and rotary keys.
        latent: whether they are the latter.
        window: positions that a query sees, its own included; None: all.
    """

    cache: int
    layer: int
    columns: int
    first: torch.Tensor
    second: torch.Tensor
    latent: bool
    window: int | None


ATTENDING: list[Attending] = []
"""Decoders that are traced, the inner ones last."""

NOTED: list[Noted] = []
"""Layers whose module's attention function is still to be called."""


def begin(config: Any, cache: Any, base: str, name: str, given: torch.Tensor | None) -> None:
    """A decoder begins that attends with the cache: its configuration names ours. ``given`` are its [B, S, ...]."""
    ends = None
    if given is not None and given.shape[1] == 1 and cache.captures:
        ends = begun(given.shape[0], cache.number, cache.device)
    ATTENDING.append(Attending(cache.number, base, ends, set(range(len(cache.layers))), set()))
    _name(config, name)


def end(config: Any) -> None:
    """It has ended: its configuration names what it named."""
    attending = ATTENDING.pop()
    _name(config, attending.base)
    if NOTED:
        refuse(NOTED[-1].layer)


def _name(config: Any, attention: str) -> None:
    """Have a configuration name an attention function, and none that belongs to it."""
    if config.sub_configs:
        config._attn_implementation_internal = attention
    else:
        # Of what is assigned while torch 2.11 traces, a configuration's own look-up finds properties alone.
        config._attn_implementation = attention


def stored_before(cache: Any) -> torch.Tensor:
    """Tokens of every row before the forward that is traced, as a number that is not known beforehand."""
    ends = ATTENDING[-1].ends if ATTENDING and ATTENDING[-1].cache == cache.number else None
    return stored_tokens(cache.number, cache.device) if ends is None else ends[0].long() - 1


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


def notes(
    owner: Any,
    layer: int,
    columns: int,
    first: torch.Tensor,
    second: torch.Tensor,
    *,
    latent: bool = False,
    window: int | None = None,
) -> bool:
    """Whether a layer's new rows will be attended to by our function, which is noted then."""
    if not ATTENDING or ATTENDING[-1].cache != owner.number:
        return False
    NOTED.append(Noted(owner.number, layer, columns, first, second, latent, window))
    return True


def attend(
    noted: Noted, module: Any, query: torch.Tensor, mask: torch.Tensor | None, sink: Any, scale: float | None
) -> torch.Tensor | None:
    """Attention of q [B, H, 1, dim] -> [B, 1, H, value dim]; None: the model attends to ``rows_of``."""
    if mask is not None and (mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != 1):
        return None
    attending = ATTENDING[-1]
    if not noted.latent:
        if attending.ends is not None:
            return _attended_captured(noted, attending.ends, query, mask, sink, scale)
        return attended(query, noted.first, noted.second, mask, sink, noted.cache, noted.layer, scale)
    projection = traced_projection(module, noted.first.shape[3])
    if projection is None:
        return None
    rows = absorbed(query, projection)
    factor = query.shape[3] ** -0.5 if scale is None else scale
    if attending.ends is not None:
        return _latents_captured(noted, attending.ends, rows, projection, mask, sink, factor)
    out = attended_latents(rows, noted.first, noted.second, mask, sink, noted.cache, noted.layer, factor)
    return valued(out, projection, query.shape[0])


def _attended_captured(
    noted: Noted, ends: torch.Tensor, query: torch.Tensor, mask: torch.Tensor | None, sink: Any, scale: float | None
) -> torch.Tensor:
    """``attend`` in a step that ``begun`` opened, which the last layer ends."""
    left, whole = None, None
    if mask is not None:
        seen = ends if noted.window is None else ends.clamp(max=noted.window)
        left, whole = behind_padding(mask, query.shape[0], ends, seen)
        ends = looked_at(noted, ends, whole)
    given = query, noted.first, noted.second, ends, left, sink
    found = over(noted, attended_captured(*given, noted.cache, noted.layer, scale))
    return found if whole is None else torch.where(whole, found, torch.nan)


def _latents_captured(
    noted: Noted,
    ends: torch.Tensor,
    rows: torch.Tensor,
    projection: Projection,
    mask: torch.Tensor | None,
    sink: Any,
    scale: float,
) -> torch.Tensor:
    """The same of latents, from queries ``rows`` [B, H, dim]: what the mask lets each see is selected."""
    selected, plain = None, None
    if mask is not None:
        shown, plain = shown_by(mask, len(rows))
        number = torch.arange(shown.shape[1], dtype=torch.int32, device=shown.device)
        selected = torch.where(shown & (number < ends[:, None]), number, -1)
        ends = ends if plain is None else looked_at(noted, ends, plain)
    given = rows, noted.first, noted.second, ends, selected, sink
    out = latents_captured(*given, noted.cache, noted.layer, scale)
    found = over(noted, valued(out, projection, len(rows)))
    return found if plain is None else torch.where(plain.view(-1, 1, 1, 1), found, torch.nan)


def looked_at(noted: Noted, ends: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """``ends``, behind a look at whether masks of layers like this one are such that the cache gives what they ask for.

    Those of a model's layers of one window are alike; NaN stands for what another one would ask for.
    """
    attending = ATTENDING[-1]
    if noted.window in attending.looked:
        return ends
    attending.looked.add(noted.window)
    return looked(ends, whole, noted.cache)


def over(noted: Noted, found: torch.Tensor) -> torch.Tensor:
    """What a layer has found; after the last one the step that ``begun`` opened has ended."""
    attending = ATTENDING[-1]
    attending.left.discard(noted.layer)
    return found if attending.ends is None or attending.left else ended(found, noted.cache)


def behind_padding(
    mask: torch.Tensor, batch: int, ends: torch.Tensor | int, seen: torch.Tensor | int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a mask [B or 1, 1, 1, n] says of rows of ``ends`` tokens, the new one included, the last ``seen`` in sight.

    Both are one number a row, [B], or one for all.

    Returns:
        Positions at each row's left that its query does not see, [B] int32; and where it sees all behind them and
        nothing else, [B, 1, 1, 1] bool.
    """
    shown, plain = shown_by(mask, batch)
    first = shown.int().argmax(dim=1)
    whole = shown.sum(dim=1) == seen - first
    whole = (whole if plain is None else whole & plain).view(-1, 1, 1, 1)
    return torch.where(first > 0, first + (ends - seen), 0).to(torch.int32), whole


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
    second = over(noted, second)
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

    What a query sees follows from the mask [B, 1, 1, columns]: everything behind the padding at its left. Where it says
    something else, all layers' rows are gathered, and attended to under it.
    """
    return CACHES[cache].layers[layer].stored_and_attended(query, keys, values, mask, sink, scale)


@torch.library.custom_op("kvcore::begun", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def begun(batch: int, cache: int, device: torch.device) -> torch.Tensor:
    """Open a step of one token a row, and put its numbers on the device: [B] int32, tokens with the step's."""
    del device
    return CACHES[cache].begin_captured(batch)


@begun.register_fake
def _(batch: int, cache: int, device: torch.device) -> torch.Tensor:
    del cache
    return torch.empty(batch, dtype=torch.int32, device=device)


@torch.library.custom_op("kvcore::looked", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def looked(ends: torch.Tensor, whole: torch.Tensor, cache: int) -> torch.Tensor:
    """Begin to look at ``whole``, which is the host's when the step ends and is refused there unless all of it is true.

    Nobody waits: by then the device has long come to it. What layers are given of the step's ``ends`` comes after it.
    """
    CACHES[cache].look(whole)
    return ends.clone()


@looked.register_fake
def _(ends: torch.Tensor, whole: torch.Tensor, cache: int) -> torch.Tensor:
    del whole, cache
    return torch.empty_like(ends)


@torch.library.custom_op("kvcore::attended_captured", mutates_args=())
def attended_captured(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    left: torch.Tensor | None,
    sink: torch.Tensor | None,
    cache: int,
    layer: int,
    scale: float | None,
) -> torch.Tensor:
    """What ``attended`` does, in the step that ``begun`` opened, whose ``ends`` say that it is open.

    Queries do not see ``left`` [B] positions. On a GPU this is launches alone, which a CUDA graph may repeat.
    """
    del ends
    return CACHES[cache].layers[layer].captured_and_attended(query, keys, values, left, sink, scale)


@attended.register_fake
@attended_captured.register_fake
def _(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *others: Any) -> torch.Tensor:
    del keys, others
    batch, heads, new, _ = query.shape
    return query.new_empty(batch, new, heads, values.shape[3])


@torch.library.custom_op("kvcore::ended", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def ended(found: torch.Tensor, cache: int) -> torch.Tensor:
    """Make the open step's tokens part of the rows, once every layer has attended; what the last of them found.

    Raises:
        StepError: a mask asked for something that the cache does not give; the step was rolled back.
    """
    CACHES[cache].end_captured()
    return found.clone()


@ended.register_fake
def _(found: torch.Tensor, cache: int) -> torch.Tensor:
    del cache
    return torch.empty_like(found)


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

    Queries are those of latent rows. Each sees what the mask [B, 1, 1, columns] lets it see, with what that adds.
    """
    return CACHES[cache].layers[layer].stored_and_attended(query, latents, rotary, mask, sink, scale)


@torch.library.custom_op("kvcore::latents_captured", mutates_args=())
def latents_captured(
    query: torch.Tensor,
    latents: torch.Tensor,
    rotary: torch.Tensor,
    ends: torch.Tensor,
    selected: torch.Tensor | None,
    sink: torch.Tensor | None,
    cache: int,
    layer: int,
    scale: float,
) -> torch.Tensor:
    """What ``attended_latents`` does, in the step that ``begun`` opened, of the rows ``selected`` [B, n] or of all."""
    del ends
    return CACHES[cache].layers[layer].captured_and_attended(query, latents, rotary, selected, sink, scale)


@attended_latents.register_fake
@latents_captured.register_fake
def _(query: torch.Tensor, latents: torch.Tensor, *others: Any) -> torch.Tensor:
    del others
    return query.new_empty(*query.shape[:2], latents.shape[3])
