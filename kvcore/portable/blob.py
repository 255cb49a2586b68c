"""One request as a self-contained blob: the way between caches, backends, processes and frameworks.

The blob is msgpack: a header (format version, spec, length, token ids, salt), every component's canonical rows, and a
digest of each. Import checks all of it before it takes a slot, and a failure leaves the cache as it was.
"""

# pyright: reportPrivateUsage=false

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from kvcore.arrays import to_numpy
from kvcore.digest import region_salt
from kvcore.errors import OutOfBlocks, RequestError, SnapshotError, SpecError
from kvcore.foreign import UNREADABLE
from kvcore.ops import Ops
from kvcore.plan import CachePlan, row_bytes
from kvcore.portable.caches import CacheInTurn, SharedCache
from kvcore.portable.rows import (
    Content,
    HostRows,
    is_coherent,
    kept_positions,
    least_kept,
    owned,
    page_digests,
    read_rows,
    rings,
    state_of,
)
from kvcore.printable import shortened
from kvcore.requests.manager import Request
from kvcore.spec import CacheSpec, Component, from_json, to_json

VERSIONS = (1, 2)
"""2 where checkpoints come along; without any the bytes are those of 1."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A past state of a request: its rings as they were at ``length``; rows and digests as in ``Blob``."""

    length: int
    rows: dict[str, bytes]
    digests: dict[str, tuple[int, int]]


class Blob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an exported request is made of.

    Attributes:
        version: of this layout.
        spec: canonical JSON of the spec.
        length: tokens.
        floor: smallest length that the rows can be rolled back to.
        tokens: ids, or None if they are not known.
        salt: whose prefixes it may share, or None.
        rows: ``"L.role"`` -> canonical rows, one after another.
        digests: ``"L.role"`` -> the two lanes of those rows.
        root: sha256 over everything above.
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
    """The same in version 2: with past states, shortest first."""

    checkpoints: list[Checkpoint]


class _Version(msgspec.Struct, frozen=True):
    version: int


def export(cache: CacheInTurn, request: Request, *, checkpoints: bool = True) -> bytes:
    """The request as a blob."""
    cache.manager.check_whole(request, "export_request")
    floor = cache.least_length(request)
    rows, digests = _packed(cache.ops, read_rows(cache.ops, cache.pools, cache.row(request), floor))
    past: list[Checkpoint] = []
    for length, state in cache.kept_states(request) if checkpoints else ():
        brought = {(layer, role): state[layer, role] for layer, role, _ in rings(cache.spec)}
        packed = _packed(cache.ops, brought)
        past.append(Checkpoint(length=length, rows=packed[0], digests=packed[1]))
    tokens = None if request.tokens is None else list(request.tokens)
    fields: dict[str, Any] = {
        "version": VERSIONS[bool(past)],
        "spec": to_json(cache.spec),
        "length": request.length,
        "floor": floor,
        "tokens": tokens,
        "salt": request.salt,
        "rows": rows,
        "digests": digests,
        **({"checkpoints": past} if past else {}),
    }
    kind = BlobWithCheckpoints if past else Blob
    return msgspec.msgpack.encode(kind(**fields, root=_root(fields)))


class Leaving(NamedTuple):
    """A request on its way to another cache of this process: what it says of itself, and its rows."""

    spec: str
    length: int
    floor: int
    tokens: list[int] | None
    salt: str | None
    rows: Content


def leave(cache: CacheInTurn, request: Request) -> Leaving:
    """Finished copies of a request's rows; no digests, since they stay in memory."""
    cache.manager.check_whole(request, "copy")
    floor = cache.least_length(request)
    tokens = None if request.tokens is None else list(request.tokens)
    rows = read_rows(cache.ops, cache.pools, cache.row(request), floor)
    return Leaving(to_json(cache.spec), request.length, floor, tokens, request.salt, rows)


def arrive(cache: CacheInTurn, leaving: Leaving) -> Request:
    """A request of a cache of the same spec with the rows of one that left another; its prefixes are not published."""
    check_spec(cache.spec, leaving.spec)
    check_length(cache.plan, leaving.length, "copy")
    return cache.restore(leaving, leaving.rows)


def copy_request(source: SharedCache, request: Request, target: SharedCache) -> Request:
    """A request of ``target`` with the rows of one of another cache of the same spec, on any backend, in this process.

    As export and import do it, but nothing is digested.
    """
    leaving = source.exclusive("copy", lambda cache: leave(cache, cache.manager.check(request)))
    return target.exclusive("copy", lambda cache: arrive(cache, leaving))


def import_(cache: CacheInTurn, blob: bytes, into: Request | None, salt: str | None) -> Request:
    """Check a blob, then make a request of it."""
    if into is not None and cache.row(into).length:
        raise RequestError(
            got=f"request {into.id} of {into.length} tokens", where="import_request: into", allowed="one without tokens"
        )
    found = _decode(blob)
    check_spec(cache.spec, found.spec)
    check_length(cache.plan, found.length, "import_request")
    content = _complete(cache, found, owned(cache.spec), found.floor, found.length)
    states = _states(cache, found, content)
    return cache.restore(found, content, into, salt=salt, states=states)


def _packed(ops: Ops, content: Content) -> tuple[dict[str, bytes], dict[str, tuple[int, int]]]:
    """Rows and digests of a content, as a blob has them."""
    rows = {f"{layer}.{role}": held.rows.tobytes() for (layer, role), held in content.items()}
    return rows, {f"{layer}.{role}": _lanes(ops, held, layer, role) for (layer, role), held in content.items()}


def _states(cache: CacheInTurn, found: Blob, content: Content) -> list[tuple[int, Content]]:
    """The checkpoints of a blob, complete and undamaged.

    Raises:
        SnapshotError: lengths out of order or beyond the request's, a component missing, damaged or too many.
    """
    states: list[tuple[int, Content]] = []
    last = 0
    for past in found.checkpoints if isinstance(found, BlobWithCheckpoints) else ():
        if not last < past.length <= found.length:
            allowed = f"lengths that ascend, up to {found.length}"
            got = f"a checkpoint at {shortened(past.length)}"
            raise SnapshotError(got=got, where="import_request", allowed=allowed)
        last = past.length
        brought = _complete(cache, past, rings(cache.spec), past.length, past.length)
        states.append((past.length, state_of(cache.ops, content, brought, past.length)))
    return states


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
        if _lanes(cache.ops, held, layer, role) != tuple(found.digests[name]):
            raise SnapshotError(got=f"damaged rows of {name}", where="import_request", allowed="rows of their digest")
        content[layer, role] = held
    others = sorted((set(found.rows) | set(found.digests)) - {f"{layer}.{role}" for layer, role in content})
    if others:
        raise SnapshotError(
            got=f"component {shortened(others[0])}", where="import_request", allowed="the spec's components, no others"
        )
    return content


def _lanes(ops: Ops, held: HostRows, layer: int, role: str) -> tuple[int, int]:
    """Digest lanes of all rows together; (0, 0) where there are none."""
    if not held.positions:
        return 0, 0
    lanes = page_digests(ops, held.rows, held.positions, len(held.positions), region_salt(layer, role))
    first, second = to_numpy(lanes)[0].tolist()
    return int(first), int(second)


def check_spec(spec: CacheSpec, text: str) -> None:
    """Refuse another spec than the cache's, naming the first difference."""
    if text == to_json(spec):
        return
    try:
        other = from_json(text)
    except SpecError as error:
        raise SnapshotError(got=str(error), where="spec", allowed=f"digest {spec.digest[:16]}") from error
    if other.digest != spec.digest:
        raise SnapshotError(
            got=f"a spec with {first_difference(spec, other)}",
            where="spec",
            allowed=f"digest {spec.digest[:16]}",
            hint="Create the cache from the same spec.",
        )


def check_length(plan: CachePlan, length: int, where: str) -> None:
    """Refuse a request that is longer than one of this cache can be.

    Raises:
        OutOfBlocks: it is.
    """
    longest = plan.longest
    if longest is not None and length > longest:
        raise OutOfBlocks(
            got=f"{length} tokens",
            where=where,
            allowed=f"{longest} tokens in one request",
            hint="Create the cache with a larger max_tokens, or max_request_tokens where that is less.",
        )


def first_difference(ours: CacheSpec, theirs: CacheSpec) -> str:
    """Path and both values of the first field in which two specs differ."""
    return _difference(msgspec.to_builtins(ours), msgspec.to_builtins(theirs), "") or "other fields"


def _difference(ours: Any, theirs: Any, path: str) -> str | None:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        left, right = cast("dict[str, Any]", ours), cast("dict[str, Any]", theirs)
        for key in [*left, *(key for key in right if key not in left)]:
            if path or key != "name":
                found = _difference(left.get(key), right.get(key), f"{path}.{key}".lstrip("."))
                if found:
                    return found
        return None
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        mine, other = cast("list[Any]", ours), cast("list[Any]", theirs)
        if len(mine) != len(other):
            return f"{path}: {len(other)} items instead of {len(mine)}"
        for number, pair in enumerate(zip(mine, other, strict=True)):
            found = _difference(*pair, f"{path}[{number}]")
            if found:
                return found
        return None
    return None if ours == theirs else f"{path} = {shortened(theirs)} instead of {ours!r}"


def _decode(blob: bytes) -> Blob:
    try:
        version = msgspec.msgpack.decode(blob, type=_Version).version
        kind = BlobWithCheckpoints if version == VERSIONS[1] else Blob
        found = msgspec.msgpack.decode(blob, type=kind)
    except UNREADABLE as error:
        raise SnapshotError(
            got=str(error), where="import_request: blob", allowed="a blob from export_request"
        ) from error
    fields = {name: getattr(found, name) for name in kind.__struct_fields__ if name != "root"}
    if found.version not in VERSIONS:
        allowed = f"version {' or '.join(map(str, VERSIONS))}"
        raise SnapshotError(got=f"version {found.version}", where="import_request: blob", allowed=allowed)
    if _root(fields) != found.root or not is_coherent(found):
        raise SnapshotError(got="a damaged blob", where="import_request: blob", allowed="bytes of their root digest")
    return found


def _root(fields: dict[str, Any]) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(fields, order="sorted")).digest()
