"""Files of version 1 that were written once and are kept: whatever comes later reads them.

One cache wrote them, of three requests: 21 tokens of a tenant's, 5 whose ids are not known, and none.
"""

import shutil
from pathlib import Path

import pytest
import stories

import kvcore
from kvcore import parity
from kvcore.handoff import FileCarrier, decode_handle, encode_handle, pull
from kvcore.portable import checkfile
from kvcore.portable.staging import parse
from kvcore.spec import from_json, to_json

FILES = Path(__file__).parent / "golden_v1"
SPEC = from_json((FILES / "spec.json").read_bytes())
FIRST, ALL = 14819178949510838875, 4192867769966869283
"""Digests of the first request and of all three, as they were where the files were written."""


def test_the_spec_is_the_one_that_was_written():
    assert SPEC.digest == stories.MIXED.digest
    assert to_json(SPEC, indent=1) + "\n" == (FILES / "spec.json").read_text()


def test_the_snapshot_is_loaded(backend):
    loaded = kvcore.load(FILES / "snapshot.kv", backend=backend)
    assert loaded.digest() == ALL
    known = [(request.length, request.tokens, request.salt) for request in loaded.requests]
    assert known == [(21, tuple(range(21)), "tenant"), (5, None, None), (0, (), None)]
    assert (loaded.plan.slots, loaded.plan.max_tokens, loaded.plan.max_draft_tokens) == (3, 64, 2)
    assert checkfile.check(FILES / "snapshot.kv")["whole"]


def test_the_blob_is_imported(backend):
    cache = stories.create(SPEC, backend, prefix="zero")
    moved = cache.import_request((FILES / "blob").read_bytes(), salt="tenant")
    assert cache.digest([moved]) == FIRST
    assert (moved.length, moved.tokens, moved.salt) == (21, tuple(range(21)), "tenant")


def test_the_export_is_pulled(backend, tmp_path):
    data = (FILES / "handle").read_bytes()
    handle = decode_handle(data)
    assert encode_handle(handle) == data
    for file in FILES.glob("*.kvexport"):
        shutil.copy(file, tmp_path)
    cache = stories.create(SPEC, backend)
    moved = pull(cache, handle, FileCarrier(tmp_path, clock=lambda: 0.0))
    assert cache.digest([moved]) == FIRST
    assert moved.tokens == tuple(range(21))
    manifest = parse((FILES / "manifest").read_bytes(), handle.root)
    assert (manifest.version, manifest.length, manifest.salt) == (1, 21, "tenant")
    # It was for two readers.
    pull(cache, handle, FileCarrier(tmp_path, clock=lambda: 0.0))
    with pytest.raises(kvcore.errors.TransferError, match="not pulled yet"):
        pull(cache, handle, FileCarrier(tmp_path, clock=lambda: 0.0))


def test_the_record_is_read():
    report = parity.read(FILES / "record.json")
    assert [record.status for record in report.checks] == ["agree"] * 3
    assert report.runs[0].backend == "torch_triton"
    assert len(report.quality) == 2
