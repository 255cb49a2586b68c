"""A disk in memory that fails, writes short and loses power on demand, every choice drawn from one seed.

What was written is volatile until it is flushed, and so are names until their folder is. After a crash each volatile
thing is there, gone, or there in part, as on a disk with a write cache.
"""

import errno
import random
from typing import TYPE_CHECKING

from kvcore.portable.disk import Disk

if TYPE_CHECKING:
    from pathlib import Path

SECTOR_BYTES = 512


class Crash(BaseException):
    """The power is gone. Not an Exception: no handler may go on as if the process still lived."""


class File:
    """Bytes of one file: as written, and as they were when last flushed."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = b""


class SimulatedDisk(Disk):
    """Operations are counted; the one numbered ``fail_at`` fails as ``fault`` says.

    Args:
        seed: of every choice.
        fail_at: number of the operation that fails, from 0; None: none.
        fault: ``crash before``, ``crash during``, ``crash after``, ``EIO``, ``ENOSPC``; or, for all operations,
            ``short writes`` and ``lost flushes``.
    """

    def __init__(self, seed: int = 0, *, fail_at: int | None = None, fault: str = "") -> None:
        self.random = random.Random(seed)
        self.fail_at = fail_at
        self.fault = fault
        self.operations: list[str] = []
        self.names: dict[Path, File] = {}
        self.durable_names: dict[Path, File] = {}
        self._gone = False

    def create(self, path):
        self._before("create")
        self.names[path] = File()
        self._after()
        return self.names[path]

    def write(self, file, data):
        self._before("write")
        count = len(data)
        if self.fault == "short writes" or self._now("crash during"):
            count = self.random.randint(1 if self.fault == "short writes" else 0, len(data))
        file.data += data[:count]
        self._after()
        return count

    def flush(self, file):
        self._before("flush")
        if self.fault != "lost flushes":
            part = self.random.randint(0, len(file.data)) if self._now("crash during") else len(file.data)
            file.durable = bytes(file.data[:part])
        self._after()

    def close(self, file):
        self._before("close")
        self._after()

    def rename(self, source, target):
        self._before("rename")
        if not self._now("crash during") or self.random.random() < 0.5:
            self.names[target] = self.names.pop(source)
        self._after()

    def flush_folder(self, folder):
        self._before("flush folder")
        if self.fault != "lost flushes" and (not self._now("crash during") or self.random.random() < 0.5):
            self.durable_names = dict(self.names)
        self._after()

    def remove(self, path):
        self._before("remove")
        self.names.pop(path, None)
        self._after()

    def sweep(self, path):
        # One process: whatever lies there was left behind.
        for left in [name for name in self.names if name.name.startswith(f".{path.name}.")]:
            self.remove(left)

    def sweep_folder(self, folder):
        for left in [name for name in self.names if name.parent == folder and name.name.startswith(".")]:
            self.remove(left)

    def read(self, path):
        self._before("read")
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return bytes(self.names[path].data)

    def after_power_loss(self, seed: int) -> "SimulatedDisk":
        """A disk as it may look after the power came back: one of the many possible ones."""
        back = SimulatedDisk(seed)
        choice = back.random
        names = dict(self.durable_names)
        for path in {*self.names, *self.durable_names}:
            if self.names.get(path) is not self.durable_names.get(path) and choice.random() < 0.5:
                names.pop(path, None)
                if path in self.names:
                    names[path] = self.names[path]
        for path, file in names.items():
            kept = File()
            kept.data = bytearray(_survived(file, choice))
            kept.durable = bytes(kept.data)
            back.names[path] = kept
        back.durable_names = dict(back.names)
        return back

    def _now(self, fault: str) -> bool:
        return self.fault == fault and len(self.operations) - 1 == self.fail_at

    def _before(self, name: str) -> None:
        if self._gone:
            raise Crash
        self.operations.append(name)
        if self._now("crash before"):
            self._lose_power()
        for code in ("EIO", "ENOSPC"):
            if self._now(code):
                raise OSError(getattr(errno, code), f"{code}, simulated", name)

    def _after(self) -> None:
        if self._now("crash during") or self._now("crash after"):
            self._lose_power()

    def _lose_power(self) -> None:
        self._gone = True
        raise Crash


def _survived(file: File, choice: random.Random) -> bytes:
    """What a file holds after a crash: flushed bytes for certain, of the others any sectors, zeros where lost."""
    data, durable = bytes(file.data), file.durable
    if data == durable or choice.random() < 0.3:
        return data
    length = choice.choice([len(durable), len(data), choice.randint(len(durable), len(data))])
    kept = bytearray(durable[:length].ljust(length, b"\0"))
    for start in range(len(durable) // SECTOR_BYTES * SECTOR_BYTES, length, SECTOR_BYTES):
        if choice.random() < 0.5:
            first = max(start, len(durable))
            kept[first : start + SECTOR_BYTES] = data[first : min(start + SECTOR_BYTES, length)]
    return bytes(kept)
