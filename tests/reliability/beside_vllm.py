"""Beside R1 and R6: what vLLM's block pool does on the same faults, and how fast it hands out blocks.

``python -m tests.reliability.beside_vllm SOURCE [--out FILE]``: SOURCE holds the package's ``vllm`` folder, from a
wheel or an sdist. Only ``v1/core/block_pool.py`` and ``kv_cache_utils.py`` are run, on any CPU; what they import of the
engine, and use for logging, types and events only, is stood in for. The pool trusts its one caller, the scheduler: what
is counted is whether a caller's mistake is noticed at the faulty call, later, or never.
"""

import argparse
import hashlib
import json
import random
import sys
import time
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import cbor2

from kvcore import environment

BLOCKS = 64
MISTAKES = 200


def pool_module(source: Path) -> Any:
    """``vllm.v1.core.block_pool`` of that source, with the engine stood in for."""
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.distributed"):
        package = types.ModuleType(name)
        package.__path__ = [str(source / name.replace(".", "/"))]
        sys.modules[name] = package

    class Anything:
        """Stands for a class that is only named."""

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

    def stub(name: str, **known: Any) -> None:
        module = types.ModuleType(name)
        vars(module).update(known)
        module.__getattr__ = lambda _: Anything
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        setattr(sys.modules[parent], last, module)

    class Silent:
        def __getattr__(self, _: str) -> Any:
            return lambda *_, **__: None

    stub("vllm.envs", VLLM_KV_CACHE_BLOCK_SIZE=16)
    stub("vllm.config")
    stub("vllm.logger", init_logger=lambda _: Silent())
    stub("vllm.distributed.kv_events", MEDIUM_GPU="GPU")
    stub("vllm.v1.request")
    stub("vllm.v1.kv_cache_interface")
    stub("vllm.v1.metrics", __path__=[])
    stub("vllm.v1.metrics.stats")
    stub(
        "vllm.utils",
        cdiv=lambda a, b: -(-a // b),
        GiB_bytes=1 << 30,
        sha256_cbor=lambda value: hashlib.sha256(cbor2.dumps(value, canonical=True)).digest(),
    )
    return import_module("vllm.v1.core.block_pool")


class Watched:
    """A pool, and what its caller rightly holds: every block once, and free and held ones adding up."""

    def __init__(self, module: Any, seed: int) -> None:
        self.pool = module.BlockPool(num_gpu_blocks=BLOCKS, enable_caching=True, enable_kv_cache_events=False)
        self.choice = random.Random(seed)
        self.held: list[list[Any]] = []
        self.gone: list[list[Any]] = []
        # One block is the pool's own, to pad tables with.
        self.capacity = self.pool.get_num_free_blocks()

    def good(self) -> None:
        """A legitimate operation."""
        count = self.choice.randint(1, 6)
        if self.held and (self.choice.random() < 0.5 or count > self.pool.get_num_free_blocks()):
            blocks = self.held.pop(self.choice.randrange(len(self.held)))
            self.pool.free_blocks(blocks)
            self.gone = [*self.gone[-3:], blocks]
        elif count <= self.pool.get_num_free_blocks():
            self.held.append(self.pool.get_new_blocks(count))

    def wrong(self) -> str | None:
        """The first thing that is no longer as it must be, or None."""
        held = [block.block_id for blocks in self.held for block in blocks]
        if len(set(held)) != len(held):
            return "a block held by two owners"
        if len(held) + self.pool.get_num_free_blocks() != self.capacity:
            return "free and held blocks do not add up"
        return None


def double_free(watched: Watched) -> None:
    """Give blocks back that were given back before."""
    watched.pool.free_blocks(watched.choice.choice(watched.gone))


def stale_touch(watched: Watched) -> None:
    """Take a share of blocks that were given back, as a stale request's fork would."""
    watched.pool.touch((watched.choice.choice(watched.gone),))


def too_many(watched: Watched) -> None:
    """Ask for more than there is."""
    watched.pool.get_new_blocks(watched.pool.get_num_free_blocks() + 1)


def outcome(module: Any, mistake: Any, seed: int) -> str:
    """What becomes of one mistake after some legitimate operations and before 200 more."""
    watched = Watched(module, seed)
    while not watched.gone:
        watched.good()
    for _ in range(watched.choice.randrange(20)):
        watched.good()
    before = watched.wrong()
    if before:
        return f"wrong before: {before}"
    free = watched.pool.get_num_free_blocks()
    try:
        mistake(watched)
    except Exception:  # noqa: BLE001 - any error is a refusal
        same = watched.pool.get_num_free_blocks() == free and watched.wrong() is None
        return "refused, state unchanged" if same else "refused, state changed"
    for _ in range(200):
        try:
            watched.good()
        except Exception as error:  # noqa: BLE001 - as above
            return f"accepted; an unrelated later call failed with {type(error).__name__}"
        if watched.wrong():
            return f"accepted; later {watched.wrong()}"
    return "accepted; nothing seen in 200 operations"


def pairs_a_second(module: Any, batch: int, pairs: int = 100_000) -> int:
    """Blocks handed out and taken back a second of processor time."""
    pool = module.BlockPool(num_gpu_blocks=16384, enable_caching=True, enable_kv_cache_events=False)
    start = time.process_time()
    for _ in range(pairs // batch):
        pool.free_blocks(pool.get_new_blocks(batch))
    return round(pairs // batch * batch / (time.process_time() - start))


def main() -> None:
    """Run it all, print and record it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--version", default="unknown", help="of the source, for the record")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    module = pool_module(given.source)
    mistakes: dict[str, dict[str, int]] = {}
    for mistake in (double_free, stale_touch, too_many):
        found = mistakes.setdefault(mistake.__name__.replace("_", " "), {})
        for seed in range(MISTAKES):
            what = outcome(module, mistake, seed)
            found[what] = found.get(what, 0) + 1
    record = {
        "beside": "R1, R6",
        "vllm": given.version,
        **environment.of_script(),
        "mistakes": mistakes,
        "pairs_a_second": {str(batch): pairs_a_second(module, batch) for batch in (1, 16, 256)},
    }
    text = json.dumps(record, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
