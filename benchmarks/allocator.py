"""How many blocks a second the allocator hands out and takes back, on one core.

A pair is one block taken and dropped again. ``python -m benchmarks.allocator [--out FILE] [--pairs N]`` prints pairs a
second of processor time for several sizes of a request, with and without a full prefix cache to evict from.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.written import write
from kvcore import environment
from kvcore.requests.blocks import BlockAllocator

BLOCKS = 16384


def measure(batch: int, pairs: int, *, cached: bool) -> float:
    """Pairs a second where every request takes ``batch`` blocks; ``cached``: each take evicts sealed blocks."""
    allocator = BlockAllocator(BLOCKS)
    if cached:
        blocks = allocator.take(BLOCKS)
        for block in blocks:
            allocator.seal(block, block.to_bytes(8, "big"))
        allocator.drop(blocks)
    take, drop, seal = allocator.take, allocator.drop, allocator.seal
    rounds = max(1, pairs // batch)
    # Hashing tokens into keys is not the allocator's work.
    keys = (
        iter([number.to_bytes(8, "big") for number in range(BLOCKS, BLOCKS + rounds * batch)]) if cached else iter(())
    )
    start = time.process_time()
    for _ in range(rounds):
        held = take(batch)
        if cached:
            for block in held:
                seal(block, next(keys))
        drop(held)
    return rounds * batch / (time.process_time() - start)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for cached in (False, True):
        for batch in (1, 4, 16, 64, 256):
            best = max(measure(batch, options.pairs, cached=cached) for _ in range(3))
            rows.append({"blocks_a_request": batch, "evicting": cached, "pairs_a_second": round(best)})
            print(f"{batch:4} blocks a request, {'evicting' if cached else 'free list'}: {best / 1e6:6.2f} M pairs/s")
    write({"benchmark": "allocator", **environment.of_script(), "blocks": BLOCKS, "rows": rows}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
