"""Where a module of latent attention expands latents: a method of its own that a cache's stands in front of.

Modules expand latents to keys and values of every head in ``expand_kv``, before they call the attention function. As
long as a cache of the model lives that attends to latents itself, ``expand`` is what its modules find under that name.
It goes by what it is given, so that forwards with other caches, in other threads too, may come and go meanwhile, and
code that is compiled meanwhile stays right: it expands what is of no such cache as they do.
"""

from functools import partial
from typing import Any

import torch

from kvcore.interop.transformers.deferred import Deferred, made

SEAM = "expand_kv"
"""The method of a module: latents [B, 1, n, rank], rotary keys [B, 1, n, dim] -> keys and values [B, H, n, dim]."""


def expanding(decoder: Any) -> tuple[Any, ...]:
    """Modules of a decoder that expand latents."""
    if not isinstance(decoder, torch.nn.Module):
        return ()
    return tuple(module for module in decoder.modules() if hasattr(type(module), SEAM) and hasattr(module, "kv_b_proj"))


def stand_in(decoder: torch.nn.Module) -> list[Any]:
    """Put ``expand`` in front of the methods of a decoder's modules, those left out that somebody has replaced.

    Returns:
        The modules, for ``step_aside``.
    """
    found = [module for module in expanding(decoder) if SEAM not in module.__dict__]
    for module in found:
        module.__dict__[SEAM] = partial(expand, module)
    return found


def step_aside(modules: list[Any]) -> None:
    """Undo ``stand_in``, but for what somebody has replaced since."""
    for module in modules:
        method = module.__dict__.get(SEAM)
        if type(method) is partial and method.func is expand:
            del module.__dict__[SEAM]


def expand(module: Any, latents: Any, rotary: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of every head: of a cache's latents when somebody looks, of any other as the module does."""
    if type(latents) is Deferred and type(rotary) is Deferred and latents.source is rotary.source:
        return latents.source.expanded(module, latents, rotary)
    return getattr(type(module), SEAM)(module, made(latents), made(rotary))
