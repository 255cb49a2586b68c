"""The shape classes: which requests a checked step brings, from nothing at all to more than a ring holds."""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

TARGET = 1
"""Number of the layer that a check is about: the second of two, so that a verb that touches another one is seen."""


class Sizes(NamedTuple):
    """What a shape class is relative to.

    Attributes:
        full: tokens that exactly fill the unit under test: a ring's rows, or a block's tokens.
        ratio: tokens per row, 1 where nothing is compressed.
        block: tokens of a block.
    """

    full: int
    ratio: int
    block: int


class Shape(NamedTuple):
    """One shape class.

    Attributes:
        name: last part of a check's id.
        requests: (length before the step, new tokens) of every request, from the sizes.
        dtype: of the float inputs, where a verb takes either.
        pad_tokens: padding rows among the tokens.
        pad_requests: padding rows among the requests.
        stored: tokens of every request, from the sizes, whose paged rows were taken over at admission; None: of none.
        apart: units that lie between those of one request and the next, of every request; None: in no order.
        layouts: the only ones that the class is checked in; all of them if empty.
    """

    name: str
    requests: Callable[[Sizes], tuple[tuple[int, int], ...]]
    dtype: np.dtype
    pad_tokens: int = 0
    pad_requests: int = 0
    stored: Callable[[Sizes], tuple[int, ...]] | None = None
    apart: tuple[int, ...] | None = None
    layouts: tuple[str, ...] = ()


FP32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

SHAPES: tuple[Shape, ...] = (
    Shape("no_tokens", lambda s: ((s.full // 2 + s.ratio, 0), (0, 0)), FP32),
    Shape("one_token", lambda s: ((0, 1), (2 * s.ratio - 1, 1)), BF16),
    Shape("exactly_full", lambda s: ((0, s.full), (s.ratio, 1)), FP32),
    Shape("one_over", lambda s: ((0, s.full + 1), (s.block - 1, 2)), BF16),
    Shape("ragged", lambda s: ((0, 5), (s.block - 1, 3), (s.ratio + 1, 0), (s.full - 1, s.ratio)), FP32),
    Shape("longer", lambda s: ((3, 2 * s.full + 3), (s.ratio - 1, 2)), FP32),
    Shape("padded", lambda s: ((s.full, 2), (s.block - 2, 3), (0, 3)), BF16, pad_tokens=3, pad_requests=2),
)

LONG = 2048
"""Rows that no backend holds at a time when it attends to them: the longer requests come in several pieces."""

EXTRA_SHAPES: tuple[Shape, ...] = (
    Shape(
        "taken_over",
        lambda s: ((0, s.block + 3), (s.block, 2 * s.ratio + 1), (s.ratio, s.block + s.ratio + 2), (0, s.ratio + 1)),
        FP32,
        stored=lambda s: (s.block, s.block, s.block, 0),
    ),
    Shape("apart", lambda _: ((3, 1),) * 4, FP32, apart=(0, 0, 1, 0)),
    Shape("pieces", lambda _: ((LONG - 2, 4), (LONG + 51, 3)), FP32, layouts=("packed",)),
)
"""Shape classes of single verbs: rows that were taken over and are not written again, requests unevenly apart, and
more rows than are attended to at a time."""
