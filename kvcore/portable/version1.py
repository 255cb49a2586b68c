"""What 0.1.0 wrote, read: blobs, snapshots and manifests of exports, with checkpoints and without.

A blob is msgpack, a snapshot a safetensors file, a manifest msgpack; each holds the two lanes of the structural digest
of its rows. Within version 1 blobs and snapshots call themselves 1, and 2 where checkpoints come along. Nothing of it
is written any more.
"""

import hashlib
import struct
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvcore.arrays import to_numpy
from kvcore.digest import region_salt
from kvcore.errors import BackendError, KvcoreError, SnapshotError
from kvcore.foreign import UNREADABLE, shortened
from kvcore.ops import Ops
from kvcore.portable.caches import CacheInTurn
from kvcore.portable.manifest import Described
from kvcore.portable.record import Refusal, RequestRecord, check_length, check_spec, is_coherent
from kvcore.portable.rows import (
    Content,
    HostRows,
    kept_positions,
    least_kept,
    owned,
    page_digests,
    rings,
    state_of,
)
from kvcore.portable.saved import Damage, Sizes, check_sizes
from kvcore.requests.manager import Request
from kvcore.spec import CacheSpec, Component, from_json
from kvcore.spec.sizes import row_bytes

PLAIN, WITH_CHECKPOINTS = 1, 2
"""What blobs and snapshots of version 1 call themselves."""

NO_ROOT = "0" * 64
"""Stands in a snapshot's header for the root while the root is worked out."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A past state of a request: its rings as they were at ``length``; rows and digests as in ``Blob``."""

    length: int
    rows: dict[str, bytes]
    digests: dict[str, tuple[int, int]]


class Blob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An exported request.

    Attributes:
        version: of this layout.
        spec: canonical JSON of the spec.
        length, floor, tokens, salt: as in ``RequestRecord``.
        rows: ``"L.role"`` -> canonical rows, one after another.
        digests: ``"L.role"`` -> the two lanes of those rows.
        root: sha256 over everything above, as msgpack with sorted keys.
    """

    version: int
    spec: str
    length: int
    floor: int
    tokens: list[int] | None
    salt: str | None
    rows: dict[str, bytes]
    digests: dict[str, tuple[int, int]]
    root: bytes


class BlobWithCheckpoints(Blob, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same with past states, shortest first."""

    checkpoints: list[Checkpoint]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An export without its pages: no checkpoints, lanes for every page of history and for the record."""

    version: int
    export: tuple[str, int, int]
    spec: str
    length: int
    floor: int
    tokens: list[int] | None
    salt: str | None
    digests: list[tuple[int, int]]


class SavedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request in a snapshot; its rows are arrays of the file."""

    length: int
    floor: int
    tokens: list[int] | None
    salt: str | None = None


class SavedWithCheckpoints(SavedRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same with the lengths of its checkpoints, whose rings are arrays of their own."""

    checkpoints: list[int]


class _Version(msgspec.Struct, frozen=True):
    version: int


class _Header(msgspec.Struct, rename={"metadata": "__metadata__"}):
    """What safetensors keeps of others' in its header; what it keeps of its own is skipped."""

    metadata: dict[str, str]


def read_manifest(manifest: bytes, where: str, refusal: Refusal) -> Described:
    """The manifest of an export that somebody's root vouches for.

    Raises:
        what ``refusal`` makes: other bytes, another version, or numbers that do not fit together.
    """
    try:
        found = msgspec.msgpack.decode(manifest, type=Manifest)
        digests = [struct.pack("<II", *lanes) for lanes in found.digests]
    except (*UNREADABLE, struct.error) as error:
        raise refusal(got=shortened(str(error)), where=where, allowed="as exported") from error
    if found.version != PLAIN:
        raise refusal(got=f"version {shortened(found.version)}", where=where, allowed=f"version {PLAIN}")
    record = _record(found)
    if not is_coherent(record):
        got = f"{found.length} tokens, rows from {found.floor} on"
        raise refusal(got=shortened(got), where=where, allowed="numbers that fit together")
    return Described(PLAIN, found.spec, record, "lanes", digests, None, None)


def _record(found: Blob | Manifest | SavedRequest) -> RequestRecord:
    lengths: list[int] = []
    if isinstance(found, BlobWithCheckpoints):
        lengths = [one.length for one in found.checkpoints]
    elif isinstance(found, SavedWithCheckpoints):
        lengths = found.checkpoints
    return RequestRecord(
        length=found.length, floor=found.floor, tokens=found.tokens, salt=found.salt, checkpoints=lengths
    )


def read_blob(
    cache: CacheInTurn, data: memoryview
) -> tuple[RequestRecord, dict[tuple[int, str], HostRows], list[tuple[int, Content]]]:
    """A blob, checked: what the request says of itself, its rows, and the states of its checkpoints.

    Raises:
        SnapshotError: damaged, or of another spec. OutOfBlocks: longer than a request of this cache can be.
    """
    found = _decode(data)
    record = _record(found)
    if not is_coherent(record):
        raise SnapshotError(got="lengths out of order", where="import_request: blob", allowed="what was exported")
    check_spec(cache.spec, found.spec)
    check_length(cache.plan, found.length, "import_request")
    content = _complete(cache, found, owned(cache.spec), found.floor, found.length)
    states: list[tuple[int, Content]] = []
    for past in found.checkpoints if isinstance(found, BlobWithCheckpoints) else ():
        brought = _complete(cache, past, rings(cache.spec), past.length, past.length)
        states.append((past.length, state_of(cache.ops, content, brought, past.length)))
    return record, content, states


def _decode(blob: memoryview) -> Blob:
    try:
        version = msgspec.msgpack.decode(blob, type=_Version).version
        kind = BlobWithCheckpoints if version == WITH_CHECKPOINTS else Blob
        found = msgspec.msgpack.decode(blob, type=kind)
    except UNREADABLE as error:
        raise SnapshotError(
            got=shortened(str(error)), where="import_request: blob", allowed="a blob from export_request"
        ) from error
    if found.version not in (PLAIN, WITH_CHECKPOINTS):
        allowed = f"the portable form, or version {PLAIN} or {WITH_CHECKPOINTS} of 0.1.0"
        got = f"version {shortened(found.version)}"
        raise SnapshotError(got=got, where="import_request: blob", allowed=allowed)
    fields = {name: getattr(found, name) for name in kind.__struct_fields__ if name != "root"}
    if blob_root(fields) != found.root:
        raise SnapshotError(got="a damaged blob", where="import_request: blob", allowed="bytes of their root digest")
    return found


def blob_root(fields: dict[str, Any]) -> bytes:
    """sha256 over everything of a blob but its root."""
    return hashlib.sha256(msgspec.msgpack.encode(fields, order="sorted")).digest()


def _complete(
    cache: CacheInTurn,
    found: Blob | Checkpoint,
    components: Iterable[tuple[int, str, Component]],
    floor: int,
    length: int,
) -> dict[tuple[int, str], HostRows]:
    """The rows of a blob or of a checkpoint, undamaged: all of the components, and nothing else."""
    content: dict[tuple[int, str], HostRows] = {}
    for layer, role, component in components:
        name = f"{layer}.{role}"
        size, held_bytes = row_bytes(component), len(found.rows.get(name, b""))
        # As many positions as the blob says are made only where it has the rows.
        fits = name in found.rows and name in found.digests
        fits = fits and held_bytes >= least_kept(component, floor, length) * size
        positions = kept_positions(component, floor, length) if fits else ()
        if not fits or held_bytes != len(positions) * size:
            got, allowed = f"component {name} missing or cut", f"the rows of {length} tokens, {size} bytes each"
            raise SnapshotError(got=got, where="import_request", allowed=allowed)
        held = HostRows(np.frombuffer(found.rows[name], np.uint8).reshape(len(positions), size), positions)
        if _lanes(cache.ops, held, len(held.positions), layer, role).tolist() != [list(found.digests[name])]:
            raise SnapshotError(got=f"damaged rows of {name}", where="import_request", allowed="rows of their digest")
        content[layer, role] = held
    others = sorted((set(found.rows) | set(found.digests)) - {f"{layer}.{role}" for layer, role in content})
    if others:
        raise SnapshotError(
            got=f"component {shortened(others[0])}", where="import_request", allowed="the spec's components, no others"
        )
    return content


def _lanes(ops: Ops, held: HostRows, page: int, layer: int, role: str) -> np.ndarray[Any, Any]:
    """Digest lanes [pages, 2] of pages of ``page`` rows; of no rows, one page of (0, 0) where all rows are one page."""
    if not held.positions:
        return np.zeros((0 if page else 1, 2), np.int64)
    lanes = page_digests(ops, held.rows, held.positions, page, region_salt(layer, role))
    return to_numpy(lanes).astype(np.int64).reshape(-1, 2)


class Snapshot(NamedTuple):
    """A snapshot whose header and root are right; its pages are yet to be checked."""

    spec: CacheSpec
    sizes: Sizes
    records: list[RequestRecord]
    arrays: dict[str, np.ndarray[Any, Any]]

    def damage(self, number: int, ops: Ops) -> list[Damage]:
        """The damaged pages of one request; a page has as many rows as a block holds of a paged component."""
        found: list[Damage] = []
        record = self.records[number]
        main = ((None, layer, role, component) for layer, role, component in owned(self.spec))
        past = ((at, *one) for at, one in product(record.checkpoints, rings(self.spec)))
        for at, layer, role, component in (*main, *past):
            name = _name(number, layer, role, at)
            called = f"{layer}.{role}" if at is None else f"checkpoint {at}, {layer}.{role}"
            floor, length = (record.floor, record.length) if at is None else (at, at)
            rows, stored = self.arrays.get(name), self.arrays.get(f"{name}.digest")
            missing = Damage(number, f"{called} missing or misshapen")
            # As many positions as a request says are made only where there are rows for them.
            least = least_kept(component, floor, length)
            if rows is None or stored is None or rows.dtype != np.uint8 or rows.ndim != 2 or len(rows) < least:
                found.append(missing)
                continue
            held = self.rows_of(number, layer, role, at)
            if rows.shape != (len(held.positions), row_bytes(component)):
                found.append(missing)
                continue
            page = max(1, self.spec.block_tokens // component.tokens_per_row)
            lanes = _lanes(ops, held, page, layer, role)
            if lanes.shape != stored.shape:
                found.append(missing)
                continue
            bad = np.flatnonzero((lanes != stored).any(axis=1))
            found += [Damage(number, f"{called} page {page}") for page in bad.tolist()]
        return found

    def rows_of(self, number: int, layer: int, role: str, at: int | None = None) -> HostRows:
        """The rows of one component of a request, or of its checkpoint; an empty array where they are missing."""
        record = self.records[number]
        floor, length = (record.floor, record.length) if at is None else (at, at)
        positions = kept_positions(getattr(self.spec.all_layers[layer], role), floor, length)
        return HostRows(self.arrays.get(_name(number, layer, role, at), np.zeros(0, np.uint8)), positions)

    def take_in(self, cache: CacheInTurn, number: int) -> Request:
        """Make a request of one that is whole."""
        record = self.records[number]
        content = {(layer, role): self.rows_of(number, layer, role) for layer, role, _ in owned(self.spec)}
        states: list[tuple[int, Content]] = []
        for at in record.checkpoints:
            brought = {(layer, role): self.rows_of(number, layer, role, at) for layer, role, _ in rings(self.spec)}
            states.append((at, state_of(cache.ops, content, brought, at)))
        return cache.restore(record, content, salt=record.salt, shares=True, states=states)


def _name(number: int, layer: int, role: str, at: int | None) -> str:
    """An array's name in a snapshot."""
    return f"{number}.{layer}.{role}" if at is None else f"{number}.at.{at}.{layer}.{role}"


def read_snapshot(data: bytes, where: str) -> Snapshot:
    """A snapshot's bytes, its header and root checked.

    Raises:
        SnapshotError: not a snapshot, of another version, or its header does not match its root.
        BackendError: safetensors is not installed.
    """
    try:
        end = header_end(data)
        header = data[:end]
        metadata = msgspec.json.decode(header[8:], type=_Header).metadata
        version, root = metadata.get("kvcore.snapshot"), metadata.get("root")
    except (*UNREADABLE, KeyError, AttributeError) as error:
        got = f"no header ({shortened(str(error))})"
        raise SnapshotError(got=got, where=where, allowed="a file that Cache.save wrote") from error
    if version not in (str(PLAIN), str(WITH_CHECKPOINTS)):
        allowed = f"the portable form, or kvcore.snapshot {PLAIN} or {WITH_CHECKPOINTS} of 0.1.0"
        raise SnapshotError(got=f"version {shortened(version)}", where=where, allowed=allowed)
    if not isinstance(root, str) or len(root) != len(NO_ROOT):
        raise SnapshotError(got=f"root {shortened(root)}", where=where, allowed=f"{len(NO_ROOT)} hexadecimal digits")
    safetensors = _safetensors()
    try:
        arrays = safetensors.load(data)
    except Exception as error:
        got = f"damaged ({shortened(str(error))})"
        raise SnapshotError(got=got, where=where, allowed="a file that Cache.save wrote") from error
    if root != snapshot_root(header.replace(root.encode(), NO_ROOT.encode()), arrays):
        raise SnapshotError(got="a damaged header or digest", where=where, allowed="bytes of their root")
    try:
        if version == str(PLAIN):
            saved = msgspec.json.decode(metadata["requests"], type=list[SavedRequest])
        else:
            saved = msgspec.json.decode(metadata["requests"], type=list[SavedWithCheckpoints])
        records = [_record(one) for one in saved]
        sizes = msgspec.json.decode(metadata["sizes"], type=Sizes)
        # A request without any rows has an array for every component all the same.
        if not all(map(is_coherent, records)) or len(records) > len(arrays):
            raise SnapshotError(got="lengths that don't fit together", where=where, allowed="what Cache.save wrote")
        spec = from_json(metadata["spec"])
        check_sizes(spec, sizes)
        return Snapshot(spec, sizes, records, arrays)
    except (*UNREADABLE, KeyError, KvcoreError) as error:
        raise SnapshotError(got=shortened(str(error)), where=where, allowed="a header that Cache.save wrote") from error


def header_end(data: bytes) -> int:
    """Where the header of a safetensors file ends: 8 bytes of its length, then JSON."""
    return 8 + int.from_bytes(data[:8], "little")


def snapshot_root(header: bytes, arrays: dict[str, np.ndarray[Any, Any]]) -> str:
    """sha256 over the header, its root blanked, and every digest: all that the pages do not cover."""
    root = hashlib.sha256(header)
    for name in sorted(arrays):
        if name.endswith(".digest"):
            root.update(np.ascontiguousarray(arrays[name]).tobytes())
    return root.hexdigest()


def _safetensors() -> Any:
    try:
        from safetensors import numpy as safetensors
    except ImportError as error:
        raise BackendError(
            got="safetensors is not installed",
            where="snapshot",
            allowed="snapshots of version 1 with safetensors",
            hint='pip install "kvcore[snapshot]"',
        ) from error
    return safetensors
