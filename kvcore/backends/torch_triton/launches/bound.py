"""What all launches of torch share: records by number, options, registration with ``torch.library``.

A custom operator takes tensors and numbers, so records go into lists and travel as their place in them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcore.kernels.triton.device import INTERPRETED as INTERPRETED
from kvcore.kernels.triton.device import native
from kvcore.kernels.triton.record import RowRecord
from kvcore.kernels.triton.shape import tile as tile
from kvcore.kernels.triton.tail import TailRecord


class Bound(NamedTuple):
    """A record with the places of its codes, scales and plain buffers in the list that a launch is given."""

    record: RowRecord
    codes: int
    scales: int
    plain: int


class BoundTail(NamedTuple):
    """A tail's record with the places of kv's buffer and score's in the list that a launch is given."""

    record: TailRecord
    kv: int
    score: int

    def given(self, buffers: list[Tensor]) -> tuple[Tensor, Tensor]:
        """What a kernel takes for kv and score of the tail."""
        return buffers[self.kv].view(torch.float32), buffers[self.score].view(torch.float32)


BOUND: list[Bound] = []
TAILS: list[BoundTail] = []


def bind(bound: Bound) -> int:
    """The number of a bound record; equal ones share a number."""
    if bound not in BOUND:
        BOUND.append(bound)
    return BOUND.index(bound)


def bind_tail(bound: BoundTail) -> int:
    """The number of a bound tail record; equal ones share a number."""
    if bound not in TAILS:
        TAILS.append(bound)
    return TAILS.index(bound)


@cache
def options(device: torch.device) -> dict[str, Any]:
    """What every launch on a device is given: no contraction of products and sums, so that stored bits are the same."""
    return {} if INTERPRETED else {"enable_fp_fusion": False}


@cache
def is_native(device: torch.device) -> bool:
    """``shape.native``, looked up once a device."""
    if INTERPRETED or device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return native(10 * major + minor)


def _nothing(*args: Any) -> None:
    """The fake of a launch that returns nothing."""


def registered(mutates: tuple[str, ...], fake: Callable[..., Any] | None = None) -> Callable[[Any], Any]:
    """Register a launch as ``torch.ops.kvcore.<name>`` and leave the function itself as it is."""

    def wrap(function: Any) -> Any:
        op = torch.library.custom_op(f"kvcore::{function.__name__}", function, mutates_args=mutates)
        op.register_fake(fake or _nothing)
        return function

    return wrap
