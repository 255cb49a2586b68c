"""The conformance kit's checks in many processes, with one report: for backends that compile for every shape.

    python -m tests.conformance.kit_in_parts --backend jax_pallas --device cpu --out kit_jax_cpu.json.gz
    python -m tests.conformance.kit_in_parts --backend jax_pallas --device cpu:interpret --only '*/tpu_tile/*' --out k

16 cores end in minutes what takes one process hours. Processes take checks of one plan at a time, which share compiled
code; one whose device is lost to an error is replaced. What has ended when the time is up is reported, and the exit
status is then 2 (1: some check fails). OUT is written as checks end, so that what is broken off loses little and goes
on with --resume, which runs again what ended in an error. A race that the interpreter of TPU kernels sees fails its
check.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import queue
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from kvcore import environment, parity
from kvcore.conformance.specs import conformance_spec
from kvcore.conformance.suite import Check, checks_of
from kvcore.errors import SpecError
from kvcore.parity.records import Record, Report
from kvcore.parity.run import Subject, check_backends, report_of
from kvcore.plugins import registry

QUICK_COMPILES = {
    "cpu": (
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ),
    "cuda": ("--xla_gpu_autotune_level=0",),
}
"""Compiling is most of the work, and what is checked does not depend on the optimiser's effort."""

RACE = "RACE DETECTED"
"""What Pallas' interpreter prints before it goes on."""

EVERY = 20.0
"""Seconds between reports that are written: what a run that is killed loses."""

_checks: dict[str, Check] = {}
_subjects: list[Subject] = []


def prepare(backend: str, device: str) -> None:
    """Set what the processes inherit: one thread each and, for JAX, little effort in compiling where XLA knows how."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("XLA_PYTHON_CLIENT_PREALLOCATE", "false")):
        os.environ.setdefault(name, value)
    if "jax" not in backend or "XLA_FLAGS" in os.environ:
        return
    kind = device.split(":")[0]
    if kind == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = ""
    for flag in QUICK_COMPILES.get(kind, ()):
        # XLA ends the process over a flag that it does not know, or no longer.
        line = [sys.executable, "-c", "import jax.numpy as jnp; jnp.zeros(1)"]
        tried = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{flags} {flag}".strip()}
        if not subprocess.run(line, env=tried, capture_output=True, check=False).returncode:
            flags = tried["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = flags
    print(f"XLA_FLAGS={flags}", flush=True)


def begin(backend: str, device: str, gpu: int | None = None) -> None:
    """What every process holds; and its GPU where there are several."""
    if gpu is not None:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(gpu))
    _checks.update((one.id, one) for one in checks_of(conformance_spec()))
    _subjects[:] = [Subject(registry().backends[backend], device or None)]


def run(check: str) -> tuple[list[bytes], bool]:
    """The records of a check, and whether it was an error that the device does not get over."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        records = check_backends(_checks[check], _subjects)
    if RACE in told.getvalue():
        seen = next(line for line in told.getvalue().splitlines() if RACE in line)
        records = [msgspec.structs.replace(record, status="error", detail=seen) for record in records]
    gone = any(record.status == "error" for record in records) and lost()
    return [msgspec.json.encode(record) for record in records], gone


def lost() -> bool:
    """Whether this process can no longer use its device: some errors of CUDA outlive what caused them."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    try:
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if jax is not None:
            jax.numpy.zeros(1).block_until_ready()
    except RuntimeError:
        return True
    return False


def work(groups: Any, found: Any, backend: str, device: str, gpu: int | None = None) -> None:
    """Take groups of checks, ids of one plan, and tell (records, ids that are left, whether the device is lost, gpu).

    With the device the process ends; else it ends where no group is left: None.
    """
    begin(backend, device, gpu)
    gone = False
    while not gone and (ids := groups.get()) is not None:
        while ids and not gone:
            (records, gone), ids = run(ids[0]), ids[1:]
            found.put((records, ids if gone else [], gone, gpu))


def to_go_on_from(before: Report, blank: Report, backend: str, chosen: Sequence[str]) -> tuple[Report, set[str]]:
    """What a report keeps beside a run, and the checks that it has of its backend.

    What ended in an error, or could not run, is among neither where it is chosen: the worse of two records is kept.

    Raises:
        SpecError: it is of another spec, or of other tolerances, than the run's, which has no record yet.
    """
    # With some records: tolerances of none are compared with nothing.
    parity.merge({"OUT": before, "this run": msgspec.structs.replace(blank, checks=before.checks)})
    to_run = set(chosen)
    kept, known, again = [], set[str](), set[str]()
    for record in before.checks:
        mine, ended = record.backend == backend, record.status not in ("error", "unavailable")
        if mine and not ended and record.check in to_run:
            again.add(record.check)
            continue
        kept.append(record)
        if mine:
            known.add(record.check)
    return msgspec.structs.replace(before, checks=tuple(kept)), known - again


def main() -> int:
    """Run the checks and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", default="", help="of the backend; its own choice if not given")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes at once")
    parser.add_argument("--gpus", type=int, default=1, help="with --device cuda: processes take turns at so many")
    parser.add_argument("--seconds", type=float, default=3600, help="end then, with what there is")
    parser.add_argument("--only", default="*", help="a shell pattern of check ids: VERB/FORMATS/LAYOUT/SHAPE")
    parser.add_argument("--resume", action="store_true", help="keep what OUT has of this backend, and run the rest")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    started = time.monotonic()
    prepare(options.backend, options.device)
    spec = conformance_spec()
    chosen = [one for one in checks_of(spec) if fnmatchcase(one.id, options.only)]
    subject = Subject(registry().backends[options.backend], options.device or None)
    subject.introduce(chosen[0].plan)
    command = f"python -m tests.conformance.kit_in_parts {shlex.join(environment.typed(sys.argv[1:]))}"
    blank = report_of(spec, [subject], [], command=command)
    before, known = None, set[str]()
    if options.resume and options.out.exists():
        try:
            chosen_ids = [one.id for one in chosen]
            before, known = to_go_on_from(parity.read(options.out), blank, options.backend, chosen_ids)
        except SpecError as error:
            parser.error(f"--resume: {error}")
    left = [one for one in chosen if one.id not in known]
    plans: dict[str, list[str]] = {}
    for one in left:
        plans.setdefault(one.id.rsplit("/", 1)[0], []).append(one.id)
    shuffled = list(plans.values())
    # In no order, so that a run that is cut off has met every verb and format; the same one every time.
    random.Random(0).shuffle(shuffled)
    records: list[Record] = []
    order = {one.id: number for number, one in enumerate(chosen)}

    def written() -> Report:
        """The report of what has ended; a run that is broken off loses little."""
        ordered = sorted(records, key=lambda one: order[one.check])
        report = msgspec.structs.replace(blank, checks=tuple(ordered))
        if before:
            report = parity.merge({"before": before, "now": report})
        # Another name until it is whole.
        part = options.out.with_name(f"part-{options.out.name}")
        part.write_bytes(parity.write(report, packed=options.out.suffix == ".gz"))
        part.replace(options.out)
        return report

    spawning = multiprocessing.get_context("spawn")
    groups, found = spawning.Queue(), spawning.Queue()
    for ids in shuffled:
        groups.put(ids)
    workers: list[Any] = []

    def start(gpu: int | None) -> None:
        workers.append(spawning.Process(target=work, args=(groups, found, options.backend, options.device, gpu)))
        workers[-1].start()

    try:
        for number in range(min(options.jobs, len(shuffled))):
            start(number % options.gpus if options.gpus > 1 else None)
        told, last = 0, time.monotonic()
        while len(records) < len(left) and (remaining := options.seconds - (time.monotonic() - started)) > 0:
            if len(records) > told and time.monotonic() - last >= EVERY:
                written()
                told, last = len(records), time.monotonic()
                print(f"[{last - started:5.0f} s] {told} of {len(left)}", flush=True)
            try:
                texts, rest, gone, gpu = found.get(timeout=min(remaining, EVERY))
            except queue.Empty:
                continue
            records += [msgspec.json.decode(text, type=Record) for text in texts]
            if rest:
                groups.put(rest)
            if gone:
                print(f"the device was lost in {records[-1].check}; another process goes on", flush=True)
                start(gpu)
    finally:
        groups.cancel_join_thread()
        for worker in workers:
            worker.kill()
        report = written()
    counts: dict[tuple[str, str], int] = {}
    for record in report.checks:
        counts[record.how, record.status] = counts.get((record.how, record.status), 0) + 1
    print(*(f"{how}: {count} {status}" for (how, status), count in sorted(counts.items())), sep="\n")
    for failure in report.failures[:20]:
        print(f"  {failure.check}: {failure.detail or failure.first_mismatch}")
    print(f"{len(records)} of {len(left)} checks ended, in {time.monotonic() - started:.0f} s", flush=True)
    return 2 if len(records) < len(left) else 1 if report.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
