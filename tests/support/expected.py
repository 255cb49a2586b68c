"""What a pool must hold after rows were stored: the reference's encoder and the layout table, in NumPy."""

import numpy as np

from kvcore.backends.reference import encoding
from kvcore.plan import Region
from kvcore.spec import Format

ODD = (np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-30, 3e38, -448.0, 448.0, 6.0, -6.0, 2.0**-10, 5e-39)


def random_values(rng: np.random.Generator, rows: int, dim: int, *, odd: bool = True) -> np.ndarray:
    """fp32 [rows, dim], magnitudes over many octaves; with ``odd``, some rows hold what formats find hard."""
    values = rng.standard_normal((rows, dim), np.float32)
    values *= np.exp2(rng.integers(-14, 14, (rows, 1))).astype(np.float32)
    if odd:
        many = max(1, rows // 7)
        values[rng.integers(0, rows, many), rng.integers(0, dim, many)] = rng.choice(np.array(ODD, np.float32), many)
    return values


def as_bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to bf16, still fp32."""
    with np.errstate(invalid="ignore", over="ignore"):
        return values.astype(encoding.DTYPES["bf16"]).astype(np.float32)


def encoded(format: Format, values: np.ndarray, global_scale: float = 1.0) -> np.ndarray:
    """Canonical rows [n, row_bytes] by the reference."""
    return encoding.encode(format, values, global_scale)


def decoded(format: Format, rows: np.ndarray, global_scale: float = 1.0) -> np.ndarray:
    """Values of canonical rows by the reference, in its dtype."""
    return encoding.decode(format, rows, None, global_scale)


def images(region: Region, units: int, unit: np.ndarray, row: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Pool name -> bytes: 0xFF but for canonical ``rows`` [n, row_bytes] at row ``row`` [n] of unit ``unit`` [n]."""
    found = {name: np.full((units, size), 0xFF, np.uint8) for name, size in region.buffers.values()}
    for place in region.unit.places:
        name, size = region.buffers[place.buffer]
        first, last = region.format.byte_range(place.field)
        start = unit.astype(np.int64) * size + place.base + row.astype(np.int64) * place.stride
        flat = found[name].reshape(-1)
        for byte in range(place.nbytes):
            flat[start + byte] = rows[:, first + byte]
        assert last - first == place.nbytes
    return found
