"""Export and import: between backends, layouts and sizes, with nothing lost, and refused with a reason otherwise."""

import itertools
import json

import msgspec
import pytest

import kvcore
from kvcore.errors import OutOfBlocks, OutOfSlots, RequestError, RollbackError, SnapshotError
from kvcore.portable.rows import read_rows, write_rows
from kvcore.spec import CacheSpec
from tests.support import hand_over, portable_form, scene, stories, version_1
from tests.support.backends_under_test import BACKENDS
from tests.support.stories import LATENT, MIXED, STORED

TOKENS = list(range(400, 460))
LAYOUTS = ("packed", "planar", "tpu_tile")


def exported(spec, backend, count=41, **sizes):
    cache = stories.create(spec, backend, **sizes)
    cache.admit()
    request = cache.admit()
    stories.tell(cache, {request: TOKENS[:30]})
    stories.tell(cache, {request: TOKENS[30:count]})
    return cache, request, cache.export_request(request)


@pytest.mark.sampled
@pytest.mark.parametrize("spec", [LATENT, MIXED, STORED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", BACKENDS)
def test_a_request_moves_in_mid_generation(backend, target, layout, spec):
    cache, request, blob = exported(spec, backend)
    other = stories.create(spec, target, layout=layout, max_requests=3, max_tokens=128)
    for _ in range(2):
        stories.tell(other, {other.admit(): [1] * 13})
    moved = other.import_request(blob)
    assert moved.tokens == tuple(TOKENS[:41])
    assert other.digest([moved]) == cache.digest([request])
    # An export of the import is the same bytes.
    assert other.export_request(moved) == blob
    # Generation goes on identically: on the same backend always, on another wherever nothing is computed.
    for new in ([1], [2, 3, 4], [5] * 17):
        stories.tell(cache, {request: new})
        stories.tell(other, {moved: new})
    if target == backend or spec is STORED:
        assert other.digest([moved]) == cache.digest([request])
    # And home again.
    home = cache.import_request(other.export_request(moved))
    assert cache.digest([home]) == other.digest([moved])


@pytest.mark.parametrize("route", list(itertools.permutations(BACKENDS * 2, 3)), ids="-".join)
def test_a_chain_of_moves_equals_staying(route):
    stayed = stories.create(STORED, route[0])
    request = stayed.admit()
    blob = None
    for number, backend in enumerate(route):
        cache = stories.create(STORED, backend, layout=LAYOUTS[number])
        moved = cache.admit() if blob is None else cache.import_request(blob)
        piece = TOKENS[13 * number : 13 * number + 13]
        stories.tell(cache, {moved: piece})
        stories.tell(stayed, {request: piece})
        assert cache.digest([moved]) == stayed.digest([request])
        blob = cache.export_request(moved)


@pytest.mark.parametrize("spec", hand_over.SPECS.values(), ids=lambda spec: spec.name)
@pytest.mark.parametrize("backends", [*itertools.product(BACKENDS, repeat=3)], ids=" to ".join)
def test_a_hand_over_travels_as_the_bytes_written_down(spec, backends):
    assert hand_over.route(spec, backends) == hand_over.BLOBS[spec.name]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 16, 40])
def test_requests_of_every_length_move(backend, count):
    cache, request, blob = exported(LATENT, backend, max(count, 30))
    if count < 30:
        cache.release(request)
        request = cache.admit()
        if count:
            stories.tell(cache, {request: TOKENS[:count]})
        blob = cache.export_request(request)
    other = stories.create(LATENT, backend)
    moved = other.import_request(blob)
    assert (moved.length, other.digest([moved])) == (count, cache.digest([request]))
    stories.tell(other, {moved: TOKENS[count : count + 9]})
    assert other.digest([moved]) == stories.retell(backend, LATENT, TOKENS[: count + 9])


@pytest.mark.sampled
@pytest.mark.parametrize("spec", [LATENT, MIXED], ids=lambda spec: spec.name)
def test_an_import_can_be_rolled_back_as_far_as_the_original(backend, spec):
    for high, length in ((41, 41), (41, 39), (44, 44), (48, 48), (49, 48), (20, 18)):
        cache = stories.create(spec, backend, max_draft_tokens=4)
        request = cache.admit()
        stories.tell(cache, {request: TOKENS[: high - 12]})
        stories.tell(cache, {request: TOKENS[high - 12 : high]})
        cache.truncate(request, length)
        blob = cache.export_request(request)
        for rollback in (4, 2, 0):
            other = stories.create(spec, backend, max_draft_tokens=rollback)
            moved = other.import_request(blob)
            deepest = max(high - 4, length - rollback)
            with pytest.raises(RollbackError, match=f"{deepest} to {length}"):
                other.truncate(moved, deepest - 1)
            other.truncate(moved, deepest)
            assert other.digest([moved]) == stories.retell(backend, spec, TOKENS[:deepest])
            stories.tell(other, {moved: [9] * 5})
            assert other.digest([moved]) == stories.retell(backend, spec, [*TOKENS[:deepest], *[9] * 5])


def test_an_export_is_a_finished_copy(backend):
    cache, request, blob = exported(LATENT, backend)
    before = bytes(blob)
    stories.tell(cache, {request: [3] * 20})
    cache.release(request)
    scene.poison(cache)
    assert blob == before
    for kind in (bytes, bytearray, memoryview):
        other = stories.create(LATENT, backend)
        assert other.digest([other.import_request(kind(blob))]) == stories.retell(backend, LATENT, TOKENS[:41])


def test_preempted_requests_resume_where_they_were(backend, rng):
    cache = stories.create(MIXED, backend, max_requests=2, max_tokens=96)
    histories = {number: [] for number in range(5)}
    parked = dict.fromkeys(histories)
    for _ in range(30):
        pair = rng.permutation(5)[:2].tolist()
        running = {number: cache.import_request(parked[number]) if parked[number] else cache.admit() for number in pair}
        new = {number: rng.integers(0, 99, size=int(rng.integers(0, 4))).tolist() for number in pair}
        stories.tell(cache, {running[number]: new[number] for number in pair})
        for number, request in running.items():
            histories[number] += new[number]
            parked[number] = cache.export_request(request)
            cache.release(request)
        assert (cache.free_slots, cache.free_blocks) == (2, 12)
    for number, history in histories.items():
        request = cache.import_request(parked[number])
        assert cache.digest([request]) == stories.retell(backend, MIXED, history)
        cache.release(request)


def test_into_a_waiting_request(backend):
    cache, _, blob = exported(LATENT, backend)
    waiting = cache.admit()
    assert cache.import_request(blob, into=waiting) is waiting
    assert cache.digest([waiting]) == stories.retell(backend, LATENT, TOKENS[:41])
    with pytest.raises(RequestError, match="without tokens"):
        cache.import_request(blob, into=waiting)
    cache.release(waiting)
    with pytest.raises(RequestError):
        cache.import_request(blob, into=waiting)


def test_without_room_an_import_changes_nothing(backend):
    _, _, blob = exported(MIXED, backend)
    small = stories.create(MIXED, backend, max_tokens=40)
    full = stories.create(MIXED, backend, max_requests=1)
    full.admit()
    busy = stories.create(MIXED, backend, max_tokens=64, max_requests=2)
    stories.tell(busy, {busy.admit(): [1] * 30})
    for cache, error in ((small, OutOfBlocks), (full, OutOfSlots), (busy, OutOfBlocks)):
        before = cache.digest(), cache.free_slots, cache.free_blocks, cache.requests
        with pytest.raises(error):
            cache.import_request(blob)
        assert (cache.digest(), cache.free_slots, cache.free_blocks, cache.requests) == before


def test_other_specs_are_refused_by_their_first_difference(backend):
    _, _, blob = exported(LATENT, backend)
    layers = list(LATENT.layers)
    others = {
        "block_tokens = 16 instead of 8": CacheSpec(layers=layers, block_tokens=8),
        r"layers\[3\].window.window = 7 instead of 6": CacheSpec(
            layers=[*layers[:3], scene.ring(6, format="fp16")], block_tokens=16
        ),
        "layers: 4 items instead of 3": CacheSpec(layers=layers[:3], block_tokens=16),
        r"layers\[0\].entries.format = 'fp32' instead of 'bf16'": CacheSpec(
            layers=[
                msgspec.structs.replace(layers[0], entries=msgspec.structs.replace(layers[0].entries, format="bf16")),
                layers[1],
                msgspec.structs.replace(layers[2], entries=msgspec.structs.replace(layers[2].entries, format="bf16")),
                layers[3],
            ],
            block_tokens=16,
        ),
    }
    for difference, spec in others.items():
        cache = stories.create(spec, backend)
        with pytest.raises(SnapshotError, match=difference):
            cache.import_request(blob)
        assert (cache.requests, cache.free_slots) == ((), 4)
    # A name is for people.
    renamed = stories.create(msgspec.structs.replace(LATENT, name="another"), backend)
    assert renamed.import_request(blob).length == 41


def test_what_is_missing_too_much_or_damaged_is_refused(backend):
    cache, request, blob = exported(LATENT, backend)
    manifest, pages = portable_form.opened(blob)
    size = manifest["page_bytes"]

    def told(**changes):
        return portable_form.sealed({**manifest, **changes}, pages)

    def said(**changes):
        return told(request={**manifest["request"], **changes})

    def placed(change):
        layout = json.loads(json.dumps(manifest["layout"]))
        change(layout)
        return told(layout=layout)

    swapped = pages[size : 2 * size] + pages[:size] + pages[2 * size :]
    assert swapped != pages
    bad = {
        "not a blob": b"\x93abc",
        "empty": b"",
        "text": "blob",
        "the head alone": blob[:48],
        "half of it": blob[: len(blob) // 2],
        "more than it": blob + b"\0",
        "a page more": blob + bytes(size),
        "another version": blob[:7] + b"\x03" + blob[8:],
        "another version inside": told(version=3),
        "a version of 0.1.0": told(version=1),
        "another form": told(form="kvcore.snapshot"),
        "something more": told(more=1),
        "no pages": portable_form.sealed(manifest),
        "a page less": portable_form.digested({**manifest, "pages": manifest["pages"] - 1}, pages[:-size]),
        "pages of other sizes": told(page_bytes=size // 2, pages=2 * manifest["pages"]),
        "pages of nothing": told(page_bytes=0),
        "pages of less than nothing": told(page_bytes=-size),
        "a digest missing": told(digests=manifest["digests"][1:]),
        "digests of other sizes": told(digests=[one[2:] for one in manifest["digests"]]),
        "digests of another kind": told(digest="lanes"),
        "digests that are no numbers": told(digests=["x" * 64 for _ in manifest["digests"]]),
        "pages out of order": portable_form.sealed(manifest, swapped),
        "no layout": told(layout={"components": [], "sections": []}),
        "a component missing": placed(lambda layout: layout["components"].pop()),
        "rows elsewhere": placed(lambda layout: layout["sections"][0]["strips"][0].update(start=1)),
        "an unknown role": placed(lambda layout: layout["sections"][0]["strips"][0].update(role="7.tail")),
        "rows of other widths": placed(lambda layout: layout["components"][0].update(row_bytes=1)),
        "other rows": placed(lambda layout: layout["sections"][1]["strips"][0].update(numbers=[[0, 8]])),
        "another length": said(length=manifest["request"]["length"] + 4, tokens=None),
        "a negative length": said(length=-1, floor=-1, tokens=None),
        "another floor": said(floor=0),
        "ids of another length": said(tokens=manifest["request"]["tokens"][:-1]),
    }
    assert portable_form.sealed(manifest, pages) == portable_form.digested(manifest, pages) == blob
    assert portable_form.sealed(json.dumps(manifest, indent=2).encode(), pages) != blob
    before = scene.raw(cache), cache.digest(), cache.free_slots, cache.free_blocks
    for what, data in bad.items():
        with pytest.raises(SnapshotError):
            cache.import_request(data)
        assert (scene.raw(cache), cache.digest(), cache.free_slots, cache.free_blocks) == before, what
    with pytest.raises(SnapshotError, match="page 0"):
        cache.import_request(bad["pages out of order"])
    # However the JSON is written.
    spaced = cache.import_request(portable_form.sealed(json.dumps(manifest, indent=2).encode(), pages))
    assert cache.digest([spaced]) == cache.digest([request])
    cache.release(request)


def test_what_is_missing_too_much_or_damaged_is_refused_in_version_1(backend):
    cache, request, _ = exported(LATENT, backend)
    fields = version_1.blob_fields(cache, request)
    rows, digests = fields["rows"], fields["digests"]
    name = "0.index_tail"
    swapped = rows["0.tail"][512:] + rows["0.tail"][:512]
    assert swapped != rows["0.tail"]

    def told(**changes):
        return version_1.signed(fields | changes)

    good = version_1.blob(cache, request)
    bad = {
        "half of it": good[: len(good) // 2],
        "more than it": good + b"\0",
        "another version": told(version=2),
        "a version to come": told(version=3),
        "a component missing": told(rows={key: rows[key] for key in rows if key != name}),
        "its digest missing": told(digests={key: digests[key] for key in rows if key != name}),
        "an unknown component": told(rows={**rows, "7.tail": b""}),
        "a row less": told(rows={**rows, name: rows[name][:-128]}),
        "rows out of order": told(rows={**rows, "0.tail": swapped}),
        "another length": told(length=fields["length"] + 4),
        "a negative length": told(length=-1, floor=-1),
        "ids of another length": told(tokens=fields["tokens"][:-1]),
    }
    before = scene.raw(cache), cache.digest(), cache.free_slots, cache.free_blocks
    for what, data in bad.items():
        with pytest.raises(SnapshotError):
            cache.import_request(data)
        assert (scene.raw(cache), cache.digest(), cache.free_slots, cache.free_blocks) == before, what
    with pytest.raises(SnapshotError, match=r"0\.index_tail"):
        cache.import_request(bad["a component missing"])
    assert cache.digest([cache.import_request(good)]) == cache.digest([request])


@pytest.mark.parametrize("version", [1, 2])
def test_every_flipped_bit_of_a_blob_is_noticed(backend, rng, version):
    source, request, blob = exported(LATENT, backend, 37)
    blob = blob if version == 2 else version_1.blob(source, request)
    cache = stories.create(LATENT, backend)
    for bit in rng.integers(8 * len(blob), size=300).tolist():
        damaged = bytearray(blob)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SnapshotError):
            cache.import_request(damaged)
    assert cache.free_slots == 4
    assert isinstance(cache.import_request(blob), kvcore.Request)


def test_no_two_rows_are_written_to_one_place(monkeypatch):
    """A ring that is shorter than the one that the rows come from: in parallel any of them could win."""
    source = stories.create(LATENT, "reference", max_draft_tokens=4)
    request = source.admit()
    stories.tell(source, {request: TOKENS[:41]})
    target = stories.create(LATENT, "reference", max_draft_tokens=0)
    written = []
    store = target._state.ops.store_rows

    def watched(pools, layer, role, index, raw):
        region = target.plan.region(layer, role)[0]
        if region.growth == "slot":
            places = [position % region.rows for position in kvcore.to_numpy(raw.positions)[0].tolist()]
            written.append(places)
        return store(pools, layer, role, index, raw)

    monkeypatch.setattr(target._state.ops, "store_rows", watched)
    floor = source._state.least_length(request)
    content = read_rows(source._state.ops, source.pools, source._state.row(request), floor)
    row = target._state.row(target.admit())._replace(start=41, blocks=list(range(3)))
    write_rows(target._state.ops, target.pools, row, content)
    assert written
    assert all(len(set(places)) == len(places) for places in written)
