"""R14: one flipped bit among a million pages is found wherever it lies, and the page that has it is named.

A file, a store's tier in the host's memory, a pull on its way, and memory of somebody else's that a cache was made of.
Each trial flips one bit anywhere in the bytes, and nothing is found where none is flipped.
"""

import random
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import kvcore
from kvcore.errors import SnapshotError, TransferError
from kvcore.handoff import Direct, Exporter, pull
from kvcore.spec import KV, CacheSpec, LayerSpec
from kvcore.store import BlockStore, HostTier
from tests.reliability import command

SPEC = CacheSpec(layers=(LayerSpec(kv=KV(key_heads=1, key_dim=4, key_format="fp16")),), block_tokens=1, name="one_bit")
"""A token is a page: 16 bytes of a key and a value."""

LAYOUT = "NL_X_NB_TWO_BS_NH_HS"
TRIALS = 10


def filled(pages: int, seed: int) -> tuple[kvcore.Cache, kvcore.Request, np.ndarray]:
    """A cache over somebody's tensor of any bytes, and a request that has all of its blocks."""
    rng = np.random.default_rng(seed)
    tensor = rng.integers(0, 1 << 16, (pages, 2, 1, 1, 4), np.uint16).view(np.float16)
    cache = kvcore.adopt(SPEC, [tensor], layout=LAYOUT)
    return cache, cache.admit(blocks=rng.permutation(pages).tolist(), length=pages), tensor


def flip(data: Any, choice: random.Random, first: int = 0) -> int:
    """Flip one bit from a byte on; the byte."""
    at = choice.randrange(first, len(data))
    data[at] ^= 1 << choice.randrange(8)
    return at


def in_a_file(pages: int, seed: int, choice: random.Random) -> int:
    """Bits that loading did not find, or whose page it did not name."""
    cache, request, _ = filled(pages, seed)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.kv"
        cache.save(path, requests=[request])
        whole = path.read_bytes()
        kvcore.load(path, backend="reference")
        # Pages come last, each of 16 bytes; the request's record has none.
        begin = len(whole) - 16 * pages
        for _ in range(TRIALS):
            data = bytearray(whole)
            at = flip(data, choice, begin)
            path.write_bytes(data)
            try:
                kvcore.load(path, backend="reference")
                missed += 1
            except SnapshotError as error:
                missed += str((at - begin) // 16) not in re.findall(r"\d+", str(error))
    return missed


def in_the_host_tier(pages: int, seed: int, choice: random.Random) -> int:
    """Bits that reading all pages did not find, or whose page it did not name."""
    rng = np.random.default_rng(seed)
    held = rng.bytes(16 * pages)
    tier = HostTier(1 << 40)
    store = BlockStore([tier])
    keys = [number.to_bytes(8, "little") for number in range(pages)]
    for number, key in enumerate(keys):
        store.put(key, held[16 * number : 16 * number + 16])
    missed = 0
    for trial in range(2):
        bad = None
        if trial:
            bad = choice.choice(keys)
            data = bytearray(tier.get(bad))
            flip(data, choice)
            tier.put(bad, bytes(data))
        lost = [key for key in keys if store.get(key) is None]
        missed += (lost, store.damaged) != (([bad], [bad]) if trial else ([], []))
    for bad in choice.sample(keys, TRIALS):
        if store.has(bad):
            data = bytearray(tier.get(bad))
            flip(data, choice)
            tier.put(bad, bytes(data))
            missed += store.get(bad) is not None
    return missed


class Flips(Direct):
    """A way on which one bit is flipped."""

    def __init__(self, exporter: Exporter, choice: random.Random, pages: int) -> None:
        super().__init__(exporter)
        self.choice = choice
        self.page = choice.randrange(pages)

    def fetch(self, handle: Any, first: int, into: Any, *, timeout: float) -> None:
        super().fetch(handle, first, into, timeout=timeout)
        if first <= self.page < first + len(into):
            flip(into[self.page - first], self.choice)


def on_its_way(pages: int, seed: int, choice: random.Random) -> int:
    """Bits that a pull did not find, or whose page it did not name."""
    cache, request, _ = filled(pages, seed)
    there = kvcore.create_cache(SPEC, backend="reference", max_requests=1, max_tokens=pages)
    desk = Exporter(cache)
    right, missed = cache.digest([request]), 0
    for trial in range(TRIALS):
        handle = desk.export(request)
        way = Flips(desk, choice, pages)
        way.page = way.page if trial else -1
        try:
            moved = pull(there, handle, way, timeout=600.0, chunk_pages=1 << 16)
            missed += bool(trial) or there.digest([moved]) != right
            there.release(moved)
        except TransferError as error:
            missed += not trial or str(way.page) not in re.findall(r"\d+", str(error))
            way.finish(handle, timeout=1.0)
    return missed


def in_memory_of_somebody(pages: int, seed: int, choice: random.Random) -> int:
    """Bits that the digest does not see."""
    cache, request, tensor = filled(pages, seed)
    right, missed = cache.digest([request]), 0
    held = tensor.reshape(-1).view(np.uint8)
    for _ in range(TRIALS):
        at = choice.randrange(len(held))
        bit = np.uint8(1 << choice.randrange(8))
        held[at] ^= bit
        missed += cache.digest([request]) == right
        held[at] ^= bit
        missed += cache.digest([request]) != right
    return missed


PLACES = {
    "file": in_a_file,
    "host tier": in_the_host_tier,
    "on its way": on_its_way,
    "somebody's memory": in_memory_of_somebody,
}


def run(*, pages: int, seed: int) -> dict[str, Any]:
    """Flip bits in every place."""
    choice = random.Random(seed)
    missed = {}
    for name, place in PLACES.items():
        missed[name] = place(pages, seed, choice)
        print(f"{name}: {missed[name]} missed")
    return {"figure": "R14", "pages": pages, "flips": TRIALS, "missed": missed, "divergences": sum(missed.values())}


if __name__ == "__main__":
    command.main(__doc__, lambda full, seed: run(pages=1_000_000 if full else 3000, seed=seed))
