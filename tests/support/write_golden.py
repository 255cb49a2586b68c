"""Write the golden files of both versions of the portable form: ``python -m tests.support.write_golden``.

Files of version 1 are what 0.1.0 wrote; ``version_1.py`` writes them byte for byte. A change of either is a
change of what others have on their disks: read the old ones too, and give the new form a number of its own.
"""

import tempfile
from pathlib import Path
from typing import Any

from kvcore.handoff import Exporter, encode_handle, publish
from kvcore.portable import blob, snapshot
from kvcore.portable.manifest import Staged, stage
from kvcore.spec import to_json
from tests.support import every_format, stories, version_1

TESTS = Path(__file__).parents[1]
EXPORTERS = {1: "ce6087ad867243ceb47c8910dede451d", 2: "0f1e2d3c4b5a69788796a5b4c3d2e1f0"}
FOLDERS = {"golden_v1": (1, "lanes"), "golden_v2": (2, "sha256"), "golden_v2_xxh3_128": (2, "xxh3_128")}
"""Version of the files in each, and what their pages are verified by."""
NEWEST = "golden_v2_xxh3_128"
"""Also of every format and component."""
DEADLINE = 1e9


def three(spec: Any = stories.MIXED, backend: str = "reference") -> tuple[Any, list[Any]]:
    """A cache of three requests: 21 tokens of a tenant's, 5 whose ids are not known, and none."""
    cache = stories.create(spec, backend, max_requests=3, max_tokens=64, max_draft_tokens=2)
    requests = [cache.admit(salt="tenant"), cache.admit(), cache.admit()]
    stories.tell(cache, {requests[0]: list(range(21))})
    with cache.step({requests[1]: 5}) as step:
        stories.feed(step, [7] * 5)
    return cache, requests


def with_checkpoints(backend: str = "reference") -> tuple[Any, Any]:
    """A cache that keeps checkpoints, and a request of it that has three."""
    cache = stories.create(stories.MIXED, backend, max_requests=2, max_tokens=64, max_draft_tokens=2, prefix="full")
    request = cache.admit(list(range(100, 121)), salt="tenant")
    for first, end in ((0, 13), (13, 21)):
        stories.tell(cache, {request: list(range(100 + first, 100 + end))})
        if end == 13:
            cache.checkpoint(request)
    return cache, request


def export(desk: Any, staged: Staged, number: int) -> tuple[bytes, bytes]:
    """(handle, file) of an export that two may read."""
    place = desk._places[number]
    place.generation, place.staged, place.deadline, place.readers = 0, staged, DEADLINE, 2
    handle = desk._handle(number)
    with tempfile.TemporaryDirectory() as folder:
        return encode_handle(handle), publish(desk, handle, folder, readers=2).read_bytes()


def files(folder: str) -> dict[str, bytes]:
    """Name -> bytes of every golden file of a folder."""
    version, digest = FOLDERS[folder]
    cache, requests = three()
    kept, request = with_checkpoints()
    desk = Exporter(cache, clock=lambda: 0.0)
    desk.name = EXPORTERS[version]
    reference = desk.name, 0, 0
    found = {"spec.json": (to_json(stories.MIXED, indent=1) + "\n").encode()}
    if version == 1:
        staged = version_1.staged(cache, requests[0], reference)
        found["blob"] = version_1.blob(cache, requests[0])
        found["blob_checkpoints"] = version_1.blob(kept, request)
        found["snapshot.kv"] = version_1.snapshot(cache, requests)
        found["snapshot_checkpoints.kv"] = version_1.snapshot(kept, [request])
    else:
        staged = stage(cache._state, requests[0], "export", export=reference, digest=digest)
        found["blob"] = blob.export(cache._state, requests[0], digest=digest)
        found["blob_checkpoints"] = blob.export(kept._state, request, digest=digest)
        found["snapshot.kv"] = snapshot.to_bytes(cache._state, requests, digest=digest)
        found["snapshot_checkpoints.kv"] = snapshot.to_bytes(kept._state, [request], digest=digest)
        quantised, (first, *_) = three(stories.STORED)
        found["blob_quantised"] = blob.export(quantised._state, first, digest=digest)
        if folder == NEWEST:
            every, one = every_format.told()
            found["blob_every_format"] = blob.export(every._state, one, digest=digest)
            found["snapshot_every_format.kv"] = snapshot.to_bytes(every._state, [one], digest=digest)
        past = stage(kept._state, request, "export", export=(desk.name, 1, 0), digest=digest)
        found["handle_checkpoints"], found[f"{desk.name}.1.kvexport"] = export(desk, past, 1)
    found["manifest"] = staged.manifest
    found["handle"], found[f"{desk.name}.0.kvexport"] = export(desk, staged, 0)
    return found


def main() -> None:
    """Write them beside the tests that read them."""
    for place in FOLDERS:
        folder = TESTS / "portable" / place
        folder.mkdir(exist_ok=True)
        for name, data in files(place).items():
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
