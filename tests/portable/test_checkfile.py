"""``kvcore check``: what it prints and how it exits."""

import json

import pytest

from kvcore.cli import main
from kvcore.errors import SnapshotError
from kvcore.portable import checkfile
from tests.support import portable_form, stories, version_1, write_golden
from tests.support.stories import LATENT


@pytest.fixture
def saved(tmp_path):
    cache = stories.create(LATENT, "reference")
    for length in (41, 0, 7):
        request = cache.admit()
        if length:
            stories.tell(cache, {request: list(range(length))})
    cache.save(tmp_path / "cache.kv")
    return tmp_path / "cache.kv"


def damage(path, *pieces):
    """Change the first byte of a component's rows in some requests' sections."""
    data = bytearray(path.read_bytes())
    _, blobs = portable_form.blobs_of(data)
    for number, section, component in pieces:
        data[data.index(blobs[number]) + portable_form.place_of(blobs[number], section, component)] ^= 1
    path.write_bytes(data)


def test_a_whole_file(saved, capsys):
    assert main(["check", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "3 requests" in out
    assert "whole" in out
    assert LATENT.digest[:16] in out


def test_damaged_pages_are_named(saved, capsys):
    damage(saved, (0, "history", "0.entries"), (2, "record", "3.window"))
    assert main(["check", str(saved)]) == 1
    out = capsys.readouterr().out
    assert "damaged: request 0: page 0" in out
    assert "damaged: request 2: the record" in out
    assert "1 of 3 requests are whole" in out


def test_json(saved, capsys):
    damage(saved, (2, "record", "1.tail"))
    assert main(["check", str(saved), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["whole"], found["spec"], found["spec_digest"]) == (False, "latent", LATENT.digest)
    assert [request["tokens"] for request in found["requests"]] == [41, 0, 7]
    assert [request["damaged"] for request in found["requests"]] == [[], [], ["request 2: the record"]]


@pytest.mark.parametrize("content", [None, b"", b"text, and no snapshot", b"\x08" + bytes(40)], ids=repr)
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_what_is_no_snapshot(tmp_path, capsys, content, flags):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    assert main(["check", str(path), *flags]) == 2
    printed = capsys.readouterr()
    if flags:
        assert json.loads(printed.out)["whole"] is False
    else:
        assert str(path) in printed.err


def test_a_damaged_manifest_costs_its_request(saved, capsys):
    data = bytearray(saved.read_bytes())
    _, blobs = portable_form.blobs_of(data)
    data[data.index(blobs[2]) + 60] ^= 1
    saved.write_bytes(data)
    assert main(["check", str(saved), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [request["tokens"] for request in found["requests"]] == [41, 0, None]
    assert found["requests"][2]["damaged"] == ["request 2: manifest (a damaged head)"]


def test_a_damaged_directory_is_no_snapshot_to_trust(saved):
    data = bytearray(saved.read_bytes())
    data[60] ^= 1
    saved.write_bytes(data)
    assert main(["check", str(saved)]) == 2


def test_a_file_of_version_1(tmp_path, capsys):
    cache = stories.create(LATENT, "reference")
    requests = [cache.admit() for _ in range(2)]
    stories.tell(cache, {requests[0]: list(range(41)), requests[1]: [1, 2]})
    path = tmp_path / "old.kv"
    path.write_bytes(version_1.snapshot(cache, requests))
    assert main(["check", str(path)]) == 0
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    data[start + header["0.0.entries"]["data_offsets"][0]] ^= 1
    path.write_bytes(data)
    capsys.readouterr()
    assert main(["check", str(path)]) == 1
    assert "damaged: request 0: 0.entries page 0" in capsys.readouterr().out
    data[start + header["0.0.entries.digest"]["data_offsets"][0]] ^= 1
    path.write_bytes(data)
    assert main(["check", str(path)]) == 2


def test_a_blob_is_checked_as_a_snapshot_is(tmp_path):
    cache, (request, *_) = write_golden.three()
    path, data = tmp_path / "blob", bytearray(cache.export_request(request))
    path.write_bytes(data)
    assert checkfile.check(path)["requests"] == [{"request": 0, "tokens": 21, "damaged": []}]
    data[-70] ^= 1
    path.write_bytes(data)
    found = checkfile.check(path)
    assert (found["whole"], len(found["requests"][0]["damaged"])) == (False, 1)
    for bad, said in ((bytes(data[:200]), "whole file"), (bytes(data[:60]) + b"x" + bytes(data[61:]), "head")):
        path.write_bytes(bad)
        with pytest.raises(SnapshotError, match=said):
            checkfile.check(path)
    path.write_bytes(data[:-64])
    with pytest.raises(SnapshotError, match="pages"):
        checkfile.check(path)
