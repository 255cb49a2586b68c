"""The importer's side: fetch, verify, commit; an error at any moment leaves the cache as it was."""

import contextlib
import time
from typing import NamedTuple

import msgspec

from kvcore.counts import check_count
from kvcore.errors import ShapeError, TransferError
from kvcore.foreign import UNREADABLE
from kvcore.ops import Ops
from kvcore.ops.arguments import check_number
from kvcore.pools import Pools
from kvcore.portable.blob import check_length, check_spec
from kvcore.portable.caches import SharedCache
from kvcore.portable.exporter import Handle
from kvcore.portable.page_digests import Array, PageDigests, content_of
from kvcore.portable.pages import PageLayout
from kvcore.portable.rows import write_rows
from kvcore.portable.staging import Manifest, empty_pages, layout_of, parse
from kvcore.portable.strips import move_at_once
from kvcore.portable.transport import Carrier, begin
from kvcore.requests.manager import Request
from kvcore.requests.tokens import check_salt
from kvcore.step import StepRequest

MOST_DRAFTS = 1 << 16
"""Tokens to roll back that an exporter may keep more than the importer's smallest ring has rows."""


class Received(NamedTuple):
    """An export that is here and verified, not yet a request."""

    manifest: Manifest
    layout: PageLayout
    pages: Array


def pull(
    cache: SharedCache,
    handle: Handle,
    carrier: Carrier,
    *,
    timeout: float = 10.0,
    chunk_pages: int = 1024,
    on_device: bool = False,
    salt: str | None = None,
) -> Request:
    """Make a request of an export; generation goes on where it was.

    Checkpoints stay with the exporter: where the spec has rings, ``cache.checkpoint(request)`` makes one at its present
    length, for prompts that go on from there.

    Digests tell damage, not deceit: an exporter may have put any rows beside any ids. So it is you who says whom its
    prefixes may serve; the salt that its manifest names counts for nothing.

    Args:
        cache: with the exporter's spec, on any backend and layout. Context shards pull with
            ``kvcore.interop.torch_distributed.pull``, so that all of them commit or none.
        handle: from the exporter's ``Desk.export``.
        carrier: the way to it.
        timeout: seconds until the last page has to be here.
        chunk_pages: pages to ask for at a time; many, since every question costs a round trip.
        on_device: receive into the device memory of a torch cache.
        salt: as for ``Cache.admit``: prefixes of the request, and of what follows it, may be found by requests of this
            salt. None: they are not published.

    Raises:
        TransferError: ``unknown``, ``out_of_range``, ``consumed``, ``stale``, ``expired``: the exporter refused;
            ``peer_lost``, ``timeout``: it did not answer; ``damaged``: what came is not what was exported.
        SnapshotError: it is of another spec. OutOfSlots, OutOfBlocks: no room. ShapeError: the salt is no text.
            Nothing is changed by any of them.
    """
    salt = check_salt(salt, "pull: salt")
    end = time.monotonic() + check_number(timeout, "pull: timeout")
    received = receive(cache, handle, carrier, timeout=timeout, chunk_pages=chunk_pages, on_device=on_device)
    request = commit(cache, received, salt)
    # It is here, whatever becomes of the exporter, whose lease ends by itself.
    with contextlib.suppress(TransferError):
        carrier.finish(handle, timeout=_left(end))
    return request


def receive(
    cache: SharedCache,
    handle: Handle,
    carrier: Carrier,
    *,
    timeout: float = 10.0,
    chunk_pages: int = 1024,
    on_device: bool = False,
) -> Received:
    """Fetch an export and verify every page of it; arguments and errors as for ``pull``."""
    end = time.monotonic() + check_number(timeout, "pull: timeout")
    check_count(ShapeError, "pull: chunk_pages", chunk_pages, 1)
    manifest = parse(carrier.manifest(handle, timeout=_left(end)), handle.root)
    check_spec(cache.spec, manifest.spec)
    check_length(cache.plan, manifest.length, "pull")
    _check_rollback(cache, manifest)
    layout = layout_of(cache.spec, manifest)
    if len(manifest.digests) != layout.blocks + 1:
        raise TransferError(
            reason="damaged",
            got=f"{len(manifest.digests)} digests",
            where="manifest",
            allowed=f"one for each of {layout.blocks} pages, and one for the record",
        )
    if (layout.pages, layout.page_bytes) != (handle.pages, handle.page_bytes):
        raise TransferError(
            reason="damaged",
            got=f"{handle.pages} pages of {handle.page_bytes} bytes",
            where="handle",
            allowed=f"{layout.pages} pages of {layout.page_bytes} bytes",
        )
    pages = empty_pages(cache, layout.pages, layout.page_bytes, on_device=on_device)
    digests, here = PageDigests(cache.ops, layout), 0
    for first in range(0, layout.pages, chunk_pages):
        coming = pages[first : first + chunk_pages]
        wait = begin(carrier, handle, first, coming, timeout=_left(end))
        # What is here is verified while the next pages are on the way.
        digests.add(pages[here:first], here)
        wait()
        here = first
    _verify(digests.result(pages), manifest, layout)
    return Received(manifest, layout, pages)


def _check_rollback(cache: SharedCache, manifest: Manifest) -> None:
    """Refuse an export that could be rolled back farther than rings are large: all those rows would be made room for.

    Raises:
        TransferError: ``damaged``.
    """
    rings = [region.rows for region in cache.plan.regions if region.growth == "slot"]
    most = min(rings, default=manifest.length) + MOST_DRAFTS
    if manifest.length - manifest.floor > most:
        raise TransferError(
            reason="damaged",
            got=f"rows from {manifest.floor} on for {manifest.length} tokens",
            where="manifest",
            allowed=f"{most} tokens to roll back at most",
        )


def commit(cache: SharedCache, received: Received, salt: str | None = None) -> Request:
    """Make a request of what was verified, its prefixes for requests of the salt, or for nobody.

    Raises:
        OutOfSlots, OutOfBlocks: no room; nothing is changed.
    """
    manifest, layout, pages = received

    def write(ops: Ops, pools: Pools, row: StepRequest) -> Pools:
        if move_at_once(ops, pools, row, layout, pages, store=True):
            return pools
        return write_rows(ops, pools, row, content_of(layout, pages))

    return cache.exclusive("pull", lambda state: state.restore(manifest, write, salt=salt))


def _verify(found: list[tuple[int, int]], manifest: Manifest, layout: PageLayout) -> None:
    """Refuse pages that do not match their digests, naming the first."""
    if found == manifest.digests:
        return
    bad = [at for at, (lanes, told) in enumerate(zip(found, manifest.digests, strict=True)) if lanes != told]
    if bad:
        what = "the record" if bad[0] == layout.blocks else f"page {bad[0]}"
        raise TransferError(
            reason="damaged", got=f"other bytes than were exported in {what}", where="pull", allowed="as exported"
        )


def encode_handle(handle: Handle) -> bytes:
    """A handle as bytes, to be sent."""
    return msgspec.msgpack.encode(handle)


def decode_handle(data: bytes) -> Handle:
    """The inverse.

    Raises:
        TransferError: ``damaged``: not a handle.
    """
    try:
        return msgspec.msgpack.decode(data, type=Handle)
    except UNREADABLE as error:
        raise TransferError(reason="damaged", got=str(error), where="handle", allowed="bytes of a Handle") from error


def _left(end: float) -> float:
    """Seconds left.

    Raises:
        TransferError: ``timeout``: none.
    """
    left = end - time.monotonic()
    if left <= 0:
        raise TransferError(
            reason="timeout", got="no end in time", where="pull", allowed="all pages within the timeout"
        )
    return left
