"""Decode attention from codes of eight and of four bits, and their appends, beside torch's attention on a dense copy.

One run on one GPU takes all figures, each in a CUDA graph of calls on buffers that rotate:

    python -m benchmarks.low_bit_on_device --out records/low_bit_h200.json

Shapes are those of ``kvcore bench``: 32 query heads, 8 key heads of 128 channels.
"""

import argparse
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.written import write
from kvcore import environment
from kvcore.bench import kv
from kvcore.bench.timing import copy_time, graph
from kvcore.bench.workloads import Workload, rotating

SHAPES = ((16, 32768), (64, 32768))
"""(requests, tokens of each)."""
FORMATS = (
    ("bf16", None, 1.05),
    ("fp8_row", None, 0.60),
    ("int8_row", None, 0.62),
    ("nf4_b64", None, 0.80),
    ("mxfp4", None, 0.80),
    ("int4_ch32", "int4_g32", 0.50),
    ("int4_ch64", "int4_g64", 0.50),
)
"""(keys, values if they have another, part of the time of torch's attention that it is to take at most)."""
REQUESTS = 64
APPENDS = (
    ("bf16", None, 30, 1),
    ("int4_ch32", "int4_g32", 30, 1),
    ("int4_ch32", "int4_g32", 0, 32),
    ("int4_ch32", "int4_g32", 31, 1),
    ("int4_ch64", "int4_g64", 30, 1),
    ("int4_ch64", "int4_g64", 0, 64),
    ("int4_ch64", "int4_g64", 63, 1),
)
"""(keys, values, position, positions from there on): the token at position 31 closes a group of 32.

Requests that do not keep step with each other are spread over all positions, so that two of 64 close one of 32, and one
closes one of 64."""
APPEND = 1.3
"""Part of the time of an append of bf16 that one of int4 is to take at most."""


def timed(make: Callable[[], Workload], repeats: int) -> dict[str, Any]:
    """One row: its name, bytes that must move, and the time of a call in µs."""
    work = make()
    work.calls[0]()
    row = {"name": work.name, "nbytes": work.nbytes, "us": round(graph(work.calls, per_graph=8, repeats=repeats), 2)}
    del work
    gc.collect()
    torch.cuda.empty_cache()
    return row


def copied(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the time of a plain copy of as many bytes, below which nothing comes."""
    return {**row, "copy_us": round(copy_time(row["nbytes"], rotating(row["nbytes"])), 2)}


def beside(row: dict[str, Any], peer: dict[str, Any], goal: float) -> dict[str, Any]:
    """A row with its part of the peer's time, and the goal."""
    return {**row, "peer": peer["name"], "part": round(row["us"] / peer["us"], 3), "goal": goal}


def measure(device: str, repeats: int) -> Iterator[dict[str, Any]]:
    """All rows, as they come."""
    first, *others = (
        lambda a=each: kv.append(device, a[0], REQUESTS, a[2], values=a[1], spread=a[3]) for each in APPENDS
    )
    yield (peer := copied(timed(first, 30)))
    yield from (beside(copied(timed(make, 30)), peer, APPEND) for make in others)
    for count, tokens in SHAPES:
        yield (peer := timed(lambda a=(count, tokens): kv.dense_copy(device, "SDPA", *a), repeats))
        for keys, values, goal in FORMATS:
            made = timed(lambda a=(keys, count, tokens), v=values: kv.attend(device, *a, values=v), repeats)
            yield beside(made, peer, goal)


def said(row: dict[str, Any]) -> str:
    """A row as a line."""
    part = f"{row['part']:6.3f} (goal {row['goal']:.2f})" if "part" in row else ""
    copy = f" {row['copy_us']:.2f} us of a copy" if "copy_us" in row else ""
    return f"{row['name']:56s} {row['us']:9.2f} us {row['nbytes'] / row['us'] / 1e6:5.2f} TB/s {part}{copy}"


def main() -> None:
    """Print all rows, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file of the record")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    record = {
        "figure": "decode attention from low-bit codes, as a part of torch's attention on a dense copy, one run",
        "command": environment.of_script()["command"],
        "commit": environment.commit(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "stopped_early": True,
        "rows": rows,
    }
    with torch.no_grad():
        for row in measure("cuda", args.repeats):
            rows.append(row)
            print(said(row), flush=True)
            write(record, args.out)
    del record["stopped_early"]
    write(record, args.out)


if __name__ == "__main__":
    main()
