"""How near TPU kernels come to the memory's rate, by the compiler's own bundles; compiled, not run, no TPU needed.

    python -m benchmarks.compile_tpu [--chips v5e v6e v7x] [--only attend_rows] [--json] [--out records]

libtpu compiles every kernel of ``benchmarks.tpu_kernels`` for chips that are not here, jax's and tpu-inference's own
paged attention among them, and dumps what a core would issue. For each: the bundles of one turn of the hot loop (a
lower bound of its cycles: no stall, no wait for memory), the bytes that the turn must move and those that it does,
DMAs, spills, temporaries, and the share of the chip's memory rate that follows: bytes that must move over what the rate
allows in the larger of the turn's bundles and its transfers. ``--out`` writes ``bundles_tpu.json`` and ``.svg``;
kernels left out by ``--only`` keep what the record there says of them.
"""

import argparse
import importlib.metadata
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks import tpu_bundles
from benchmarks.apart import compiled_for_tpu
from benchmarks.written import write

RATES = {"v4": 451, "v5e": 442, "v5p": 1136, "v6e": 756, "v7x": 1265}
"""Bytes of HBM a cycle: of a large element-wise program, over the cycles that libtpu's cost model gives it."""

CHIPS = ("v5e", "v6e", "v7x")
WORD = "compiled, not run"
NAME = "bundles_tpu"


def weigh(name: str, chip: str, folder: Path) -> dict[str, Any]:
    """Compile one kernel in a process whose dumps go to ``folder``, and read what was dumped."""
    import jax

    from benchmarks.tpu_kernels import KERNELS
    from kvcore.interop.jax import inspect_in_place

    kernel = KERNELS[name]
    said = {"kernel": name, "whose": kernel.whose, "chip": chip, "unit": kernel.unit}
    try:
        fn, *args = kernel.build()
        args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tuple(args))
        program = inspect_in_place(fn, *args, chip=chip)
        hot = tpu_bundles.read(folder, kernel.call).hot(inner=kernel.inner)
    except Exception as error:  # noqa: BLE001 - what the compiler, or another package, refuses is the finding
        return {**said, "refused": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"}
    needed = kernel.needed() if kernel.needed else hot.moved
    cycles = max(hot.bundles, hot.moved / RATES[chip], needed / RATES[chip])
    return {
        **said,
        "bundles": hot.bundles,
        "needed": needed,
        "moved": hot.moved,
        "dmas": hot.dmas,
        "spills": hot.spills,
        "fills": hot.fills,
        "slots": hot.slots,
        "temporaries": program.temporary_bytes,
        "share": round(needed / cycles / RATES[chip], 4),
        "word": WORD,
    }


def compiled(chip: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """What ``weigh`` finds of kernels on one chip, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = "--worker", folder, "--chips", chip, "--kernels", *names
        flags = tpu_bundles.FLAGS.format(folder)
        return compiled_for_tpu("benchmarks.compile_tpu", *arguments, LIBTPU_INIT_ARGS=flags)


def work(folder: Path, chip: str, names: Sequence[str]) -> None:
    """The process of one chip: a line of JSON a kernel."""
    for name in names:
        print(json.dumps(weigh(name, chip, folder)), flush=True)
        # The next kernel may have the same name in the dump.
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def merged(record: dict[str, Any], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A record's kernels with those exchanged that were found anew."""
    held = {(one["chip"], one["kernel"]): one for one in record.get("kernels", ())}
    held |= {(one["chip"], one["kernel"]): one for one in found}
    return [held[key] for key in sorted(held)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """What was found in lines of text."""
    lines = [
        f"{'chip':5}{'kernel':42}{'unit':26}{'bundles':>9}{'needed':>10}{'moved':>10}{'DMAs':>6}{'spills':>8}"
        f"{'temporary':>11}{'share':>8}"
    ]
    for one in rows:
        head = f"{one['chip']:5}{one['kernel']:42}"
        if "refused" in one:
            lines.append(f"{head}{one['refused']}")
            continue
        lines.append(
            f"{head}{one['unit']:26}{one['bundles']:9,}{one['needed']:10,}{one['moved']:10,}{one['dmas']:6}{one['spills']:8,}"
            f"{one['temporaries']:11,}{one['share']:8.1%}"
        )
    return "\n".join([*lines, WORD])


def as_svg(record: dict[str, Any]) -> str:
    """Bars: the share of the memory's rate, a kernel a row and a chip a bar."""
    kernels = list(dict.fromkeys(one["kernel"] for one in record["kernels"] if "share" in one))
    chips = list(dict.fromkeys(one["chip"] for one in record["kernels"]))
    shares = {(one["kernel"], one["chip"]): one["share"] for one in record["kernels"] if "share" in one}
    colours = dict(zip(chips, ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d"), strict=False))
    left, wide, thin = 330, 420, 11
    tall = thin * len(chips) + 10
    height = 60 + tall * len(kernels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide + 90}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-size="14">Share of the memory rate that the bundles allow ({WORD})</text>',
    ]
    for number, chip in enumerate(chips):
        parts.append(f'<rect x="{left + 90 * number}" y="30" width="10" height="10" fill="{colours[chip]}"/>')
        parts.append(f'<text x="{left + 14 + 90 * number}" y="39">{chip}</text>')
    for row, kernel in enumerate(kernels):
        top = 52 + tall * row
        parts.append(f'<text x="10" y="{top + tall / 2}">{escape(kernel)}</text>')
        for number, chip in enumerate(chips):
            share = shares.get((kernel, chip))
            if share is None:
                continue
            y, width = top + thin * number, max(1, wide * min(share, 1))
            parts.append(f'<rect x="{left}" y="{y}" width="{width:.0f}" height="{thin - 2}" fill="{colours[chip]}"/>')
            parts.append(f'<text x="{left + width + 4:.0f}" y="{y + 9}" font-size="10">{share:.1%}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    """Compile, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=tuple(RATES), default=list(CHIPS))
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--out", type=Path, help=f"folder for {NAME}.json and .svg")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kernels", nargs="*", default=(), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(chosen.worker, chosen.chips[0], chosen.kernels)
        return 0
    from benchmarks.tpu_kernels import KERNELS

    names = [name for name in KERNELS if chosen.only in name]
    found = [one for chip in chosen.chips for one in compiled(chip, names)]
    print(json.dumps(found, indent=1) if chosen.json else table(found))
    if chosen.out:
        path = chosen.out / f"{NAME}.json"
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        record = {
            "what": "bundles of the hot loop of TPU kernels and the share of the memory's rate that follows",
            "word": WORD,
            "command": "python -m benchmarks.compile_tpu --out records",
            "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
            "bytes_a_cycle": RATES,
            "kernels": merged(record, found),
        }
        write(record, path, svg=as_svg(record))
    return int(any("refused" in one and one["whose"] == "kvcore" for one in found))


if __name__ == "__main__":
    sys.exit(main())
