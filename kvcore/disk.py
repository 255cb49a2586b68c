"""The few things that saving asks of a disk, so that tests can put a failing one in its place."""

import os
from pathlib import Path


class Disk:
    """The real file system. A file is complete and durable once ``publish`` has returned."""

    def write(self, path: Path, data: bytes) -> None:
        """Write and flush a file that nobody reads yet."""
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def publish(self, temporary: Path, path: Path) -> None:
        """Give a written file its name, atomically, and make the name durable."""
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self, path: Path) -> None:
        """Remove a file if it is there."""
        path.unlink(missing_ok=True)
