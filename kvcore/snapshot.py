"""Requests as one verified file, and back.

A snapshot is a safetensors file: for every request and component its canonical rows as ``uint8`` [n, row_bytes] and the
digest lanes of its pages [pages, 2]; the metadata holds the spec, the requests and a root, sha256 over all of it. The
file is written beside its name, flushed, and renamed, so that it appears whole or not at all. Loading checks header,
root and pages; a damaged page is named, and only the request that it belongs to is refused.
"""

import hashlib
import os
import threading
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from kvcore.arrays import to_numpy
from kvcore.content import owned, page_digests, positions_of, read_rows
from kvcore.digest import region_salt
from kvcore.disk import Disk
from kvcore.errors import BackendError, SnapshotError
from kvcore.manager import Request
from kvcore.ops import Ops
from kvcore.plan import CachePlan, row_bytes
from kvcore.spec import CacheSpec, from_json, to_json

if TYPE_CHECKING:
    from kvcore.cache import Cache

VERSION = "1"


class SavedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request in a snapshot's metadata."""

    length: int
    tokens: list[int] | None


class Saved(NamedTuple):
    """A snapshot's contents before its pages were checked."""

    spec: CacheSpec
    sizes: dict[str, Any]
    requests: list[SavedRequest]
    arrays: dict[str, np.ndarray[Any, Any]]


def save(cache: "Cache", path: str | PathLike[str], requests: list[Request], disk: Disk | None = None) -> None:
    """Write a snapshot of the requests, in order."""
    disk = disk or Disk()
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        disk.write(temporary, to_bytes(cache, requests))
        disk.publish(temporary, target)
    except BaseException:
        disk.remove(temporary)
        raise


def to_bytes(cache: "Cache", requests: list[Request]) -> bytes:
    """The snapshot file of some requests."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for number, request in enumerate(requests):
        for (layer, role), raw in read_rows(cache.ops, cache.pools, cache.row(request)).items():
            name = f"{number}.{layer}.{role}"
            rows = to_numpy(raw.rows)[0]
            positions = to_numpy(raw.positions)[0].tolist()
            page = page_rows(cache.plan, layer, role)
            arrays[name] = rows
            arrays[f"{name}.digest"] = _lanes(cache.ops, rows, positions, page, layer, role)
    saved = [
        SavedRequest(length=request.length, tokens=None if request.tokens is None else list(request.tokens))
        for request in requests
    ]
    plan = cache.plan
    sizes = {"max_requests": plan.slots, "max_tokens": plan.max_tokens, "max_draft_tokens": plan.max_draft_tokens}
    metadata = {
        "kvcore.snapshot": VERSION,
        "spec": to_json(cache.spec),
        "sizes": msgspec.json.encode(sizes).decode(),
        "requests": msgspec.json.encode(saved).decode(),
    }
    metadata["root"] = _root(metadata, arrays)
    return _safetensors().save(arrays, metadata=metadata)


def read(path: str | PathLike[str]) -> Saved:
    """Read a snapshot and check its header and root; pages are checked by ``damage``.

    Raises:
        SnapshotError: not a snapshot, of another version, or its header does not match its root.
    """
    data = Path(path).read_bytes()
    try:
        header = int.from_bytes(data[:8], "little")
        metadata = msgspec.json.decode(data[8 : 8 + header], type=dict[str, Any]).get("__metadata__", {})
        arrays = _safetensors().load(data)
    except (msgspec.MsgspecError, ValueError, KeyError, _safetensors_error()) as error:
        raise SnapshotError(got=str(error), where=f"snapshot {path}", allowed="a file that Cache.save wrote") from error
    if metadata.get("kvcore.snapshot") != VERSION:
        got = f"version {metadata.get('kvcore.snapshot')}"
        raise SnapshotError(got=got, where=f"snapshot {path}", allowed=f"kvcore.snapshot {VERSION}")
    root = metadata.pop("root", None)
    if root != _root(metadata, arrays):
        raise SnapshotError(got="a damaged header or digest", where=f"snapshot {path}", allowed="bytes of their root")
    requests = msgspec.json.decode(metadata["requests"], type=list[SavedRequest])
    return Saved(from_json(metadata["spec"]), msgspec.json.decode(metadata["sizes"]), requests, arrays)


def damage(saved: Saved, plan: CachePlan, ops: Ops, number: int) -> list[str]:
    """Names of the damaged pages of one request: ``"layer.role page p"``."""
    found: list[str] = []
    for layer, role, component in owned(saved.spec):
        name = f"{number}.{layer}.{role}"
        positions = positions_of(component, saved.requests[number].length)
        rows, stored = saved.arrays.get(name), saved.arrays.get(f"{name}.digest")
        if rows is None or stored is None or rows.shape != (len(positions), row_bytes(component)):
            found.append(f"{layer}.{role}: missing or misshapen")
            continue
        lanes = _lanes(ops, rows, positions, page_rows(plan, layer, role), layer, role)
        if lanes.shape != stored.shape:
            found.append(f"{layer}.{role}: digests missing")
            continue
        found += [f"{layer}.{role} page {page}" for page in np.flatnonzero((lanes != stored).any(axis=1))]
    return found


def page_rows(plan: CachePlan, layer: int, role: str) -> int:
    """Rows of one digest page: what a block holds of a paged component, and as much of any other."""
    component = getattr(plan.spec.all_layers[layer], role)
    return max(1, plan.spec.block_tokens // component.tokens_per_row)


def _lanes(
    ops: Ops, rows: np.ndarray[Any, Any], positions: Any, page: int, layer: int, role: str
) -> np.ndarray[Any, Any]:
    lanes = page_digests(ops, rows, positions, page, region_salt(layer, role))
    return to_numpy(lanes).astype(np.int64).reshape(-1, 2)


def _root(metadata: dict[str, str], arrays: dict[str, np.ndarray[Any, Any]]) -> str:
    """sha256 over the metadata, every tensor's name and shape, and every digest: all that the pages do not cover."""
    root = hashlib.sha256()
    for name in sorted(metadata):
        root.update(f"{name}={metadata[name]}\n".encode())
    for name in sorted(arrays):
        root.update(f"{name}:{arrays[name].shape}\n".encode())
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


def _safetensors_error() -> type[Exception]:
    _safetensors()
    from safetensors import SafetensorError

    return SafetensorError
