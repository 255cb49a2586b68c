"""The portable form taken apart and put together, as whoever lies could: from its specification, not by the library."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from examples import read_portable
from examples.read_portable import ALIGNMENT, HEAD_BYTES, MAGIC

Tree = dict[str, Any]


def opened(data: bytes) -> tuple[Tree, bytes]:
    """(the JSON, what follows) of a blob or a snapshot."""
    end = HEAD_BYTES + int.from_bytes(data[8:16], "little")
    return json.loads(data[HEAD_BYTES:end]), data[-(-end // ALIGNMENT) * ALIGNMENT :]


def sealed(tree: Any, rest: bytes = b"") -> bytes:
    """A file of this JSON, whose root is right."""
    text = tree if isinstance(tree, bytes) else json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()
    head = MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text
    return head + bytes(-len(head) % ALIGNMENT) + rest


def digested(manifest: Tree, pages: bytes) -> bytes:
    """A blob of these pages, their digests worked out anew."""
    shaped = read_portable.np.frombuffer(pages, read_portable.np.uint8).reshape(-1, manifest["page_bytes"])
    _, found = read_portable.pieces(read_portable.Request(manifest, shaped))
    digest = read_portable.HASHES[manifest["digest"]]
    return sealed({**manifest, "digests": [digest(piece) for piece in found]}, pages)


def blobs_of(data: bytes) -> tuple[Tree, list[bytes]]:
    """(directory, blobs) of a snapshot."""
    directory, rest = opened(data)
    return directory, [rest[one["offset"] : one["offset"] + one["bytes"]] for one in directory["requests"]]


def bound(directory: Any, blobs: Sequence[bytes]) -> bytes:
    """A snapshot of these blobs."""
    entries, rest = [], bytearray()
    for blob in blobs:
        entries.append({"offset": len(rest), "bytes": len(blob), "root": blob[16:HEAD_BYTES].hex()})
        rest += blob + bytes(-len(blob) % ALIGNMENT)
    return sealed({**directory, "requests": entries}, bytes(rest))


def changed(data: bytes, change: Callable[[Tree], Any]) -> bytes:
    """A blob, or the one blob of a snapshot, whose manifest says something else; everything is signed anew."""
    tree, rest = opened(data)
    if tree["form"] == "kvcore.snapshot":
        directory, (blob,) = blobs_of(data)
        return bound(directory, [changed(blob, change)])
    said = change(tree)
    return sealed(tree if said is None else said, rest)


def rows_of(blob: bytes, section: str = "") -> dict[str, bytes]:
    """``"L.role"`` -> the rows of a blob's history and record, or of one section."""
    wanted = (section,) if section else ("history", "record")
    found = read_portable.rows(read_portable.read_blob(blob))
    return {f"{one.layer}.{one.role}": one.rows.tobytes() for one in found if one.section in wanted}


def place_of(blob: bytes, section: str, name: str, byte: int = 0) -> int:
    """Where in a blob a byte of a component's first row in a section lies."""
    manifest, pages = opened(blob)
    part = next(one for one in manifest["layout"]["sections"] if one["name"] == section)
    strip = next(one for one in part["strips"] if f"{one['layer']}.{one['role']}" == name)
    return len(blob) - len(pages) + part["first"] * manifest["page_bytes"] + strip["start"] + byte
