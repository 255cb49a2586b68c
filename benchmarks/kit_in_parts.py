"""The conformance kit in parts, several at once, each in a process of its own; their reports merged into one.

    python -m benchmarks.kit_in_parts --backend jax_pallas --device cpu --out records/kit_jax.json.gz
    python -m benchmarks.kit_in_parts --backend jax_pallas --device cpu:interpret --out kit.json.gz -k tpu_tile

For backends that compile for every shape: 16 cores end in minutes what takes one process hours. Parts are many more
than processes, so that none waits long for the last; those that did not end when the time is up are named, and the exit
status is then 2 (1: some check fails).
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvcore import parity

QUICK_COMPILES = {
    "cpu": (
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ),
    "cuda": ("--xla_gpu_autotune_level=0",),
}
"""Compiling is most of the work, and what is checked does not depend on the optimiser's effort."""

PLUGIN = "kvcore.conformance.plugin"

GRACE = 20
"""Seconds that a part has to write its report once the time is up."""


class Part(NamedTuple):
    """A running part: its number, process and report."""

    number: int
    process: subprocess.Popen[bytes]
    report: Path


def environment(backend: str, device: str) -> dict[str, str]:
    """Variables of the parts: one thread each, and for JAX compiling with little effort where its XLA knows how."""
    found = {"OMP_NUM_THREADS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    # What else is installed has no part in it, and kvcore need not be installed.
    found["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if "jax" not in backend or "XLA_FLAGS" in os.environ:
        return found
    kind = device.split(":")[0]
    if kind == "cpu":
        found.setdefault("JAX_PLATFORMS", "cpu")
    flags = ""
    for flag in QUICK_COMPILES.get(kind, ()):
        # XLA ends the process over a flag that it does not know, or no longer.
        line = [sys.executable, "-c", "import jax.numpy as jnp; jnp.zeros(1)"]
        tried = {**found, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{flags} {flag}".strip()}
        if not subprocess.run(line, env=tried, capture_output=True, check=False).returncode:
            flags = tried["XLA_FLAGS"]
    print(f"XLA_FLAGS={flags}", flush=True)
    return {**found, "XLA_FLAGS": flags}


def begin(number: int, options: argparse.Namespace, folder: Path, variables: dict[str, str]) -> Part:
    """Start one part in a folder that has no pytest settings."""
    report = folder / f"part-{number}.json"
    line = [sys.executable, "-m", "pytest", "--pyargs", "kvcore.conformance", "-q"]
    line += ["-p", PLUGIN, "-p", "no:cacheprovider"]
    line += [f"--kv-backend={options.backend}", f"--kv-shard={number}/{options.parts}", f"--kv-report={report.name}"]
    line += [f"--kv-device={options.device}"] * bool(options.device) + ["-k", options.k] * bool(options.k)
    with report.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(line, cwd=folder, env=variables, stdout=log, stderr=subprocess.STDOUT)
    return Part(number, process, report)


def run(options: argparse.Namespace, folder: Path) -> tuple[list[Path], list[int]]:
    """(reports of the parts, numbers of parts that did not end)."""
    variables, started = environment(options.backend, options.device or ""), time.monotonic()
    waiting, running, reports = list(range(options.parts)), list[Part](), list[Path]()
    unfinished: list[int] = []
    while waiting or running:
        late = time.monotonic() - started > options.seconds
        if late:
            unfinished += waiting + [part.number for part in running]
            waiting = []
            for part in running:
                part.process.send_signal(signal.SIGINT)
            for part in running:
                try:
                    part.process.wait(GRACE)
                except subprocess.TimeoutExpired:
                    part.process.kill()
                    part.process.wait()
        while waiting and len(running) < options.jobs:
            running.append(begin(waiting.pop(0), options, folder, variables))
        for part in [part for part in running if part.process.poll() is not None]:
            running.remove(part)
            lines = part.report.with_suffix(".log").read_text(errors="replace").splitlines()
            # 5: nothing was selected in this part.
            failed = part.process.returncode not in (0, 5)
            if part.report.exists():
                reports.append(part.report)
            elif failed and part.number not in unfinished:
                unfinished.append(part.number)
            shown = lines[-40:] if failed else lines[-1:]
            print(f"[{time.monotonic() - started:5.0f} s] part {part.number}:", *shown, sep="\n  ", flush=True)
        time.sleep(0.2)
    return reports, sorted(unfinished)


def merged(paths: list[Path], command: str) -> Any:
    """One report, in which the parts are one run each way that verbs ran."""
    report = parity.merge({path.name: parity.read(path) for path in paths})
    runs: list[Any] = []
    for one in (msgspec.structs.replace(run, command=command) for run in report.runs):
        runs += [one] * (one not in runs)
    return msgspec.structs.replace(report, runs=tuple(runs))


def main() -> int:
    """Run all parts and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", help="of the backend; its own choice if not given")
    parser.add_argument("--parts", type=int, default=0, help="default: four for every process, and one")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes at once")
    parser.add_argument("--seconds", type=float, default=3600, help="end then, with what there is")
    parser.add_argument("-k", help="pytest's expression of which checks")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.parts = options.parts or 4 * options.jobs + 1
    typed = [Path(word).name if word.startswith(os.sep) else word for word in sys.argv[1:]]
    command = f"python -m benchmarks.kit_in_parts {shlex.join(typed)}"
    with tempfile.TemporaryDirectory() as folder:
        paths, unfinished = run(options, Path(folder))
        if not paths:
            print("no part has a report")
            return 2
        report = merged(paths, command)
    options.out.write_bytes(parity.write(report, packed=options.out.suffix == ".gz"))
    counts: dict[tuple[str, str], int] = {}
    for record in report.checks:
        counts[record.how, record.status] = counts.get((record.how, record.status), 0) + 1
    print(*(f"{how}: {count} {status}" for (how, status), count in sorted(counts.items())), sep="\n")
    if unfinished:
        print(f"parts that did not end: {', '.join(map(str, unfinished))} of {options.parts}")
    return 2 if unfinished else 1 if report.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
