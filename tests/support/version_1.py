"""What 0.1.0 wrote, written as it did: blobs, snapshots and exports of version 1, for tests of what reads them."""

from typing import Any

import msgspec
import numpy as np
import safetensors.numpy

from kvcore import to_numpy
from kvcore.digest import region_salt
from kvcore.portable import version1
from kvcore.portable.digests import LaneDigests
from kvcore.portable.manifest import Staged, root_of, stage_one_by_one
from kvcore.portable.pages import page_layout
from kvcore.portable.rows import page_digests, read_rows, rings
from kvcore.spec import to_json


def blob_fields(cache: Any, request: Any, *, checkpoints: bool = True) -> dict[str, Any]:
    """The fields of a blob, but its root."""
    floor = cache._state.least_length(request)
    rows, digests = packed(cache, read_rows(cache.ops, cache.pools, cache._state.row(request), floor))
    past = []
    for length, state in cache._state.kept_states(request) if checkpoints else ():
        held = packed(cache, {(layer, role): state[layer, role] for layer, role, _ in rings(cache.spec)})
        past.append({"length": length, "rows": held[0], "digests": held[1]})
    return {
        "version": 2 if past else 1,
        "spec": to_json(cache.spec),
        "length": request.length,
        "floor": floor,
        "tokens": None if request.tokens is None else list(request.tokens),
        "salt": request.salt,
        "rows": rows,
        "digests": digests,
        **({"checkpoints": past} if past else {}),
    }


def packed(cache: Any, content: Any) -> tuple[dict[str, bytes], dict[str, list[int]]]:
    """Rows and digests by ``"L.role"``."""
    rows = {f"{layer}.{role}": held.rows.tobytes() for (layer, role), held in content.items()}
    lanes = {}
    for (layer, role), held in content.items():
        found = lanes_of(cache, held, max(1, len(held.positions)), layer, role)
        lanes[f"{layer}.{role}"] = found[0].tolist() if len(found) else [0, 0]
    return rows, lanes


def lanes_of(cache: Any, held: Any, page: int, layer: int, role: str) -> np.ndarray:
    if not len(held.positions):
        return np.zeros((0, 2), np.int64)
    found = page_digests(cache.ops, held.rows, held.positions, page, region_salt(layer, role))
    return to_numpy(found).astype(np.int64).reshape(-1, 2)


def signed(fields: dict[str, Any]) -> bytes:
    """A blob of these fields, its root worked out."""
    kind = version1.BlobWithCheckpoints if "checkpoints" in fields else version1.Blob
    root = version1.blob_root(fields)
    order = {name: fields[name] for name in kind.__struct_fields__ if name in fields}
    others = {name: value for name, value in fields.items() if name not in order}
    return msgspec.msgpack.encode(_in_order({**order, **others}, root))


def _in_order(fields: dict[str, Any], root: bytes) -> dict[str, Any]:
    """The root stands before the checkpoints, which a later class added."""
    past = {name: fields[name] for name in ("checkpoints",) if name in fields}
    return {**{name: value for name, value in fields.items() if name not in past}, "root": root, **past}


def blob(cache: Any, request: Any, *, checkpoints: bool = True) -> bytes:
    """An exported request."""
    return signed(blob_fields(cache, request, checkpoints=checkpoints))


def snapshot(cache: Any, requests: Any, *, checkpoints: bool = True) -> bytes:
    """A saved cache."""
    arrays: dict[str, np.ndarray] = {}
    saved = []
    past = [cache._state.kept_states(request) if checkpoints else [] for request in requests]
    for number, request in enumerate(requests):
        floor = cache._state.least_length(request)
        content = read_rows(cache.ops, cache.pools, cache._state.row(request), floor)
        held = [(f"{number}.{layer}.{role}", layer, role, found) for (layer, role), found in content.items()]
        for length, state in past[number]:
            for layer, role, _ in rings(cache.spec):
                held.append((f"{number}.at.{length}.{layer}.{role}", layer, role, state[layer, role]))
        for name, layer, role, found in held:
            arrays[name] = found.rows
            page = max(1, cache.spec.block_tokens // getattr(cache.spec.all_layers[layer], role).tokens_per_row)
            arrays[f"{name}.digest"] = lanes_of(cache, found, page, layer, role)
        tokens = None if request.tokens is None else list(request.tokens)
        one = {"length": request.length, "floor": floor, "tokens": tokens, "salt": request.salt}
        saved.append({**one, "checkpoints": [length for length, _ in past[number]]} if any(past) else one)
    plan = cache.plan
    sizes = {
        "max_requests": plan.slots,
        "max_tokens": plan.max_tokens,
        "max_draft_tokens": plan.max_draft_tokens,
        **({} if plan.max_request_tokens is None else {"max_request_tokens": plan.max_request_tokens}),
    }
    metadata = {
        "kvcore.snapshot": "2" if any(past) else "1",
        "spec": to_json(cache.spec),
        "sizes": msgspec.json.encode(sizes).decode(),
        "requests": msgspec.json.encode(saved).decode(),
        "root": version1.NO_ROOT,
    }
    return signed_file(safetensors.numpy.save(arrays, metadata=metadata))


def signed_file(data: bytes) -> bytes:
    """A safetensors file whose root is blank, its header's keys in order and its root worked out."""
    end = version1.header_end(data)
    text = msgspec.json.encode(msgspec.json.decode(data[8:end]), order="sorted")
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    arrays = safetensors.numpy.load(header + data[end:])
    root = version1.snapshot_root(header, arrays)
    return header.replace(version1.NO_ROOT.encode(), root.encode()) + data[end:]


def staged(cache: Any, request: Any, export: tuple[str, int, int]) -> Staged:
    """An export: its manifest and its pages."""
    row, floor = cache._state.row(request), cache._state.least_length(request)
    layout = page_layout(cache.spec, floor, row.length)
    pages = np.zeros((layout.pages, layout.page_bytes), np.uint8)
    stage_one_by_one(cache._state, row, floor, layout, pages)
    lanes = [np.frombuffer(found, "<u4").tolist() for found in LaneDigests(cache.ops, layout).result(pages)]
    manifest = {
        "version": 1,
        "export": list(export),
        "spec": to_json(cache.spec),
        "length": row.length,
        "floor": floor,
        "tokens": None if request.tokens is None else list(request.tokens),
        "salt": request.salt,
        "digests": lanes,
    }
    text = msgspec.msgpack.encode(manifest)
    return Staged(text, pages, root_of(text))
