"""The TPU compiler's word on every kernel, as a parity report that ``kvcore parity merge`` and ``html`` read.

    python -m tests.jax_pallas.compile_tpu [--chips v5e v6e] [--only attend_kv] [--out records/compile_tpu.json]

For each chip, none of which need be here: does libtpu compile each kernel, does the program update the pools in place,
how much temporary memory does it hold, does it move a whole pool. Nothing is run, and no numbers are compared.
"""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.apart import compiled_for_tpu
from kvcore import environment, parity
from kvcore.conformance.specs import conformance_spec
from kvcore.conformance.suite import computed_formats_of
from kvcore.ops import tolerances
from kvcore.parity.records import SCHEMA, Record, Report, Run, SpecRef, Status
from tests.jax_pallas.tpu_cases import CHIPS, KERNELS, STEPS

BACKEND = "jax_pallas"
TEMPORARY_BYTES = {True: 8 << 20, False: 4 << 20}
"""Allowed beside pools of 15 to 50 MB: of whole steps, and of single kernels, whose results are up to 4 MB."""


def compiled(chip: str, *cases: str) -> list[dict[str, Any]]:
    """What the compiled programs do to their pools, from a process of their own."""
    return compiled_for_tpu("tests.jax_pallas.tpu_cases", chip, *cases)


def fault(found: dict[str, Any]) -> str:
    """What is wrong with one compiled case, or empty."""
    if "error" in found:
        return found["error"]
    if found["alias_bytes"] < found["pool_bytes"]:
        return f"{found['alias_bytes']:,} of {found['pool_bytes']:,} bytes of pools are updated in place"
    if found["moves"]:
        return f"a whole pool is moved: {found['moves'][0]}"
    allowed = TEMPORARY_BYTES[found["case"] in STEPS]
    if found["temporary_bytes"] > allowed:
        return f"{found['temporary_bytes']:,} bytes of temporaries, {allowed:,} allowed"
    return ""


def record(found: dict[str, Any], how: str) -> Record:
    """One case as a record."""
    wrong = fault(found)
    status: Status = "error" if "error" in found else "disagree" if wrong else "agree"
    detail = wrong or (
        f"compiled, not run: {found['alias_bytes']:,} of {found['pool_bytes']:,} bytes of pools updated in place, "
        f"{found['temporary_bytes']:,} bytes of temporaries, no pool moved"
    )
    return Record(
        check=found["case"],
        backend=BACKEND,
        how=how,
        status=status,
        rule="storage",
        detail=detail,
        seconds=found["seconds"],
    )


def report(chips: Sequence[str], only: str, command: str) -> Report:
    """Compile all cases whose name contains ``only`` for some chips."""
    spec = conformance_spec()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    runs, records = [], []
    cases = [name for name in (*KERNELS, *STEPS) if only in name]
    for chip in chips:
        how = f"TPU {chip}, compiled ahead of time by libtpu {versions['libtpu']}, not run"
        records += [record(found, how) for found in compiled(chip, *cases)]
        described = environment.describe()
        described["versions"] = {**described["versions"], **versions}
        runs.append(Run(backend=BACKEND, how=how, device="", reason="", command=command, **described))
        print(f"{chip}: {sum(one.how == how and one.status == 'agree' for one in records)} of {len(cases)}")
    return Report(
        schema=SCHEMA,
        spec=SpecRef(name=spec.name, digest=spec.digest),
        runs=tuple(runs),
        tolerances=tolerances.table(computed_formats_of(spec)),
        checks=tuple(records),
    )


def main() -> int:
    """Compile, write the report; 1 if anything is refused or copies a pool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--only", default="", help="cases whose name contains this; kvcore parity merge adds them")
    parser.add_argument("--out", type=Path, default=Path("records/compile_tpu.json"))
    options = parser.parse_args()
    # Where the record was written says nothing about what it holds.
    only = f" --only {options.only}" if options.only else ""
    command = f"python -m tests.jax_pallas.compile_tpu --chips {' '.join(options.chips)}{only}"
    found = report(options.chips, options.only, command)
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    for one in found.failures:
        print(f"{one.check}, {one.how}: {one.detail}")
    return 0 if parity.read(options.out).agrees else 1


if __name__ == "__main__":
    sys.exit(main())
