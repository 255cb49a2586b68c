"""Where a module of latent attention expands latents: a method of its own that a cache's stands in front of.

Modules expand latents to keys and values of every head in ``expand_kv``, before they call the attention function. While
a decoder runs with a cache that attends to latents itself, ``expand`` is what its modules find under that name. It
expands what is of no such cache as they do, and nothing is left of it when the decoder has run, or failed.
"""

import threading
from functools import partial
from typing import Any

import torch

from kvcore.interop.transformers.deferred import Deferred, made

SEAM = "expand_kv"
"""The method of a module: latents [B, 1, n, rank], rotary keys [B, 1, n, dim] -> keys and values [B, H, n, dim]."""

LOCK = threading.Lock()
RUNNING: dict[int, int] = {}
"""Modules by id -> forwards in which ``expand`` stands in front of them."""


def expanding(decoder: Any) -> tuple[Any, ...]:
    """Modules of a decoder that expand latents."""
    if not isinstance(decoder, torch.nn.Module):
        return ()
    return tuple(module for module in decoder.modules() if hasattr(type(module), SEAM) and hasattr(module, "kv_b_proj"))


def stand_in(modules: tuple[Any, ...]) -> None:
    """Put ``expand`` in front of modules' own methods, those left out that somebody else has replaced."""
    with LOCK:
        for module in modules:
            running = RUNNING.get(id(module), 0)
            if running or SEAM not in module.__dict__:
                RUNNING[id(module)] = running + 1
                module.__dict__[SEAM] = partial(expand, module)


def step_aside(modules: tuple[Any, ...]) -> None:
    """Undo ``stand_in``."""
    with LOCK:
        for module in modules:
            running = RUNNING.pop(id(module), 0) - 1
            if running > 0:
                RUNNING[id(module)] = running
            elif running == 0:
                module.__dict__.pop(SEAM, None)


def expand(module: Any, latents: Any, rotary: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of every head: of a cache's latents when somebody looks, of any other as the module does."""
    if type(latents) is Deferred and type(rotary) is Deferred and latents.source is rotary.source:
        return latents.source.expanded(module, latents, rotary)
    return getattr(type(module), SEAM)(module, made(latents), made(rotary))
