"""Life cycle: reset, copies, raw rows, digests."""

import numpy as np

from kvcore import digest
from kvcore.backends.reference import rows as place
from kvcore.ops import RawRows, bounds
from kvcore.pools import fresh_unit


def reset_slots(ops, pools, slots):
    """Make slots [n] as if never used; -1 is ignored."""
    slots = slots[slots >= 0]
    for region in ops.plan.regions:
        if region.growth == "slot":
            for buffer, (name, size) in region.buffers.items():
                pools[name][slots] = np.frombuffer(fresh_unit(region, buffer) or bytes(size), np.uint8)
    return pools


def poison(ops, pools, slots, blocks):
    """Fill freed slots [n] and blocks [m] with 0xFF, NaN in every float code, so that a stale read is seen."""
    for region in ops.plan.regions:
        for name, _ in region.buffers.values():
            pools[name][slots if region.growth == "slot" else blocks] = 0xFF
    return pools


def copy_slots(ops, pools, sources, targets):
    """Copy whole slots; all sources are read before any target is written."""
    return _copy(ops, pools, sources, targets, "slot")


def copy_blocks(ops, pools, sources, targets):
    """Copy whole blocks; all sources are read before any target is written."""
    return _copy(ops, pools, sources, targets, "block")


def _copy(ops, pools, sources, targets, growth):
    for region in ops.plan.regions:
        if region.growth == growth:
            for name, _ in region.buffers.values():
                pools[name][targets] = pools[name][sources]
    return pools


def gather_rows(ops, pools, layer, role, index, rows=None, *, columns=None):
    """The role's live rows in position order as canonical bytes; ``rows`` are the step's own, one per part."""
    component = ops.component(layer, role)
    regions = ops.plan.region(layer, role)
    columns = bounds.columns(ops.plan, layer, role, index) if columns is None else columns
    requests = len(index.slots)
    out = np.zeros((requests, columns, sum(region.heads * region.format.row for region in regions)), np.uint8)
    positions = np.full((requests, columns), -1, np.int32)
    own = [None] * len(regions)
    if rows is not None:
        own = [ops.encode_rows(region, values) for region, values in zip(regions, rows, strict=True)]
    for request in range(requests):
        for column, number in enumerate(component.live(int(index.lengths[request]))[:columns]):
            parts = [
                place.read(pools, region, index, request, number, stored).reshape(-1)
                for region, stored in zip(regions, own, strict=True)
            ]
            out[request, column] = np.concatenate(parts)
            positions[request, column] = number * component.tokens_per_row
    return RawRows(out, positions)


def store_rows(ops, pools, layer, role, index, raw):
    """Write canonical rows at their positions: the inverse of ``gather_rows``; position -1 is ignored."""
    step = ops.component(layer, role).tokens_per_row
    for request in range(len(raw.positions)):
        for row, position in zip(raw.rows[request], raw.positions[request], strict=True):
            first = 0
            for region in ops.plan.region(layer, role):
                last = first + region.heads * region.format.row
                number = int(position) // step if position >= 0 else -1
                stored = row[first:last].reshape(region.heads, region.format.row)
                place.store(pools, region, *place.locate(region, index, request, number), stored)
                first = last
    return pools


def read_ring(ops, pools, layer, role, index):
    """Raw bytes of the ring rows that the step's tokens will overwrite, for ``restore_ring``."""
    return [
        [place.load(pools, region, *place.locate(region, index, int(q), int(p))) for q, p in tokens(index)]
        for region in ops.plan.region(layer, role)
    ]


def restore_ring(ops, pools, layer, role, index, saved):
    """Put back what ``read_ring`` saved."""
    for region, rows in zip(ops.plan.region(layer, role), saved, strict=True):
        for (request, position), row in zip(tokens(index), rows, strict=True):
            place.store(pools, region, *place.locate(region, index, int(request), int(position)), row)
    return pools


def tokens(index):
    """(request, position) of every token, padding included."""
    return zip(index.request_index, index.positions, strict=True)


def digest_rows(ops, raw, salt):
    """Two 32-bit lanes for every request over its rows and positions -> [Q, 2] int64; see ``kvcore.digest``."""
    requests, columns, size = raw.rows.shape
    padded = np.zeros((requests, columns, -(-size // 4) * 4), np.uint8)
    padded[:, :, :size] = raw.rows
    words = padded.view("<u4")
    place_of = np.arange(words.shape[2], dtype=np.uint32) * np.uint32(digest.WORD_FACTOR)
    row_of = raw.positions.astype(np.uint32) * np.uint32(digest.POSITION_FACTOR)
    valid = (raw.positions >= 0)[:, :, None]
    lanes = []
    for seed in digest.LANE_SEEDS:
        key = mix(row_of[:, :, None] + place_of + np.uint32((salt + seed) & digest.MASK))
        mixed = np.where(valid, mix(words ^ key), np.uint32(0))
        lanes.append(mixed.sum(axis=(1, 2), dtype=np.uint64) & np.uint64(digest.MASK))
    return np.stack(lanes, axis=1).astype(np.int64)


def mix(value):
    """murmur3's 32-bit finaliser; products of uint32 arrays are taken modulo 2^32."""
    for shift, factor in zip(digest.MIX_SHIFTS, (*digest.MIX_FACTORS, 1), strict=True):
        value = (value ^ (value >> np.uint32(shift))) * np.uint32(factor)
    return value
