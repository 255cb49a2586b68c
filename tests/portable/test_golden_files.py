"""Files of every version that were written once and are kept: whatever comes later reads them.

``write_golden.py`` writes them. One cache, of three requests: 21 tokens of a tenant's, 5 whose ids are not known, and
none; another with one request and its checkpoints.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

import kvcore
from examples import read_portable
from kvcore import parity
from kvcore.handoff import FileTransport, decode_handle, encode_handle, pull
from kvcore.portable import checkfile
from kvcore.portable.importer import parse
from kvcore.portable.rows import read_rows
from kvcore.spec import Component, from_json, to_json
from tests.support import every_format, portable_form, stories, write_golden
from tests.support.built_in_formats import DIM

FOLDERS = {name: Path(__file__).parent / name for name in write_golden.FOLDERS}
OLDEST, *NEWER = FOLDERS.values()
FIRST, ALL = 14819178949510838875, 4192867769966869283
"""Digests of the first request and of all three, as they were where the files were written."""
PAST = 11254040812821924935
"""Of the request with checkpoints."""
EVERY = 15222897528930855973
"""Of that of every format."""
PROMPT = list(range(100, 121))


@pytest.fixture(params=FOLDERS, ids=str)
def files(request):
    return FOLDERS[request.param]


def test_the_same_bytes_are_written_again(files):
    written = {name: (files / name).read_bytes() for name in write_golden.files(files.name)}
    assert write_golden.files(files.name) == written
    kept = {file.name for file in files.iterdir()} - {"record.json"}
    assert kept == set(written)


@pytest.mark.parametrize("name", ["blob", "blob_checkpoints"])
def test_every_backend_exports_those_bytes(backend, name):
    """Of rows that are stored as they are given; others differ between backends in the last bit."""
    cache, (request, *_) = write_golden.three(stories.STORED, backend)
    assert cache.export_request(request) == (NEWER[-1] / "blob_quantised").read_bytes()
    if backend == "reference":
        made = {"blob": write_golden.three, "blob_checkpoints": write_golden.with_checkpoints}[name]()
        one = made[1][0] if name == "blob" else made[1]
        assert made[0].export_request(one) == (NEWER[-1] / name).read_bytes()


def test_the_spec_is_the_one_that_was_written(files):
    spec = from_json((files / "spec.json").read_bytes())
    assert spec.digest == stories.MIXED.digest
    assert to_json(spec, indent=1) + "\n" == (files / "spec.json").read_text()


def test_the_snapshot_is_loaded(backend, files):
    loaded = kvcore.load(files / "snapshot.kv", backend=backend)
    assert loaded.digest() == ALL
    known = [(request.length, request.tokens, request.salt) for request in loaded.requests]
    assert known == [(21, tuple(range(21)), "tenant"), (5, None, None), (0, (), None)]
    assert (loaded.plan.slots, loaded.plan.max_tokens, loaded.plan.max_draft_tokens) == (3, 64, 2)
    assert checkfile.check(files / "snapshot.kv")["whole"]


def test_the_blob_is_imported(backend, files):
    cache = stories.create(stories.MIXED, backend, prefix="zero")
    moved = cache.import_request((files / "blob").read_bytes(), salt="tenant")
    assert cache.digest([moved]) == FIRST
    assert (moved.length, moved.tokens, moved.salt) == (21, tuple(range(21)), "tenant")


def test_checkpoints_are_found(backend, files):
    imported = stories.create(stories.MIXED, backend, prefix="full")
    moved = imported.import_request((files / "blob_checkpoints").read_bytes(), salt="tenant")
    loaded = kvcore.load(files / "snapshot_checkpoints.kv", backend=backend, prefix="full")
    assert checkfile.check(files / "snapshot_checkpoints.kv")["whole"]
    for cache, request in ((imported, moved), (loaded, loaded.requests[0])):
        assert cache.digest([request]) == PAST
        lengths = [cache.restorable(PROMPT, n, salt="tenant").length for n in (8, 13, 20, 21)]
        assert lengths == [8, 13, 16, 16]
        hit = cache.admit(PROMPT[:13], salt="tenant")
        assert cache.digest([hit]) == stories.retell("reference", stories.MIXED, PROMPT[: hit.length])


def carried(files, folder, name="handle"):
    """A handle, and a carrier to a copy of what it names."""
    data = (files / name).read_bytes()
    handle = decode_handle(data)
    assert encode_handle(handle) == data
    for file in files.glob("*.kvexport"):
        shutil.copy(file, folder)
    return handle, FileTransport(folder, clock=lambda: 0.0)


def test_the_export_is_pulled(backend, files, tmp_path):
    handle, carrier = carried(files, tmp_path)
    cache = stories.create(stories.MIXED, backend)
    moved = pull(cache, handle, carrier)
    assert cache.digest([moved]) == FIRST
    assert moved.tokens == tuple(range(21))
    described = parse((files / "manifest").read_bytes(), handle.root)
    assert described.version == write_golden.FOLDERS[files.name][0]
    assert (described.record.length, described.record.salt) == (21, "tenant")
    # It was for two readers.
    pull(cache, handle, carrier)
    with pytest.raises(kvcore.errors.TransferError, match="not pulled yet"):
        pull(cache, handle, carrier)


@pytest.mark.parametrize("files", NEWER, ids=lambda folder: folder.name)
def test_the_export_with_checkpoints_is_pulled(backend, files, tmp_path):
    handle, carrier = carried(files, tmp_path, "handle_checkpoints")
    cache = stories.create(stories.MIXED, backend, prefix="full")
    assert cache.digest([pull(cache, handle, carrier, salt="tenant")]) == PAST
    assert [cache.restorable(PROMPT, n, salt="tenant").length for n in (8, 13, 21)] == [8, 13, 16]


def test_the_record_is_read():
    report = parity.read(OLDEST / "record.json")
    assert [record.status for record in report.checks] == ["agree"] * 3
    assert report.runs[0].backend == "torch_triton"
    assert len(report.quality) == 2


def golden_requests():
    """Name -> a request of a golden file, read without kvcore."""
    for folder in NEWER:
        for name in ("blob", "blob_checkpoints", "blob_quantised"):
            yield f"{folder.name} {name}", read_portable.read_blob((folder / name).read_bytes())
        for name in ("snapshot.kv", "snapshot_checkpoints.kv"):
            directory, requests = read_portable.read_snapshot((folder / name).read_bytes())
            assert directory["sizes"]["max_tokens"] == 64
            yield from ((f"{folder.name} {name} {number}", request) for number, request in enumerate(requests))
    yield "every format", read_portable.read_blob((NEWER[-1] / "blob_every_format").read_bytes())


def of_tokens(cache, request, layer):
    """Keys and values as a cache gives them to whoever attends."""
    with cache.step({request: 0}) as step:
        keys, values, _ = step.layer(layer).gather_kv()
    return {"key": kvcore.to_numpy(keys)[0], "value": kvcore.to_numpy(values)[0]}


def test_every_format_and_component_is_in_a_golden_file():
    """A format or a component that is added is added to ``every_format``, and written down."""
    written = read_portable.read_blob((NEWER[-1] / "blob_every_format").read_bytes()).manifest
    found = from_json(read_portable.json.dumps(written["spec"]))
    assert found.digest == every_format.spec().digest
    assert every_format.used(found) == {*DIM, "tail"}
    assert every_format.kinds(found) == set(kinds_of(Component))
    assert {part["format"] for one in written["layout"]["components"] for part in one["parts"]} == {*DIM, "tail"}


def kinds_of(kind):
    """Its subclasses within kvcore, that of the seam for outside code left out."""
    for one in kind.__subclasses__():
        yield from kinds_of(one)
        if one.__module__.startswith("kvcore.spec."):
            yield one


def test_a_request_of_every_format_is_imported_and_loaded(backend):
    data = (NEWER[-1] / "blob_every_format").read_bytes()
    cache = stories.create(every_format.spec(), backend, max_requests=1, max_tokens=128, max_draft_tokens=1)
    moved = cache.import_request(data)
    assert (cache.digest([moved]), cache.export_request(moved) == data) == (EVERY, True)
    loaded = kvcore.load(NEWER[-1] / "snapshot_every_format.kv", backend=backend)
    assert loaded.digest() == EVERY
    assert checkfile.check(NEWER[-1] / "snapshot_every_format.kv")["whole"]
    assert checkfile.check(NEWER[-1] / "blob_every_format")["whole"]


@pytest.mark.parametrize("read", [pytest.param(one, id=name) for name, one in golden_requests()])
def test_a_reader_without_kvcore_decodes_what_kvcore_gathers(read):
    manifest, pages = read
    spec = from_json(read_portable.json.dumps(manifest["spec"]))
    cache = stories.create(spec, "reference", prefix="full", max_draft_tokens=2)
    request = cache.import_request(portable_form.sealed(manifest, pages.tobytes()), salt="tenant")
    content = read_rows(cache.ops, cache.pools, cache._state.row(request), cache._state.least_length(request))
    past = dict(cache._state.kept_states(request))
    assert list(past) == manifest["request"]["checkpoints"]
    seen = set()
    for found in read_portable.rows(read):
        where, _, length = found.section.partition(" ")
        held = (past[int(length)] if where == "checkpoint" else content)[found.layer, found.role]
        assert found.rows.tolist() == np.asarray(held.rows).tolist()
        assert found.positions.tolist() == list(held.positions)
        component = getattr(spec.all_layers[found.layer], found.role)
        start = 0
        for part in component.parts:
            width = part.heads * part.format.row
            rows = np.ascontiguousarray(held.rows[:, start : start + width]).reshape(-1, part.format.row)
            start += width
            scale = getattr(component, "global_scale", 1.0) if part.format.global_scaled else 1.0
            decoded = cache.ops.decode(part.format, cache.asarray(rows), global_scale=scale)
            wanted = kvcore.to_numpy(decoded).astype(np.float32)
            values = read_portable.values(found)[part.name]
            if found.role == "kv" and component.ratio > 1:
                wanted = of_tokens(cache, request, found.layer)[part.name][: len(values)]
            assert np.array_equal(values.reshape(wanted.shape), wanted, equal_nan=True)
        seen.add((found.section, found.layer, found.role))
    assert len(seen) >= len(content) - sum(not len(held.positions) for held in content.values())


@pytest.mark.parametrize("folder", NEWER, ids=lambda folder: folder.name)
def test_the_reader_without_kvcore_notices_every_flipped_bit(rng, folder):
    for name, read in (("blob_checkpoints", read_portable.read_blob), ("snapshot.kv", read_portable.read_snapshot)):
        data = (folder / name).read_bytes()
        for bit in rng.integers(8 * len(data), size=200).tolist():
            bad = bytearray(data)
            bad[bit // 8] ^= 1 << bit % 8
            with pytest.raises((ValueError, KeyError)):
                read(bytes(bad))
