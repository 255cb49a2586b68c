"""How pages come from an exporter: a small Protocol, and the ways of it that need nothing but a process and a disk.

Those of torch.distributed and NIXL are alike (``kvcore.interop``). A folder that both sides see holds exports as files,
written whole and read page by page. The file of place n of an exporter is replaced when the place is used again,
and by a tombstone when it was pulled, so that a stale or repeated reference is told so rather than read. Names are made
of what a ``Handle`` may hold only, links are not followed, and sizes that a file declares are held against its own.
"""

import math
import os
import time
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from kvcore.counts import check_count
from kvcore.errors import ShapeError, TransferError
from kvcore.foreign import UNREADABLE
from kvcore.portable.disk import Disk, open_regular, write_whole
from kvcore.portable.exporter import Exports, Handle, check_range, check_reference
from kvcore.portable.manifest import LARGEST_MANIFEST
from kvcore.portable.pages import Array


class Transport(Protocol):
    """One way to an exporter. Every verb ends within ``timeout`` seconds.

    A transport may have ``begin`` too, with the arguments of ``fetch``: it returns while pages are on the way, and the
    function that it returns waits for them. Where all pages lie in memory of this process, ``in_place(handle)`` gives
    them as they lie, to be read until the pull ends.

    Raises:
        TransferError: what the exporter refuses (``unknown``, ``out_of_range``, ``consumed``, ``stale``, ``expired``),
            or ``peer_lost`` or ``timeout``. Nothing that has come so far is valid then.
    """

    def manifest(self, handle: Handle, *, timeout: float) -> bytes:
        """The manifest's bytes."""
        ...

    def fetch(self, handle: Handle, first: int, into: Array, *, timeout: float) -> None:
        """Fill ``into`` [count, page_bytes] with pages from ``first`` on."""
        ...

    def finish(self, handle: Handle, *, timeout: float) -> None:
        """Tell the exporter that this reader has the export."""
        ...


class Direct:
    """From an exporter in the same process: what the others are compared with."""

    def __init__(self, exporter: Exports) -> None:
        self._exporter = exporter

    def manifest(self, handle: Handle, *, timeout: float) -> bytes:
        """From the exporter itself."""
        del timeout
        return self._exporter.manifest(*reference(handle))

    def fetch(self, handle: Handle, first: int, into: Array, *, timeout: float) -> None:
        """Copied."""
        del timeout
        pages = self._exporter.pages(*reference(handle), first, len(into))
        if isinstance(pages, type(into)):
            into[:] = pages
        else:
            into[:] = pages.cpu().numpy() if isinstance(into, np.ndarray) else into.new_tensor(pages)

    def in_place(self, handle: Handle) -> Array:
        """All pages, where the exporter laid them."""
        return self._exporter.pages(*reference(handle), 0, handle.pages)

    def finish(self, handle: Handle, *, timeout: float) -> None:
        """Told at once."""
        del timeout
        self._exporter.finish(*reference(handle))


def begin(transport: Transport, handle: Handle, first: int, into: Array, *, timeout: float) -> Callable[[], None]:
    """Begin a fetch, or do all of it where the transport cannot; what is returned waits for the pages."""
    start: Any = getattr(transport, "begin", None)
    if start is not None:
        return start(handle, first, into, timeout=timeout)
    transport.fetch(handle, first, into, timeout=timeout)
    return lambda: None


def reference(handle: Handle) -> tuple[str, int, int]:
    """What names an export to whoever gave it."""
    return handle.exporter, handle.number, handle.generation


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands before the manifest: sizes, the generation, the lease, and how many readers are left."""

    generation: int
    deadline: float
    readers: int
    manifest_bytes: int
    pages: int
    page_bytes: int


def publish(exporter: Exports, handle: Handle, folder: str | PathLike[str], *, readers: int = 1) -> Path:
    """Put an export into the folder, whole or not at all.

    Raises:
        TransferError: the handle is no longer good. ShapeError: fewer than one reader. OSError: the disk refused.
    """
    check_count(ShapeError, "publish: readers", readers, 1)
    staged = exporter.staged(*reference(handle))
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
    write_whole(Disk(), path, [_encode(head), staged.manifest, np.ascontiguousarray(pages).reshape(-1).data])
    return path


class FileTransport:
    """Pulls from a folder that ``publish`` wrote to."""

    def __init__(self, folder: str | PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self._folder = Path(folder)
        self._clock = clock

    def manifest(self, handle: Handle, *, timeout: float) -> bytes:
        """From the file's start."""
        del timeout
        with self._open(handle) as file:
            head = self._head(file, handle)
            if head.manifest_bytes > LARGEST_MANIFEST:
                raise _damaged(f"a manifest of {head.manifest_bytes} bytes", f"{LARGEST_MANIFEST} bytes or fewer")
            return _read(file, head.manifest_bytes)

    def fetch(self, handle: Handle, first: int, into: Array, *, timeout: float) -> None:
        """From their place in the file."""
        del timeout
        with self._open(handle) as file:
            head = self._head(file, handle)
            check_range(first, len(into), head.pages)
            if head.page_bytes != into.shape[1]:
                raise _damaged(f"pages of {head.page_bytes} bytes", f"pages of {into.shape[1]} bytes")
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
            return open_regular(_path(self._folder, handle), follow=False)
        except OSError as error:
            # Also a link, a pipe or a folder of that name.
            raise TransferError(
                reason="unknown",
                got=error.strerror or "no such export",
                where="pull",
                allowed=f"an export in {self._folder}",
            ) from error

    def _head(self, file: Any, handle: Handle) -> Head:
        """The head, if the file is what the handle refers to."""
        size = int.from_bytes(_read(file, 4), "little")
        try:
            head = msgspec.msgpack.decode(_read(file, size), type=Head)
        except UNREADABLE as error:
            raise _damaged(str(error), "a file of publish") from error
        counts = head.manifest_bytes, head.pages, head.page_bytes
        rest = os.fstat(file.fileno()).st_size - file.tell()
        # A tombstone has nothing but its head.
        declared = head.manifest_bytes + head.pages * head.page_bytes if head.readers > 0 else 0
        if min(counts) < 0 or declared != rest or not math.isfinite(head.deadline):
            raise _damaged(f"{rest} bytes after a head that declares others", "a file of publish")
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
    """Its place in the folder, and nowhere else: ``Handle`` refuses exporters that are no plain names."""
    return folder / f"{handle.exporter}.{handle.number}.kvexport"


def _encode(head: Head) -> bytes:
    data = msgspec.msgpack.encode(head)
    return len(data).to_bytes(4, "little") + data


def _read(file: Any, count: int) -> bytes:
    # Asked for more than there is, Python would make room for all of it first.
    data = file.read(count) if count <= os.fstat(file.fileno()).st_size else b""
    if len(data) != count:
        raise _damaged("a file that was cut", "a file of publish")
    return data


def _damaged(got: str, allowed: str) -> TransferError:
    return TransferError(reason="damaged", got=got, where="pull", allowed=allowed)
