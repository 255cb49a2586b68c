"""What the figures' commands share: their arguments, and the record that they write."""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_stop_at: list[float] = []


def spent() -> bool:
    """True once the time that ``--seconds`` gave is over: a figure then stops, and records what it did."""
    return bool(_stop_at) and time.perf_counter() > _stop_at[-1]


def main(description: str, run: Callable[[bool, int], dict[str, Any]]) -> None:
    """Run a figure from the command line; the exit code is 1 if it did not hold.

    Args:
        run: (full, seed) -> the record; ``divergences`` in it must be 0.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the full form, as recorded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="stop early, after this long; the record says what was run")
    parser.add_argument("--out", type=Path, help="write the record there, as JSON")
    options = parser.parse_args()
    start = time.perf_counter()
    if options.seconds:
        _stop_at.append(start + options.seconds)
    record = {
        "form": "full" if options.full else "short",
        **run(options.full, options.seed),
        "stopped_early": spent(),
        "seconds": round(time.perf_counter() - start, 1),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    text = json.dumps(record, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    sys.exit(1 if record["divergences"] else 0)
