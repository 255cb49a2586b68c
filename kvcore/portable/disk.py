"""The few things that saving asks of a disk, so that tests can put a failing one in its place.

``write_whole`` is the protocol: write a file beside the name, flush it, rename it, flush the folder. Whatever fails on
the way, the name shows the old file or the new one, whole; once ``write_whole`` has returned, the new one, durably.

A process that is killed on the way leaves its temporary file, ``.NAME.PROCESS.THREAD.tmp``. A writer keeps a lock on
its own, which ends with the process, so that the next save to that name can tell what was left behind and removes it.

Others may write to the folder too. A temporary file is always a new one: a link or a pipe of its name is never followed
or waited for, and goes as what was left behind does. What is read must be a regular file, or nobody knows its end.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Part = bytes | memoryview

CHUNK_BYTES = 1 << 22

NO_DETOUR = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link is not followed, a pipe is not waited for."""


WRITER = re.compile(r"\d+\.\d+\.tmp\Z")
"""The end of a temporary file's name: process and thread."""


class NotAFile(OSError):
    """A folder, a pipe or a device in the place of a file: it may have no end, and nobody waits for it."""


class Disk:
    """The real file system, one system call a method."""

    def create(self, path: Path) -> Any:
        """A new, empty file, open for writing and locked until it is closed."""
        while True:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_DETOUR, 0o666)
            with contextlib.suppress(OSError):  # some network disks know no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return file
            # Swept away between the two calls.
            os.close(file)

    def write(self, file: Any, data: bytes | memoryview) -> int:
        """Write some of ``data``, from its start; returns how many bytes."""
        return os.write(file, data)

    def flush(self, file: Any) -> None:
        """Make what was written to a file durable."""
        os.fsync(file)

    def close(self, file: Any) -> None:
        """Close a file."""
        os.close(file)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, atomically, in place of any file of that name."""
        source.replace(target)

    def flush_folder(self, folder: Path) -> None:
        """Make a folder's names durable."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove(self, path: Path) -> None:
        """Remove a file if it is there."""
        path.unlink(missing_ok=True)

    def sweep(self, path: Path) -> None:
        """Remove temporary files of saves to ``path`` whose writers are gone; those in use are locked."""
        prefix = f".{path.name}."
        # Most names of a large folder are of other files: nothing is made of them.
        self._sweep(path.parent, lambda name: name.startswith(prefix) and WRITER.fullmatch(name, len(prefix)))

    def sweep_folder(self, folder: Path) -> None:
        """The same of saves to any name in a folder that is nobody else's."""
        self._sweep(folder, lambda name: name.startswith(".") and WRITER.search(name))

    def _sweep(self, folder: Path, ours: Callable[[str], Any]) -> None:
        names: list[str] = []
        with contextlib.suppress(OSError):  # whoever writes next is told why
            names = os.listdir(folder)
        for left in [folder / name for name in names if ours(name)]:
            with contextlib.suppress(OSError):
                if not stat.S_ISREG(left.lstat().st_mode):
                    # No writer makes such a thing.
                    left.unlink()
                    continue
                file = os.open(left, os.O_WRONLY | NO_DETOUR)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    left.unlink()
                finally:
                    os.close(file)

    def read(self, path: Path) -> bytes | memoryview:
        """All bytes of a regular file."""
        with open_regular(path) as file:
            # Memory of NumPy's comes in large pages, where the system has such.
            data = np.empty(os.fstat(file.fileno()).st_size, np.uint8).data
            count = file.readinto(data)
            rest = file.read()
        return bytes(data[:count]) + rest if rest or count < len(data) else data


def open_regular(path: Path, *, follow: bool = True) -> Any:
    """A regular file, open for reading bytes; ``follow`` a link of that name.

    Raises:
        NotAFile: a folder, a pipe or a device. OSError: there is nothing of that name, or it cannot be opened.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise NotAFile(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def write_whole(disk: Disk, path: Path, data: bytes | Sequence[Part], *, sweep: bool = True) -> None:
    """Put ``data``, or its parts one after another, in place of the file ``path``: all of it, durably, or nothing.

    ``sweep`` away what killed writers to that name left; without it, whoever calls does so at times, for a folder.

    Raises:
        OSError: the disk refused. The old file, if there was one, is still there; after a failed close or flush of
            the folder the new one may be instead.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    if sweep:
        disk.sweep(path)
    try:
        _write_and_name(disk, temporary, path, (data,) if isinstance(data, bytes) else data)
        disk.flush_folder(path.parent)
    except BaseException as error:
        # A disk that refuses to write may refuse to remove as well; the first error is the one to report.
        with contextlib.suppress(OSError):
            disk.remove(temporary)
        if isinstance(error, OSError) and error.errno is not None:
            # The name that was asked for, not the one on the way to it.
            error.filename = str(path)
            del error.filename2
        raise


def _write_and_name(disk: Disk, temporary: Path, path: Path, parts: Sequence[Part]) -> None:
    # A function of its own: between a `try` and one right within it Python 3.11 has a place that no handler covers.
    file = disk.create(temporary)
    try:
        for part in parts:
            _write_all(disk, file, part)
        disk.flush(file)
        # While the file is open it is locked: nobody sweeps it away before it has its name.
        disk.rename(temporary, path)
    finally:
        disk.close(file)


def _write_all(disk: Disk, file: Any, data: Part) -> None:
    rest = memoryview(data)
    while rest:
        written = disk.write(file, rest[:CHUNK_BYTES])
        if written <= 0:
            raise OSError(f"the disk took {written} of {len(rest)} bytes")
        rest = rest[written:]
