"""The importer's side: fetch, verify, commit; an error at any moment leaves the cache as it was."""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvcore.counts import check_count
from kvcore.errors import ShapeError, TransferError
from kvcore.foreign import UNREADABLE
from kvcore.ops.arguments import check_number
from kvcore.portable import version1
from kvcore.portable.blob import take_in
from kvcore.portable.caches import CacheInTurn, SharedCache
from kvcore.portable.digests import SIZES, digests_of
from kvcore.portable.exporter import Handle
from kvcore.portable.manifest import Described, check_places, damaged, empty_pages, layout_of, root_of
from kvcore.portable.manifest import parse as parse_manifest
from kvcore.portable.pages import Array, PageLayout, takes_chunks
from kvcore.portable.record import RequestRecord, check_length, check_spec
from kvcore.portable.transport import Transport, begin
from kvcore.requests.manager import Request
from kvcore.requests.tokens import check_salt

MOST_DRAFTS = 1 << 16
"""Tokens to roll back that an exporter may keep more than the importer's smallest ring has rows."""

refuse = partial(TransferError, reason="damaged")
"""What is wrong with what an exporter said."""


class Received(NamedTuple):
    """An export that is here, not yet a request.

    Attributes:
        record, layout, pages: what it is.
        declared: lanes that its pages are still to be verified by, as the device reads them; None: they were.
        check: what is still to be checked of the manifest, while the device reads them.
        begun: that it has begun to.
    """

    record: RequestRecord
    layout: PageLayout
    pages: Array
    declared: Sequence[bytes] | None = None
    check: Callable[[], object] = bool
    begun: Any = None


def pull(
    cache: SharedCache,
    handle: Handle,
    transport: Transport,
    *,
    timeout: float = 10.0,
    chunk_pages: int = 1024,
    on_device: bool = False,
    salt: str | None = None,
    digests: Sequence[str] = tuple(SIZES),
) -> Request:
    """Make a request of an export; generation goes on where it was.

    Checkpoints come along where they can be found: with a ``prefix`` policy and a ``salt``, and no more than this cache
    keeps. Elsewhere their pages are not fetched.

    Digests tell damage, not deceit: an exporter may have put any rows beside any ids. So it is you who says whom its
    prefixes may serve; the salt that its manifest names counts for nothing.

    Args:
        cache: with the exporter's spec, on any backend and layout. Context shards pull with
            ``kvcore.interop.torch_distributed.pull``, so that all of them commit or none.
        handle: from the exporter's ``Exporter.export``.
        transport: the way to it.
        timeout: seconds until the last page has to be here.
        chunk_pages: pages to ask for at a time; many, since every question costs a round trip.
        on_device: receive into the device memory of a torch cache.
        salt: as for ``Cache.admit``: prefixes of the request, and of what follows it, may be found by requests of this
            salt. None: they are not published.
        digests: what pages may be verified by: ``("sha256",)`` where their way is not trusted and the handle's is.

    Raises:
        TransferError: ``unknown``, ``out_of_range``, ``consumed``, ``stale``, ``expired``: the exporter refused;
            ``peer_lost``, ``timeout``: it did not answer; ``damaged``: what came is not what was exported.
        SnapshotError: it is of another spec. OutOfSlots, OutOfBlocks: no room. ShapeError: the salt is no text.
            Nothing is changed by any of them.
    """
    salt = check_salt(salt, "pull: salt")
    end = time.monotonic() + check_number(timeout, "pull: timeout")
    received = receive(
        cache,
        handle,
        transport,
        timeout=timeout,
        chunk_pages=chunk_pages,
        on_device=on_device,
        checkpoints=salt is not None,
        digests=digests,
        verified=False,
    )
    request = commit(cache, received, salt)
    # It is here, whatever becomes of the exporter, whose lease ends by itself.
    with contextlib.suppress(TransferError):
        transport.finish(handle, timeout=_left(end))
    return request


def receive(
    cache: SharedCache,
    handle: Handle,
    transport: Transport,
    *,
    timeout: float = 10.0,
    chunk_pages: int = 1024,
    on_device: bool = False,
    checkpoints: bool = False,
    digests: Sequence[str] = tuple(SIZES),
    verified: bool = True,
) -> Received:
    """Fetch an export and verify every page of it; arguments and errors as for ``pull``.

    Args:
        checkpoints: fetch those too that a cache with a ``prefix`` policy keeps.
        verified: False leaves it to ``commit`` where that reads all pages once more, on their way to a device.
    """
    end = time.monotonic() + check_number(timeout, "pull: timeout")
    check_count(ShapeError, "pull: chunk_pages", chunk_pages, 1)
    with contextlib.ExitStack() as stack:
        manifest = transport.manifest(handle, timeout=_left(end))
        held, begun = None, None
        if not verified and not on_device and "lanes" in digests and takes_chunks(cache.ops):
            held, begun = _ahead(cache, handle, transport)
        if begun is not None:
            # Whatever comes of it, nothing reads an exporter's pages any more when this has ended.
            stack.callback(begun.wait)
        described = parse(manifest, handle.root)
        if described.digest not in digests:
            raise refuse(got=f"pages verified by {described.digest}", where="pull", allowed=" or ".join(digests))
        check_spec(cache.spec, described.spec)
        check_length(cache.plan, described.record.length, "pull")
        _check_rollback(cache, described)
        later = not verified and not on_device and described.digest == "lanes" and takes_chunks(cache.ops)
        size = handle.pages, handle.page_bytes
        whole = layout_of(cache.spec, described, size, "manifest", refuse, places=not later)
        check = partial(check_places, cache.spec, described, whole, "manifest", refuse) if later else bool
        wanted = 0
        if checkpoints and whole.checkpoints:
            kept = cache.exclusive("pull", lambda state: state.most_checkpoints, in_step=True)
            wanted = min(kept, len(whole.checkpoints))
        layout = whole.latest(wanted)
        declared = [*described.digests[: layout.blocks + 1], *described.digests[whole.digests - wanted :]]
        if later and held is not None and not wanted:
            stack.pop_all()
            return Received(described.record, layout, held[: layout.pages], declared, check, begun)
    # Pages of the checkpoints that are not wanted lie between the others.
    rest = layout.record.first + layout.record.pages
    skipped = whole.pages - layout.pages
    pages = empty_pages(cache, layout.pages, layout.page_bytes, on_device=on_device, where="pull", passing=True)
    verifying, here = digests_of(described.digest, cache.ops, layout), 0
    for first in [*range(0, rest, chunk_pages), *range(rest, layout.pages, chunk_pages)]:
        coming = pages[first : min(first + chunk_pages, rest if first < rest else layout.pages)]
        there = first if first < rest else first + skipped
        wait = begin(transport, handle, there, coming, timeout=_left(end))
        # What is here is verified while the next pages are on the way.
        if not later:
            verifying.add(pages[here:first], here)
        wait()
        here = first
    if later:
        return Received(described.record, layout, pages, declared, check)
    bad = damaged(layout, verifying.result(pages), declared)
    if bad:
        raise refuse(got=f"other bytes than were exported in {bad[0]}", where="pull", allowed="as exported")
    return Received(described.record, layout, pages)


def _ahead(cache: SharedCache, handle: Handle, transport: Transport) -> tuple[Array, Any]:
    """All pages where they lie in this process, and the first of them on their way to the device; or nothing."""
    in_place = getattr(transport, "in_place", None)
    held: Array = None if in_place is None else in_place(handle)
    if not isinstance(held, np.ndarray) or held.shape != (handle.pages, handle.page_bytes):
        return None, None
    kernels: Any = cache.ops
    return held, kernels.begin_pages(held)


def parse(manifest: bytes, root: bytes) -> Described:
    """The manifest of a handle, of any version.

    Raises:
        TransferError: ``damaged``: these bytes are not what the handle was given for, or make no request.
    """
    if root_of(manifest) != root:
        raise refuse(got="a manifest of another export", where="manifest", allowed="bytes of the handle's root")
    # Version 2 is a JSON object; what 0.1.0 wrote is a map of msgpack.
    read = parse_manifest if manifest[:1] == b"{" else version1.read_manifest
    return read(manifest, "manifest", refuse)


def _check_rollback(cache: SharedCache, described: Described) -> None:
    """Refuse an export that could be rolled back farther than rings are large: all those rows would be made room for.

    Raises:
        TransferError: ``damaged``.
    """
    record = described.record
    rings = [region.rows for region in cache.plan.regions if region.growth == "slot"]
    most = min(rings, default=record.length) + MOST_DRAFTS
    if record.length - record.floor > most:
        raise refuse(
            got=f"rows from {record.floor} on for {record.length} tokens",
            where="manifest",
            allowed=f"{most} tokens to roll back at most",
        )


def commit(cache: SharedCache, received: Received, salt: str | None = None) -> Request:
    """Make a request of what was verified, its prefixes for requests of the salt, or for nobody.

    Raises:
        TransferError: ``damaged``, of what was left to be verified here. OutOfSlots, OutOfBlocks: no room. Nothing is
            changed.
    """
    record, layout, pages, declared, meanwhile, begun = received

    def check(found: Sequence[bytes]) -> None:
        wrong = [] if declared is None else damaged(layout, found, declared)
        if wrong:
            raise refuse(got=f"other bytes than were exported in {wrong[0]}", where="pull", allowed="as exported")

    verify = None if declared is None else check

    def act(state: CacheInTurn) -> Request:
        return take_in(state, record, layout, pages, salt=salt, verify=verify, meanwhile=meanwhile, begun=begun)

    try:
        return cache.exclusive("pull", act)
    finally:
        if begun is not None:
            begun.wait()


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
