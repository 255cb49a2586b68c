"""How the indexer's scores are cut into programs, without a framework of arrays."""

from functools import cache
from typing import Any, NamedTuple

from kvcore.kernels.triton.device import INTERPRETED
from kvcore.kernels.triton.record import RowRecord, ceil_div, power_of_two, power_of_two_scaled
from kvcore.ops.choices import Declined


class ScoreParts(NamedTuple):
    """How a key is cut for the product; see ``attention.Parts``."""

    dim: int
    chunk: int
    chunks: int
    full: bool
    apart: bool


class ScoreCut(NamedTuple):
    """Keys of a tile, warps and the depth of the pipeline."""

    keys: int
    warps: int
    stages: int


CUTS = {True: ScoreCut(128, 4, 1), False: ScoreCut(64, 4, 2)}
"""By whether keys are nibbles."""


@cache
def score_parts(record: RowRecord) -> ScoreParts | None:
    """How keys are cut; None where ``scored`` declines."""
    found = scored(record)
    return None if isinstance(found, Declined) else found


@cache
def scored(record: RowRecord) -> ScoreParts | Declined:
    """How keys are cut, or why the kernel does not cover them: codes are bf16 numbers, scales apart or exact."""
    chunk = min(64, power_of_two(record.dim))
    whole = record.quant % chunk == 0 and (record.width % chunk == 0 or chunk % record.width == 0)
    scaled = record.code in ("e4m3", "e2m1", "int8") and (
        record.groups == 1 or power_of_two_scaled(record) or (record.code, record.scale) == ("e2m1", "e4m3")
    )
    exact = (scaled or not record.quant) and record.plain in ("", "bf16")
    if chunk < 16:
        return Declined(f"scores need keys of more than 8 channels, these have {record.dim}")
    if not whole or record.heads != 1:
        return Declined("scores need keys of one head whose groups divide, or are divided by, 64 channels")
    if not exact:
        return Declined(f"scores need keys that are bf16 numbers; {record.code or record.plain} with its scales is not")
    return ScoreParts(record.dim, chunk, ceil_div(record.dim, chunk), INTERPRETED, True)


@cache
def nibbles(record: RowRecord) -> bool:
    """Four power-of-two scales in a word, sixteen bytes of codes each."""
    words = all(number % 4 == 0 for number in (record.scales_unit, record.scales_base, record.scales_stride))
    return (record.code, record.scale, record.groups, record.width) == ("e2m1", "e8m0", 4, 32) and words


def score_cut(record: RowRecord, heads: int, native: bool) -> tuple[ScoreCut, dict[str, Any]]:
    """The cut of a record's keys, and what the kernels must know of it."""
    packed = nibbles(record) and native
    cut = CUTS[packed]
    return cut, {
        "R": record, "S": score_parts(record), "HEADS": max(16, power_of_two(heads)), "KEYS": cut.keys,
        "STAGES": cut.stages, "NIBBLES": packed, "NATIVE": native,
    }  # fmt: skip


def score_tiles(multiprocessors: int, tokens: int, columns: int, keys: int) -> int:
    """Tiles of a program: enough programs to fill the GPU a few times; beyond that longer runs load queries once."""
    most = ceil_div(columns, keys)
    return power_of_two(max(1, min(64, most * tokens // (8 * multiprocessors))))
