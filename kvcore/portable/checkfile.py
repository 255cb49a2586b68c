"""``kvcore check FILE``: is a snapshot or a blob whole, and if not, what is damaged and what is not.

Exit codes: 0 whole, 1 damaged (every damaged page is named), 2 neither of them, as this version reads them.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.errors import KvcoreError, SnapshotError
from kvcore.foreign import printable

if TYPE_CHECKING:
    from kvcore.spec import CacheSpec

EXAMPLES = """\
examples:
  kvcore check cache.kv          which requests are whole, which pages are damaged
  kvcore check cache.kv --json   the same for programs

exit code: 0 whole, 1 damaged, 2 neither a snapshot nor a blob that this version reads
"""

WHOLE, DAMAGED, NO_SNAPSHOT = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a file that Cache.save wrote, or bytes of export_request"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def add_to(commands: Any) -> None:
    """Add the command to the parser of ``kvcore``."""
    parser = commands.add_parser(
        "check",
        help="is a snapshot or a blob whole? names the damaged pages",
        description="Reads a file that Cache.save or export_request wrote and compares every page with its digest.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the file and print what was found."""
    try:
        findings = check(args.file)
    except (SnapshotError, OSError) as error:
        if args.json:
            print(json.dumps({"file": str(args.file), "whole": False, "error": str(error)}, indent=2))
        else:
            print(f"kvcore check: {printable(str(error), lines=True)}", file=sys.stderr)
        return NO_SNAPSHOT
    print(printable(json.dumps(findings, indent=2) if args.json else _text(findings), lines=True))
    return WHOLE if findings["whole"] else DAMAGED


def check(path: Path) -> dict[str, Any]:
    """What a snapshot or a blob holds, and its damaged pages.

    Raises:
        SnapshotError: header or root are those of neither. OSError: the file cannot be read.
    """
    from kvcore.ops.fused import created
    from kvcore.plan import plan_cache
    from kvcore.plugins import choose_backend
    from kvcore.portable.snapshot import read_or_blob

    saved = read_or_blob(path)
    try:
        # Digests need a backend's verbs, bound to any plan of the spec: nothing is allocated.
        plan = plan_cache(saved.spec, max_requests=1, max_tokens=_least(saved.spec))
        ops = created(choose_backend("reference", None), plan)
    except KvcoreError as error:
        raise SnapshotError(got=str(error), where=f"snapshot {path}", allowed="a spec that can be planned") from error
    requests: list[dict[str, Any]] = []
    for number, record in enumerate(saved.records):
        pieces = [str(piece) for piece in saved.damage(number, ops)]
        requests.append({"request": number, "tokens": None if record is None else record.length, "damaged": pieces})
    return {
        "file": str(path),
        "spec": saved.spec.name or "unnamed",
        "spec_digest": saved.spec.digest,
        "whole": not any(request["damaged"] for request in requests),
        "requests": requests,
    }


def _least(spec: "CacheSpec") -> int | None:
    """The smallest size of a plan, where the spec has a component that needs one."""
    bounded = any(component.growth == "block" or component.span is None for _, _, component in spec.components())
    return 1 if bounded else None


def _text(findings: dict[str, Any]) -> str:
    requests: list[dict[str, Any]] = findings["requests"]
    broken = [request for request in requests if request["damaged"]]
    lines = [f"{findings['file']}: {len(requests)} requests, spec {findings['spec']} {findings['spec_digest'][:16]}"]
    lines += [f"  damaged: {page}" for request in broken for page in request["damaged"]]
    if broken:
        whole = len(requests) - len(broken)
        lines.append(f"  {whole} of {len(requests)} requests are whole; kvcore.load(..., strict=False) loads those")
    else:
        lines.append("  whole: header, root and every page match their digests")
    return "\n".join(lines)
