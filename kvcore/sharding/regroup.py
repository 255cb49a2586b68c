"""A request from some shards by head into others, of another number: prefill and decode need not be cut alike.

What travels are the blobs that every source shard exports, over files or any transport. They are verified whole; then
each target takes the rows of its own heads, from whichever shard owns them. Blocks may be of other sizes on both sides.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvcore.cache.cache import Cache
from kvcore.errors import ShapeError, SnapshotError, SpecError
from kvcore.portable.blob import opened, pages_of
from kvcore.portable.digests import digests_of
from kvcore.portable.manifest import damaged, layout_of, refuse_blob
from kvcore.portable.pages import content_of
from kvcore.portable.record import RequestRecord, check_length
from kvcore.portable.rows import HostRows, owned
from kvcore.requests.manager import Request
from kvcore.requests.tokens import check_salt
from kvcore.sharding.heads import Heads
from kvcore.spec import CacheSpec, Component, from_json

WHERE = "import_shards"

Rows = dict[tuple[int, str], HostRows]


class Share(NamedTuple):
    """A source shard's request: what it says of itself, and its rows."""

    record: RequestRecord
    rows: Rows


def import_shards(
    cache: Cache,
    blobs: Sequence[bytes],
    *,
    whole: CacheSpec,
    rank: int = 0,
    ranks: int = 1,
    into: Request | None = None,
    salt: str | None = None,
) -> Request:
    """A request on one of ``ranks`` shards by head from its parts on ``len(blobs)`` others.

    Args:
        cache: this shard's: its spec is ``whole`` with the heads of one shard, and blocks of any size.
        blobs: what ``export_request`` gave on every source shard, in order.
        whole: the spec of all heads together.
        rank, ranks: which shard this is, and of how many.
        into: a request without tokens to fill; None admits one.
        salt: under which its prefixes may be found.

    Returns:
        The request. Checkpoints stay behind.

    Raises:
        SnapshotError: a blob is damaged, or the parts are of different requests. SpecError: a blob's spec, or the
            cache's, is not ``whole`` cut in so many. ShapeError: no such rank, or no blobs.
        OutOfSlots, OutOfBlocks: no room. Nothing is changed by any of them.
    """
    if not blobs or not 0 <= rank < ranks:
        raise ShapeError(got=f"{len(blobs)} blobs, rank {rank} of {ranks}", where=WHERE, allowed="one blob a shard")
    _check_shard(cache.spec, whole, ranks, "the cache's spec")
    salt = check_salt(salt, f"{WHERE}: salt")

    def take(state: Any) -> Request:
        shares = [_open(state.ops, blob, whole, number, len(blobs)) for number, blob in enumerate(blobs)]
        first = shares[0].record
        if any((one.record.length, one.record.tokens) != (first.length, first.tokens) for one in shares):
            lengths = [one.record.length for one in shares]
            raise SnapshotError(got=f"requests of {lengths} tokens", where=WHERE, allowed="parts of one request")
        check_length(state.plan, first.length, WHERE)
        floor = max(one.record.floor for one in shares)
        # Shards of one request were converted alike, if at all.
        left = RequestRecord(
            length=first.length,
            floor=floor,
            tokens=first.tokens,
            salt=salt,
            checkpoints=[],
            converted=next((one.record.converted for one in shares if one.record.converted), []),
            approximate=any(one.record.approximate for one in shares),
        )
        return state.restore(left, _regrouped(whole, shares, rank, ranks), into, salt=salt)

    return cache.exclusive(WHERE, take)


def _of_one_shard(whole: CacheSpec, shards: int) -> dict[tuple[int, str], Component]:
    """Components of one shard."""
    found: dict[tuple[int, str], Component] = {}
    for layer, role, component in owned(whole):
        if component.split_by_heads:
            component = component.with_heads(tuple(Heads(part.heads, shards).per_shard for part in component.parts))
        found[layer, role] = component
    return found


def _check_shard(spec: CacheSpec, whole: CacheSpec, shards: int, what: str) -> None:
    # As many values as keys may be said or left out.
    ours = _of_one_shard(spec, 1)
    wanted = _of_one_shard(whole, shards)
    for key in {**wanted, **ours}:
        if ours.get(key) != wanted.get(key):
            raise SpecError(
                got=f"{ours.get(key)} in layers[{key[0]}].{key[1]} of {what}",
                where=WHERE,
                allowed=f"{wanted.get(key)}: one of {shards} shards of the whole",
            )


def _open(ops: Any, blob: bytes, whole: CacheSpec, number: int, shards: int) -> Share:
    """A blob's rows, all of them verified."""
    where = f"{WHERE}: blob {number}"
    found = opened(memoryview(blob).cast("B"), where)
    spec = from_json(found.described.spec)
    _check_shard(spec, whole, shards, f"blob {number}")
    pages = pages_of(found)
    layout = layout_of(spec, found.described, pages.shape, where, refuse_blob)
    bad = damaged(layout, digests_of(found.described.digest, ops, layout).result(pages), found.described.digests)
    if bad:
        raise SnapshotError(got=f"other bytes than were exported in {bad[0]}", where=where, allowed="as exported")
    return Share(found.described.record, content_of(layout, pages))


def _regrouped(whole: CacheSpec, shares: Sequence[Share], rank: int, ranks: int) -> Rows:
    """The rows of a shard's heads; what is not split is the same on all of them."""
    content: Rows = {}
    for layer, role, component in owned(whole):
        key = layer, role
        held = _common([share.rows[key] for share in shares])
        rows, positions = held[0]
        if component.split_by_heads:
            parts: list[np.ndarray[Any, Any]] = []
            starts = [0] * len(shares)
            for part in component.parts:
                size, theirs = part.format.row, Heads(part.heads, len(shares))
                for head in Heads(part.heads, ranks).on(rank):
                    owner = theirs.owner(head)
                    begin = starts[owner] + theirs.local(head) * size
                    parts.append(held[owner].rows[:, begin : begin + size])
                starts = [start + theirs.per_shard * size for start in starts]
            rows = np.concatenate(parts, axis=1)
        content[key] = HostRows(rows, positions)
    return content


def _common(held: list[HostRows]) -> list[HostRows]:
    """The rows that all shards have: one that can be rolled back further has more of a ring."""
    positions = held[0].positions
    if all(np.array_equal(one.positions, positions) for one in held[1:]):
        return held
    there = {*positions}.intersection(*(one.positions for one in held))
    found: list[HostRows] = []
    for one in held:
        kept = [number for number, position in enumerate(one.positions) if position in there]
        found.append(HostRows(one.rows[kept], [one.positions[number] for number in kept]))
    return found
