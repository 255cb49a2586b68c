"""R4: snapshots damaged at random; every damage must be noticed, and what is whole must be restored bit for bit.

Bit flips, cut ends, lost and repeated pieces, swapped pages, zeroed sectors, another version's parts. Beside it, bit
flips in files of safetensors, ``torch.save`` and ``numpy.savez``, and what their loaders say.
"""

import functools
import io
import random
from collections import Counter
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from kvcore.errors import SnapshotError
from kvcore.portable import snapshot
from kvcore.portable.blob import HEAD_BYTES
from kvcore.testing.operations import shrink
from tests.reliability import command
from tests.support import stories

LENGTHS = (21, 9, 34)
KINDS = {"flip": 6, "flip header": 2, "cut": 2, "zero": 1, "swap": 2, "repeat": 1, "lose": 1, "other": 1, "byte": 2}
SECTOR_BYTES = 512
SEED_CORRUPTIONS = 1000
SEED_BESIDE = 20


@functools.cache
def snapshots(backend: str = "reference", device: str | None = None) -> tuple[Any, list[bytes]]:
    """A cache of three requests, and two snapshots of it: before and after one more token each."""
    cache = stories.create(stories.LATENT, backend, device=device, check=False)
    requests = [cache.admit() for _ in LENGTHS]
    for number, (request, length) in enumerate(zip(requests, LENGTHS, strict=True)):
        stories.tell(cache, {request: [100 * number + token for token in range(length)]})
    files = [snapshot.to_bytes(cache._state, requests)]
    stories.tell(cache, {request: [5] for request in requests})
    return cache, [*files, snapshot.to_bytes(cache._state, requests)]


def corrupt(data: bytes, other: bytes, choice: random.Random) -> tuple[str, bytes]:
    """(kind of damage, damaged bytes), never equal to ``data``."""
    header = HEAD_BYTES + int.from_bytes(data[8:16], "little")
    while True:
        kind = choice.choices(list(KINDS), list(KINDS.values()))[0]
        bad = bytearray(data)
        first = choice.randrange(len(data))
        size = min(choice.choice((1, 8, 64, SECTOR_BYTES, 4096)), len(data) - first)
        second = choice.randrange(len(data) - size + 1)
        if kind == "flip":
            bad[first] ^= 1 << choice.randrange(8)
        elif kind == "flip header":
            bad[choice.randrange(header)] ^= 1 << choice.randrange(8)
        elif kind == "byte":
            bad[first] = choice.randrange(256)
        elif kind == "cut":
            del bad[first:]
        elif kind == "zero":
            bad[first : first + size] = bytes(size)
        elif kind == "swap":
            bad[first : first + size], bad[second : second + size] = (
                data[second : second + size],
                data[first : first + size],
            )
        elif kind == "repeat":
            bad[first:first] = data[first : first + size]
        elif kind == "lose":
            del bad[first : first + size]
        else:
            bad[first : first + size] = other[first : first + size]
        if bytes(bad) != data:
            return kind, bytes(bad)


def verdict(data: bytes, whole: snapshot.Snapshot, ops: Any) -> tuple[bool, int, int]:
    """(damage noticed, requests still restored, whether any of those differs from the original)."""
    try:
        saved = snapshot.parse(data)
    except SnapshotError:
        return True, 0, 0
    damaged = [bool(saved.damage(number, ops)) for number in range(len(saved.records))]
    wrong = 0
    for number, bad in enumerate(damaged):
        if not bad:
            one, other = whole.requests[number], saved.requests[number]
            known = not isinstance(other, str) and one.described == other.described
            wrong += not (known and np.array_equal(one.pages, other.pages))
    return any(damaged), damaged.count(False), wrong


def unnoticed(data: bytes, bad: bytes, whole: snapshot.Snapshot, ops: Any) -> str | None:
    """What is wrong about how a damaged file is received, or None."""
    noticed, _, differing = verdict(bad, whole, ops)
    if differing:
        return "a request was restored with other bytes"
    return None if noticed or bad == data else "damage was not noticed"


def failure(seed: int, number: int, kind: str, data: bytes, bad: bytes, whole: snapshot.Snapshot, ops: Any):
    """The failure's record, its trace the fewest changed bytes that do it."""
    error = f"number {number}, {kind}: {unnoticed(data, bad, whole, ops)}"
    trace = [f"{len(data)} bytes became {len(bad)}"]
    if len(bad) == len(data):

        def changed(places) -> bytes:
            some = bytearray(data)
            for place in places:
                some[place] = bad[place]
            return bytes(some)

        every = [place for place in range(len(data)) if data[place] != bad[place]]
        short = shrink(every, lambda places: bool(unnoticed(data, changed(places), whole, ops)))
        trace = [f"byte {place}: {data[place]:#04x} became {bad[place]:#04x}" for place in short]
    print(f"seed {seed}: {error}", *trace, sep="\n  ")
    return {"seed": seed, "error": error, "trace": trace}


def tell(seed: int, options: dict[str, str]) -> command.Told:
    """Damage a file many times, and look at the whole one in between."""
    cache, (data, other) = snapshots(options["backend"], options["device"] or None)
    whole = snapshot.parse(data)
    choice = random.Random(seed)
    kinds: Counter[str] = Counter()
    restored = false_alarms = 0
    failures = []
    for number in range(SEED_CORRUPTIONS):
        kind, bad = corrupt(data, other, choice)
        kinds[kind] += 1
        noticed, left, differing = verdict(bad, whole, cache.ops)
        restored += left
        if not noticed or differing:
            failures.append(failure(seed, number, kind, data, bad, whole, cache.ops))
        if number % 100 == 0 and verdict(data, whole, cache.ops) != (False, len(LENGTHS), 0):
            false_alarms += 1
            failures.append({"seed": seed, "error": "a whole file was refused", "trace": []})
    counts = {
        "corruptions": SEED_CORRUPTIONS,
        "kinds": dict(kinds),
        "restored_beside_damage": restored,
        "whole_files_looked_at": SEED_CORRUPTIONS // 100,
        "false_alarms": false_alarms,
        "beside": others(whole, SEED_BESIDE, seed) if options["beside"] == "yes" else {},
    }
    return command.Told(counts, failures)


def others(whole: snapshot.Snapshot, count: int, seed: int) -> dict[str, dict[str, int]]:
    """Bit flips in files of other formats with the same arrays: refused, loaded right, or wrong without a word."""
    import torch

    arrays = {str(number): request.pages for number, request in enumerate(whole.requests)}
    plain = safetensors.numpy.save(arrays)
    pickled = io.BytesIO()
    torch.save({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, pickled)
    zipped = io.BytesIO()
    np.savez(zipped, **arrays)

    def from_torch(data: bytes) -> dict[str, Any]:
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        return {name: tensor.numpy() for name, tensor in loaded.items()}

    files = {
        f"safetensors {safetensors.__version__}": (plain, safetensors.numpy.load),
        f"torch.save {torch.__version__}": (pickled.getvalue(), from_torch),
        f"numpy.savez {np.__version__}": (zipped.getvalue(), lambda data: dict(np.load(io.BytesIO(data)))),
    }
    choice = random.Random(seed)
    found = {}
    for name, (data, load) in files.items():
        tally = {"flips": count, "refused": 0, "loaded_right": 0, "loaded_wrong": 0}
        for _ in range(count):
            bad = bytearray(data)
            bad[choice.randrange(len(bad))] ^= 1 << choice.randrange(8)
            try:
                loaded = load(bytes(bad))
                same = loaded.keys() == arrays.keys() and all(
                    np.array_equal(arrays[key], loaded[key]) for key in arrays
                )
            except Exception:  # noqa: BLE001 - any error is a refusal
                tally["refused"] += 1
            else:
                tally["loaded_right" if same else "loaded_wrong"] += 1
        found[name] = tally
    return found


FIGURE = command.Figure(
    "R4", "corruptions", 1000, 100_000, tell, {"backend": "reference", "device": "", "beside": "yes"}
)

if __name__ == "__main__":
    command.run_figure(__doc__, FIGURE)
