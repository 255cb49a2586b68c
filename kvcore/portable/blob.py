"""One request as a self-contained blob: the way between caches, backends, processes and frameworks.

A blob is a head of 48 bytes, the manifest, and the pages. Import checks all of it before it takes a slot, and a failure
leaves the cache as it was. Blobs of 0.1.0 are read too.
"""

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any, NamedTuple, cast

import numpy as np

from kvcore.errors import OutOfBlocks, RequestError, SnapshotError
from kvcore.foreign import UNREADABLE, shortened
from kvcore.ops import Ops
from kvcore.pools import Pools
from kvcore.portable import version1
from kvcore.portable.caches import CacheInTurn, SharedCache
from kvcore.portable.convert import convert as converted
from kvcore.portable.convert import spec_of
from kvcore.portable.digests import DEFAULT, HASHES, digests_of
from kvcore.portable.manifest import (
    ROOT_BYTES,
    Described,
    Staging,
    damaged,
    layout_of,
    parse,
    refuse_blob,
    root_of,
)
from kvcore.portable.pages import Array, PageLayout, content_of, states_of, under_way
from kvcore.portable.record import RequestRecord, check_length, check_spec
from kvcore.portable.room import bytes_of_any_content
from kvcore.portable.rows import Content, read_rows, write_rows
from kvcore.requests.manager import Request
from kvcore.spec import to_json
from kvcore.step import StepRequest

MAGIC = b"kvcore\x00\x02"
"""First bytes of every file of the portable form; the last one is its version."""

COUNT_BYTES = 8
HEAD_BYTES = len(MAGIC) + COUNT_BYTES + ROOT_BYTES
ALIGNMENT = 64
"""Bytes: pages begin at multiples of it."""

WHERE = "import_request: blob"

HINT = "Create the cache from the same spec, or pass convert=True where formats alone differ."


def is_portable(data: memoryview | bytes) -> bool:
    """Whether these are bytes of this form and version, by how they begin."""
    return bytes(data[: len(MAGIC)]) == MAGIC


def head_of(text: bytes) -> bytes:
    """What stands before the pages: magic, length and root of the JSON text, the text, zeros up to the alignment."""
    head = b"".join((MAGIC, len(text).to_bytes(COUNT_BYTES, "little"), root_of(text), text))
    return head + bytes(-len(head) % ALIGNMENT)


def split(data: memoryview, where: str) -> tuple[memoryview, bytes, memoryview]:
    """(JSON text, its root, what follows) of a file of the portable form.

    Raises:
        SnapshotError: not such a file, or its text is not what its root was made of.
    """
    if not is_portable(data):
        begin = shortened(bytes(data[: len(MAGIC)]))
        raise SnapshotError(got=f"a file that begins with {begin}", where=where, allowed=f"one with {MAGIC!r}")
    end = HEAD_BYTES + int.from_bytes(data[len(MAGIC) : len(MAGIC) + COUNT_BYTES], "little")
    start = end + -end % ALIGNMENT
    if len(data) < start or any(data[end:start]):
        raise SnapshotError(got="a head that does not fit", where=where, allowed="a whole file, zeros before its pages")
    text, root = data[HEAD_BYTES:end], root_in(bytes(data[:HEAD_BYTES]))
    if root_of(cast("bytes", text)) != root:
        raise SnapshotError(got="a damaged head", where=where, allowed="bytes of their root")
    return text, root, data[start:]


def blob_bytes(staging: Staging) -> int:
    """Bytes of the blob of a request that is about to be copied out."""
    return _first_page(staging) + staging.layout.pages * staging.layout.page_bytes


def fill_blob(staging: Staging, data: Array) -> bytes:
    """Copy a request straight to its place in a blob, ``data`` [``blob_bytes``] uint8; returns the root."""
    start = _first_page(staging)
    text = staging.fill(data[start:].reshape(staging.layout.pages, staging.layout.page_bytes))
    data[:start] = np.frombuffer(head_of(text), np.uint8)
    return staging.root


def _first_page(staging: Staging) -> int:
    # Digests are as long as what stands in their place before they are known.
    end = HEAD_BYTES + len(staging.manifest())
    return end + -end % ALIGNMENT


def root_in(blob: bytes) -> bytes:
    """The root that a blob's head names."""
    return blob[HEAD_BYTES - ROOT_BYTES : HEAD_BYTES]


class Opened(NamedTuple):
    """A blob whose manifest is right; its pages are yet to be checked."""

    described: Described
    bytes_of_pages: memoryview


def opened(data: memoryview, where: str) -> Opened:
    """Read a blob's manifest.

    Raises:
        SnapshotError: not a blob, or damaged before its pages.
    """
    text, _, rest = split(data, where)
    described = parse(text, where, refuse_blob)
    if described.digest not in HASHES:
        allowed = f"in a file {' or '.join(HASHES)}"
        raise SnapshotError(got=f"digests of kind {described.digest}", where=where, allowed=allowed)
    return Opened(described, rest)


def pages_of(blob: Opened) -> Array:
    """Its bytes as pages, as far as they fill them.

    Raises:
        SnapshotError: they are no whole pages.
    """
    _, page_bytes = blob.described.size or (0, 0)
    if page_bytes < 1 or len(blob.bytes_of_pages) % page_bytes:
        got = f"{len(blob.bytes_of_pages)} bytes after the manifest"
        raise SnapshotError(got=got, where=WHERE, allowed=f"pages of {shortened(page_bytes)} bytes")
    return np.frombuffer(blob.bytes_of_pages, np.uint8).reshape(-1, page_bytes)


def export(cache: CacheInTurn, request: Request, *, checkpoints: bool = True, digest: str = DEFAULT) -> bytes:
    """The request as a blob, its pages verified by a hash of ``digests.HASHES``."""
    staging = Staging(cache, request, "export_request", checkpoints=checkpoints, digest=digest)
    size = blob_bytes(staging)
    try:
        # Nothing is copied twice: rows are put where they will lie in the blob, which this gives out as it is.
        blob = BytesIO(bytes_of_any_content(size))
    except (MemoryError, OverflowError) as error:
        raise OutOfBlocks(
            got=f"a blob of {size} bytes", where="export_request", allowed="what there is memory for"
        ) from error
    inside = blob.getbuffer()
    fill_blob(staging, np.frombuffer(inside, np.uint8))
    inside.release()
    return blob.getvalue()


def import_(
    cache: CacheInTurn, blob: bytes, into: Request | None, salt: str | None, *, convert: bool = False
) -> Request:
    """Check a blob, then make a request of it; ``convert``: in this cache's formats, if it has others."""
    if into is not None and cache.row(into).length:
        raise RequestError(
            got=f"request {into.id} of {into.length} tokens", where="import_request: into", allowed="one without tokens"
        )
    try:
        data = memoryview(blob).cast("B")
    except UNREADABLE as error:
        raise SnapshotError(got=shortened(str(error)), where=WHERE, allowed="bytes from export_request") from error
    if not is_portable(data):
        record, content, states = version1.read_blob(cache, data)
        return cache.restore(record, content, into, salt=salt, states=states)
    found = opened(data, WHERE)
    described = found.described
    pages = pages_of(found)
    if convert and (source := spec_of(described, WHERE)).digest != cache.spec.digest:
        check_length(cache.plan, described.record.length, "import_request")
        made = converted(described, pages, source, cache.spec, cache.ops, WHERE)
        described, pages = parse(made.manifest, WHERE, refuse_blob), made.pages
    check_spec(cache.spec, described.spec, HINT)
    check_length(cache.plan, described.record.length, "import_request")
    layout = layout_of(cache.spec, described, pages.shape, WHERE, refuse_blob)
    bad = damaged(layout, digests_of(described.digest, cache.ops, layout).result(pages), described.digests)
    if bad:
        raise SnapshotError(got=f"other bytes than were exported in {bad[0]}", where=WHERE, allowed="as exported")
    return take_in(cache, described.record, layout, pages, into, salt=salt)


def take_in(
    cache: CacheInTurn,
    record: RequestRecord,
    layout: PageLayout,
    pages: Array,
    into: Request | None = None,
    *,
    salt: str | None,
    shares: bool | None = None,
    verify: Callable[[Sequence[bytes]], None] | None = None,
    meanwhile: Callable[[], object] = bool,
    begun: Any = None,
) -> Request:
    """Make a request of pages that were verified, and keep its checkpoints where prefixes are kept.

    Args:
        verify: of pages that were not; given the lanes of what was stored, it raises, and there is no request.
        meanwhile: called while pages may be on their way; it may raise likewise.
        begun: as for ``under_way``.
    """
    content: dict[str, Content] = {}

    def rows() -> Content:
        if not content:
            content["rows"] = content_of(layout, pages)
        return content["rows"]

    def write(ops: Ops, pools: Pools, row: StepRequest) -> Pools:
        with under_way(ops, pools, row, layout, pages, store=True, digested=verify is not None, begun=begun) as moved:
            if moved is None:
                pools = write_rows(ops, pools, row, rows())
            meanwhile()
            if verify is not None:
                lanes = [] if moved is None else moved.lanes()
                verify(digests_of("lanes", ops, layout, lanes).result(pages))
        return pools

    keeps = cache.most_checkpoints and layout.checkpoints
    states = states_of(cache.ops, layout, pages, rows()) if keeps else []
    return cache.restore(record, write, into, salt=salt, shares=shares, states=states)


class Leaving(NamedTuple):
    """A request on its way to another cache of this process: its spec, what it says of itself, and its rows."""

    spec: str
    record: RequestRecord
    rows: Content


def leave(cache: CacheInTurn, request: Request) -> Leaving:
    """Finished copies of a request's rows; no digests, since they stay in memory."""
    cache.manager.check_whole(request, "copy")
    floor = cache.least_length(request)
    tokens = None if request.tokens is None else list(request.tokens)
    record = RequestRecord(
        length=request.length,
        floor=floor,
        tokens=tokens,
        salt=request.salt,
        checkpoints=[],
        converted=list(request.converted),
        approximate=request.approximate,
    )
    return Leaving(to_json(cache.spec), record, read_rows(cache.ops, cache.pools, cache.row(request), floor))


def arrive(cache: CacheInTurn, leaving: Leaving) -> Request:
    """A request of a cache of the same spec with the rows of one that left another; its prefixes are not published."""
    check_spec(cache.spec, leaving.spec)
    check_length(cache.plan, leaving.record.length, "copy")
    return cache.restore(leaving.record, leaving.rows)


def copy_request(source: SharedCache, request: Request, target: SharedCache) -> Request:
    """A request of ``target`` with the rows of one of another cache of the same spec, on any backend, in this process.

    As export and import do it, but nothing is digested.
    """
    leaving = source.exclusive("copy", lambda cache: leave(cache, cache.manager.check(request)))
    return target.exclusive("copy", lambda cache: arrive(cache, leaving))
