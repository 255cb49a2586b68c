"""Checkpoints go where their requests go: what a prompt finds in one cache it finds in the next."""

import msgspec
import pytest

import kvcore
from kvcore.errors import SnapshotError, TransferError
from kvcore.handoff import Direct, Exporter, pull
from kvcore.portable.manifest import root_of
from kvcore.portable.pages import page_layout
from kvcore.portable.rows import state_at
from tests.support import portable_form, stories, version_1
from tests.support.backends_under_test import BACKENDS
from tests.support.stories import LATENT, MIXED, PAGED

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
@pytest.mark.parametrize("target", BACKENDS)
def test_they_come_with_a_pull_as_far_as_they_can_be_found(backend, target, spec):
    cache, request = told(spec, backend)
    wanted = found(cache)
    desk = Exporter(cache)
    handle = desk.export(request, readers=9)
    pulled = stories.create(spec, target, prefix="full", layout="planar")
    moved = pull(pulled, handle, Direct(desk), salt="a", chunk_pages=2)
    assert pulled.digest([moved]) == cache.digest([request])
    assert found(pulled) == wanted
    if target == backend:
        check_hits(pulled, backend, spec)
    # And on from there, by another way.
    home = stories.create(spec, backend, prefix="full")
    home.import_request(pulled.export_request(moved), salt="a")
    assert found(home) == wanted
    # Nobody could find them: their pages are not asked for.
    for policy, salt in (("full", None), ("off", "a")):
        other = stories.create(spec, target, prefix=policy)
        counting = Counting(desk)
        assert other.digest([pull(other, handle, counting, salt=salt)]) == cache.digest([request])
        lengths = [length for length, _ in cache._state.kept_states(request)]
        layout = page_layout(spec, cache._state.least_length(request), 45, lengths)
        past = sum(section.pages for section in layout.checkpoints)
        assert counting.asked == handle.pages - past
        assert set(found(other)) == {0}


LENGTHS = (13, 16, 32)
"""Of the checkpoints of ``told`` where blocks have 16 tokens."""


class Counting(Direct):
    """Says how many pages were asked for."""

    def __init__(self, desk):
        super().__init__(desk)
        self.asked = 0

    def fetch(self, handle, first, into, *, timeout):
        self.asked += len(into)
        super().fetch(handle, first, into, timeout=timeout)


def test_no_more_come_than_are_kept(backend):
    cache = stories.create(LATENT, backend, prefix="full")
    request = cache.admit(PROMPT, salt="a")
    for token in range(45):
        stories.tell(cache, {request: PROMPT[token : token + 1]})
        cache.checkpoint(request)
    desk = Exporter(cache)
    handle = desk.export(request)
    other = stories.create(LATENT, backend, prefix="full", max_requests=1, max_tokens=48)
    assert other._state.prefix.capacity == 7 < 45
    counting = Counting(desk)
    pull(other, handle, counting, salt="a", chunk_pages=3)
    assert counting.asked < handle.pages
    hits = [length for length in range(46) if other.restorable(PROMPT, length, salt="a").length == length]
    assert hits == [0, *range(39, 46)]


@SPECS
def test_they_may_be_left_behind(backend, spec, tmp_path):
    cache, request = told(spec, backend)
    plain = stories.create(spec, backend, max_draft_tokens=2)
    plain.admit()
    same = plain.admit(salt="a")
    for start, end in ((0, 13), (13, 40), (40, 45)):
        stories.tell(plain, {same: PROMPT[start:end]})
    blob = cache.export_request(request, checkpoints=False)
    assert blob == plain.export_request(same)
    cache.save(tmp_path / "one.kv", [request], checkpoints=False)
    assert portable_form.blobs_of((tmp_path / "one.kv").read_bytes())[1] == [blob]
    desk = Exporter(cache)
    handle = desk.export(request, checkpoints=False)
    other, pulled = (stories.create(spec, backend, prefix="full") for _ in range(2))
    other.import_request(blob, salt="a")
    pull(pulled, handle, Direct(desk), salt="a")
    loaded = kvcore.load(tmp_path / "one.kv", backend=backend, prefix="full")
    assert found(other) == found(loaded) == found(pulled)
    assert max(found(other)) == (40 if spec is PAGED else 0)


def test_without_a_salt_nothing_is_found(backend):
    cache, request = told(LATENT, backend)
    other = stories.create(LATENT, backend, prefix="full")
    other.import_request(cache.export_request(request))
    assert [set(found(other, salt)) for salt in (None, "a")] == [{0}, {0}]
    assert other._state.prefix.checkpoints == 0


def of_version_1(cache, request, change=list):
    """A blob of version 1 with its checkpoints changed and its root made to match."""
    fields = version_1.blob_fields(cache, request)
    return version_1.signed({**fields, "checkpoints": change(fields["checkpoints"])})


BAD_1 = {
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


def lengths(*told):
    """A manifest whose checkpoints are at other lengths."""
    return lambda manifest: manifest["request"].update(checkpoints=list(told))


BAD_2 = {
    "beyond the request": lengths(13, 16, 46),
    "at nothing": lengths(0, 16, 32),
    "negative": lengths(-1, 16, 32),
    "huge": lengths(13, 16, 2**62),
    "twice": lengths(13, 13, 32),
    "out of order": lengths(32, 16, 13),
    "of another length": lengths(2, 16, 32),
    "fewer": lengths(13, 16),
    "more": lengths(13, 14, 16, 32),
    "a million": lengths(*range(1, 1_000_000)),
    "no lengths": lengths([3], [16], [32]),
    "without digests": lambda manifest: manifest.update(digests=manifest["digests"][:-1]),
    "with other digests": lambda manifest: manifest["digests"].reverse(),
    "elsewhere": lambda manifest: manifest["layout"]["sections"][-1].update(first=0),
    "without pages": lambda manifest: manifest["layout"]["sections"].pop(),
}


@pytest.mark.parametrize(("version", "name"), [*((1, name) for name in BAD_1), *((2, name) for name in BAD_2)], ids=str)
def test_hostile_checkpoints_are_refused_and_change_nothing(backend, version, name):
    cache, request = told(LATENT, backend)
    blob = cache.export_request(request)
    assert portable_form.opened(blob)[0]["request"]["checkpoints"] == list(LENGTHS)
    bad = of_version_1(cache, request, BAD_1[name]) if version == 1 else portable_form.changed(blob, BAD_2[name])
    other = stories.create(LATENT, backend, prefix="full")
    free = other.free_slots, other.free_blocks
    with pytest.raises((SnapshotError, kvcore.OutOfBlocks)):
        other.import_request(bad, salt="a")
    assert ((other.free_slots, other.free_blocks), other._state.prefix.checkpoints) == (free, 0)
    whole = of_version_1(cache, request) if version == 1 else portable_form.changed(blob, lambda _: None)
    assert other.import_request(whole, salt="a").length == 45


@pytest.mark.parametrize("name", BAD_2)
def test_hostile_checkpoints_of_a_manifest_are_refused(name):
    cache, request = told(LATENT, "reference")
    desk = Exporter(cache)
    handle = desk.export(request, readers=9)
    manifest = msgspec.json.decode(desk.manifest(handle.exporter, handle.number, handle.generation))
    BAD_2[name](manifest)
    lie = msgspec.json.encode(manifest)

    class Lying(Direct):
        def manifest(self, *_, **__):
            return lie

    other = stories.create(LATENT, "reference", prefix="full")
    with pytest.raises((TransferError, kvcore.OutOfBlocks)):
        pull(other, msgspec.structs.replace(handle, root=root_of(lie)), Lying(desk), salt="a")
    assert (other.requests, other._state.prefix.checkpoints) == ((), 0)


def test_a_damaged_checkpoint_of_a_file_is_named(backend, tmp_path):
    cache, request = told(LATENT, backend)
    path = tmp_path / "cache.kv"
    cache.save(path, [request])
    data = bytearray(path.read_bytes())
    _, (blob,) = portable_form.blobs_of(data)
    data[data.index(blob) + portable_form.place_of(blob, "checkpoint 13", "0.window")] ^= 1
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match=r"request 0: checkpoint 13"):
        kvcore.load(path, backend=backend)
    path.write_bytes(version_1.snapshot(cache, [request]))
    data = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    header = msgspec.json.decode(data[8:end])
    data[end + header["0.at.13.0.window"]["data_offsets"][0]] ^= 1
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match=r"checkpoint 13, 0\.window page 0"):
        kvcore.load(path, backend=backend)


def test_a_damaged_checkpoint_is_named_by_a_pull(backend):
    cache, request = told(LATENT, backend)
    desk = Exporter(cache)
    handle = desk.export(request, readers=2)
    last = page_layout(LATENT, cache._state.least_length(request), 45, LENGTHS).checkpoints[1]

    class Damaging(Direct):
        def fetch(self, handle, first, into, *, timeout):
            super().fetch(handle, first, into, timeout=timeout)
            if first <= last.first < first + len(into):
                into[last.first - first, 0] ^= 1

    other = stories.create(LATENT, backend, prefix="full")
    with pytest.raises(TransferError, match="checkpoint 16"):
        pull(other, handle, Damaging(desk), salt="a")
    assert (other.requests, other._state.prefix.checkpoints) == ((), 0)
    assert other.digest([pull(other, handle, Damaging(desk))]) == cache.digest([request])


def test_a_checkpoint_holds_no_block_that_is_found_anyway(backend):
    """Of what is paged, the rows behind the last whole block; the rest is in blocks that the prefix shares."""
    cache = stories.create(MIXED, backend)
    request = cache.admit()
    stories.tell(cache, {request: PROMPT[:21]})
    state = state_at(cache._state.ops, cache.pools, cache._state.row(request), 21, {})
    whole = 21 // MIXED.block_tokens * MIXED.block_tokens
    paged = 0
    for (layer, role), held in state.items():
        component = getattr(MIXED.all_layers[layer], role)
        if not component.in_checkpoint:
            assert len(held.positions) == len(component.live(21)) - whole // component.tokens_per_row
            paged += 1
    assert paged
