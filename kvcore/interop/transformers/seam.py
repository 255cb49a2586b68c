"""Methods of a model's modules that a cache's stand in front of, where what it holds would have to be decoded for them.

Modules of latent attention expand latents to keys and values of every head in ``expand_kv``, before they call the
attention function; a module of DeepSeek-V4's indexer scores all index keys in its ``forward``. As long as a cache of
the model lives that attends itself, ``expand`` and ``score`` are what modules find under those names. They go by what
they are given, so that forwards with other caches, in other threads too, may come and go meanwhile, and code that is
compiled meanwhile stays right: of no such cache they do what the modules' own methods do.
"""

import inspect
from functools import partial
from typing import Any

import torch

from kvcore.interop.transformers.deferred import Deferred, made

SEAM = "expand_kv"
"""The method of a module: latents [B, 1, n, rank], rotary keys [B, 1, n, dim] -> keys and values [B, H, n, dim]."""

SCORED = ("self", "q", "compressed_kv", "hidden_states")
"""What a module that scores index keys is given: queries [B, S, H, dim], keys [B, n, dim], [B, S, width]."""


def expanding(decoder: Any) -> tuple[Any, ...]:
    """Modules of a decoder that expand latents."""
    if not isinstance(decoder, torch.nn.Module):
        return ()
    return tuple(module for module in decoder.modules() if hasattr(type(module), SEAM) and hasattr(module, "kv_b_proj"))


def scoring(decoder: torch.nn.Module) -> tuple[Any, ...]:
    """Modules of a decoder that score index keys."""
    names = "softmax_scale", "weights_scaling", "weights_proj"
    some = (module for module in decoder.modules() if all(hasattr(module, name) for name in names))
    return tuple(module for module in some if tuple(inspect.signature(type(module).forward).parameters) == SCORED)


def stand_in(decoder: torch.nn.Module) -> list[Any]:
    """Put ``expand`` and ``score`` in front of the methods of a decoder's modules, but for what somebody has replaced.

    Returns:
        The modules, for ``step_aside``.
    """
    found: list[Any] = []
    for modules, name, method in (expanding(decoder), SEAM, expand), (scoring(decoder), "forward", score):
        mine = [module for module in modules if name not in module.__dict__]
        for module in mine:
            module.__dict__[name] = partial(method, module)
        found += mine
    return found


def step_aside(modules: list[Any]) -> None:
    """Undo ``stand_in``, but for what somebody has replaced since."""
    for module in modules:
        for name in (SEAM, "forward"):
            method = module.__dict__.get(name)
            if type(method) is partial and method.func in (expand, score):
                del module.__dict__[name]


def expand(module: Any, latents: Any, rotary: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of every head: of a cache's latents when somebody looks, of any other as the module does."""
    if type(latents) is Deferred and type(rotary) is Deferred and latents.source is rotary.source:
        return latents.source.expanded(module, latents, rotary)
    return getattr(type(module), SEAM)(module, made(latents), made(rotary))


def score(module: Any, q: torch.Tensor, compressed_kv: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Scores [B, S, n] of index keys: of a cache's where they lie, of any other as the module does."""
    if type(compressed_kv) is Deferred:
        found = compressed_kv.source.scores(module, q, hidden_states)
        if found is not None:
            return found
    return type(module).forward(module, q, made(compressed_kv), hidden_states)
