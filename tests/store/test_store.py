"""Pages by key over tiers: what goes, what is found, what does not verify, what a crash leaves."""

import errno
import os
import random
import signal
import time

import msgspec
import pytest

from kvcore.errors import ShapeError
from kvcore.portable.disk import Disk
from kvcore.store import AllBlocksCleared, BlockRemoved, BlockStore, BlockStored, DiskTier, EventBatch, HostTier
from kvcore.store.events import encode
from kvcore.store.seal import HEAD
from kvcore.store.store import About
from tests.reliability.simulated_disk import Crash, SimulatedDisk

SECRET = b"sixteen bytes or more"


def key(number):
    return number.to_bytes(4, "big") * 8


def page(number, size=100):
    return random.Random(number).randbytes(size)


def size(count):
    return count * (HEAD.size + 100)


def test_the_least_recently_used_goes_to_the_next_tier_and_comes_back(tmp_path):
    host, disk = HostTier(size(3)), DiskTier(tmp_path, size(4))
    store = BlockStore([host, disk])
    for number in range(5):
        store.put(key(number), page(number))
    assert (host.held(), set(disk.held())) == ([key(2), key(3), key(4)], {key(0), key(1)})
    # Whatever is asked for is the last to go, of the first tier or of another.
    assert (store.get(key(2)), store.peek(key(3)) is None) == (page(2), False)
    assert host.held() == [key(3), key(4), key(2)]
    assert store.get(key(0)) == page(0)
    assert host.held() == [key(4), key(2), key(0)]
    assert store.longest([key(number) for number in (0, 1, 2, 9, 3)]) == 3
    # What both tiers lack room for is gone, the oldest first.
    for number in range(5, 9):
        store.put(key(number), page(number))
    held = [number for number in range(9) if store.has(key(number))]
    assert (len(held), host.held()) == (7, [key(6), key(7), key(8)])
    assert [store.get(key(number)) for number in held[-4:]] == [page(number) for number in held[-4:]]
    assert (len(host.held()), len(disk.held()), store.damaged) == (3, 4, [])
    store.put(key(99), bytes(10 * size(4)))
    assert not store.has(key(99))


def test_another_process_finds_what_was_flushed(tmp_path):
    store = BlockStore([HostTier(1 << 20), DiskTier(tmp_path, 1 << 20)])
    store.put(key(1), page(1))
    other = BlockStore([HostTier(1 << 20), DiskTier(tmp_path, 1 << 20)])
    assert not other.has(key(1))
    store.flush()
    assert (other.longest([key(1)]), other.get(key(1))) == (1, page(1))
    # What a third one removes is a miss.
    DiskTier(tmp_path, 1 << 20).remove(key(1))
    assert BlockStore([DiskTier(tmp_path, 1 << 20)]).get(key(1)) is None


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path, where, secret):
    tier = HostTier(1 << 20) if where == "host" else DiskTier(tmp_path, 1 << 20)
    store = BlockStore([tier], secret=secret)
    whole = bytes((store.put(key(1), page(1)), tier.get(key(1)))[1])
    for bit in [*range(8 * HEAD.size), *range(8 * HEAD.size, 8 * len(whole), 97)]:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        if where == "host":
            tier.put(key(1), bytes(flipped))
        else:
            tier._path(key(1)).write_bytes(flipped)
        assert store.get(key(1)) is None, bit
        assert not store.has(key(1))
    tier.put(key(1), whole[:-1])
    assert store.get(key(1)) is None
    tier.put(key(2), whole)
    assert store.get(key(2)) is None, "another's page under this key"
    tier.put(key(1), whole)
    assert store.get(key(1)) == page(1)


def test_damage_in_one_tier_is_made_good_by_another(tmp_path):
    host, disk = HostTier(1 << 20), DiskTier(tmp_path, 1 << 20)
    store = BlockStore([host, disk])
    store.put(key(1), page(1))
    store.flush()
    host.put(key(1), b"something else")
    assert (store.get(key(1)), store.damaged) == (page(1), [key(1)])


def test_who_lacks_the_secret_writes_nothing_that_is_read(tmp_path):
    disk = DiskTier(tmp_path, 1 << 20)
    ours, theirs, bare = (BlockStore([disk], secret=secret) for secret in (SECRET, b"another secret, long", None))
    ours.put(key(1), page(1))
    assert ours.get(key(1)) == page(1)
    for other in (theirs, bare):
        other.put(key(1), page(2))
        assert ours.get(key(1)) is None
    with pytest.raises(ShapeError, match="16 to 64 bytes"):
        BlockStore([disk], secret=b"short")


def test_events_are_those_that_vllm_publishes():
    told = []
    store = BlockStore([HostTier(size(2))], events=told.extend)
    for number in range(3):
        store.put(key(number), page(number), About(key(number - 1) if number else None, [1, 2], 2))
    assert told == [
        BlockStored([key(0)], None, [1, 2], 2, None, "CPU", None),
        BlockStored([key(1)], key(0), [1, 2], 2, None, "CPU", None),
        BlockStored([key(2)], key(1), [1, 2], 2, None, "CPU", None),
        BlockRemoved([key(0)], "CPU"),
    ]
    batch = msgspec.msgpack.decode(encode(told, rank=3))
    assert batch[2] == 3
    assert batch[1][1] == {
        "type": "BlockStored",
        "block_hashes": [key(1)],
        "parent_block_hash": key(0),
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
    }
    assert msgspec.msgpack.decode(encode(told), type=EventBatch).events == told


@pytest.mark.parametrize("wrong", [b"", bytes(65), "text", 7, None, bytearray(32)])
def test_keys_are_bytes_that_a_file_can_be_named_by(tmp_path, wrong):
    host, disk = HostTier(1 << 20), DiskTier(tmp_path, 1 << 20)
    store = BlockStore([host, disk])
    with pytest.raises(ShapeError, match="1 to 64 bytes"):
        store.put(wrong, b"a page", About(None, [1, 2], 2))
    assert (host.held(), store._about) == ([], {})
    # A page of wider elements is its bytes.
    store.put(bytes(64), memoryview(bytes(range(8))).cast("I"))
    store.flush()
    assert (disk.held(), store.get(bytes(64))) == ([bytes(64)], bytes(range(8)))


def test_what_is_removed_is_said(tmp_path):
    told = []
    store = BlockStore([HostTier(1 << 20), DiskTier(tmp_path, 1 << 20)], events=told.extend)
    for number in range(2):
        store.put(key(number), page(number), About(None, [1, 2], 2))
    store.flush()
    told.clear()
    assert (store.remove(key(0)), store.remove(key(0)), store.get(key(0))) == (True, False, None)
    assert told == [BlockRemoved([key(0)], "CPU"), BlockRemoved([key(0)], "STORAGE")]
    store.clear()
    assert (store.has(key(1)), told[2:], store._about) == (False, [AllBlocksCleared()], {})


@pytest.mark.parametrize("fault", ["crash before", "crash during", "crash after"])
def test_power_loss_at_every_boundary_leaves_the_old_page_or_the_new_one(tmp_path, fault):
    def write(disk):
        store, done = BlockStore([DiskTier(tmp_path, 1 << 20, disk=disk)]), -1
        try:
            for version in range(3):
                store.put(key(1), page(version))
                done = version
        except Crash:
            pass
        return done

    quiet = SimulatedDisk()
    assert write(quiet) == 2
    assert len(quiet.operations) > 12
    for boundary in range(len(quiet.operations)):
        disk = SimulatedDisk(boundary, fail_at=boundary, fault=fault)
        done = write(disk)
        for outcome in range(3):
            store = BlockStore([DiskTier(tmp_path, 1 << 20, disk=disk.after_power_loss(outcome))])
            found = store.get(key(1))
            allowed = [page(version) if version >= 0 else None for version in (done, min(done + 1, 2))]
            assert found in allowed, (boundary, outcome)
            assert store.damaged == []


class Full(Disk):
    """A disk without room after so many bytes."""

    def __init__(self, room):
        self.room = room

    def write(self, file, data):
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(data)
        return super().write(file, data)


def test_a_page_that_a_full_disk_refuses_is_not_stored_and_ends_nothing(tmp_path):
    told = []
    host, disk = HostTier(size(1)), DiskTier(tmp_path, 1 << 20, disk=Full(size(1)))
    store = BlockStore([host, disk], events=told.extend)
    about = About(None, [1, 2], 2)
    assert [store.put(key(number), page(number), about) for number in range(3)] == [True, True, True]
    # The second one went to a disk without room.
    assert [store.has(key(number)) for number in range(3)] == [True, False, True]
    assert (disk.refused, disk.error.errno, disk.used) == (1, errno.ENOSPC, size(1))
    assert [event for event in told if isinstance(event, BlockRemoved)] == [
        BlockRemoved([key(0)], "CPU"),
        BlockRemoved([key(1)], "CPU"),
    ]
    assert set(store._about) == {key(0), key(2)}
    assert (store.flush(), store.get(key(2)), disk.refused) == (False, page(2), 2)
    assert [file.suffix for file in tmp_path.rglob("*") if file.is_file()] == [".page"]
    # Room again: what is asked for is there again.
    disk._disk.room = 1 << 20
    assert store.put(key(1), page(1))
    assert store.flush()
    assert not BlockStore([DiskTier(tmp_path / "other", 1 << 20, disk=Full(0))]).put(key(1), page(1))


def test_a_page_that_a_disk_does_not_let_go_is_there_still_and_others_go(tmp_path):
    class Keeps(Disk):
        kept = ()

        def remove(self, path):
            if path.stem in self.kept:
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            super().remove(path)

    told = []
    disk = DiskTier(tmp_path, 2 * size(1), disk=Keeps())
    store = BlockStore([disk], events=told.extend)
    for number in range(2):
        store.put(key(number), page(number))
        os.utime(disk._path(key(number)), (number, number))
    disk._disk.kept = [key(0).hex()]
    assert store.put(key(2), page(2))
    assert [store.has(key(number)) for number in range(3)] == [True, False, True]
    assert [event for event in told if isinstance(event, BlockRemoved)] == [BlockRemoved([key(1)], "STORAGE")]
    disk._disk.kept = [key(number).hex() for number in range(3)]
    assert not store.put(key(3), page(3))
    assert (disk.refused, disk.error.errno, disk.used) == (1, errno.EPERM, 2 * size(1))


def test_what_a_disk_cannot_read_is_not_there(tmp_path, monkeypatch):
    store = BlockStore([DiskTier(tmp_path, 1 << 20)])
    store.put(key(1), page(1))

    def broken(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Disk, "read", broken)
    assert store.get(key(1)) is None
    monkeypatch.setattr(os, "stat", broken)
    monkeypatch.setattr("pathlib.Path.glob", broken)
    assert (store.has(key(1)), store.tiers[0].held()) == (False, [])


def test_a_folder_is_looked_through_once(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, 1 << 20)
    (tmp_path / key(1).hex()[:2]).mkdir()
    left = tmp_path / key(1).hex()[:2] / f".{key(2).hex()}.page.1.2.tmp"
    left.write_bytes(b"half")
    looked = []
    monkeypatch.setattr(os, "listdir", lambda folder, listdir=os.listdir: (looked.append(folder), listdir(folder))[1])
    for number in range(5):
        tier.put(key(number), page(number))
    assert (looked, left.exists()) == ([tmp_path / "00"], False)


def _write_forever(folder, acknowledge):
    store = BlockStore([DiskTier(folder, 1 << 20)])
    number = 0
    while True:
        store.put(key(number % 7), page(number, 5000))
        os.write(acknowledge, number.to_bytes(4, "big"))
        number += 1


def test_processes_that_are_killed_tear_nothing(tmp_path):
    choice = random.Random(5)
    for _ in range(8):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                _write_forever(tmp_path, writer)
            finally:
                os._exit(1)
        os.close(writer)
        time.sleep(0.02 + 0.03 * choice.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as file:
            said = file.read()
        last = int.from_bytes(said[-4:], "big") if said else -1
        store = BlockStore([DiskTier(tmp_path, 1 << 20)])
        for place in range(7):
            newest = last - (last - place) % 7
            if newest < 0:
                continue
            # The last one that was acknowledged, or the next one, which was being written.
            assert store.get(key(place)) in (page(newest, 5000), page(newest + 7, 5000))
        assert store.damaged == []
