"""What others may put in the place of files, and what snapshots and blobs may say that nobody would write."""

import os
import threading
from pathlib import Path

import pytest
import stories

import kvcore
from kvcore.disk import Disk, open_regular, write_whole
from kvcore.errors import SnapshotError


def temporary_of(path):
    """Where a save of this thread to ``path`` writes first."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")


def in_the_way(path, kind):
    """Put something of that kind there; a link leads to a file that must stay as it is."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(path.with_name("precious"))
    elif kind == "link to nothing":
        path.symlink_to(path.with_name("nothing"))
    else:
        path.write_bytes(b"of a killed save")


@pytest.mark.parametrize("kind", ["pipe", "link", "link to nothing", "file"])
@pytest.mark.parametrize("whose", ["ours", "another process's"])
def test_a_save_follows_no_link_and_waits_for_no_pipe(tmp_path, kind, whose):
    path, precious = tmp_path / "cache.kv", tmp_path / "precious"
    precious.write_bytes(b"precious")
    left = temporary_of(path) if whose == "ours" else tmp_path / ".cache.kv.1.2.tmp"
    in_the_way(left, kind)
    write_whole(Disk(), path, b"whole")
    assert path.read_bytes() == b"whole"
    assert not path.is_symlink()
    assert precious.read_bytes() == b"precious"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cache.kv", "precious"]


def test_a_temporary_file_is_always_a_new_one(tmp_path):
    """Also between the sweep and the first write."""
    left = temporary_of(tmp_path / "cache.kv")
    for kind in ("pipe", "link", "file"):
        in_the_way(left, kind)
        with pytest.raises(FileExistsError):
            Disk().create(left)
        left.unlink()


def test_a_save_replaces_a_link_and_not_what_it_leads_to(tmp_path):
    path, precious = tmp_path / "cache.kv", tmp_path / "precious"
    precious.write_bytes(b"precious")
    path.symlink_to(precious)
    write_whole(Disk(), path, b"whole")
    assert (path.read_bytes(), path.is_symlink(), precious.read_bytes()) == (b"whole", False, b"precious")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_a_regular_file_is_read_as_a_snapshot(tmp_path, kind):
    path = tmp_path / "cache.kv"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(SnapshotError, match="regular file"):
        kvcore.load(path, backend="reference")


def test_a_snapshot_may_be_reached_by_a_link(tmp_path):
    cache = stories.create(stories.MIXED, "reference")
    stories.tell(cache, {cache.admit(): [1, 2, 3]})
    cache.save(tmp_path / "one.kv")
    (tmp_path / "latest.kv").symlink_to("one.kv")
    assert kvcore.load(tmp_path / "latest.kv", backend="reference").digest() == cache.digest()
    with pytest.raises(OSError, match="symbolic link"):
        open_regular(Path(tmp_path / "latest.kv"), follow=False)
