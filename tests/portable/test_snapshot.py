"""Snapshots: whole or not at all, verified page by page, and only what is damaged is lost."""

import errno
import fcntl
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import kvcore
from kvcore.errors import BackendError, OutOfSlots, RequestError, SnapshotError, StepError
from kvcore.portable import snapshot
from kvcore.portable.disk import Disk, write_whole
from kvcore.spec import CacheSpec
from tests.reliability.simulated_disk import Crash, SimulatedDisk
from tests.support import portable_form, scene, stories, version_1
from tests.support.stories import LATENT, MIXED, STORED

TOKENS = list(range(500, 560))
LENGTHS = (41, 0, 16, 7)
FILE = Path("/disk/cache.kv")


def filled(spec, backend, lengths=LENGTHS, **sizes):
    """A cache of requests of several lengths, in slots that are not in order."""
    cache = stories.create(spec, backend, max_requests=5, max_draft_tokens=2, **sizes)
    early = cache.admit()
    requests = [cache.admit() for _ in lengths]
    cache.release(early)
    for number, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        if length:
            stories.tell(cache, {request: _history(number, length)})
    return cache, requests


def _history(number, length):
    return [1000 * number + token for token in TOKENS[:length]]


@pytest.mark.parametrize("spec", [LATENT, MIXED, STORED], ids=lambda spec: spec.name)
def test_a_loaded_cache_holds_the_same_and_goes_on(backend, spec, tmp_path):
    cache, requests = filled(spec, backend)
    path = tmp_path / "cache.kv"
    cache.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["cache.kv"]
    loaded = kvcore.load(path, backend=backend, check=True)
    assert loaded.digest() == cache.digest()
    assert [request.length for request in loaded.requests] == list(LENGTHS)
    assert [request.tokens for request in loaded.requests] == [request.tokens for request in requests]
    assert (loaded.spec, loaded.plan.slots, loaded.plan.max_draft_tokens) == (spec, 5, 2)
    for both in zip(requests, loaded.requests, strict=True):
        for each, request in zip((cache, loaded), both, strict=True):
            stories.tell(each, {request: [1, 2, 3, 4, 5]})
            each.truncate(request, request.length - 2)
    assert loaded.digest() == cache.digest()


def test_a_snapshot_moves_between_backends_layouts_and_sizes(tmp_path):
    cache, _ = filled(LATENT, "torch_triton")
    cache.save(tmp_path / "a")
    other = kvcore.load(tmp_path / "a", backend="reference", layout="planar", max_requests=9, max_tokens=500)
    assert other.digest() == cache.digest()
    other.save(tmp_path / "b")
    again = kvcore.load(tmp_path / "b", backend="torch_triton", layout="tpu_tile", max_draft_tokens=0)
    assert again.digest() == cache.digest()
    # Everything but the sizes is the same file.
    (one, first), (two, second) = (portable_form.blobs_of((tmp_path / name).read_bytes()) for name in "ab")
    assert first == second
    assert {**one, "sizes": None} == {**two, "sizes": None}


def test_requests_that_shared_blocks_load_without_being_asked_for_room(backend, tmp_path):
    cache = stories.create(MIXED, backend, max_tokens=48)
    first = cache.admit()
    stories.tell(cache, {first: TOKENS[:33]})
    for _ in range(3):
        cache.fork(first)
    cache.save(tmp_path / "cache.kv")
    loaded = kvcore.load(tmp_path / "cache.kv", backend=backend)
    assert loaded.digest() == cache.digest()
    assert (cache.plan.blocks, loaded.plan.blocks) == (6, 20)
    assert kvcore.load(tmp_path / "cache.kv", backend=backend, requests=[0]).plan.blocks == 6


def test_equal_caches_give_equal_files(backend, tmp_path):
    for name, layout in (("a", "packed"), ("b", "packed"), ("c", "planar")):
        filled(STORED, backend, layout=layout)[0].save(tmp_path / name)
    filled(STORED, "reference")[0].save(tmp_path / "d")
    assert len({(tmp_path / name).read_bytes() for name in "abcd"}) == 1


def test_chosen_requests_in_the_order_wanted(backend, tmp_path):
    cache, (a, b, c, d) = filled(LATENT, backend)
    cache.save(tmp_path / "all")
    cache.save(tmp_path / "some", [d, a])
    some = kvcore.load(tmp_path / "some", backend=backend)
    assert some.digest() == cache.digest([d, a])
    chosen = kvcore.load(tmp_path / "all", backend=backend, requests=[3, 0], max_requests=2)
    assert chosen.digest() == cache.digest([d, a])
    assert kvcore.load(tmp_path / "all", backend=backend, requests=[]).requests == ()
    twice = kvcore.load(tmp_path / "all", backend=backend, requests=[2, 2])
    assert twice.digest() == cache.digest([c, c])
    for odd in ([4], [-1], [True], [1.0], ["0"]):
        with pytest.raises(SnapshotError, match="requests"):
            kvcore.load(tmp_path / "all", backend=backend, requests=odd)
    with pytest.raises(OutOfSlots):
        kvcore.load(tmp_path / "all", backend=backend, max_requests=3)
    cache.save(tmp_path / "none", [])
    assert kvcore.load(tmp_path / "none", backend=backend).requests == ()
    assert b.length == 0


def test_the_file_is_a_directory_and_the_requests_blobs(tmp_path):
    cache, requests = filled(LATENT, "reference")
    cache.save(tmp_path / "cache.kv")
    directory, blobs = portable_form.blobs_of((tmp_path / "cache.kv").read_bytes())
    assert blobs == [cache.export_request(request) for request in requests]
    assert (directory["form"], directory["version"]) == ("kvcore.snapshot", 2)
    assert directory["spec"]["schema_version"] == 1
    assert {entry["offset"] % 64 for entry in directory["requests"]} == {0}
    other = stories.create(LATENT, "reference", max_draft_tokens=2)
    for blob, request in zip(blobs, requests, strict=True):
        assert other.digest([other.import_request(blob)]) == cache.digest([request])


def test_what_cannot_be_saved_leaves_the_old_file(backend, tmp_path):
    cache, (a, *_) = filled(LATENT, backend)
    path = tmp_path / "cache.kv"
    cache.save(path)
    before = path.read_bytes()
    step = cache.step({a: 0})
    with pytest.raises(StepError):
        cache.save(path)
    step.abort()
    cache.release(a)
    with pytest.raises(RequestError):
        cache.save(path, [a])
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "nowhere" / "cache.kv")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["cache.kv"]


@pytest.mark.parametrize(
    ("number", "section", "component", "byte", "piece"),
    [
        pytest.param(0, "history", "0.entries", 0, "page 0", id="first byte of the first page"),
        pytest.param(0, "history", "0.index_keys", 2 * 512, "page 2", id="a last, short page"),
        pytest.param(2, "record", "3.window", 5, "the record", id="a window"),
        pytest.param(3, "record", "1.tail", 17, "the record", id="a tail"),
    ],
)
def test_a_damaged_page_is_named_and_costs_one_request(backend, tmp_path, number, section, component, byte, piece):
    cache, requests = filled(LATENT, backend)
    path = tmp_path / "cache.kv"
    cache.save(path)
    data = bytearray(path.read_bytes())
    _, blobs = portable_form.blobs_of(data)
    if piece == "page 2":
        byte = 2 * portable_form.opened(blobs[0])[0]["page_bytes"]
    data[data.index(blobs[number]) + portable_form.place_of(blobs[number], section, component, byte)] ^= 4
    path.write_bytes(data)
    named = f"request {number}: {piece}"
    with pytest.raises(SnapshotError, match=named):
        kvcore.load(path, backend=backend)
    whole = kvcore.load(path, backend=backend, strict=False)
    assert whole.damaged == (named,)
    rest = [request for at, request in enumerate(requests) if at != number]
    assert whole.digest() == cache.digest(rest)
    # A damaged request that is not asked for is in nobody's way.
    others = [at for at in range(4) if at != number]
    assert kvcore.load(path, backend=backend, requests=others).digest() == cache.digest(rest)


def test_a_damaged_manifest_costs_one_request(backend, tmp_path):
    cache, requests = filled(LATENT, backend)
    path = tmp_path / "cache.kv"
    cache.save(path)
    data = path.read_bytes()
    directory, blobs = portable_form.blobs_of(data)
    start = data.index(blobs[0])
    bad = {
        "its text": data[: start + 60] + b"\0" + data[start + 61 :],
        "its root": data[: start + 20] + bytes([data[start + 20] ^ 1]) + data[start + 21 :],
        "its magic": data[:start] + b"x" + data[start + 1 :],
        "its length": data[: start + 8] + b"\xff" * 8 + data[start + 16 :],
        "another request's": portable_form.bound(directory, [blobs[1], *blobs[1:]])[:start] + data[start:],
        "another spec's": portable_form.bound(directory, [_of_another_spec(backend), *blobs[1:]]),
        "an export's": portable_form.bound(
            directory, [portable_form.changed(blobs[0], lambda told: told.update(digest="lanes")), *blobs[1:]]
        ),
    }
    for what, content in bad.items():
        path.write_bytes(content)
        if what == "another request's":
            with pytest.raises(SnapshotError):
                kvcore.load(path, backend=backend, strict=False)
            continue
        with pytest.raises(SnapshotError, match=r"request 0: (manifest|another root)"):
            kvcore.load(path, backend=backend)
        whole = kvcore.load(path, backend=backend, strict=False)
        assert len(whole.damaged) == 1, what
        assert whole.digest() == cache.digest(requests[1:])
        assert kvcore.load(path, backend=backend, requests=[1, 2]).digest() == cache.digest(requests[1:3])


def _of_another_spec(backend):
    other, (request, *_) = filled(MIXED, backend)
    return other.export_request(request)


def test_what_is_no_snapshot_is_refused(tmp_path):
    cache, _ = filled(LATENT, "reference")
    path = tmp_path / "cache.kv"
    cache.save(path)
    data = path.read_bytes()
    directory, blobs = portable_form.blobs_of(data)
    tree, rest = portable_form.opened(data)
    start = len(data) - len(rest)
    entries = tree["requests"]
    old = version_1.snapshot(cache, cache.requests)
    old_start = 8 + int.from_bytes(old[:8], "little")
    root = json.loads(old[8:old_start])["__metadata__"]["root"].encode()
    plain = safetensors.numpy.save({"a": np.zeros(3, np.uint8)})
    other = safetensors.numpy.save({"a": np.zeros(3, np.uint8)}, metadata={"kvcore.snapshot": "3"})
    bad = {
        "empty": b"",
        "seven bytes": data[:7],
        "the head alone": data[:48],
        "directory only": data[:start],
        "a byte short": data[:-1],
        "a byte long": data + b"\0",
        "zeros": bytes(len(data)),
        "a huge directory": data[:8] + b"\xff" * 8 + data[16:],
        "a version to come": data[:7] + b"\x03" + data[8:],
        "text": b"not a snapshot at all, but long enough",
        "a blob": blobs[0],
        "another root": data[:16] + b"f" * 32 + data[48:],
        "something after the directory": data[: start - 1] + b"1" + data[start:] if not data[start - 1] else b"",
        "a list": portable_form.sealed([1, 2]),
        "another form": portable_form.sealed({**tree, "form": "kvcore.request"}, rest),
        "another version": portable_form.sealed({**tree, "version": 1}, rest),
        "something more": portable_form.sealed({**tree, "more": 1}, rest),
        "no spec": portable_form.sealed({name: tree[name] for name in tree if name != "spec"}, rest),
        "a gap": portable_form.sealed(
            {**tree, "requests": [{**one, "offset": one["offset"] + 64} for one in entries]}, bytes(64) + rest
        ),
        "requests over each other": portable_form.sealed({**tree, "requests": [entries[0], *entries]}, rest),
        "a request of no bytes": portable_form.sealed({**tree, "requests": [{**entries[0], "bytes": 0}]}, b""),
        "a request of less": portable_form.sealed({**tree, "requests": [{**entries[0], "bytes": -1}]}, rest),
        "more than there is": portable_form.sealed({**tree, "requests": [{**entries[0], "bytes": 2**62}]}, rest),
        "fewer requests": portable_form.sealed({**tree, "requests": entries[:-1]}, rest),
        "1: header only": old[:old_start],
        "1: a byte short": old[:-1],
        "1: a byte long": old + b"\0",
        "1: a huge header": b"\xff" * 8 + old[8:],
        "1: other safetensors": plain,
        "1: another version": other,
        "1: a list for a header": (4).to_bytes(8, "little") + b"[12]",
        "1: no metadata": (2).to_bytes(8, "little") + b"{}",
        "1: null metadata": (21).to_bytes(8, "little") + b'{"__metadata__":null}',
        "1: another root": old.replace(root, b"f" * 64),
        "1: root in capitals": old.replace(root, root.upper()),
        "1: another length": old.replace(b'\\"length\\":41', b'\\"length\\":40'),
        "1: signed rows": old.replace(b'"dtype":"U8"', b'"dtype":"I8"', 1),
    }
    for what, content in bad.items():
        path.write_bytes(content)
        with pytest.raises(SnapshotError):
            kvcore.load(path, backend="reference", strict=False)
        assert content not in (data, old), what
    for content in (portable_form.bound(directory, blobs), old):
        path.write_bytes(content)
        assert kvcore.load(path, backend="reference").digest() == cache.digest()
    with pytest.raises(FileNotFoundError):
        kvcore.load(tmp_path / "nothing")


def test_only_files_of_version_1_need_safetensors(monkeypatch, tmp_path):
    cache, requests = filled(LATENT, "reference")
    (tmp_path / "old.kv").write_bytes(version_1.snapshot(cache, requests))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.numpy", raising=False)
    cache.save(tmp_path / "new.kv")
    assert kvcore.load(tmp_path / "new.kv", backend="reference").digest() == cache.digest()
    with pytest.raises(BackendError, match=r"kvcore\[snapshot\]"):
        kvcore.load(tmp_path / "old.kv")


def test_a_prefix_cache_finds_what_was_loaded(backend, tmp_path):
    cache, _ = filled(LATENT, backend)
    cache.save(tmp_path / "cache.kv")
    loaded = kvcore.load(tmp_path / "cache.kv", backend=backend, prefix="zero", max_tokens=512)
    # Two blocks of the first request; 25 tokens rebuild the rings.
    assert loaded.restorable(_history(0, 41)) == (32, 25, True)
    request = loaded.admit(_history(0, 41))
    assert request.length == 7
    stories.tell(loaded, {request: _history(0, 41)[7:]})
    assert loaded.digest([request]) == cache.digest([cache.requests[0]])


SAVES = [bytes([version]) * (5000 + 700 * version) for version in range(3)]


def _save_all(disk):
    """Save versions one after another; returns how many were acknowledged."""
    done = 0
    try:
        for data in SAVES:
            write_whole(disk, FILE, data)
            done += 1
    except Crash:
        pass
    return done


def test_power_loss_at_every_boundary_keeps_the_last_acknowledged_file(monkeypatch):
    monkeypatch.setattr("kvcore.portable.disk.CHUNK_BYTES", 1024)
    quiet = SimulatedDisk()
    assert _save_all(quiet) == 3
    assert quiet.names[FILE].data == SAVES[2]
    assert set(quiet.names) == {FILE}
    outcomes = set()
    for fault in ("crash before", "crash during", "crash after"):
        for boundary in range(len(quiet.operations)):
            disk = SimulatedDisk(boundary, fail_at=boundary, fault=fault)
            done = _save_all(disk)
            for seed in range(20):
                back = disk.after_power_loss(seed)
                found = bytes(back.names[FILE].data) if FILE in back.names else None
                allowed = {SAVES[done] if done < 3 else SAVES[2], SAVES[done - 1] if done else None}
                assert found in allowed, (fault, boundary, seed)
                outcomes.add((fault, done, found is None or SAVES.index(found)))
    assert len(outcomes) > 15


@pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])
def test_a_refusing_disk_is_an_error_and_the_old_file_stays(monkeypatch, fault):
    monkeypatch.setattr("kvcore.portable.disk.CHUNK_BYTES", 1024)
    quiet = SimulatedDisk()
    write_whole(quiet, FILE, SAVES[0])
    first = len(quiet.operations)
    write_whole(quiet, FILE, SAVES[1])
    for boundary in range(first, len(quiet.operations)):
        disk = SimulatedDisk(fail_at=boundary, fault=fault)
        write_whole(disk, FILE, SAVES[0])
        with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is compared below
            write_whole(disk, FILE, SAVES[1])
        assert caught.value.errno == getattr(errno, fault)
        assert str(caught.value).endswith(f": {str(FILE)!r}")
        last = disk.operations[boundary]
        assert disk.names[FILE].data == (SAVES[1] if last in ("close", "flush folder") else SAVES[0]), last
        assert set(disk.names) == {FILE}
        write_whole(disk, FILE, SAVES[2])
        assert disk.names[FILE].data == SAVES[2]


@pytest.mark.parametrize(("name", "kind"), [("nowhere/saved.kv", FileNotFoundError), ("taken", IsADirectoryError)])
def test_an_error_names_what_was_asked_for(tmp_path, name, kind):
    (tmp_path / "taken").mkdir()
    path = tmp_path / name
    with pytest.raises(kind) as caught:
        write_whole(Disk(), path, b"rows")
    assert str(caught.value).endswith(f": {str(path)!r}")


def test_short_writes_are_completed():
    disk = SimulatedDisk(3, fault="short writes")
    write_whole(disk, FILE, SAVES[2])
    assert disk.names[FILE].data == SAVES[2]
    assert disk.operations.count("write") > 3


def test_a_disk_that_takes_nothing_is_an_error():
    class Full(SimulatedDisk):
        def write(self, *_):
            return 0

    disk = Full()
    with pytest.raises(OSError, match="took 0"):
        write_whole(disk, FILE, SAVES[0])
    assert disk.names == {}


def test_lost_flushes_can_lose_a_snapshot_but_a_torn_one_is_never_accepted():
    cache, _ = filled(LATENT, "reference", (20, 7))
    data = snapshot.to_bytes(cache._state, list(cache.requests))
    torn = whole = 0
    for seed in range(60):
        disk = SimulatedDisk(seed, fault="lost flushes")
        snapshot.write(FILE, data, disk)
        back = disk.after_power_loss(seed)
        if FILE not in back.names:
            continue
        try:
            saved = snapshot.read(FILE, back)
            damaged = [page for number in range(2) for page in saved.damage(number, cache.ops)]
        except SnapshotError:
            damaged = ["header"]
        if back.names[FILE].data == data:
            whole += 1
            assert damaged == []
        else:
            torn += 1
            assert damaged
    assert torn > 5
    assert whole > 5


def test_the_harness_finds_a_writer_that_does_not_flush(monkeypatch):
    monkeypatch.setattr(SimulatedDisk, "flush", lambda self, _: self.operations.append("flush"))
    torn = 0
    for boundary in range(30):
        disk = SimulatedDisk(boundary, fail_at=boundary, fault="crash after")
        done = _save_all(disk)
        for seed in range(10):
            back = disk.after_power_loss(seed)
            found = bytes(back.names[FILE].data) if FILE in back.names else None
            torn += found not in {SAVES[done] if done < 3 else SAVES[2], SAVES[done - 1] if done else None}
    assert torn > 10


def test_the_real_disk_keeps_an_old_file_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "cache.kv"
    write_whole(Disk(), path, b"old")

    class Stops(Disk):
        def rename(self, *_):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OSError, match="Input/output"):
        write_whole(Stops(), path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["cache.kv"]
    write_whole(Disk(), path, b"new" * 10**6)
    assert path.read_bytes() == b"new" * 10**6


def killed_save(path):
    """What a process leaves that is killed in the middle of a save: it never closes, renames or removes."""
    child = os.fork()
    if child == 0:

        class Dies(Disk):
            def flush(self, _):
                os.kill(os.getpid(), signal.SIGKILL)

        write_whole(Dies(), path, b"half")
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_the_next_save_removes_what_a_killed_one_left(tmp_path):
    path, other = tmp_path / "cache[1].kv", tmp_path / "cache[1].kv.2"
    for name in (path, path, other):
        killed_save(name)
    left = sorted(file.name for file in tmp_path.iterdir())
    # The second has swept the first away.
    assert sorted(name.startswith(".cache[1].kv.2.") for name in left) == [False, True]
    assert all(name.endswith(".tmp") for name in left)
    write_whole(Disk(), path, b"new")
    # What belongs to another name is none of its business.
    assert sorted(file.name for file in tmp_path.iterdir()) == [*(n for n in left if ".kv.2." in n), "cache[1].kv"]


def test_a_save_in_progress_is_not_swept_away(tmp_path):
    path = tmp_path / "cache.kv"

    class Meanwhile(Disk):
        def rename(self, source, target):
            # Another process saves to the same name before this one is done.
            Disk().sweep(target)
            assert source.exists()
            super().rename(source, target)

    write_whole(Meanwhile(), path, b"whole")
    assert path.read_bytes() == b"whole"


def test_a_temporary_file_that_was_swept_away_at_once_is_made_again(tmp_path, monkeypatch):
    path = tmp_path / ".cache.kv.1.2.tmp"
    real, swept = fcntl.flock, []

    def late(file, how):
        # The sweeper was faster than the lock.
        if not swept:
            swept.append(path.unlink())
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    file = Disk().create(path)
    assert (path.exists(), os.fstat(file).st_nlink, len(swept)) == (True, 1, 1)
    os.close(file)


def test_freed_storage_is_not_in_a_snapshot(tmp_path):
    cache = stories.create(MIXED, "reference", check=False)
    secret = cache.admit()
    stories.tell(cache, {secret: [77777] * 40})
    held = stories.rows("k1", [77777], np.array([39]), 2, 4).tobytes()
    assert held in b"".join(scene.raw(cache).values())
    cache.release(secret)
    stories.tell(cache, {cache.admit(): TOKENS[:3]})
    cache.save(tmp_path / "cache.kv")
    assert held in b"".join(scene.raw(cache).values())
    assert held not in (tmp_path / "cache.kv").read_bytes()


def test_a_request_whose_numbers_do_not_fit_together_is_refused(tmp_path):
    cache, _ = filled(LATENT, "reference", (41,))
    path = tmp_path / "cache.kv"
    cache.save(path)

    def fewer(manifest):
        manifest["request"]["tokens"].pop()

    # One that a faulty writer signed: root and digests are right.
    path.write_bytes(portable_form.changed(path.read_bytes(), fewer))
    with pytest.raises(SnapshotError, match="41 tokens, rows from 39 on"):
        kvcore.load(path, backend="reference")
    old = version_1.snapshot(cache, cache.requests)
    root = json.loads(old[8 : 8 + int.from_bytes(old[:8], "little")])["__metadata__"]["root"].encode()
    unsigned = old.replace(root, b"0" * 64).replace(b'\\"length\\":41', b'\\"length\\":42')
    data = version_1.signed_file(unsigned)
    with pytest.raises(SnapshotError, match="fit together"):
        snapshot.parse(data)


def test_a_request_in_another_ones_place_is_not_taken(backend, tmp_path):
    cache, _ = filled(stories.PAGED, backend, lengths=(9, 9))
    path = tmp_path / "cache.kv"
    cache.save(path)
    directory, (first, second) = portable_form.blobs_of(path.read_bytes())
    assert len(first) == len(second)
    whole = portable_form.bound(directory, [first, second])
    assert whole == path.read_bytes()
    path.write_bytes(whole.replace(first, second))
    with pytest.raises(SnapshotError, match="request 0: another root"):
        kvcore.load(path, backend=backend)


def test_a_request_of_another_spec_is_not_taken(backend, tmp_path):
    cache, _ = filled(stories.PAGED, backend, lengths=(9,))
    layers = [scene.classic(), scene.classic(window=6)]
    other, (request,) = filled(CacheSpec(layers=layers, block_tokens=8, name="paged"), backend, lengths=(9,))
    path = tmp_path / "cache.kv"
    cache.save(path)
    directory, _ = portable_form.blobs_of(path.read_bytes())
    path.write_bytes(portable_form.bound(directory, [other.export_request(request)]))
    with pytest.raises(SnapshotError, match="spec"):
        kvcore.load(path, backend=backend)


@pytest.mark.parametrize("lane", [0, 1])
def test_one_lane_of_a_digest_is_enough_for_damage_in_version_1(backend, tmp_path, monkeypatch, lane):
    cache, requests = filled(stories.PAGED, backend, lengths=(9,))
    found = version_1.lanes_of

    def lied(*given):
        lanes = found(*given).copy()
        lanes[0, lane] ^= 1
        return lanes

    monkeypatch.setattr(version_1, "lanes_of", lied)
    path = tmp_path / "cache.kv"
    path.write_bytes(version_1.snapshot(cache, requests))
    with pytest.raises(SnapshotError, match="page 0"):
        kvcore.load(path, backend=backend)


def test_a_blob_of_another_spec_is_not_taken_in_version_1(backend):
    cache, (request,) = filled(stories.PAGED, backend, lengths=(9,))
    layers = [scene.classic(), scene.classic(window=6)]
    other = stories.create(CacheSpec(layers=layers, block_tokens=8, name="paged"), backend)
    with pytest.raises(SnapshotError, match="a spec with"):
        other.import_request(version_1.blob(cache, request))
    assert not other.requests
