"""How well each format keeps a row: bytes a channel against the error of one fixed sample, for the report's picture.

The sample is Gaussian rows with a spread of scales, the same for every format and every run. It says nothing about a
model's quality, only how formats compare on the same numbers.
"""

import msgspec
import numpy as np

from kvcore.backends.reference import encoding
from kvcore.spec import FORMATS

ROWS = 64
CLASSIC_DIM = 128


class Quality(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One format on the sample.

    Attributes:
        format: name.
        bits: bits that are stored for a channel, scales and pads included.
        error: root mean square of (decoded - encoded), as a part of the sample's.
    """

    format: str
    bits: float
    error: float


def measure() -> tuple[Quality, ...]:
    """Every built-in or registered format on the sample, by the reference's encoder."""
    found: list[Quality] = []
    for name, format in FORMATS.items():
        if format.hadamard:
            continue
        sized = format if format.dim is not None else format.for_dim(CLASSIC_DIM)
        dim = sized.dim or 0
        rng = np.random.default_rng(20_240_117)
        sample = rng.standard_normal((ROWS, dim)) * np.exp2(rng.uniform(-3, 3, (ROWS, 1)))
        values = sample.astype(np.float32)
        decoded = encoding.decode(sized, encoding.encode(sized, values)).astype(np.float64)
        error = np.sqrt(np.mean((decoded - values) ** 2) / np.mean(values.astype(np.float64) ** 2))
        found.append(Quality(format=name, bits=8 * sized.row / dim, error=float(error)))
    return tuple(sorted(found, key=lambda quality: quality.bits))
