"""One request as a self-contained blob: the way between caches, backends, processes and frameworks.

The blob is msgpack: a header (format version, spec, length, token ids), the canonical rows of every component, and a
digest of each. Import checks all of it before it takes a slot, and a failure leaves the cache as it was.
"""

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvcore.arrays import to_numpy
from kvcore.content import owned, page_digests, positions_of, read_rows, to_raw
from kvcore.digest import region_salt
from kvcore.errors import RequestError, SnapshotError
from kvcore.manager import Request
from kvcore.plan import row_bytes
from kvcore.spec import CacheSpec, from_json, to_json

if TYPE_CHECKING:
    from kvcore.cache import Cache

VERSION = 1


class Blob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an exported request is made of.

    Attributes:
        version: of this layout.
        spec: canonical JSON of the spec.
        length: tokens.
        tokens: ids, or None if they are not known.
        rows: ``"L.role"`` -> canonical rows, one after another.
        digests: ``"L.role"`` -> the two lanes of those rows.
        root: sha256 over everything above.
    """

    version: int
    spec: str
    length: int
    tokens: list[int] | None
    rows: dict[str, bytes]
    digests: dict[str, tuple[int, int]]
    root: bytes


def export(cache: "Cache", request: Request) -> bytes:
    """The request as a blob."""
    rows: dict[str, bytes] = {}
    digests: dict[str, tuple[int, int]] = {}
    for (layer, role), raw in read_rows(cache.ops, cache.pools, cache.row(request)).items():
        lanes = to_numpy(cache.ops.digest_rows(raw, region_salt(layer, role)))[0]
        rows[f"{layer}.{role}"] = to_numpy(raw.rows).tobytes()
        digests[f"{layer}.{role}"] = int(lanes[0]), int(lanes[1])
    tokens = None if request.tokens is None else list(request.tokens)
    fields: dict[str, Any] = {
        "version": VERSION,
        "spec": to_json(cache.spec),
        "length": request.length,
        "tokens": tokens,
        "rows": rows,
        "digests": digests,
    }
    return msgspec.msgpack.encode(Blob(**fields, root=_root(fields)))


def import_(cache: "Cache", blob: bytes, into: Request | None) -> Request:
    """Check a blob, then make a request of it."""
    if into is not None:
        cache.row(into)
    found = _decode(blob)
    check_spec(cache.spec, found.spec)
    content = {}
    for layer, role, component in owned(cache.spec):
        name = f"{layer}.{role}"
        positions = positions_of(component, found.length)
        size = row_bytes(component)
        if len(found.rows.get(name, b"")) != len(positions) * size or name not in found.digests:
            raise SnapshotError(got=f"component {name}", where="import_request", allowed=f"{len(positions)} rows of it")
        rows = np.frombuffer(found.rows[name], np.uint8).reshape(len(positions), size)
        lanes = page_digests(cache.ops, rows, positions, max(1, len(positions)), region_salt(layer, role))
        if len(positions) and tuple(to_numpy(lanes)[0].tolist()) != found.digests[name]:
            raise SnapshotError(got=f"damaged rows of {name}", where="import_request", allowed="rows of their digest")
        content[layer, role] = to_raw(cache.ops, rows, positions)
    if set(found.rows) != {f"{layer}.{role}" for layer, role in content}:
        raise SnapshotError(got=sorted(found.rows), where="import_request", allowed="the spec's components, no others")
    if into is not None and into.length:
        raise RequestError(
            got=f"request {into.id} of {into.length} tokens", where="import_request: into", allowed="one without tokens"
        )
    request = cache.admit() if into is None else into
    try:
        cache.install(request, found.length, found.tokens, content)
    except BaseException:
        if into is None:
            cache.release(request)
        raise
    return request


def check_spec(spec: CacheSpec, text: str) -> None:
    """Refuse another spec than the cache's, naming the first difference."""
    other = from_json(text)
    if other.digest != spec.digest:
        raise SnapshotError(
            got=f"a spec with {first_difference(spec, other)}",
            where="spec",
            allowed=f"digest {spec.digest[:16]}",
            hint="Create the cache from the same spec.",
        )


def first_difference(ours: CacheSpec, theirs: CacheSpec) -> str:
    """Path and both values of the first field in which two specs differ."""
    return _difference(msgspec.to_builtins(ours), msgspec.to_builtins(theirs), "") or "other fields"


def _difference(ours: Any, theirs: Any, path: str) -> str | None:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            if path or key != "name":
                found = _difference(ours.get(key), theirs.get(key), f"{path}.{key}".lstrip("."))
                if found:
                    return found
        return None
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{path}: {len(theirs)} items instead of {len(ours)}"
        for number, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            found = _difference(left, right, f"{path}[{number}]")
            if found:
                return found
        return None
    return None if ours == theirs else f"{path} = {theirs!r} instead of {ours!r}"


def _decode(blob: bytes) -> Blob:
    try:
        found = msgspec.msgpack.decode(blob, type=Blob)
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError) as error:
        raise SnapshotError(
            got=str(error), where="import_request: blob", allowed="a blob from export_request"
        ) from error
    fields = {name: getattr(found, name) for name in Blob.__struct_fields__ if name != "root"}
    if found.version != VERSION:
        raise SnapshotError(got=f"version {found.version}", where="import_request: blob", allowed=f"version {VERSION}")
    if _root(fields) != found.root or found.length < 0:
        raise SnapshotError(got="a damaged blob", where="import_request: blob", allowed="bytes of their root digest")
    return found


def _root(fields: dict[str, Any]) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(fields, order="sorted")).digest()
