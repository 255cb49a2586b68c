"""``kvcore describe FILE``: what a blob, a snapshot or a descriptor says of itself; no page is verified.

Exit codes: 0 described, 2 nothing of these.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvcore.errors import SnapshotError, SpecError
from kvcore.foreign import printable

if TYPE_CHECKING:
    from kvcore.spec import CacheSpec

EXAMPLES = """\
examples:
  kvcore describe request.blob        whose rows, of how many tokens, in which components
  kvcore describe cache.kv            the same of every request of a snapshot
  kvcore describe layout.json         a descriptor: which field lies where in whose tensors

exit code: 0 described, 2 nothing that this version reads
"""

DESCRIBED, UNKNOWN = 0, 2


def add_to(commands: Any) -> None:
    """Add the command to the parser of ``kvcore``."""
    parser = commands.add_parser(
        "describe",
        help="what a blob, a snapshot or a descriptor says of itself",
        description="Reads what is before the pages; kvcore check verifies those of a snapshot.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a blob, a snapshot, or a descriptor in JSON")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Describe the file."""
    try:
        found = describe(args.file)
    except (SnapshotError, SpecError, OSError) as error:
        if args.json:
            print(json.dumps({"file": str(args.file), "error": str(error)}, indent=2))
        else:
            print(f"kvcore describe: {printable(str(error), lines=True)}", file=sys.stderr)
        return UNKNOWN
    print(printable(json.dumps(found, indent=2) if args.json else _text(found), lines=True))
    return DESCRIBED


def describe(path: Path) -> dict[str, Any]:
    """What a file says of itself.

    Raises:
        SnapshotError, SpecError: it is none of these, or damaged before its pages. OSError: it cannot be read.
    """
    from kvcore.portable.disk import Disk

    data = memoryview(Disk().read(path))
    if bytes(data[:1]) == b"{":
        return {"file": str(path), **_descriptor(bytes(data))}
    return {"file": str(path), **_rows(data, str(path))}


def _descriptor(text: bytes) -> dict[str, Any]:
    from kvcore.adoption import from_json

    found = from_json(text)
    places = [
        {
            "component": f"{line.layer}.{line.role}",
            "field": " ".join(part for part in (line.part, line.field) if part),
            "tensor": line.tensor,
            "in": f"{line.units or found.blocks} {line.kind}s of {line.rows or found.block_tokens} "
            f"{'rows' if line.rows else 'tokens'}" + (f", by map {line.map!r}" if line.map else ""),
            "offset": line.offset,
            "steps": {line.kind: line.block, "row": line.token, "head": line.head},
        }
        for line in found.lines
    ]
    return {"form": found.form, "version": found.version, "places": places}


def _rows(data: memoryview, where: str) -> dict[str, Any]:
    from kvcore.portable import blob, snapshot
    from kvcore.spec import from_json

    try:
        saved = snapshot.parse(data, where)
    except SnapshotError as no_snapshot:
        try:
            described = blob.opened(data, where).described
        except SnapshotError:
            raise no_snapshot from None
        return {"form": "kvcore.request", **_spec(from_json(described.spec)), "requests": [_request(described.record)]}
    return {"form": "kvcore.snapshot", **_spec(saved.spec), "requests": [_request(one) for one in saved.records]}


def _spec(spec: "CacheSpec") -> dict[str, Any]:
    kinds: dict[str, list[int]] = {}
    for layer, role, component in spec.components():
        shared = "" if component.shared_from is None else f" of layer {component.shared_from}"
        kinds.setdefault(f"{component.summary(role)} {component.label(role).partition('.')[2]}{shared}", []).append(
            layer
        )
    return {
        "spec": spec.name or "unnamed",
        "spec_digest": spec.digest,
        "block_tokens": spec.block_tokens,
        "components": [{"what": what, "layers": layers} for what, layers in kinds.items()],
    }


def _request(record: Any) -> dict[str, Any]:
    if record is None:
        return {"damaged": True}
    return {
        "tokens": record.length,
        "least": record.floor,
        "ids": record.tokens is not None,
        "salt": record.salt is not None,
        "checkpoints": record.checkpoints,
        "converted": [msgspec.to_builtins(one) for one in record.converted],
        "approximate": record.approximate,
    }


def _text(found: dict[str, Any]) -> str:
    lines = [f"{found['file']}: {found['form']}"]
    if "places" in found:
        for place in found["places"]:
            steps = ", ".join(f"{name} {step}" for name, step in place["steps"].items())
            lines.append(
                f"  {place['component']} {place['field']}: tensor {place['tensor']!r} from {place['offset']}, "
                f"{place['in']}, bytes to the next {steps}"
            )
        return "\n".join(lines)
    lines.append(f"  spec {found['spec']} {found['spec_digest'][:16]}, {found['block_tokens']} tokens a block")
    lines += [f"  {one['what']}: layers {', '.join(map(str, one['layers']))}" for one in found["components"]]
    for number, one in enumerate(found["requests"]):
        if "damaged" in one:
            lines.append(f"  request {number}: damaged")
            continue
        ids = "ids" if one["ids"] else "no ids"
        made = "".join(
            f", converted from {past['spec'][:16]} ({'exact' if past['exact'] else 'rounded'})"
            for past in one["converted"]
        )
        near = ", of an approximate replay" if one["approximate"] else ""
        lines.append(
            f"  request {number}: {one['tokens']} tokens, back to {one['least']}, {ids}, {len(one['checkpoints'])} "
            f"checkpoints{made}{near}"
        )
    return "\n".join(lines)
