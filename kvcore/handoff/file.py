"""Exports as files in a folder that both sides see: written whole, read page by page.

The file of place n of an exporter is replaced when the place is used again, and by a tombstone when it was pulled, so
that a stale or repeated reference is told so rather than read.
"""

import time
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvcore.disk import Disk, write_whole
from kvcore.errors import TransferError
from kvcore.handoff.carrier import reference
from kvcore.handoff.desk import Desk, Handle, check_range, check_reference
from kvcore.handoff.layout import Array


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands before the manifest: sizes, the generation, the lease, and how many readers are left."""

    generation: int
    deadline: float
    readers: int
    manifest_bytes: int
    pages: int
    page_bytes: int


def publish(desk: Desk, handle: Handle, folder: str | PathLike[str], *, readers: int = 1) -> Path:
    """Put an export of a desk into the folder, whole or not at all.

    Raises:
        TransferError: the handle is no longer good. OSError: the disk refused.
    """
    staged = desk.staged(*reference(handle))
    head = Head(
        generation=handle.generation,
        deadline=handle.deadline,
        readers=readers,
        manifest_bytes=len(staged.manifest),
        pages=handle.pages,
        page_bytes=handle.page_bytes,
    )
    pages = staged.pages if isinstance(staged.pages, np.ndarray) else staged.pages.cpu().numpy()
    path = _path(Path(folder), handle)
    write_whole(Disk(), path, _encode(head) + staged.manifest + pages.tobytes())
    return path


class FileCarrier:
    """Pulls from a folder that ``publish`` wrote to."""

    def __init__(self, folder: str | PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self._folder = Path(folder)
        self._clock = clock

    def manifest(self, handle: Handle, *, timeout: float) -> bytes:
        """From the file's start."""
        del timeout
        with self._open(handle) as file:
            head = self._head(file, handle)
            return _read(file, head.manifest_bytes)

    def fetch(self, handle: Handle, first: int, into: Array, *, timeout: float) -> None:
        """From their place in the file."""
        del timeout
        with self._open(handle) as file:
            head = self._head(file, handle)
            check_range(first, len(into), head.pages)
            file.seek(head.manifest_bytes + first * head.page_bytes, 1)
            data = np.frombuffer(_read(file, len(into) * head.page_bytes), np.uint8).reshape(len(into), head.page_bytes)
            into[:] = data if isinstance(into, np.ndarray) else into.new_tensor(data)

    def finish(self, handle: Handle, *, timeout: float) -> None:
        """One reader less; after the last one a tombstone takes the file's place."""
        del timeout
        with self._open(handle) as file:
            head = self._head(file, handle)
            rest = file.read() if head.readers > 1 else b""
        left = msgspec.structs.replace(head, readers=head.readers - 1)
        write_whole(Disk(), _path(self._folder, handle), _encode(left) + rest)

    def _open(self, handle: Handle) -> Any:
        try:
            return _path(self._folder, handle).open("rb")
        except FileNotFoundError:
            raise TransferError(
                reason="unknown", got="no such export", where="pull", allowed=f"an export in {self._folder}"
            ) from None

    def _head(self, file: Any, handle: Handle) -> Head:
        """The head, if the file is what the handle refers to."""
        size = int.from_bytes(_read(file, 4), "little")
        head = msgspec.msgpack.decode(_read(file, size), type=Head)
        exporter, number, generation = reference(handle)
        check_reference(
            f"export {number} of {exporter[:8]}, generation {generation}",
            generation,
            head.generation,
            consumed=head.readers <= 0,
            expired=head.deadline <= self._clock(),
        )
        return head


def _path(folder: Path, handle: Handle) -> Path:
    return folder / f"{handle.exporter}.{handle.number}.kvexport"


def _encode(head: Head) -> bytes:
    data = msgspec.msgpack.encode(head)
    return len(data).to_bytes(4, "little") + data


def _read(file: Any, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise TransferError(reason="damaged", got="a file that was cut", where="pull", allowed="a file of publish")
    return data
