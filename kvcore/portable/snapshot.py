"""Requests as one verified file, and back.

A snapshot is a directory and, after it, the blob of every request, as ``export_request`` gives it. The directory says
the spec, the sizes of the cache, and where each blob lies, with its root; its own root vouches for all of it. The file
appears whole or not at all. Loading checks roots and pages; a damaged page is named, and only the request that it
belongs to is refused. Snapshots of 0.1.0 are read too.
"""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from kvcore.errors import KvcoreError, SnapshotError
from kvcore.foreign import UNREADABLE, shortened
from kvcore.ops import Ops
from kvcore.portable import version1
from kvcore.portable.blob import (
    ALIGNMENT,
    blob_bytes,
    fill_blob,
    head_of,
    is_portable,
    opened,
    pages_of,
    root_in,
    split,
    take_in,
)
from kvcore.portable.caches import CacheInTurn
from kvcore.portable.digests import DEFAULT, ByteDigests
from kvcore.portable.disk import Disk, NotAFile, Part, write_whole
from kvcore.portable.manifest import FORM as REQUEST
from kvcore.portable.manifest import Described, Staging, damaged, empty_pages, layout_of, refuse_blob
from kvcore.portable.pages import Array, PageLayout
from kvcore.portable.record import RequestRecord, check_spec
from kvcore.portable.saved import Damage, Saved, Sizes, check_sizes
from kvcore.requests.manager import Request
from kvcore.spec import DERIVED, ROLES, CacheSpec, from_json, to_json

FORM, VERSION = "kvcore.snapshot", 2


class Form(msgspec.Struct):
    """What any JSON of a portable file says first of all."""

    form: str


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the blob of one request lies: from the end of the directory, which is aligned; its root, hexadecimal."""

    offset: int
    bytes: int
    root: str


class Directory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a snapshot says before its requests."""

    form: Literal["kvcore.snapshot"]
    version: Literal[2]
    spec: msgspec.Raw
    sizes: Sizes
    requests: list[Entry]


class SavedRequest(NamedTuple):
    """The blob of one request whose manifest is right."""

    described: Described
    layout: PageLayout
    pages: Array


class Snapshot(NamedTuple):
    """A snapshot of version 2; in the place of a request that is damaged before its pages, what is wrong with it."""

    spec: CacheSpec
    sizes: Sizes
    requests: list[SavedRequest | str]

    @property
    def records(self) -> list[RequestRecord | None]:
        """Of every request; None where its manifest is damaged."""
        return [None if isinstance(one, str) else one.described.record for one in self.requests]

    def damage(self, number: int, ops: Ops) -> list[Damage]:
        """The damaged pieces of one request; bytes are verified, so no backend is asked."""
        del ops
        request = self.requests[number]
        if isinstance(request, str):
            return [Damage(number, request)]
        described, layout, pages = request
        found = ByteDigests(layout, described.digest).result(pages)
        return [Damage(number, name) for name in damaged(layout, found, described.digests)]

    def take_in(self, cache: CacheInTurn, number: int) -> Request:
        """Make a request of one that is whole."""
        request = self.requests[number]
        if isinstance(request, str):
            raise SnapshotError(got=str(Damage(number, request)), where="load", allowed="a request that is whole")
        described, layout, pages = request
        return take_in(cache, described.record, layout, pages, salt=described.record.salt, shares=True)


def write(path: str | PathLike[str], data: bytes | Sequence[Part], disk: Disk | None = None) -> None:
    """Put a snapshot's bytes, or their parts, in place of the file ``path``, whole and durably."""
    write_whole(disk or Disk(), Path(path), data)


def _check_readable(spec: CacheSpec) -> None:
    """Refuse to write what nobody could read: a file says its spec as JSON, which knows the library's own roles."""
    for layer, role, _ in spec.components():
        if role not in ROLES and role not in DERIVED:
            raise SnapshotError(
                got=f"layers[{layer}].{role}, a component of outside code",
                where="save",
                allowed=f"roles that a spec as JSON has: {', '.join(ROLES)}",
                hint="export_request and import_request take its requests to another cache of the same spec.",
            )


def to_bytes(cache: CacheInTurn, requests: list[Request], *, checkpoints: bool = True, digest: str = DEFAULT) -> bytes:
    """The snapshot file of some requests."""
    return b"".join(to_parts(cache, requests, checkpoints=checkpoints, digest=digest))


def to_parts(
    cache: CacheInTurn, requests: list[Request], *, checkpoints: bool = True, digest: str = DEFAULT
) -> list[Part]:
    """The same in pieces that follow one another: copies of the rows, and nothing copied twice."""
    _check_readable(cache.spec)
    parts: list[Part] = []
    entries: list[Entry] = []
    offset = 0
    for request in requests:
        staging = Staging(cache, request, "save", checkpoints=checkpoints, digest=digest)
        blob = empty_pages(cache, 1, blob_bytes(staging), on_device=False, where="save")[0]
        root = fill_blob(staging, blob)
        entries.append(Entry(offset=offset, bytes=len(blob), root=root.hex()))
        parts += [blob.data, bytes(-len(blob) % ALIGNMENT)]
        offset += len(blob) + len(parts[-1])
    plan = cache.plan
    sizes = Sizes(
        max_requests=plan.slots,
        max_tokens=plan.max_tokens,
        max_draft_tokens=plan.max_draft_tokens,
        max_request_tokens=plan.max_request_tokens,
    )
    return [_directory(cache.spec, sizes, entries), *parts]


def _directory(spec: CacheSpec, sizes: Sizes, entries: list[Entry]) -> bytes:
    directory = Directory(
        form=FORM, version=VERSION, spec=msgspec.Raw(to_json(spec).encode()), sizes=sizes, requests=entries
    )
    return head_of(msgspec.json.encode(directory))


def bound(spec: CacheSpec, sizes: Sizes, blobs: Sequence[bytes]) -> bytes:
    """The snapshot file of blobs that are whole, of one spec."""
    entries: list[Entry] = []
    parts: list[bytes] = []
    offset = 0
    for blob in blobs:
        entries.append(Entry(offset=offset, bytes=len(blob), root=root_in(blob).hex()))
        parts += [blob, bytes(-len(blob) % ALIGNMENT)]
        offset += len(blob) + len(parts[-1])
    return b"".join([_directory(spec, sizes, entries), *parts])


def read(path: str | PathLike[str], disk: Disk | None = None) -> Saved:
    """Read a snapshot and check its directory and roots; pages are checked by ``damage``.

    Raises:
        SnapshotError: not a snapshot, of another version, or its directory does not match its root; no regular file.
        OSError: the file cannot be read.
    """
    where = f"snapshot {path}"
    return parse(_bytes_of(path, where, disk), where)


def read_or_blob(path: str | PathLike[str]) -> Saved:
    """The same of a file that may be a blob; errors as for ``read``, which say what a snapshot lacks of it."""
    where = f"snapshot {path}"
    data = memoryview(_bytes_of(path, where, None))
    try:
        return parse(data, where)
    except SnapshotError as no_snapshot:
        try:
            return of_blob(data, f"blob {path}")
        except SnapshotError as no_blob:
            raise (no_blob if _is_blob(data) else no_snapshot) from None


def _is_blob(data: memoryview) -> bool:
    """Whether a file with a head that is whole says that it is a request."""
    try:
        return is_portable(data) and msgspec.json.decode(split(data, "")[0], type=Form).form == REQUEST
    except (SnapshotError, *UNREADABLE):
        return False


def _bytes_of(path: str | PathLike[str], where: str, disk: Disk | None) -> bytes | memoryview:
    try:
        return (disk or Disk()).read(Path(path))
    except NotAFile as error:
        raise SnapshotError(got=error.strerror, where=where, allowed="a file that Cache.save wrote") from error


def parse(data: bytes | memoryview, where: str = "snapshot") -> Saved:
    """A snapshot's bytes as ``Saved``; see ``read``."""
    if not is_portable(data):
        return version1.read_snapshot(bytes(data), where)
    text, _, rest = split(memoryview(data), where)
    try:
        directory = msgspec.json.decode(text, type=Directory)
        spec = from_json(bytes(directory.spec))
        check_sizes(spec, directory.sizes)
    except (*UNREADABLE, KvcoreError) as error:
        raise SnapshotError(got=shortened(str(error)), where=where, allowed="what Cache.save wrote") from error
    end = 0
    for entry in directory.requests:
        if entry.offset != end or not 0 < entry.bytes <= len(rest) - end:
            got = f"{shortened(entry.bytes)} bytes of a request at {shortened(entry.offset)}"
            raise SnapshotError(got=got, where=where, allowed=f"one after another, {len(rest)} bytes in all")
        end += entry.bytes + -entry.bytes % ALIGNMENT
    if end != len(rest):
        raise SnapshotError(got=f"{len(rest)} bytes of requests", where=where, allowed=f"{end} bytes")
    requests = [_request(spec, entry, rest[entry.offset :]) for entry in directory.requests]
    return Snapshot(spec, directory.sizes, requests)


def of_blob(data: memoryview, where: str) -> Snapshot:
    """A blob of this form as a snapshot of one request, to be checked.

    Raises:
        SnapshotError: not such a blob, or damaged before its pages.
    """
    blob = opened(data, where)
    try:
        spec = from_json(blob.described.spec)
    except KvcoreError as error:
        raise SnapshotError(got=str(error), where=where, allowed="a spec that export_request wrote") from error
    pages, record = pages_of(blob), blob.described.record
    layout = layout_of(spec, blob.described, pages.shape, where, refuse_blob)
    sizes = Sizes(max_requests=1, max_tokens=max(1, record.length), max_draft_tokens=record.length - record.floor)
    return Snapshot(spec, sizes, [SavedRequest(blob.described, layout, pages)])


def _request(spec: CacheSpec, entry: Entry, rest: memoryview) -> SavedRequest | str:
    """One request of a snapshot as far as its pages, or what is wrong with it."""
    data, padding = rest[: entry.bytes], rest[entry.bytes : entry.bytes + -entry.bytes % ALIGNMENT]
    try:
        _, root, _ = split(data, "request")
        if root.hex() != entry.root or any(padding):
            return "another root"
        blob = opened(data, "request")
        check_spec(spec, blob.described.spec)
        pages = pages_of(blob)
        return SavedRequest(blob.described, layout_of(spec, blob.described, pages.shape, "request", refuse_blob), pages)
    except SnapshotError as error:
        return f"manifest ({error.got})"
