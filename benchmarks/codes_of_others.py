"""How others keep keys and values in few bits, as NumPy functions of rows [..., n, dim] -> the same as read back.

Leading axes are heads and requests, each coded by itself. Each function follows its paper; where a paper calibrates on
data, the rows at hand are what it calibrates on here, which favours it. None is bound to bytes: bits are counted by
whoever lists them.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from statistics import NormalDist

import numpy as np

Coder = Callable[[np.ndarray], np.ndarray]
"""Keys or values [..., n, dim] -> the same as they are read back."""


def by_range(bits: int, group: int, *, over_tokens: bool = False) -> Coder:
    """KIVI (arXiv 2402.02750): integers between the smallest and the largest of a group, both kept in fp16."""

    def code(rows: np.ndarray) -> np.ndarray:
        *lead, count, dim = rows.shape
        whole = count // group * group if over_tokens else count
        groups = (rows[..., :whole, :].swapaxes(-1, -2) if over_tokens else rows).reshape(-1, group)
        low = groups.min(axis=1, keepdims=True).astype(np.float16).astype(np.float32)
        step = (groups.max(axis=1, keepdims=True) - low) / (2**bits - 1)
        step = np.maximum(step.astype(np.float16).astype(np.float32), 2.0**-24)
        read = low + step * np.clip(np.rint((groups - low) / step), 0, 2**bits - 1)
        read = read.reshape(*lead, dim, whole).swapaxes(-1, -2) if over_tokens else read.reshape(rows.shape)
        return np.concatenate([read, rows[..., whole:, :]], axis=-2)

    return code


@cache
def hadamard(dim: int) -> np.ndarray:
    """The orthonormal Sylvester matrix."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(math.sqrt(len(matrix)))


def rotated(code: Coder) -> Coder:
    """Rows turned by the orthonormal Hadamard matrix before they are coded, and back (QuaRot, arXiv 2404.00456)."""

    def turned(rows: np.ndarray) -> np.ndarray:
        matrix = hadamard(rows.shape[-1])
        return code(rows @ matrix) @ matrix

    return turned


def nvfp4(rows: np.ndarray) -> np.ndarray:
    """NVFP4: e2m1 with an e4m3 scale for every 16 channels, relative to one fp32 number for all rows of a head."""
    import ml_dtypes

    groups = rows.reshape(*rows.shape[:-1], -1, 16)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    whole = np.maximum(largest.max(axis=(-3, -2), keepdims=True) / (6 * 448), np.float32(2.0**-100))
    scale = largest / 6 / whole
    scale = np.clip(scale, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * whole
    codes = np.clip(groups / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (codes * scale).reshape(rows.shape)


def nearest(levels: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Each number's nearest of ascending levels."""
    # A handful of comparisons of all numbers takes a third of the time of a search for each.
    above = np.zeros(rows.shape, np.uint8)
    for middle in (levels[1:] + levels[:-1]) / 2:
        above += rows > middle
    return levels[above]


def lloyd(samples: np.ndarray, count: int, rounds: int = 12) -> np.ndarray:
    """``count`` levels of least squared error for some numbers: k-means on a line, from their quantiles."""
    ordered = np.sort(samples.reshape(-1)).astype(np.float64)
    levels = np.quantile(ordered, (np.arange(count) + 0.5) / count)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    for _ in range(rounds):
        ends = np.searchsorted(ordered, (levels[1:] + levels[:-1]) / 2)
        ends = np.concatenate([[0], ends, [len(ordered)]])
        held = np.diff(ends)
        levels = np.where(held > 0, np.diff(sums[ends]) / np.maximum(held, 1), levels)
    return np.sort(levels).astype(np.float32)


@cache
def threads() -> ThreadPoolExecutor:
    """For heads that are sorted each by itself, which takes the longest of all."""
    return ThreadPoolExecutor(4)


def nuq(bits: int, *, over_tokens: bool, outliers: float = 0.01) -> Coder:
    """KVQuant (arXiv 2401.18079): levels by k-means, over what is left when the largest 1 % are set aside as they are.

    Keys by channel and before their rotary turn, values by token. Its weights by Fisher information, and the first
    token that it keeps raw, are left out.
    """

    def of_one(rows: np.ndarray) -> np.ndarray:
        lines = np.ascontiguousarray(rows.T) if over_tokens else rows
        middle = np.median(lines, axis=1, keepdims=True)
        aside = max(1, round(outliers * lines.shape[1]))
        far = np.abs(lines - middle)
        out = far >= np.sort(far, axis=1)[:, -aside:][:, :1]
        low = np.where(out, np.inf, lines).min(axis=1, keepdims=True)
        high = np.where(out, -np.inf, lines).max(axis=1, keepdims=True)
        low, high = np.where(np.isfinite(low), low, middle), np.where(np.isfinite(high), high, middle)
        half, centre = np.maximum((high - low) / 2, 2.0**-24), (high + low) / 2
        even = np.clip((lines - centre) / half, -1, 1)
        levels = lloyd(even[~out][:: max(1, even.size // 50_000)] if (~out).any() else even, 2**bits)
        read = np.where(out, lines, nearest(levels, even) * half + centre).astype(np.float32)
        return read.T if over_tokens else read

    def code(rows: np.ndarray) -> np.ndarray:
        return np.stack(list(threads().map(of_one, rows.reshape(-1, *rows.shape[-2:])))).reshape(rows.shape)

    return code


GAUSSIAN = {
    bits: lloyd(np.array([NormalDist().inv_cdf((at + 0.5) / 20_000) for at in range(20_000)]), 2**bits, rounds=60)
    for bits in (3, 4)
}
"""Levels of least squared error for normal numbers, by bits."""


@cache
def random_turn(dim: int) -> np.ndarray:
    """An orthonormal matrix that is the same for all rows."""
    return np.linalg.qr(np.random.default_rng(dim).standard_normal((dim, dim)))[0].astype(np.float32)


def turbo(bits: int) -> Coder:
    """TurboQuant (arXiv 2504.19874), for least squared error: turned at random, the norm, levels for normal numbers."""

    def code(rows: np.ndarray) -> np.ndarray:
        dim = rows.shape[-1]
        turn = random_turn(dim)
        norm = np.linalg.norm(rows, axis=-1, keepdims=True).astype(np.float16).astype(np.float32)
        even = rows @ turn / np.maximum(norm, 2.0**-24) * np.float32(math.sqrt(dim))
        return (nearest(GAUSSIAN[bits], even) / np.float32(math.sqrt(dim)) * norm) @ turn.T

    return code


def kvarn(bits: int, tile: int = 128, rounds: int = 8) -> Coder:
    """KVarN (arXiv 2606.03458), as its paper is read here.

    A Hadamard turn; in tiles of tokens the standard deviations of both axes are made one, in turns; then each token's
    numbers are rounded between its smallest and largest.
    """

    def of_tiles(rows: np.ndarray) -> np.ndarray:
        scales = [np.ones((), np.float32), np.ones((), np.float32)]
        for _ in range(rounds):
            for side in (0, 1):
                spread = (rows / scales[0] / scales[1]).std(axis=-1 - side, keepdims=True)
                scales[side] = scales[side] * np.maximum(spread, 1e-6)
        scales = [np.maximum(scale.astype(np.float16).astype(np.float32), 2.0**-24) for scale in scales]
        even = by_range(bits, rows.shape[-1])(rows / scales[0] / scales[1])
        return even * scales[0] * scales[1]

    def code(rows: np.ndarray) -> np.ndarray:
        *lead, count, dim = rows.shape
        whole = count // tile * tile
        tiles = of_tiles(rows[..., :whole, :].reshape(*lead, -1, tile, dim)).reshape(*lead, whole, dim)
        return np.concatenate([tiles, rows[..., whole:, :]], axis=-2)

    return rotated(code)
