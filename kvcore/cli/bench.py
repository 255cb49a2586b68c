"""``kvcore bench``: the verbs timed on a device, against what its memory allows. ``kvcore.bench`` measures."""

import argparse
import contextlib
import json
import sys
from pathlib import Path

from kvcore import bench
from kvcore.errors import SpecError

EXAMPLES = """\
examples:
  kvcore bench                                     every row, on the first CUDA device
  kvcore bench --only append --device cuda:1       rows whose name contains a word
  kvcore bench --out bench.json --svg bench.svg    keep the record, draw it
  kvcore bench --json > bench.json                 the record alone; progress goes to standard error

exit code: 0 measured, 2 it cannot run here
"""


def add_to(commands: argparse._SubParsersAction) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "bench",
        help="time the verbs on a CUDA device",
        description="Times of each verb, against the time that the device's memory needs for the same bytes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the record as JSON instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print, write what was asked for."""
    for name in ("out", "svg"):
        path = getattr(options, name)
        file = Path(path or ".")
        if path and ((file.exists() and not file.is_file()) or not file.absolute().parent.is_dir()):
            raise SpecError(got=path, where=f"--{name}", allowed="a file in a folder that exists")
    # What is printed on the way is for people.
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        record = bench.record(options)
        if not options.json:
            from kvcore.bench.report import as_table

            print(as_table(record))
    if options.json:
        print(json.dumps(record, indent=1, ensure_ascii=False))
    bench.keep(record, options)
    return 0
