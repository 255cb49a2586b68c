"""Life cycle: reset, copies, raw rows, digests."""

import torch
from torch.nn.functional import pad

from kvcore import digest
from kvcore.backends.torch_triton import cpu_views
from kvcore.backends.torch_triton import rows as place
from kvcore.backends.torch_triton.layer import Layer
from kvcore.digest import row_lanes
from kvcore.ops import RawRows, StepIndex
from kvcore.pools import Pools


def reset_slots(pool: torch.Tensor, slots: torch.Tensor, fresh: bytes | None) -> torch.Tensor:
    """One pool with slots [n] as if never used; -1 is ignored. ``fresh`` is one unit's bytes, or None for zeros."""
    unit = None if fresh is None else torch.frombuffer(bytearray(fresh), dtype=torch.uint8).to(pool.device)
    # A handful of slots, outside any step: plain copies of whole slots, which are memory-speed.
    for slot in slots.tolist():
        if slot >= 0:
            pool[slot].zero_() if unit is None else pool[slot].copy_(unit)
    return pool


def poison(pool: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """One pool with freed slots or blocks [n] filled with 0xFF, so that a stale read is seen."""
    return pool.index_fill_(0, units.long(), 0xFF)


def copy_units(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One pool with whole slots or blocks copied; all sources are read before any target is written."""
    return pool.index_copy_(0, targets.long(), pool.index_select(0, sources.long()))


def gather_rows(
    layer: Layer,
    pools: Pools,
    index: StepIndex,
    rows: tuple[torch.Tensor, ...] | None = None,
    *,
    role: str,
    columns: int,
) -> RawRows:
    """The role's live rows in position order as canonical bytes; ``rows`` are the step's own, one per part."""
    component = layer.component(role)
    regions = layer.regions[role]
    first, end = component.live_bounds(index.lengths, place.maximum)
    numbers = place.numbers_from(first, end - first, columns)
    own = [None] * len(regions)
    if rows is not None:
        own = [place.encode_rows(region, values) for region, values in zip(regions, rows, strict=True)]
    requests = torch.arange(len(index.slots), device=numbers.device)[:, None]
    parts = [
        place.read(pools, region, index, requests, numbers, stored).flatten(2)
        for region, stored in zip(regions, own, strict=True)
    ]
    positions = torch.where(numbers >= 0, numbers * component.tokens_per_row, -1)
    return RawRows(torch.cat(parts, dim=2), positions.int())


def store_rows(layer: Layer, pools: Pools, index: StepIndex, raw: RawRows, *, role: str) -> Pools:
    """Write canonical rows at their positions: the inverse of ``gather_rows``; position -1 is ignored."""
    positions = raw.positions.flatten()
    requests = torch.arange(len(raw.positions), device=positions.device)[:, None].expand_as(raw.positions).flatten()
    numbers = torch.where(positions >= 0, positions // layer.component(role).tokens_per_row, -1)
    regions = layer.regions[role]
    parts = raw.rows.flatten(0, 1).split([region.heads * region.format.row for region in regions], dim=1)
    for region, rows in zip(regions, parts, strict=True):
        rows = rows.reshape(len(rows), region.heads, region.format.row)
        place.store(pools, region, *place.locate(region, index, requests, numbers), rows)
    return pools


def read_ring(layer: Layer, pools: Pools, index: StepIndex, *, role: str) -> list[torch.Tensor]:
    """Raw bytes of the ring rows that the step's tokens will overwrite, for ``restore_ring``."""
    saved = []
    for region in layer.regions[role]:
        rows = cpu_views.overwritten(layer.ops, pools, region, index)
        saved.append(place.load(pools, region, *_tokens(region, index)) if rows is None else rows)
    return saved


def restore_ring(layer: Layer, pools: Pools, index: StepIndex, saved: list[torch.Tensor], *, role: str) -> Pools:
    """Put back what ``read_ring`` saved."""
    for region, rows in zip(layer.regions[role], saved, strict=True):
        place.store(pools, region, *_tokens(region, index), rows.view(torch.uint8))
    return pools


DIGEST_WORDS = 1 << 16
"""Words of rows that are digested at a time: they and what is made of them stay in a core's cache."""


def digest_rows(raw: RawRows, salt: int) -> torch.Tensor:
    """Two 32-bit lanes for every request over its rows and positions -> [Q, 2] int64; see ``kvcore.digest``."""
    if raw.rows.device.type == "cpu":
        return torch.from_numpy(row_lanes(raw.rows.numpy(), raw.positions.numpy(), salt))
    requests, columns, size = raw.rows.shape
    words = -(-size // 4)
    place_of = _signed(torch.arange(words, device=raw.rows.device) * digest.WORD_FACTOR)
    lanes = torch.zeros((requests, 2), dtype=torch.int64, device=raw.rows.device)
    step = max(1, DIGEST_WORDS // max(1, requests * words))
    # A tensor without elements may have any strides, which ``view`` refuses.
    for first in range(0, columns if requests and words else 0, step):
        some = slice(first, first + step)
        stored = pad(raw.rows[:, some], (0, words * 4 - size)).contiguous().view(torch.int32)
        row_of = _signed(raw.positions[:, some, None].long() * digest.POSITION_FACTOR)
        missing = (raw.positions[:, some] < 0)[:, :, None]
        for lane, seed in enumerate(digest.LANE_SEEDS):
            mixed = row_of + place_of
            mixed += _signed_number(salt + seed)
            mix(mixed)
            mixed ^= stored
            mix(mixed)
            mixed.masked_fill_(missing, 0)
            lanes[:, lane] += mixed.sum(dim=(1, 2))
    return lanes & digest.MASK


def mix(value: torch.Tensor) -> None:
    """murmur3's 32-bit finaliser of int32 in place: products wrap, and what shifts bring in of the sign is masked."""
    shifted = torch.empty_like(value)
    for shift, factor in zip(digest.MIX_SHIFTS, (*digest.MIX_FACTORS, 1), strict=True):
        torch.bitwise_right_shift(value, shift, out=shifted)
        shifted &= digest.MASK >> shift
        value ^= shifted
        if factor != 1:
            value *= _signed_number(factor)


def _signed(value: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 as int32."""
    return (((value + (1 << 31)) & digest.MASK) - (1 << 31)).to(torch.int32)


def _signed_number(value: int) -> int:
    return ((value + (1 << 31)) & digest.MASK) - (1 << 31)


def _tokens(region, index):
    """Place of every token's row, padding included."""
    return place.locate(region, index, index.request_index, index.positions)
