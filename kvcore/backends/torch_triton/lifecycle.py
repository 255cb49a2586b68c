"""Life cycle: reset, copies, raw rows, digests."""

import torch
from torch.nn.functional import pad

from kvcore import digest
from kvcore.backends.torch_triton import plain
from kvcore.backends.torch_triton import rows as place
from kvcore.ops import RawRows, bounds
from kvcore.pools import fresh_unit


def reset_slots(ops, pools, slots):
    """Make slots [n] as if never used; -1 is ignored."""
    # A handful of slots, outside any step: plain copies of whole slots, which are memory-speed.
    chosen = [slot for slot in ops.asarray(slots).tolist() if slot >= 0]
    for region in ops.plan.regions:
        if region.growth == "slot" and chosen:
            for buffer, (name, _) in region.buffers.items():
                fresh = fresh_unit(region, buffer)
                unit = None if fresh is None else ops.bytes_of(fresh)
                for slot in chosen:
                    pools[name][slot].zero_() if unit is None else pools[name][slot].copy_(unit)
    return pools


def poison(ops, pools, slots, blocks):
    """Fill freed slots [n] and blocks [m] with 0xFF, NaN in every float code, so that a stale read is seen."""
    slots, blocks = ops.asarray(slots).long(), ops.asarray(blocks).long()
    for region in ops.plan.regions:
        for name, _ in region.buffers.values():
            pools[name].index_fill_(0, slots if region.growth == "slot" else blocks, 0xFF)
    return pools


def copy_slots(ops, pools, sources, targets):
    """Copy whole slots; all sources are read before any target is written."""
    return _copy(ops, pools, sources, targets, "slot")


def copy_blocks(ops, pools, sources, targets):
    """Copy whole blocks; all sources are read before any target is written."""
    return _copy(ops, pools, sources, targets, "block")


def _copy(ops, pools, sources, targets, growth):
    sources, targets = ops.asarray(sources).long(), ops.asarray(targets).long()
    for region in ops.plan.regions:
        if region.growth == growth:
            for name, _ in region.buffers.values():
                pools[name].index_copy_(0, targets, pools[name].index_select(0, sources))
    return pools


def gather_rows(ops, pools, layer, role, index, rows=None, *, columns=None):
    """The role's live rows in position order as canonical bytes; ``rows`` are the step's own, one per part."""
    component = ops.component(layer, role)
    regions = ops.plan.region(layer, role)
    columns = bounds.columns(ops.plan, layer, role, index) if columns is None else columns
    first, end = component.live_bounds(index.lengths, place.maximum)
    numbers = place.numbers_from(first, end - first, columns)
    own = [None] * len(regions)
    if rows is not None:
        own = [ops.encode_rows(region, values) for region, values in zip(regions, rows, strict=True)]
    requests = torch.arange(len(index.slots), device=numbers.device)[:, None]
    parts = [
        place.read(pools, region, index, requests, numbers, stored).flatten(2)
        for region, stored in zip(regions, own, strict=True)
    ]
    positions = torch.where(numbers >= 0, numbers * component.tokens_per_row, -1)
    return RawRows(torch.cat(parts, dim=2), positions.int())


def store_rows(ops, pools, layer, role, index, raw):
    """Write canonical rows at their positions: the inverse of ``gather_rows``; position -1 is ignored."""
    positions = raw.positions.flatten()
    requests = torch.arange(len(raw.positions), device=positions.device)[:, None].expand_as(raw.positions).flatten()
    numbers = torch.where(positions >= 0, positions // ops.component(layer, role).tokens_per_row, -1)
    regions = ops.plan.region(layer, role)
    parts = raw.rows.flatten(0, 1).split([region.heads * region.format.row for region in regions], dim=1)
    for region, rows in zip(regions, parts, strict=True):
        rows = rows.reshape(len(rows), region.heads, region.format.row)
        place.store(pools, region, *place.locate(region, index, requests, numbers), rows)
    return pools


def read_ring(ops, pools, layer, role, index):
    """Raw bytes of the ring rows that the step's tokens will overwrite, for ``restore_ring``."""
    saved = []
    for region in ops.plan.region(layer, role):
        rows = plain.overwritten(ops, pools, region, index)
        saved.append(place.load(pools, region, *tokens(region, index)) if rows is None else rows)
    return saved


def restore_ring(ops, pools, layer, role, index, saved):
    """Put back what ``read_ring`` saved."""
    for region, rows in zip(ops.plan.region(layer, role), saved, strict=True):
        place.store(pools, region, *tokens(region, index), rows.view(torch.uint8))
    return pools


def tokens(region, index):
    """Place of every token's row, padding included."""
    return place.locate(region, index, index.request_index, index.positions)


def digest_rows(ops, raw, salt):
    """Two 32-bit lanes for every request over its rows and positions -> [Q, 2] int64; see ``kvcore.digest``."""
    requests, columns, size = raw.rows.shape
    words = -(-size // 4)
    place_of = torch.arange(words, device=raw.rows.device) * digest.WORD_FACTOR
    lanes = torch.zeros((requests, 2), dtype=torch.int64, device=raw.rows.device)
    # A tensor without elements may have any strides, which ``view`` refuses.
    for some in place.portions(columns if requests else 0, requests * words):
        stored = pad(raw.rows[:, some], (0, words * 4 - size)).contiguous().view(torch.int32).long() & digest.MASK
        row_of = raw.positions[:, some, None].long() * digest.POSITION_FACTOR
        valid = (raw.positions[:, some] >= 0)[:, :, None]
        for lane, seed in enumerate(digest.LANE_SEEDS):
            key = mix(row_of + place_of + ((salt + seed) & digest.MASK))
            mixed = torch.where(valid, mix(stored ^ key), 0)
            lanes[:, lane] += mixed.sum(dim=(1, 2))
    return lanes & digest.MASK


def mix(value):
    """murmur3's 32-bit finaliser, on the low 32 bits of int64; products wrap, which leaves those bits right."""
    value = value & digest.MASK
    for shift, factor in zip(digest.MIX_SHIFTS, (*digest.MIX_FACTORS, 1), strict=True):
        value = (value ^ (value >> shift)) * factor & digest.MASK
    return value
