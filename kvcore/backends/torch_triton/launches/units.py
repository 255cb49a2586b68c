"""Launches that fill and copy whole units of a pool."""

import torch
import triton
from torch import Tensor

from kvcore.backends.torch_triton.launches.bound import options, registered
from kvcore.kernels.triton.units import BLOCK, fill_units_kernel, take_units_kernel


def elements(pool: Tensor) -> Tensor:
    """A pool [units, bytes] as [units, elements] of the width that kernels use for it."""
    return pool.view(torch.int32) if pool.shape[1] % 4 == 0 and pool.data_ptr() % 4 == 0 else pool


@registered(("pool",))
def fill_units(pool: Tensor, units: Tensor, unit: Tensor | None, value: int) -> None:
    """Fill whole units of a pool [n, bytes] with a unit's bytes, or without one with a byte of ``value``."""
    target = elements(pool)
    if not units.numel() or not target.numel():
        return
    size = target.shape[1]
    chunks = triton.cdiv(size, BLOCK)
    wide = value * 0x01010101 if target.dtype == torch.int32 else value
    fill_units_kernel[(units.numel() * chunks,)](
        target,
        units,
        target if unit is None else unit.view(target.dtype),
        size,
        chunks,
        unit is not None,
        wide - (1 << 32) if wide >= 1 << 31 else wide,
        BLOCK,
        **options(pool.device),
    )


@registered(("pool",))
def copy_units(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy units of a pool [n, bytes] onto others; all are read before any is written."""
    held = pool.new_empty((sources.numel(), pool.shape[1]))
    if not held.numel():
        return
    inside, outside = elements(pool), held.view(elements(pool).dtype)
    size = inside.shape[1]
    chunks = triton.cdiv(size, BLOCK)
    for units, others, back in ((sources, targets, False), (targets, sources, True)):
        take_units_kernel[(sources.numel() * chunks,)](
            inside, units, others, outside, size, chunks, back, BLOCK, **options(pool.device)
        )
