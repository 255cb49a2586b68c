"""The matrix behind every golden hash of the packed pages."""

import hashlib

import numpy as np


def golden_values(rows: int, dim: int) -> np.ndarray:
    """``x[t,i] = ((131t + 37i) % 257 - 128) / 32 * 2^(((i // 64) + t) % 5 - 2)``, fp32, every value exact in bf16."""
    t, i = np.arange(rows)[:, None], np.arange(dim)[None]
    return ((((131 * t + 37 * i) % 257) - 128) / 32 * 2.0 ** ((i // 64 + t) % 5 - 2)).astype(np.float32)


def short_hash(page: np.ndarray) -> str:
    """First 16 hex digits of sha256 over the bytes."""
    return hashlib.sha256(page.tobytes()).hexdigest()[:16]
