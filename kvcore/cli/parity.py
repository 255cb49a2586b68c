"""``kvcore parity run | merge | show | html``: compare backends with the reference, and read the evidence."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcore.cli.tables import print_table, progress, say
from kvcore.errors import BackendError, SpecError
from kvcore.foreign import printable
from kvcore.spec.named import load_spec

EXAMPLES = """\
examples:
  kvcore parity run                                            every backend that can run here
  kvcore parity run --backend torch_triton --device cuda --out cuda.json
  kvcore parity run --spec deepseek_v4_flash_tiny --check "flush/*"
  kvcore parity merge cpu.json cuda.json --out all.json
  kvcore parity show all.json
  kvcore parity html all.json --out all.html

exit code: 0 agree, 1 disagree, 2 usage
"""


def add_to(commands: argparse._SubParsersAction) -> None:
    """Register the command and its own."""
    parser = commands.add_parser(
        "parity",
        help="compare backends with the reference",
        description="Check by check: storage must be exact, arithmetic within the printed tolerances.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = parser.add_subparsers(required=True, metavar="COMMAND")
    running = own.add_parser("run", help="run the checks", epilog=EXAMPLES, formatter_class=parser.formatter_class)
    running.add_argument(
        "--backend",
        metavar="NAME",
        nargs="+",
        action="extend",
        help="backends to check; one that cannot run here is an error. Default: all that are known",
    )
    running.add_argument(
        "--spec",
        metavar="NAME|FILE",
        default="conformance",
        help="preset or JSON file whose roles and formats are checked (default: one with all there are)",
    )
    running.add_argument("--device", metavar="D", help="device of the backends, such as cpu, cuda or cuda:1")
    running.add_argument("--check", metavar="PATTERN", default="*", help="only checks whose id matches, as in a shell")
    running.add_argument(
        "--sample", action="store_true", help="of every verb and formats, each shape in one layout only: two fifths"
    )
    _add_outputs(running)
    running.set_defaults(run=run)
    merging = own.add_parser("merge", help="join reports of different machines")
    merging.add_argument("files", metavar="FILE", nargs="+")
    _add_outputs(merging)
    merging.set_defaults(run=merge)
    showing = own.add_parser("show", help="print a report")
    showing.add_argument("file", metavar="FILE")
    showing.add_argument("--json", action="store_true", help="print the counts as JSON")
    showing.set_defaults(run=show)
    page = own.add_parser("html", help="write a report as one self-contained page")
    page.add_argument("file", metavar="FILE")
    page.add_argument("--out", metavar="PAGE", type=Path, required=True, help="write the page here")
    page.add_argument("--json", action="store_true", help="print where the page lies as JSON")
    page.set_defaults(run=html)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the report here, packed if FILE ends in .gz")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    """Run the checks, print and write the report."""
    from kvcore import parity
    from kvcore.conformance.specs import SPECS
    from kvcore.conformance.suite import checks_of
    from kvcore.environment import command

    spec = load_spec(options.spec, "--spec", **{name: make() for name, make in SPECS.items()})
    backends = _backends(options.backend, options.device)
    if options.out is not None:
        _check_writable(options.out)
    with progress("parity") as update:
        report = parity.run(
            spec,
            backends,
            device=options.device,
            only=options.check,
            sample=options.sample,
            command=command(options.typed),
            progress=update,
        )
    if not report.checks:
        got = f"{options.check}, of a sample" if options.sample else options.check
        raise SpecError(got=got, where="--check", allowed=f"a pattern for ids such as {checks_of(spec)[0].id}")
    return _finish(report, options)


def merge(options: argparse.Namespace) -> int:
    """Join reports, print and write the result."""
    from kvcore import parity

    if options.out is not None:
        _check_writable(options.out)
    return _finish(parity.merge({name: parity.read(name) for name in options.files}), options)


def show(options: argparse.Namespace) -> int:
    """Print a report."""
    from kvcore import parity

    report = parity.read(options.file)
    if options.json:
        import msgspec

        say(msgspec.json.format(msgspec.json.encode(parity.summarise(report)), indent=1).decode())
        return _verdict(report)
    return _print(report)


def html(options: argparse.Namespace) -> int:
    """Write a report as HTML."""
    from kvcore import parity
    from kvcore.parity.html import render

    _check_writable(options.out)
    report = parity.read(options.file)
    _write(options.out, render(report).encode())
    if options.json:
        import json

        print(json.dumps({"page": str(options.out), "agrees": report.agrees}))
    else:
        print(f"page: {options.out}")
    return _verdict(report)


def _backends(names: Sequence[str] | None, device: str | None) -> list:
    """Records of the named backends, or of all; a named one must be able to run."""
    from kvcore.parity.run import objection
    from kvcore.plugins import registry

    known = registry()
    if names is None:
        return list(known.backends.values())
    found = []
    for name in dict.fromkeys(names):
        if name not in known.backends:
            got = f"{name} ({known.failed[name]})" if name in known.failed else name
            raise BackendError(got=got, where="--backend", allowed=", ".join(known.backends))
        reason = objection(known.backends[name], device)
        if reason:
            raise BackendError(
                got=f"{name}: {reason}",
                where="--backend",
                allowed="backends that can run here",
                hint="Without --backend, what cannot run is reported as unavailable.",
            )
        found.append(known.backends[name])
    return found


def _check_writable(path: Path) -> None:
    """Refuse an impossible file before the work, not after it."""
    # Written whole and given its name: nothing that is no file is opened, or waits to be read.
    if (path.exists() and not path.is_file()) or not path.absolute().parent.is_dir():
        raise SpecError(got=str(path), where="--out", allowed="a file in a folder that exists")


def _write(path: Path, data: bytes) -> None:
    """Put what was made in place of the file, whole."""
    from kvcore.portable.disk import Disk, write_whole

    try:
        write_whole(Disk(), path, data)
    except OSError as error:
        raise SpecError(got=error.strerror or str(error), where="--out", allowed="a file to write to") from error


def _finish(report, options: argparse.Namespace) -> int:
    from kvcore import parity

    if options.out is not None:
        _write(options.out, parity.write(report, packed=options.out.suffix == ".gz"))
    if options.json:
        say(parity.write(report).decode())
        return _verdict(report)
    code = _print(report)
    if options.out is not None:
        print(f"report: {options.out}")
    return code


def _print(report) -> int:
    from kvcore.parity.show import FAILURES_SHOWN, cell_text, failure_text, summarise

    summary = summarise(report)
    rows = [[verb, *map(cell_text, cells)] for verb, cells in summary.verbs.items()]
    rows.append(["all", *map(cell_text, summary.totals)])
    print_table(f"Parity with the reference: spec {summary.spec}", ["verb", *(c.title for c in summary.columns)], rows)
    bounds = [
        [bound.operation, bound.format, f"{bound.relative:.3g}", f"{bound.absolute:.3g}", f"{bound.share:.3g}"]
        for bound in report.tolerances
    ]
    print_table(
        "Tolerances: |got - want| <= relative·|want| + absolute·largest, for that share of the values",
        ["operation", "format", "relative", "absolute", "share"],
        bounds,
        left=2,
    )
    runs = [
        f"{run.backend}: {f'unavailable: {run.reason}' if run.reason else run.how}; "
        f"kvcore {run.kvcore}, Python {run.python}, {run.platform}"
        for run in report.runs
    ]
    for line in dict.fromkeys(runs):  # parts of a run that was split are one line
        print(printable(line))
    for record in report.failures[:FAILURES_SHOWN]:
        say(f"\n{failure_text(record)}")
    if len(report.failures) > FAILURES_SHOWN:
        print(f"\n… and {len(report.failures) - FAILURES_SHOWN} more; the report file has them all")
    print("\nagree" if report.agrees else "\ndisagree")
    sys.stdout.flush()
    return _verdict(report)


def _verdict(report) -> int:
    return 0 if report.agrees else 1
