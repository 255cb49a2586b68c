"""``kvcore convert IN OUT``: a blob or a snapshot in other formats; no cache is made, and no framework is needed.

Exit codes: 0 converted, 2 not: nothing was written.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.errors import KvcoreError, SpecError
from kvcore.foreign import printable

if TYPE_CHECKING:
    from kvcore.ops import Ops
    from kvcore.portable.convert_file import ConvertedFile
    from kvcore.spec import CacheSpec

EXAMPLES = """\
examples:
  kvcore convert cache.kv small.kv --formats key=int4_ch32,value=int4_g32
  kvcore convert request.blob other.blob --spec other.json     the formats of another spec

exit code: 0 converted, 2 not: nothing was written
"""

CONVERTED, REFUSED = 0, 2


def add_to(commands: Any) -> None:
    """Add the command to the parser of ``kvcore``."""
    parser = commands.add_parser(
        "convert",
        help="a blob or a snapshot in other formats",
        description="Reads every row and codes it anew; what is written says what it was made of.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="IN", help="a blob or a snapshot")
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write, whole or not at all")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--formats", metavar="ROLE=FORMAT,...", help="by role, or key and value: key=int8_row")
    wanted.add_argument("--spec", metavar="SPEC", help="a preset or a JSON file that differs in formats alone")
    parser.add_argument("--json", action="store_true", help="print what was done as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert the file and say what was done."""
    try:
        made = convert(args.file, args.out, formats=args.formats, spec=args.spec)
    except (KvcoreError, OSError) as error:
        if args.json:
            print(json.dumps({"file": str(args.file), "error": str(error)}, indent=2))
        else:
            print(f"kvcore convert: {printable(str(error), lines=True)}", file=sys.stderr)
        return REFUSED
    found = {
        "file": str(args.out),
        "from": made.source.digest,
        "spec_digest": made.spec.digest,
        "requests": [
            {
                "tokens": record.length,
                "least": record.floor,
                "checkpoints": record.checkpoints,
                "exact": record.converted[-1].exact,
                "formats": [list(change) for change in record.converted[-1].formats],
            }
            for record in made.records
        ],
    }
    print(printable(json.dumps(found, indent=2) if args.json else _text(found), lines=True))
    return CONVERTED


def convert(file: Path, out: Path, *, formats: str | None = None, spec: str | None = None) -> "ConvertedFile":
    """Convert a file; ``formats`` or ``spec`` as typed.

    Raises:
        SnapshotError, SpecError: it cannot be converted so. OSError: it cannot be read, or the other not written.
    """
    from kvcore.portable.convert import with_formats
    from kvcore.portable.convert_file import converted_file
    from kvcore.portable.disk import Disk, write_whole
    from kvcore.spec.named import load_spec

    chosen = None if formats is None else _parsed(formats)

    def target(source: "CacheSpec") -> "CacheSpec":
        return load_spec(spec or "", "--spec") if chosen is None else with_formats(source, chosen)

    made = converted_file(memoryview(Disk().read(file)), target, _ops, str(file))
    write_whole(Disk(), out, made.data)
    return made


def _parsed(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    for name, sign, format in pairs:
        if not (name and sign and format):
            raise SpecError(got=text, where="--formats", allowed="ROLE=FORMAT, with commas between several")
    found = {name: format for name, _, format in pairs}
    if len(found) < len(pairs):
        raise SpecError(got=text, where="--formats", allowed="every role once")
    return found


def _ops(spec: "CacheSpec") -> "Ops":
    from kvcore.ops.fused import created
    from kvcore.plan import plan_cache
    from kvcore.plugins import choose_backend

    # Encoders and decoders, bound to any plan of the spec: nothing is allocated.
    bounded = any(component.growth == "block" or component.span is None for _, _, component in spec.components())
    return created(
        choose_backend("reference", None), plan_cache(spec, max_requests=1, max_tokens=1 if bounded else None)
    )


def _text(found: dict[str, Any]) -> str:
    lines = [f"{found['file']}: {len(found['requests'])} requests, spec {found['spec_digest'][:16]}"]
    for number, one in enumerate(found["requests"]):
        changes = ", ".join(
            f"{role} {part} {old} to {new}".replace("  ", " ") for role, part, old, new in one["formats"]
        )
        exact = "exact" if one["exact"] else "rounded"
        lines.append(f"  request {number}: {one['tokens']} tokens, back to {one['least']}, {exact}: {changes}")
    return "\n".join(lines)
