"""Tiers of a store: where sealed pages are kept, the least recently used of them going first."""

import contextlib
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

from kvcore.counts import check_count
from kvcore.errors import ShapeError
from kvcore.portable.disk import Disk, write_whole

Sealed = bytes | memoryview


class Tier(Protocol):
    """Where pages are kept by key.

    Attributes:
        medium: as events name it: ``CPU``, ``STORAGE``.
    """

    medium: str

    def has(self, key: bytes) -> bool:
        """Whether a page is there; its bytes are not looked at."""
        ...

    def get(self, key: bytes) -> Sealed | None:
        """Its bytes, as they were put; it is the last to go now."""
        ...

    def peek(self, key: bytes) -> Sealed | None:
        """The same for somebody else: which pages go first stays as it is."""
        ...

    def put(self, key: bytes, data: Sealed) -> list[tuple[bytes, Sealed | None]]:
        """Keep a page; what has to go for it, with its bytes where they are at hand."""
        ...

    def remove(self, key: bytes) -> None:
        """Let a page go, if it is there."""
        ...

    def held(self) -> list[bytes]:
        """All that are there, those to go first in front."""
        ...


class HostTier:
    """Pages in the host's memory.

    Args:
        capacity: bytes of pages.
    """

    medium = "CPU"

    def __init__(self, capacity: int) -> None:
        self.capacity = check_count(ShapeError, "HostTier: capacity", capacity, 1)
        self.used = 0
        self._pages: OrderedDict[bytes, Sealed] = OrderedDict()
        self._lock = threading.Lock()

    def has(self, key: bytes) -> bool:
        return key in self._pages

    def get(self, key: bytes) -> Sealed | None:
        with self._lock:
            data = self._pages.get(key)
            if data is not None:
                self._pages.move_to_end(key)
            return data

    def peek(self, key: bytes) -> Sealed | None:
        return self._pages.get(key)

    def put(self, key: bytes, data: Sealed) -> list[tuple[bytes, Sealed | None]]:
        gone: list[tuple[bytes, Sealed | None]] = []
        with self._lock:
            self._drop(key)
            if len(data) > self.capacity:
                return [(key, data)]
            while self.used + len(data) > self.capacity:
                oldest = next(iter(self._pages))
                gone.append((oldest, self._pages[oldest]))
                self._drop(oldest)
            self._pages[key] = data
            self.used += len(data)
        return gone

    def remove(self, key: bytes) -> None:
        with self._lock:
            self._drop(key)

    def held(self) -> list[bytes]:
        with self._lock:
            return list(self._pages)

    def _drop(self, key: bytes) -> None:
        data = self._pages.pop(key, None)
        self.used -= 0 if data is None else len(data)


class DiskTier:
    """Pages as files, one each, which several processes may read, write and remove at once.

    A file appears whole or not at all, and durably; a writer that is killed leaves a temporary file, which goes when
    another process first writes there. When a page was used last is its file's time of modification.

    Whatever the disk refuses is a page that is not stored, or not found: a full one ends nobody's step.

    Args:
        folder: for nothing else.
        capacity: bytes of files, counted when this process opens the folder and whenever it finds it full.
        disk: for tests.

    Attributes:
        refused: pages that the disk did not take.
        error: why it did not take the last of them; None if it took all.

    Raises:
        OSError: the folder cannot be made.
    """

    medium = "STORAGE"

    def __init__(self, folder: str | Path, capacity: int, *, disk: Disk | None = None) -> None:
        self.capacity = check_count(ShapeError, "DiskTier: capacity", capacity, 1)
        self.folder = Path(folder)
        self._disk = Disk() if disk is None else disk
        self.folder.mkdir(parents=True, exist_ok=True)
        self._folders: set[Path] = set()
        self.refused = 0
        self.error: OSError | None = None
        self.used = sum(size for _, size, _ in self._files())

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / f"{name}.page"

    def has(self, key: bytes) -> bool:
        return os.path.isfile(self._path(key))

    def get(self, key: bytes) -> Sealed | None:
        data = self.peek(key)
        if data is not None:
            with contextlib.suppress(OSError):
                os.utime(self._path(key))
        return data

    def peek(self, key: bytes) -> Sealed | None:
        try:
            return self._disk.read(self._path(key))
        except OSError:
            # Gone, for another process removed it; or not to be read.
            return None

    def put(self, key: bytes, data: Sealed) -> list[tuple[bytes, Sealed | None]]:
        if len(data) > self.capacity:
            return [(key, None)]
        gone: list[tuple[bytes, Sealed | None]] = []
        if self.used + len(data) > self.capacity:
            gone = self._make_room(len(data))
            if self.used + len(data) > self.capacity:
                self.refused += 1
                return [*gone, (key, None)]
        try:
            self._write(self._path(key), data)
        except OSError as error:
            self.refused += 1
            self.error = error
            return [*gone, (key, None)]
        self.used += len(data)
        return gone

    def _write(self, path: Path, data: Sealed) -> None:
        if path.parent not in self._folders:
            path.parent.mkdir(exist_ok=True)
            self._disk.flush_folder(self.folder)
            self._disk.sweep_folder(path.parent)
            self._folders.add(path.parent)
        try:
            write_whole(self._disk, path, (data,), sweep=False)
        except FileNotFoundError:
            # Somebody removed the folder: the next page makes it again.
            self._folders.discard(path.parent)
            raise

    def remove(self, key: bytes) -> None:
        path = self._path(key)
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            self._disk.remove(path)
            self.used -= size

    def held(self) -> list[bytes]:
        return [bytes.fromhex(path.stem) for _, _, path in self._files()]

    def _make_room(self, wanted: int) -> list[tuple[bytes, Sealed | None]]:
        files = self._files()
        self.used = sum(size for _, size, _ in files)
        gone: list[tuple[bytes, Sealed | None]] = []
        for _, size, path in files:
            if self.used + wanted <= self.capacity:
                break
            try:
                self._disk.remove(path)
            except OSError as error:
                # It is there still, and somebody else's: others go in its place.
                self.error = error
                continue
            self.used -= size
            gone.append((bytes.fromhex(path.stem), None))
        return gone

    def _files(self) -> list[tuple[float, int, Path]]:
        """(last use, bytes, path) of all pages, those used first in front."""
        found: list[tuple[float, int, Path]] = []
        with contextlib.suppress(OSError):
            for path in self.folder.glob("??/*.page"):
                with contextlib.suppress(OSError, ValueError):
                    bytes.fromhex(path.stem)
                    about = path.stat()
                    found.append((about.st_mtime, about.st_size, path))
        return sorted(found)
