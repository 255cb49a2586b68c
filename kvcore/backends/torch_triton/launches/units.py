"""Launches that fill and copy whole units of a pool."""

from functools import cache

import torch
from torch import Tensor

from kvcore.backends.torch_triton.launches.bound import options, registered
from kvcore.backends.torch_triton.run_triton import Launcher
from kvcore.kernels.triton.record import ceil_div, power_of_two
from kvcore.kernels.triton.units import BLOCK, fill_units_kernel, ring_rows_kernel, take_units_kernel


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
    chunks = ceil_div(size, BLOCK)
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
    chunks = ceil_div(size, BLOCK)
    for units, others, back in ((sources, targets, False), (targets, sources, True)):
        take_units_kernel[(sources.numel() * chunks,)](
            inside, units, others, outside, size, chunks, back, BLOCK, **options(pool.device)
        )


@registered(("buffers", "held"))
def move_ring_rows(
    buffers: list[Tensor],
    held: Tensor,
    positions: Tensor,
    request_index: Tensor,
    slots: Tensor,
    fields: list[int],
    rows: int,
    copies: int,
    back: bool,
) -> None:
    """Copy the bytes of the ring rows that the step's tokens take to ``held`` [tokens, heads, bytes], or back.

    Args:
        buffers: the pools of a region, three at most.
        fields: seven numbers a field, see ``ring_rows_kernel``.
        rows: of a ring, which lies ``copies`` times in its unit.
    """
    tokens, heads, size = held.shape
    if held.numel():
        one, two, three = (*buffers, *buffers[:1] * 2)[:3]
        _ring_rows(tuple(fields), rows, copies, size, back)(
            (tokens * heads,), (one, two, three, held, positions, request_index, slots), (heads,)
        )


@cache
def _ring_rows(numbers: tuple[int, ...], rows: int, copies: int, size: int, back: bool) -> Launcher:
    fields = tuple(numbers[n : n + 7] for n in range(0, len(numbers), 7))
    block = power_of_two(max(field[5] for field in fields))
    constants = {"FIELDS": fields, "COUNT": len(fields), "ROWS": rows, "COPIES": copies, "SIZE": size}
    return Launcher(ring_rows_kernel, {**constants, "BACK": back, "BLOCK": block}, max(1, min(4, block // 128)))
