"""``kvcore bench``: the cache's verbs timed on a CUDA device, against what its memory allows.

Every row counts the bytes that must be read and written once; the floor is those bytes at the copy speed measured in the
same run. Times are of one call with a cold L2 (``single``) and of one of many calls in a CUDA graph over rotating buffers
(``graph``), medians both.
"""

import argparse

from kvcore.errors import BackendError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--device", default="cuda", help="the CUDA device, in torch's words (default: cuda)")
    parser.add_argument("--only", default="", help="run only rows whose name contains this")
    parser.add_argument("--out", help="write the record here, as JSON")
    parser.add_argument("--svg", help="write a bar picture here: time against the floor")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, print a table, write what was asked for; returns the exit status.

    Raises:
        BackendError: torch, triton or a CUDA device is missing.
    """
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        raise BackendError(got=str(error), where="kvcore bench", allowed="torch and triton", hint="pip install 'kvcore[cuda]'")
    if not torch.cuda.is_available():
        raise BackendError(
            got=f"device {args.device!r}", where="kvcore bench", allowed="a CUDA device", hint="torch finds none here."
        )
    from kvcore.bench.report import as_svg, as_table, write_json
    from kvcore.bench.session import measure

    record = measure(args.device, only=args.only)
    print(as_table(record))
    if args.out:
        write_json(record, args.out)
    if args.svg:
        with open(args.svg, "w", encoding="utf-8") as file:
            file.write(as_svg(record))
    return 0
