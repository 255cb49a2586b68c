"""``kvcore bench``: the cache's verbs timed on a CUDA device, against what its memory allows.

Every row counts the bytes that must be read and written once; the floor is those bytes at the copy speed measured in
the same run. Times are of one call with a cold L2 (``single``) and of one of many calls in a CUDA graph over rotating
buffers (``graph``), medians both. Goals and peers' times were taken on another GPU; ``goal_here`` carries a goal over.
The environment variable KVCORE_COMMIT, where it is set, says in the record which commit was measured.
"""

import argparse
from pathlib import Path
from typing import Any

from kvcore.errors import BackendError

GROUPS = "write", "read", "attend", "states"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--device", default="cuda", help="the CUDA device, in torch's words (default: cuda)")
    parser.add_argument("--group", default="", choices=GROUPS, help="run only rows of one kind, and prepare no others")
    parser.add_argument("--only", default="", help="run only rows whose name contains this")
    parser.add_argument("--out", help="write the record here, as JSON")
    parser.add_argument("--svg", help="write a bar picture here: time against the floor")


def record(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark; its record as plain data. Rows are printed as they come.

    Raises:
        BackendError: torch, triton or a CUDA device is missing.
    """
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        raise BackendError(
            got=str(error), where="kvcore bench", allowed="torch and triton", hint='pip install "kvcore[cuda]"'
        ) from error
    if not torch.cuda.is_available():
        raise BackendError(
            got=f"device {args.device!r}", where="kvcore bench", allowed="a CUDA device", hint="torch finds none here."
        )
    from kvcore.bench.session import measure

    return measure(args.device, only=args.only, group=args.group)


def keep(record: dict[str, Any], args: argparse.Namespace) -> None:
    """Write the record as JSON and as a picture, where that was asked for."""
    from kvcore.bench.report import as_svg, write_json
    from kvcore.portable.disk import Disk, write_whole

    if args.out:
        write_json(record, args.out)
    if args.svg:
        write_whole(Disk(), Path(args.svg), as_svg(record).encode())


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, print a table, write what was asked for; returns the exit status.

    Raises:
        BackendError: torch, triton or a CUDA device is missing.
    """
    from kvcore.bench.report import as_table

    found = record(args)
    print(as_table(found))
    keep(found, args)
    return 0
