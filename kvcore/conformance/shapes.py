"""The shape classes: which requests a checked step brings, from nothing at all to more than a ring holds."""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np


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
    """

    name: str
    requests: Callable[[Sizes], tuple[tuple[int, int], ...]]
    dtype: np.dtype
    pad_tokens: int = 0
    pad_requests: int = 0


FP32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)

SHAPES: tuple[Shape, ...] = (
    Shape("no_tokens", lambda s: ((s.full // 2 + s.ratio, 0), (0, 0)), FP32),
    Shape("one_token", lambda s: ((0, 1), (2 * s.ratio - 1, 1)), BF16),
    Shape("exactly_full", lambda s: ((0, s.full), (s.ratio, 1)), FP32),
    Shape("one_over", lambda s: ((0, s.full + 1), (s.block - 1, 2)), BF16),
    Shape("ragged", lambda s: ((0, 5), (s.block - 1, 3), (s.ratio + 1, 0), (s.full - 1, s.ratio)), FP32),
    Shape("longer", lambda s: ((3, 2 * s.full + 3), (s.ratio - 1, 2)), FP32),
    Shape("padded", lambda s: ((s.full, 2), (s.block - 2, 3), (0, 3)), BF16, pad_tokens=3, pad_requests=2),
)
