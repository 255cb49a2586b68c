"""Requests as one verified file, and back.

A snapshot is a safetensors file: for every request and component its canonical rows as ``uint8`` [n, row_bytes] and the
digest lanes of its pages [pages, 2]; the same for the rings of its checkpoints (version 2). The metadata holds the
spec, the requests and a root, sha256 over the header and all digests. The file appears whole or not at all. Loading
checks header, root and pages; a damaged page is named, and only the request that it belongs to is refused.
"""

# pyright: reportPrivateUsage=false

import hashlib
from collections.abc import Sequence
from itertools import pairwise, product
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvcore.arrays import to_numpy
from kvcore.counts import check_count
from kvcore.digest import region_salt
from kvcore.errors import BackendError, KvcoreError, SnapshotError, SpecError
from kvcore.foreign import UNREADABLE
from kvcore.ops import Ops
from kvcore.plan import row_bytes
from kvcore.portable.caches import CacheInTurn
from kvcore.portable.disk import Disk, NotAFile, write_whole
from kvcore.portable.rows import (
    HostRows,
    is_coherent,
    kept_positions,
    least_kept,
    owned,
    page_digests,
    read_rows,
    rings,
)
from kvcore.printable import shortened
from kvcore.requests.manager import Request
from kvcore.spec import ROLES, CacheSpec, from_json, to_json

VERSIONS = ("1", "2")
"""2 where checkpoints come along; without any the bytes are those of 1."""

NO_ROOT = "0" * 64
"""Stands in the header for the root while the root is worked out."""


class SavedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request in a snapshot: tokens, the smallest length it can be rolled back to, ids if known, its salt."""

    length: int
    floor: int
    tokens: list[int] | None
    salt: str | None = None


class SavedWithCheckpoints(SavedRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same in version 2: with the lengths of its checkpoints, whose rings are arrays of their own."""

    checkpoints: list[int]


class Sizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the saved cache was created with."""

    max_requests: int
    max_tokens: int | None
    max_draft_tokens: int
    max_request_tokens: int | None = None


class _Header(msgspec.Struct, rename={"metadata": "__metadata__"}):
    """What safetensors keeps of others' in its header; what it keeps of its own is skipped."""

    metadata: dict[str, str]


class Saved(NamedTuple):
    """A snapshot whose header and root are right; its pages are yet to be checked."""

    spec: CacheSpec
    sizes: Sizes
    requests: Sequence[SavedRequest]
    arrays: dict[str, np.ndarray[Any, Any]]


class Damage(NamedTuple):
    """One page that does not match its digest: ``page`` counts pages of a block's worth of rows, None for all."""

    request: int
    component: str
    page: int | None

    def __str__(self) -> str:
        page = "missing or misshapen" if self.page is None else f"page {self.page}"
        return f"request {self.request}: {self.component} {page}"


def write(path: str | PathLike[str], data: bytes, disk: Disk | None = None) -> None:
    """Put a snapshot's bytes in place of the file ``path``, whole and durably."""
    write_whole(disk or Disk(), Path(path), data)


def _check_readable(spec: CacheSpec) -> None:
    """Refuse to write what nobody could read: a file says its spec as JSON, which knows the library's own roles."""
    for layer, role, _ in spec.components():
        if role not in ROLES:
            raise SnapshotError(
                got=f"layers[{layer}].{role}, a component of outside code",
                where="save",
                allowed=f"roles that a spec as JSON has: {', '.join(ROLES)}",
                hint="export_request and import_request take its requests to another cache of the same spec.",
            )


def to_bytes(cache: CacheInTurn, requests: list[Request], *, checkpoints: bool = True) -> bytes:
    """The snapshot file of some requests."""
    _check_readable(cache.spec)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    saved: list[SavedRequest] = []
    past = [cache.kept_states(request) if checkpoints else [] for request in requests]
    for number, request in enumerate(requests):
        cache.manager.check_whole(request, "save")
        floor = cache.least_length(request)
        for (layer, role), held in read_rows(cache.ops, cache.pools, cache.row(request), floor).items():
            name = f"{number}.{layer}.{role}"
            arrays[name] = held.rows
            arrays[f"{name}.digest"] = _lanes(cache.ops, cache.spec, held, layer, role)
        for (length, state), (layer, role, _) in product(past[number], rings(cache.spec)):
            name = f"{number}.at.{length}.{layer}.{role}"
            arrays[name] = state[layer, role].rows
            arrays[f"{name}.digest"] = _lanes(cache.ops, cache.spec, state[layer, role], layer, role)
        tokens = None if request.tokens is None else list(request.tokens)
        one: dict[str, Any] = {"length": request.length, "floor": floor, "tokens": tokens, "salt": request.salt}
        if any(past):
            saved.append(SavedWithCheckpoints(**one, checkpoints=[length for length, _ in past[number]]))
        else:
            saved.append(SavedRequest(**one))
    plan = cache.plan
    sizes = Sizes(
        max_requests=plan.slots,
        max_tokens=plan.max_tokens,
        max_draft_tokens=plan.max_draft_tokens,
        max_request_tokens=plan.max_request_tokens,
    )
    metadata = {
        "kvcore.snapshot": VERSIONS[any(past)],
        "spec": to_json(cache.spec),
        "sizes": msgspec.json.encode(sizes).decode(),
        "requests": msgspec.json.encode(saved).decode(),
        "root": NO_ROOT,
    }
    data = _safetensors().save(arrays, metadata=metadata)
    header = _sorted_header(data)
    return header.replace(NO_ROOT.encode(), _root(header, arrays).encode()) + data[_header_end(data) :]


def read(path: str | PathLike[str], disk: Disk | None = None) -> Saved:
    """Read a snapshot and check its header and root; pages are checked by ``damage``.

    Raises:
        SnapshotError: not a snapshot, of another version, or its header does not match its root; no regular file.
        OSError: the file cannot be read.
    """
    where = f"snapshot {path}"
    try:
        data = (disk or Disk()).read(Path(path))
    except NotAFile as error:
        raise SnapshotError(got=error.strerror, where=where, allowed="a file that Cache.save wrote") from error
    return parse(data, where)


def parse(data: bytes, where: str = "snapshot") -> Saved:
    """A snapshot's bytes as ``Saved``; see ``read``."""
    safetensors = _safetensors()
    try:
        header = data[: _header_end(data)]
        metadata = msgspec.json.decode(header[8:], type=_Header).metadata
        version, root = metadata.get("kvcore.snapshot"), metadata.get("root")
    except (*UNREADABLE, KeyError, AttributeError) as error:
        raise SnapshotError(got=f"no header ({error})", where=where, allowed="a file that Cache.save wrote") from error
    if version not in VERSIONS:
        allowed = f"kvcore.snapshot {' or '.join(VERSIONS)}"
        raise SnapshotError(got=f"version {shortened(version)}", where=where, allowed=allowed)
    if not isinstance(root, str) or len(root) != len(NO_ROOT):
        raise SnapshotError(got=f"root {shortened(root)}", where=where, allowed=f"{len(NO_ROOT)} hexadecimal digits")
    try:
        arrays = safetensors.load(data)
    except Exception as error:
        raise SnapshotError(got=f"damaged ({error})", where=where, allowed="a file that Cache.save wrote") from error
    if root != _root(header.replace(root.encode(), NO_ROOT.encode()), arrays):
        raise SnapshotError(got="a damaged header or digest", where=where, allowed="bytes of their root")
    try:
        kind = SavedRequest if version == VERSIONS[0] else SavedWithCheckpoints
        requests = msgspec.json.decode(metadata["requests"], type=list[kind])
        sizes = msgspec.json.decode(metadata["sizes"], type=Sizes)
        # A request without any rows has an array for every component all the same.
        if not all(map(_is_coherent, requests)) or len(requests) > len(arrays):
            raise SnapshotError(got="lengths that don't fit together", where=where, allowed="what Cache.save wrote")
        spec = from_json(metadata["spec"])
        _check_sizes(spec, sizes)
        return Saved(spec, sizes, requests, arrays)
    except (*UNREADABLE, KeyError, KvcoreError) as error:
        raise SnapshotError(got=str(error), where=where, allowed="a header that Cache.save wrote") from error


def _check_sizes(spec: CacheSpec, sizes: Sizes) -> None:
    """Refuse sizes that no cache of the spec was created with.

    Raises:
        SpecError: the first of them.
    """
    for name, least in (("max_requests", 1), ("max_draft_tokens", 0)):
        check_count(SpecError, name, getattr(sizes, name), least)
    for name in ("max_tokens", "max_request_tokens"):
        if getattr(sizes, name) is not None:
            check_count(SpecError, name, getattr(sizes, name), 1)
    if sizes.max_tokens is None and any(component.growth == "block" for _, _, component in spec.components()):
        raise SpecError(got=None, where="max_tokens", allowed="an integer, 1 or more: the spec has paged components")


def _is_coherent(saved: SavedRequest) -> bool:
    """Whether the numbers of a request fit together, those of its checkpoints too."""
    lengths = [0, *checkpoints_of(saved)]
    return is_coherent(saved) and all(before < after <= saved.length for before, after in pairwise(lengths))


def checkpoints_of(saved: SavedRequest) -> list[int]:
    """Lengths of a saved request's checkpoints."""
    return saved.checkpoints if isinstance(saved, SavedWithCheckpoints) else []


def damage(saved: Saved, ops: Ops, number: int) -> list[Damage]:
    """The damaged pages of one request."""
    found: list[Damage] = []
    request = saved.requests[number]
    main = ((f"{number}.", f"{layer}.{role}", None, layer, role, part) for layer, role, part in owned(saved.spec))
    past = (
        (f"{number}.at.{at}.", f"checkpoint {at}, {layer}.{role}", at, layer, role, part)
        for at, (layer, role, part) in product(checkpoints_of(request), rings(saved.spec))
    )
    for before, called, at, layer, role, component in (*main, *past):
        name = f"{before}{layer}.{role}"
        floor, length = (request.floor, request.length) if at is None else (at, at)
        rows, stored = saved.arrays.get(name), saved.arrays.get(f"{name}.digest")
        # As many positions as a request says are made only where there are rows for them.
        least = least_kept(component, floor, length)
        if rows is None or stored is None or rows.dtype != np.uint8 or rows.ndim != 2 or len(rows) < least:
            found.append(Damage(number, called, None))
            continue
        held = rows_of(saved, number, layer, role, at)
        if rows.shape != (len(held.positions), row_bytes(component)):
            found.append(Damage(number, called, None))
            continue
        lanes = _lanes(ops, saved.spec, held, layer, role)
        if lanes.shape != stored.shape:
            found.append(Damage(number, called, None))
            continue
        bad = np.flatnonzero((lanes != stored).any(axis=1))
        found += [Damage(number, called, int(page)) for page in bad]
    return found


def rows_of(saved: Saved, number: int, layer: int, role: str, at: int | None = None) -> HostRows:
    """The rows of one component of a saved request, or of its checkpoint; an empty array where they are missing."""
    request = saved.requests[number]
    component = getattr(saved.spec.all_layers[layer], role)
    name = f"{number}.{layer}.{role}" if at is None else f"{number}.at.{at}.{layer}.{role}"
    floor, length = (request.floor, request.length) if at is None else (at, at)
    return HostRows(saved.arrays.get(name, np.zeros(0, np.uint8)), kept_positions(component, floor, length))


def _lanes(ops: Ops, spec: CacheSpec, held: HostRows, layer: int, role: str) -> np.ndarray[Any, Any]:
    """Digest lanes [pages, 2]; a page has as many rows as a block holds of a paged component."""
    if not held.positions:
        return np.zeros((0, 2), np.int64)
    page = max(1, spec.block_tokens // getattr(spec.all_layers[layer], role).tokens_per_row)
    lanes = page_digests(ops, held.rows, held.positions, page, region_salt(layer, role))
    return to_numpy(lanes).astype(np.int64).reshape(-1, 2)


def _header_end(data: bytes) -> int:
    """Where the header of a safetensors file ends: 8 bytes of its length, then JSON."""
    return 8 + int.from_bytes(data[:8], "little")


def _sorted_header(data: bytes) -> bytes:
    """The header with its keys in order, so that equal caches give equal files; safetensors writes them in any."""
    text = msgspec.json.encode(msgspec.json.decode(data[8 : _header_end(data)]), order="sorted")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _root(header: bytes, arrays: dict[str, np.ndarray[Any, Any]]) -> str:
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
            allowed="snapshots with safetensors",
            hint='pip install "kvcore[snapshot]"',
        ) from error
    return safetensors
