"""R3: ``kill -9`` in the middle of saving, and power loss at every boundary of a simulated disk.

A child saves one version after another to the same file and acknowledges each; it is killed at a random moment. The
file must then load, and hold the last acknowledged version or the one that was being saved. Beside it, the same with a
writer that writes in place, as a plain ``safetensors.save_file`` or ``torch.save`` does.
"""

import os
import random
import signal
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcore.errors import SnapshotError
from kvcore.portable import snapshot
from kvcore.portable.disk import Disk, write_whole
from tests.reliability import command
from tests.reliability.simulated_disk import Crash, SimulatedDisk
from tests.support import stories

FILE = Path("/disk/cache.kv")


def versions(count: int) -> tuple[Any, list[bytes]]:
    """(a cache, snapshots of it): version i holds a request of 8 + i tokens."""
    cache = stories.create(stories.LATENT, "reference", check=False)
    request = cache.admit()
    stories.tell(cache, {request: list(range(8))})
    files = []
    for version in range(count):
        stories.tell(cache, {request: [version]})
        files.append(snapshot.to_bytes(cache._state, [request]))
    return cache, files


def held(ops: Any, disk: Disk, path: Path) -> int | None:
    """The version that a file holds, fully verified; None if there is no file.

    Raises:
        SnapshotError: there is a file, but it is torn.
    """
    try:
        saved = snapshot.read(path, disk)
    except FileNotFoundError:
        return None
    damaged = saved.damage(0, ops)
    if damaged:
        raise SnapshotError(got=str(damaged[0]), where="file", allowed="whole pages")
    return saved.records[0].length - 9


def kills(count: int, seed: int, write: Callable[[Path, bytes], None]) -> dict[str, int]:
    """Kill a saving child ``count`` times; count torn files and lost acknowledged versions."""
    cache, files = versions(6)
    choice = random.Random(seed)
    found = {"kills": count, "torn": 0, "lost": 0, "nothing_saved": 0}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            path = Path(folder) / f"{number}.kv"
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reading)
                _save_forever(path, files, writing, write)
            os.close(writing)
            # Most die over an old file; some before there is any.
            acknowledged = os.read(reading, 1) if number % 10 else b""
            time.sleep(choice.uniform(0, 0.01))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            acknowledged += os.read(reading, 1 << 16)
            os.close(reading)
            last = acknowledged[-1] if acknowledged else None
            allowed = {None, 0} if last is None else {last, (last + 1) % len(files)}
            try:
                version = held(cache.ops, Disk(), path)
            except SnapshotError:
                found["torn"] += 1
                continue
            found["nothing_saved"] += version is None
            if version not in allowed:
                print(f"seed {seed}, kill {number}: version {version}, acknowledged {last}")
                found["lost"] += 1
    return found


def _save_forever(path: Path, files: list[bytes], acknowledge: int, write: Callable[[Path, bytes], None]) -> None:
    """The child: save, acknowledge, go on; never returns."""
    version = 0
    while True:
        write(path, files[version])
        os.write(acknowledge, struct.pack("B", version))
        version = (version + 1) % len(files)


def in_place(path: Path, data: bytes) -> None:
    """How a plain writer saves: over the old file, in pieces."""
    with path.open("wb") as file:
        for start in range(0, len(data), 4096):
            file.write(data[start : start + 4096])
            file.flush()


def boundaries(seed: int, outcomes: int) -> dict[str, int]:
    """Lose power before, during and after every operation of the simulated disk, each with many outcomes."""
    cache, files = versions(3)
    quiet = SimulatedDisk()
    for data in files:
        write_whole(quiet, FILE, data)
    found = {"boundaries": len(quiet.operations), "power_losses": 0, "torn": 0, "lost": 0}
    for fault in ("crash before", "crash during", "crash after"):
        for boundary in range(len(quiet.operations)):
            disk = SimulatedDisk(seed + boundary, fail_at=boundary, fault=fault)
            done = 0
            try:
                for data in files:
                    write_whole(disk, FILE, data)
                    done += 1
            except Crash:
                pass
            for outcome in range(outcomes):
                found["power_losses"] += 1
                allowed = {min(done, len(files) - 1), done - 1 if done else None}
                try:
                    version = held(cache.ops, disk.after_power_loss(seed + outcome), FILE)
                except SnapshotError:
                    found["torn"] += 1
                    continue
                if version not in allowed:
                    print(f"seed {seed}: {fault} {boundary}, outcome {outcome}: version {version}, {done} acknowledged")
                    found["lost"] += 1
    return found


def run(full: bool, seed: int) -> dict[str, Any]:
    """Both, and the writer in place beside them."""
    real = kills(1000 if full else 20, seed, lambda path, data: write_whole(Disk(), path, data))
    simulated = boundaries(seed, 50 if full else 2)
    return {
        "figure": "R3",
        "seed": seed,
        "kill_9": real,
        "simulated": simulated,
        "divergences": sum(found[kind] for found in (real, simulated) for kind in ("torn", "lost")),
        "beside": {"a writer in place": kills(200 if full else 20, seed, in_place)},
    }


if __name__ == "__main__":
    command.main(__doc__, run)
