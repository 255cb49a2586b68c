"""Appends and stores of several checkouts on one GPU, in turns, so that a change is told from the card's moods:

    python -m benchmarks.appends_of_trees now=. 270537c=../before --out records/bench_appends_h200.json

A tree is named by its commit. Each has a process of its own, which is told what to time and rests while others do. Rows
are those of ``kvcore bench``.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

COUNTS = (1, 64, 256, 8192, 65536)
KEYS = ("index_fp8_132", "index_fp4_68", "index_fp4_68_h")
TURNS, REPEATS = 4, 25


def makers() -> dict[str, Callable[[], Any]]:
    """Rows of this process's tree, by name."""
    from kvcore.bench import workloads

    found: dict[str, Callable[[], Any]] = {}
    for count in COUNTS:
        found[f"append bf16 -> v4_584, T = {count:,}"] = lambda n=count: workloads.append_window("cuda", n, 0, 0)
    for count in (64, 8192, 65536):
        found[f"RoPE + append, T = {count:,}"] = lambda n=count: workloads.append_rotated("cuda", n, 0, 0)
    for name in KEYS:
        for count in (64, 8192, 65536):
            found[f"store {name}, T = {count:,}"] = lambda f=name, n=count: workloads.store_keys(
                "cuda", f, n, None, None
            )
    import torch

    for kind, ratio in (("CSA", 4), ("HCA", 128)):
        for count in (8192, 65536):
            row = f"{kind} prefill, bf16, {count:,} tokens"
            given = ratio, kind == "CSA", count, torch.bfloat16, None, None
            found[row] = lambda a=given: workloads.prefill("cuda", *a)
    return found


def serve() -> None:
    """Time what each line of the input names, that many times; answer with µs and bytes.

    Of the tree nothing is imported but its benchmark, as trees of long ago have it.
    """
    import torch

    from kvcore.bench.timing import graph

    rows, work = makers(), None
    print(json.dumps({"rows": [*rows], "device": torch.cuda.get_device_name()}), flush=True)
    with torch.no_grad():
        for line in sys.stdin:
            name, repeats = json.loads(line)
            if work is None or work.name != name:
                work = None
                gc.collect()
                torch.cuda.empty_cache()
                work = rows[name]()._replace(name=name)
            print(json.dumps([graph(work.calls, repeats=repeats), work.nbytes]), flush=True)


class Tree:
    """The process of one tree."""

    def __init__(self, path: str) -> None:
        self.path = path
        others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        own = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(path).resolve()), *filter(None, others)])}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def ask(self, name: str, repeats: int) -> None:
        """Have a row timed."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps([name, repeats]) + "\n")

    def answer(self) -> Any:
        """What it says next; what went wrong is on the screen."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the process of {self.path} ended")
        return json.loads(line)


def main() -> None:
    """Print all rows, and write them where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", nargs="*", metavar="NAME=PATH")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="file of the record")
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    trees = {name: Tree(path) for name, _, path in (each.partition("=") for each in args.trees)}
    from benchmarks.written import write  # trees may be older than it is
    from kvcore import environment

    said = [tree.answer() for tree in trees.values()]
    rows: list[dict[str, Any]] = []
    record = {
        "figure": "µs of a call in a CUDA graph, of trees that took turns on one card",
        "command": environment.of_script()["command"],
        "commit": environment.commit(),
        "device": said[0]["device"],
        "versions": environment.versions(),
        "rows": rows,
    }
    for row in said[0]["rows"]:
        for tree in trees.values():
            # Prepared side by side: most of that is compilation.
            tree.ask(row, 1)
        nbytes = max(tree.answer()[1] for tree in trees.values())
        times: dict[str, list[float]] = {name: [] for name in trees}
        for _ in range(TURNS):
            for name, tree in trees.items():
                tree.ask(row, REPEATS)
                times[name].append(tree.answer()[0])
        us = {name: round(statistics.median(each), 3) for name, each in times.items()}
        rows.append({"name": row, "nbytes": nbytes, "us": us})
        print(f"{row:40s}", us, flush=True)
        write(record, args.out)


if __name__ == "__main__":
    main()
