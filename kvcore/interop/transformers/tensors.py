"""Tensors of the model to arrays of the cache's backend and back; nothing is copied between torch and torch."""

from typing import Any

import ml_dtypes
import numpy as np
import torch

from kvcore import Cache, to_numpy
from kvcore.errors import StepError
from kvcore.spec import KV

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""What models compute in, and the formats that store it as it is."""

ACCEPTED = (torch.float32, torch.bfloat16)  # what append verbs take


def check_inference(*states: torch.Tensor) -> None:
    """Refuse states through which gradients should flow: what comes back from a cache has none.

    Raises:
        StepError: gradients are recorded, and states require them.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in states):
        raise StepError(
            got="states that require gradients",
            where="KVCache",
            allowed="inference: no gradient flows through the cache",
            hint="Run the model under torch.no_grad(); to train, use the model's own cache or none.",
        )


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written to, by torch's count, which has no public name; None where it counts nothing."""
    return None if tensor.is_inference() else tensor._version


def by_token(states: torch.Tensor) -> torch.Tensor:
    """[B, heads, S, dim] -> [B·S, heads, dim]: tokens in step order."""
    return states.squeeze(2) if states.shape[2] == 1 else states.transpose(1, 2).flatten(0, 1)


def by_head(rows: torch.Tensor) -> torch.Tensor:
    """[B, n, heads, dim] -> [B, heads, n, dim], by the operation that views were made by: its code is at hand."""
    (batch, count, heads, dim), (row, token, head, channel) = rows.shape, rows.stride()
    return rows.as_strided((batch, heads, count, dim), (row, head, token, channel))


def to_torch(array: Any, *, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An array of any backend as a tensor, converted to ``dtype`` if one is given."""
    if not isinstance(array, torch.Tensor):
        host = to_numpy(array)
        bits = host.view(np.int16) if host.dtype == ml_dtypes.bfloat16 else host
        array = torch.from_numpy(bits)
        array = array.view(torch.bfloat16) if bits is not host else array
    done = array.dtype == (dtype or array.dtype) and array.device == device
    return array if done else array.to(device=device, dtype=dtype)


def stored_as(component: KV) -> torch.dtype | None:
    """The dtype whose numbers keys and values are stored as, to the bit; None: they are coded."""
    names = {part.format.name for part in component.parts}
    return next((dtype for dtype, name in DTYPES.items() if names == {name}), None)


def uses_torch(cache: Cache) -> bool:
    """Whether the pools are torch tensors, so that the model's tensors can be handed over as they are."""
    return all(isinstance(pool, torch.Tensor) for pool in cache.pools.values())
