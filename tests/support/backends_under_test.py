"""Which backends the suite runs on, and small helpers that speak to any of them in NumPy."""

import zlib

import numpy as np

import kvcore
from kvcore.spec import Format, presets

BACKENDS = ("reference", "torch_triton")


def seed_of(check_id: str) -> int:
    """A seed that follows from a check's id, so that one failure reproduces alone."""
    return zlib.crc32(check_id.encode())


def poison(cache: kvcore.Cache) -> None:
    """Fill every pool with 0xFF: NaN in every format, so that a read of an unwritten row is seen."""

    def poisoned(pool: object) -> np.ndarray:
        host = kvcore.to_numpy(pool)
        host.view(np.uint8).fill(0xFF)
        return host

    cache.pools = {name: cache.asarray(poisoned(pool)) for name, pool in cache.pools.items()}


class Codec:
    """A backend's rows and pages with NumPy arrays on both sides."""

    def __init__(self, backend: str) -> None:
        spec = presets.classic(layers=1, key_heads=1, key_dim=2, block_tokens=1)
        self.ops = kvcore.create_cache(spec, backend=backend, max_requests=1, max_tokens=1).ops

    def encode(self, format: str | Format, values: np.ndarray, global_scale: float = 1.0) -> np.ndarray:
        return kvcore.to_numpy(self.ops.encode(format, self.ops.asarray(values), global_scale))

    def decode(
        self, format: str | Format, rows: np.ndarray, dim: int | None = None, global_scale: float = 1.0
    ) -> np.ndarray:
        return kvcore.to_numpy(self.ops.decode(format, self.ops.asarray(rows), dim, global_scale))

    def pack_page(self, format: str | Format, rows: np.ndarray) -> np.ndarray:
        return kvcore.to_numpy(self.ops.pack_page(format, self.ops.asarray(rows)))

    def unpack_page(self, format: str | Format, page: np.ndarray, rows: int) -> np.ndarray:
        return kvcore.to_numpy(self.ops.unpack_page(format, self.ops.asarray(page), rows))
