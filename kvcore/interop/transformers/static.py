"""One operator that compiled code calls to store keys and values: PyTorch sees its shapes, not what a step does.

The cache is named by a number, so that nothing that changes from step to step is part of what was compiled. CUDA graphs
leave the operator out: a step's positions are host integers.
"""

import weakref
from itertools import count
from typing import Any

import torch

NUMBERS = count()
CACHES: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""Caches with static shapes, by number."""


@torch.library.custom_op("kvcore::stored_keys_and_values", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def stored_keys_and_values(
    keys: torch.Tensor, values: torch.Tensor, cache: int, layer: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store a layer's new keys and values [B, heads, S, dim]; return its visible ones [B, heads, columns, dim].

    A second call would store the same rows at the same positions, and the result depends on the arguments' order in
    the model, so that neither running it twice nor its place among other operators can change what is stored.
    """
    return CACHES[cache].layers[layer].store(keys, values, columns)


@stored_keys_and_values.register_fake
def _(
    keys: torch.Tensor, values: torch.Tensor, cache: int, layer: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    del cache, layer
    return keys.new_empty(*keys.shape[:2], columns, keys.shape[3]), values.new_empty(
        *values.shape[:2], columns, values.shape[3]
    )


@torch.library.custom_op("kvcore::stored_tokens", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def stored_tokens(cache: int, device: torch.device) -> torch.Tensor:
    """Tokens of every row before the forward, as a number that compiled code does not know beforehand.

    Positions and masks are made from it, which the first layer's keys and attention need: it is asked before they are.
    """
    # Filled on the device: nobody waits for it, as a copy from the host does.
    return torch.full((), CACHES[cache].length, device=device)


@stored_tokens.register_fake
def _(cache: int, device: torch.device) -> torch.Tensor:
    del cache
    return torch.empty((), dtype=torch.int64, device=device)


def padded(rows: torch.Tensor, columns: int) -> torch.Tensor:
    """[B, heads, n, dim] with zeros after its n rows, up to ``columns``."""
    return torch.nn.functional.pad(rows, (0, 0, 0, columns - rows.shape[2]))
