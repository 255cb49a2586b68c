"""Checkpoints go where their requests go: what a prompt finds in one cache it finds in the next."""

import msgspec
import pytest
import stories
from backends_under_test import BACKENDS
from stories import LATENT, MIXED, PAGED

import kvcore
from kvcore.errors import SnapshotError
from kvcore.portable.blob import BlobWithCheckpoints, _root

PROMPT = list(range(100, 145))
SPECS = pytest.mark.parametrize("spec", [LATENT, MIXED, PAGED], ids=lambda spec: spec.name)


def told(spec, backend, policy="full"):
    """A request in pieces that end anywhere, one checkpoint of it at a length of its own."""
    cache = stories.create(spec, backend, prefix=policy, max_draft_tokens=2)
    cache.admit()
    request = cache.admit(PROMPT, salt="a")
    for start, end in ((0, 13), (13, 40), (40, 45)):
        stories.tell(cache, {request: PROMPT[start:end]})
        if end == 13:
            cache.checkpoint(request)
    return cache, request


def found(cache, salt="a"):
    """How much of every beginning of the prompt can be taken over."""
    return [cache.restorable(PROMPT, n, salt=salt).length for n in range(len(PROMPT) + 1)]


def check_hits(cache, backend, spec):
    for end in (14, 17, 33, 45):
        hit = cache.admit(PROMPT[:end], salt="a")
        length = hit.length
        assert length == hit.cached_tokens > 0
        # What replays is not complete yet.
        if cache._state.row(hit).stored <= length:
            assert cache.digest([hit]) == stories.retell(backend, spec, PROMPT[:length])
        stories.tell(cache, {hit: PROMPT[length:45]})
        assert cache.digest([hit]) == stories.retell(backend, spec, PROMPT)
        cache.release(hit)


@SPECS
@pytest.mark.parametrize("policy", ["full", kvcore.Periodic(8), "zero"], ids=str)
@pytest.mark.parametrize("target", BACKENDS)
def test_what_is_found_at_the_source_is_found_after_a_move(backend, target, spec, policy, tmp_path):
    cache, request = told(spec, backend, policy)
    wanted = found(cache)
    assert max(wanted) >= 32 or policy != "full"
    imported = stories.create(spec, target, prefix=policy, layout="planar")
    imported.import_request(cache.export_request(request), salt="a")
    cache.save(tmp_path / "cache.kv", [request])
    loaded = kvcore.load(tmp_path / "cache.kv", backend=target, prefix=policy)
    assert found(imported) == found(loaded) == wanted
    assert set(found(imported, None) + found(loaded, None)) == {0}
    # On another backend what is computed after a hit may differ in the last bit; what is moved may not.
    if target == backend:
        check_hits(imported, backend, spec)
        check_hits(loaded, backend, spec)
    # And on from there.
    again = kvcore.load(tmp_path / "cache.kv", backend=target, prefix=policy)
    home = stories.create(spec, backend, prefix=policy)
    home.import_request(again.export_request(again.requests[0]), salt="a")
    assert found(home) == wanted


@SPECS
def test_they_may_be_left_behind_and_then_the_bytes_are_those_of_version_1(backend, spec, tmp_path):
    cache, request = told(spec, backend)
    plain = stories.create(spec, backend, max_draft_tokens=2)
    plain.admit()
    same = plain.admit()
    for start, end in ((0, 13), (13, 40), (40, 45)):
        stories.tell(plain, {same: PROMPT[start:end]})
    blob = cache.export_request(request, checkpoints=False)
    fields = msgspec.msgpack.decode(blob)
    assert fields["version"] == 1
    assert fields["rows"] == msgspec.msgpack.decode(plain.export_request(same))["rows"]
    assert msgspec.msgpack.decode(cache.export_request(request))["version"] == 2
    cache.save(tmp_path / "one.kv", [request], checkpoints=False)
    assert b'"kvcore.snapshot":"1"' in (tmp_path / "one.kv").read_bytes()
    cache.save(tmp_path / "two.kv", [request])
    assert b'"kvcore.snapshot":"2"' in (tmp_path / "two.kv").read_bytes()
    other = stories.create(spec, backend, prefix="full")
    other.import_request(blob, salt="a")
    loaded = kvcore.load(tmp_path / "one.kv", backend=backend, prefix="full")
    assert found(other) == found(loaded)
    assert max(found(other)) == (40 if spec is PAGED else 0)


def test_without_a_salt_nothing_is_found(backend):
    cache, request = told(LATENT, backend)
    other = stories.create(LATENT, backend, prefix="full")
    other.import_request(cache.export_request(request))
    assert [set(found(other, salt)) for salt in (None, "a")] == [{0}, {0}]
    assert other._state.prefix.checkpoints == 0


def signed(blob, change):
    """The blob with its fields changed and its root made to match."""
    fields = {name: getattr(blob, name) for name in BlobWithCheckpoints.__struct_fields__ if name != "root"}
    fields["checkpoints"] = change([msgspec.structs.asdict(one) for one in fields["checkpoints"]])
    return msgspec.msgpack.encode({**fields, "root": _root(fields)})


BAD = {
    "beyond the request": lambda past: [{**past[0], "length": 46}],
    "at nothing": lambda past: [{**past[0], "length": 0}],
    "negative": lambda past: [{**past[0], "length": -1}],
    "huge": lambda past: [{**past[0], "length": 2**62}],
    "twice": lambda past: [past[0], past[0]],
    "out of order": lambda past: past[::-1],
    "of another length": lambda past: [{**past[0], "length": 2}],
    "without rows": lambda past: [{**past[0], "rows": {}}],
    "without digests": lambda past: [{**past[0], "digests": {}}],
    "with others' rows": lambda past: [{**past[0], "rows": {**past[0]["rows"], "9.window": b"1"}}],
    "damaged": lambda past: [
        {**past[0], "rows": {name: bytes(len(rows)) for name, rows in past[0]["rows"].items()}},
    ],
    "no checkpoint": lambda _: [3],
}


@pytest.mark.parametrize("name", BAD)
def test_hostile_checkpoints_are_refused_and_change_nothing(backend, name):
    cache, request = told(LATENT, backend)
    blob = msgspec.msgpack.decode(cache.export_request(request), type=BlobWithCheckpoints)
    other = stories.create(LATENT, backend, prefix="full")
    free = other.free_slots, other.free_blocks
    with pytest.raises(SnapshotError):
        other.import_request(signed(blob, BAD[name]), salt="a")
    assert ((other.free_slots, other.free_blocks), other._state.prefix.checkpoints) == (free, 0)
    assert other.import_request(signed(blob, list), salt="a").length == 45


def test_a_damaged_checkpoint_of_a_file_is_named(backend, tmp_path):
    cache, request = told(LATENT, backend)
    path = tmp_path / "cache.kv"
    cache.save(path, [request])
    data = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    header = msgspec.json.decode(data[8:end])
    data[end + header["0.at.13.0.window"]["data_offsets"][0]] ^= 1
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match=r"checkpoint 13, 0\.window page 0"):
        kvcore.load(path, backend=backend)
