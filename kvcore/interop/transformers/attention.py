"""The cache's own attention in a model's forward, through transformers' registries: attention and mask ``"kvcore"``.

While a decoder runs with a cache that attends itself, its configuration names ours, and afterwards again what it
named before. Ours go by what they are handed: keys and values of such a cache's layer are attended to where they lie,
anything else (another cache in another thread, a module without one) by the function that is named otherwise.
"""

import sys
import threading
import weakref
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from kvcore.interop.transformers import compiled
from kvcore.interop.transformers.deferred import Deferred, deferred, made, outline
from kvcore.interop.transformers.seam import stand_in, step_aside
from kvcore.interop.transformers.tensors import ACCEPTED

NAME = "kvcore"

FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""What torch's attention calls on a CPU, without looking for it: (q, k, v [B, heads, n, dim]) -> (out, ...)."""

OURS = ("sdpa", "eager", NAME)
"""Implementations of a model that ours may take the place of; any other is somebody's wish."""

KNOWN = frozenset(
    {"dropout", "scaling", "output_attentions", "output_hidden_states", "return_dict", "is_causal", "s_aux", "sinks"}
    | {"sliding_window", "position_ids", "use_cache", "cache", "layer_idx", "indices", "output_router_logits"}
)
"""Options of attention functions that are looked at elsewhere, or that say what the mask says."""


class Attending(Protocol):
    """A cache in a forward."""

    def begin_attending(self, config: Any, asked: dict[str, Any]) -> "Forward | None":
        """What its layers and masks share in the forward; None: the model attends."""
        ...

    def defers(self, new: int) -> bool:
        """Whether it attends itself to some layer, to ``new`` tokens a row."""
        ...

    def end_attending(self, forward: "Forward", *, finished: bool) -> None:
        """The decoder has run, or was left by an error."""
        ...


class Facts(NamedTuple):
    """What a mask says beyond "no later token".

    Attributes:
        left: columns of padding at the left of every row; None: none.
        window: positions that a query sees, its own included; None: all. A chunk is told as one, too.
    """

    left: tuple[int, ...] | None
    window: int | None


PLAIN = Facts(None, None)


class Forward:
    """A forward of a decoder with a cache that attends itself.

    Attributes:
        cache: it.
        config: of the decoder.
        base: name of the attention that the configuration names otherwise.
        start: tokens of every row before it.
        memo: what layers of the forward share.
    """

    __slots__ = ("base", "cache", "config", "memo", "start")

    def __init__(self, cache: Attending, config: Any, base: str, start: int) -> None:
        self.cache = cache
        self.config = config
        self.base = base
        self.start = start
        self.memo: dict[Any, Any] = {}

    def left(self, padding: torch.Tensor | None, batch: int, columns: int) -> tuple[int, ...] | str:
        """Columns of padding at each row's left, () for none; else what the padding mask [B, n] says beside that."""
        if padding is None:
            return ()
        kept = self.memo.get("left")
        if kept is None or kept[0] is not padding:
            self.memo["left"] = kept = padding, _left(padding, batch, columns)
        return kept[1]


def _left(padding: torch.Tensor, batch: int, columns: int) -> tuple[int, ...] | str:
    if padding.ndim != 2 or padding.shape[0] != batch or padding.shape[1] < columns:
        return "a padding mask of another shape"
    seen = padding[:, :columns].bool()
    held = seen.sum(dim=1)
    first = torch.where(held == 0, columns, seen.int().argmax(dim=1))  # a chunk of a prompt may be all padding
    # One answer for all rows: on a GPU the host waits for it.
    left, held = torch.stack([first, held]).tolist()
    if any(skipped + count != columns for skipped, count in zip(left, held, strict=True)):
        return "padding that is not at the left alone"
    return tuple(left) if any(left) else ()


class _Here(threading.local):
    """Forwards of a thread, the inner ones last."""

    def __init__(self) -> None:
        self.forwards: list[tuple[Any, Forward]] = []


HERE = _Here()


class Switched:
    """A configuration that names ours while decoders of it run.

    Attributes:
        base: what it names otherwise.
        running: how many do.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.base: str = config._attn_implementation
        self.running = 0


LOCK = threading.Lock()
SWITCHED: dict[int, Switched] = {}
"""By the configuration's id, as long as a decoder of it runs."""


def here(config: Any) -> Forward | None:
    """The innermost forward of this thread, if it is one of that configuration."""
    forwards = HERE.forwards
    return forwards[-1][1] if forwards and forwards[-1][1].config is config else None


def base_of(config: Any) -> str:
    """The implementation that a configuration names, ours left out."""
    if compiled.ATTENDING and torch.compiler.is_compiling():
        return compiled.ATTENDING[-1].base
    switched = SWITCHED.get(id(config))
    found = config._attn_implementation if switched is None else switched.base
    return otherwise(type(config)) if found in (NAME, None) else found


OTHERWISE: dict[type, str] = {}
"""A configuration's class -> what its models do that are given our name."""


def otherwise(kind: type) -> str:
    """``sdpa``; ``eager`` where a model's class says that it has no other, since ``sdpa`` would leave its sinks out."""
    if kind not in OTHERWISE and not torch.compiler.is_compiling():
        found = MODEL_MAPPING.get(kind, None) or MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
        classes = found if isinstance(found, (tuple, list)) else (found,)
        OTHERWISE[kind] = "sdpa" if all(getattr(each, "_supports_sdpa", True) for each in classes) else "eager"
    return OTHERWISE.get(kind, "sdpa")


def enter(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Before a decoder runs: its configuration names ours if the cache attends itself."""
    cache: Any = kwargs.get("cache")
    # Beside an encoder's a decoder's own keys and values are in one of two caches.
    cache = getattr(cache, "self_attention_cache", cache)
    begin = getattr(cache, "begin_attending", None)
    if not torch.compiler.is_compiling() and LEFT:
        _sweep()
    if begin is None:
        return
    config = module.config
    if torch.compiler.is_compiling():
        base = config._attn_implementation
        if cache.attends_compiled and base in OURS and not kwargs.get("output_attentions"):
            ids = args[0] if args else kwargs.get("input_ids")
            given = kwargs.get("inputs_embeds") if ids is None else ids
            compiled.begin(config, cache, otherwise(type(config)) if base == NAME else base, NAME, given)
        return
    forward = begin(config, kwargs)
    if forward is None:
        return
    with LOCK:
        switched = SWITCHED.setdefault(id(config), Switched(config))
        switched.running += 1
        config._attn_implementation_internal = NAME
    HERE.forwards.append((module, forward))


def leave(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """After a decoder has run, or failed: its configuration names what it named."""
    del args, kwargs
    if torch.compiler.is_compiling():
        if compiled.ATTENDING:
            compiled.end(module.config)
        return
    forwards = HERE.forwards
    if not forwards or forwards[-1][0] is not module:
        return
    _, forward = forwards.pop()
    config = forward.config
    with LOCK:
        switched = SWITCHED[id(config)]
        switched.running -= 1
        if not switched.running:
            del SWITCHED[id(config)]
            if config._attn_implementation == NAME:
                config._attn_implementation_internal = switched.base
    forward.cache.end_attending(forward, finished=output is not None)


class Hooks:
    """``enter`` and ``leave`` around a decoder, ``expand`` in its modules, as long as a cache of the model lives."""

    def __init__(self, decoder: torch.nn.Module) -> None:
        handles = (
            decoder.register_forward_pre_hook(enter, with_kwargs=True),
            decoder.register_forward_hook(leave, with_kwargs=True, always_call=True),
        )
        weakref.finalize(self, _leave_behind, handles, stand_in(decoder))


LEFT: list[tuple[Any, list[Any]]] = []
"""What hooks left that nobody holds any more: handles, and weak references to modules that ``expand`` stands in.

The next forward or cache takes it away. Whoever is collected may be so while code is compiled that has seen its hooks.
"""


def _leave_behind(handles: Any, standing: list[Any]) -> None:
    LEFT.append((handles, [weakref.ref(module) for module in standing]))


def _sweep() -> None:
    """Take away what hooks left."""
    while LEFT:
        handles, standing = LEFT.pop()
        for handle in handles:
            handle.remove()
        step_aside([module for module in (each() for each in standing) if module is not None])


HOOKS: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Hooks]]" = weakref.WeakKeyDictionary()


def hooks_of(decoder: torch.nn.Module) -> Hooks:
    """Those of a decoder, the same for all its caches; whoever holds them keeps them."""
    with LOCK:
        kept = HOOKS.get(decoder)
        found = kept() if kept is not None else None
        if found is None:
            _sweep()
            found = Hooks(decoder)
            HOOKS[decoder] = weakref.ref(found)
        return found


def model_attention(module: Any, base: str) -> Any:
    """The attention function that a module would call without us.

    Raises:
        KeyError: it is not registered.
    """
    file = sys.modules[type(module).__module__]
    registry: Any = getattr(file, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    return registry.get_interface(base, getattr(file, "eager_attention_forward", None))


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of a module: q [B, H, S, dim] to keys and values [B, heads, n, dim] -> [B, S, H, dim].

    From the cache where a layer of it has handed keys and values out; else what the configuration names otherwise.
    """
    if compiled.NOTED:
        return _attend_noted(module, query, attention_mask, args, options)
    if type(key) is Deferred:
        if type(value) is Deferred and key.source is value.source and not args:
            found = key.source.attend(module, query, attention_mask, options)
            if found is not None:
                return found, None
        base = base_of(getattr(module, "config", None))
    else:
        config = getattr(module, "config", None)
        base = base_of(config)
        if base == "sdpa" and not args and _packs(query, key, value, options) and here(config) is not None:
            return _packed(query, key, value, attention_mask, options.get("scaling")), None
    mask = made(attention_mask)
    if options.get("indices") is not None:
        mask = _of_selected(options.pop("indices"), mask, query, key.shape[2])
    return model_attention(module, base)(module, query, made(key), made(value), mask, *args, **options)


def _attend_noted(
    module: Any, query: torch.Tensor, mask: torch.Tensor | None, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same in compiled code, of rows that a layer has noted."""
    noted = compiled.NOTED.pop()
    sink = options.get("s_aux", options.get("sinks"))
    fits = not args and not options.get("dropout") and unknown(options) is None and options.get("indices") is None
    found = compiled.attend(noted, module, query, mask, sink, options.get("scaling")) if fits else None
    if found is not None:
        return found, None
    keys, values = compiled.rows_of(noted, module)
    return model_attention(module, base_of(module.config))(module, query, keys, values, mask, *args, **options)


def _of_selected(indices: torch.Tensor, mask: torch.Tensor | None, query: torch.Tensor, columns: int) -> torch.Tensor:
    """A mask [B, 1, S, n] of what an indexer picked, [B, S, k], too: under other names modules make it themselves."""
    (batch, new, _), device = indices.shape, query.device
    left_out = torch.ones((batch, new, columns), dtype=torch.bool, device=device)
    left_out = left_out.scatter_(-1, indices.long(), False)[:, None]
    if mask is None:
        mask = torch.ones((new, columns), dtype=torch.bool, device=device).tril(columns - new)[None, None]
    if mask.dtype == torch.bool:
        return mask & ~left_out
    return mask.masked_fill(left_out, torch.finfo(query.dtype).min)


def _packs(query: torch.Tensor, key: Any, value: Any, options: dict[str, Any]) -> bool:
    """Whether one token's query heads can be rows of one product, without copies of the keys they share."""
    if type(key) is not torch.Tensor or type(value) is not torch.Tensor or key.is_cuda:
        return False
    if query.shape[2] != 1 or query.shape[1] == key.shape[1] or key.shape[1] != value.shape[1]:
        return False
    return not options.get("dropout") and unknown(options) is None


def _packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float | None
) -> torch.Tensor:
    batch, heads, _, dim = query.shape
    groups = key.shape[1]
    mask = made(mask)
    if mask is None and query.dtype in ACCEPTED and key.shape == value.shape and key.shape[2]:
        rows = query.reshape(batch, groups, heads // groups, dim)
        return FUSED(rows, key, value, scale=scale)[0].reshape(batch, 1, heads, dim)
    if mask is not None and mask.shape[1] != 1:
        mask = mask.reshape(mask.shape[0], groups, heads // groups, mask.shape[3])
    out = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, groups, heads // groups, dim), key, value, attn_mask=mask, scale=scale
    )
    return out.reshape(batch, 1, heads, value.shape[3])


def unknown(options: dict[str, Any]) -> str | None:
    """The name of an option that our attention does not know; None: there is none."""
    if options.keys() <= KNOWN:
        return None
    for name, value in options.items():
        if name not in KNOWN and value is not None and value is not False:
            return name
    return None


def mask(*, config: Any = None, allow_is_causal_skip: bool = True, **given: Any) -> torch.Tensor | None:
    """The mask of what the configuration names otherwise; made when somebody looks, if the cache knows what it says."""
    base = base_of(config)
    make = ALL_MASK_ATTENTION_FUNCTIONS[base]
    forward = here(config)
    function, window, padding = given["mask_function"], given.get("local_size"), given["attention_mask"]
    sizes = given["batch_size"], given["q_length"], given["kv_length"]
    # Whoever adds to a mask says that it is not to be skipped.
    plain = allow_is_causal_skip and not given.get("use_vmap") and (function is causal_mask_function or window)
    if forward is None or not plain or not forward.cache.defers(sizes[1]):
        return make(config=config, allow_is_causal_skip=allow_is_causal_skip, **given)
    batch, new, columns = sizes
    left = forward.left(padding, batch, given["q_offset"] + new)
    if isinstance(left, str):
        forward.memo["refused"] = left
        return make(config=config, allow_is_causal_skip=allow_is_causal_skip, **given)
    if not left and base == "sdpa" and new in (1, columns) and (window is None or columns < window):
        return None
    given |= {"attention_mask": padding if left else None, "allow_is_causal_skip": False, "config": config}
    dtype = given["dtype"] if base == "eager" else torch.bool
    key = "outline", batch, new, columns, dtype
    if key not in forward.memo:
        forward.memo[key] = outline((batch, 1, new, columns), dtype)
    device, facts = torch.device(given["device"]), Facts(left or None, window)
    return deferred(forward.memo[key], device, partial(make, **given), facts, joins=True)


def facts_of(mask: Any, base: str, start: int) -> Facts | str:
    """What a mask says; else why that is not known."""
    if type(mask) is Deferred:
        return mask.source if type(mask.source) is Facts else "a mask with another one behind it"
    if mask is not None:
        return "a mask that is not known to be causal with padding at the left"
    if base == "sdpa" and not start:
        return PLAIN
    return "no mask for several tokens"


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)
