"""Faults planted one at a time, one line each: does the conformance kit notice, and if not, the test suite?

    python -m tests.reliability.planted --jobs 2 --out planted.json
    python -m tests.reliability.planted --only 'kvcore/requests/prefix.py' --part 0/4
    python -m tests.reliability.planted --ways kit --out kit.json
    python -m tests.reliability.planted --after kit.json --out planted.json

The faults are the tables in ``faults/``. Each is written into a copy of the tree in a temporary folder, never into the
tree itself, and what judges it runs there in processes of its own: first the kit on the backend that the file belongs
to, then, where the kit noticed nothing, the tests that belong to the file (``WAYS``). A fault that only the suite
notices counts as the suite's; a fault that changes nothing that can be observed says why in its table.

What a record says of a fault is taken over by ``--after``, if something noticed it: what is judged is the rest.
"""

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from tests.reliability import command
from tests.reliability.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("kvcore", "tests", "benchmarks", "examples", "docs", "records", "README.md", "pyproject.toml")
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-W", "ignore")
SECONDS = 900
"""After which a run is taken for a hang, which is noticed."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
INTERPRETED = {"TRITON_INTERPRET": "1"}
"""Interpreted kernels fail unplanted under Triton 3.6 with NumPy 2.4 or later: its interpreter makes an index of an
array of one element, which that NumPy refuses. Triton 3.9 does not."""

QUICK_COMPILES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}


class Run(NamedTuple):
    """One process that judges: arguments of Python, its environment, and whether it is the kit."""

    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    kit: bool


def kit(backend: str, checks: str = "", *options: str, **environment: str) -> Run:
    """The kit's checks on a backend: all of them, or those that an expression chooses."""
    line = ("-m", "tests.reliability.kit_once", backend, *options, *(("--checks", checks) if checks else ()))
    return Run(line, tuple(environment.items()), kit=True)


def lives(backend: str) -> Run:
    """The rest of the kit: requests over time, isolation and bad input."""
    modules = (f"kvcore.conformance.{name}" for name in ("test_life", "test_isolation", "test_input"))
    return Run((*PYTEST, "--pyargs", *modules, f"--kv-backend={backend}"), (), kit=True)


def suite(*paths: str, **environment: str) -> Run:
    """Tests of the suite."""
    return Run((*PYTEST, *paths), tuple(environment.items()), kit=False)


ROWS = (
    "(v4_584 or index_fp4_68_h or index_nvfp4 or int8_row or int8_per_token_head or nf4_b64 or mxfp4 or fp32 or bf16"
    " or fp16 or tail)"
)
"""Formats that between them have every code and rule of scales."""


def sampled(verbs: str, layouts: str = "(packed or any)", shapes: str = "(ragged or padded or one_over)") -> str:
    """Checks of some verbs on a backend that compiles, or is interpreted, for every shape."""
    return f"({verbs}) and {layouts} and {shapes} and {ROWS}"


WRITTEN = "(ragged or padded or one_over or taken_over)"
FORMATS_ALONE = "any_bytes or edges or bf16_rows or encode or decode"
TORCH, JAX = "kvcore/backends/torch_triton", "kvcore/backends/jax_pallas"
TRITON, PALLAS = "kvcore/kernels/triton", "kvcore/kernels/pallas"
CORE_TESTS = {
    "requests/manager": (
        "requests/test_allocator",
        "cache/test_fork",
        "cache/test_rollback",
        "requests/test_approximate",
        "requests/test_prefix",
        "requests/test_findable",
        "requests/test_schedulers",
    ),
    "step": ("requests/test_allocator", "cache/test_fork", "requests/test_schedulers", "plan/test_longest"),
    "requests/table": ("requests/test_repeated_steps", "cache/test_fork", "cache/test_rollback"),
    "requests/blocks": ("requests/test_allocator", "requests/test_findable", "requests/test_prefix"),
    "requests/prefix": (
        "requests/test_keys",
        "requests/test_approximate",
        "requests/test_prefix",
        "requests/test_findable",
    ),
    "cache/reuse": (
        "requests/test_approximate",
        "requests/test_prefix",
        "requests/test_findable",
        "requests/test_schedulers",
    ),
    "cache/cache": ("cache/test_fork", "requests/test_prefix", "requests/test_schedulers"),
    "cache/state": ("cache/test_fork", "requests/test_approximate", "requests/test_prefix", "requests/test_schedulers"),
    "cache/step": ("cache/test_rollback", "requests/test_prefix", "cache/test_fork"),
    "cache/canary": ("cache/test_canary",),
    "ops/canary": ("cache/test_canary",),
    "check_words": ("cache/test_canary",),
    "cache/undo": ("cache/test_rollback",),
    "ops/arguments": ("cache/test_known_calls",),
    "ops/functional": ("cache/test_known_calls", "ops/test_functional_doors"),
    "cache/attending": ("cache/test_rollback", "requests/test_prefix"),
    "cache/far": ("store/test_far",),
    "cache/ring_writes": ("cache/test_rollback", "requests/test_prefix"),
    "portable/rows": (
        "portable/test_portable",
        "portable/test_snapshot",
        "portable/test_hostile_files",
        "requests/test_prefix",
    ),
    "adoption/descriptor": ("adoption/test_descriptors", "adoption/test_chunks"),
    "adoption/tables": ("adoption/test_layouts", "adoption/test_chunks"),
    "adoption/given": ("adoption/test_requests", "adoption/test_layouts"),
    "adoption/pages": ("adoption/test_rings_and_pages", "adoption/test_maps", "adoption/test_states"),
    "adoption/maps": ("adoption/test_maps",),
    "store/requests": ("store/test_requests",),
    "store/blocks": ("store/test_blocks",),
    "store/pages": ("store/test_requests", "store/test_blocks"),
    "store/seal": ("store/test_store",),
    "store/store": ("store/test_store", "store/test_requests", "store/test_peers"),
    "store/peers": ("store/test_peers",),
    "store/exports": ("store/test_peers",),
    "store/tiers": ("store/test_store",),
    "adoption/regions": ("adoption/test_rings_and_pages", "adoption/test_layouts"),
    "ops/host": ("ops/test_host_moves",),
    "digest": ("test_digest", "ops/test_alike_lanes"),
    "native/__init__": ("test_native",),
    "portable/record": ("portable/test_portable", "portable/test_hostile_files", "portable/test_moved_checkpoints"),
    "portable/manifest": (
        "portable/test_portable",
        "portable/test_hostile_files",
        "portable/test_snapshot",
        "portable/test_moved_checkpoints",
    ),
    "portable/version1": (
        "portable/test_golden_files",
        "portable/test_portable",
        "portable/test_snapshot",
        "portable/test_checkfile",
    ),
    "portable/snapshot": (
        "portable/test_snapshot",
        "portable/test_checkfile",
        "portable/test_hostile_files",
        "requests/test_prefix",
    ),
    "portable/blob": (
        "portable/test_portable",
        "portable/test_hostile_files",
        "requests/test_prefix",
        "portable/test_moved_checkpoints",
    ),
}
"""File -> the modules of ``tests`` that are about it."""
CORE_TESTS_OF_JAX = {"cache/undo": ("tests/jax_pallas/test_functional.py",)}
"""The same for what only arrays that are never written in place show."""
LIVES = (
    "tests/cache/test_functional_abort.py",
    "tests/cache/test_lifecycle.py",
    "tests/cache/test_chunk_invariance.py",
)
OVER_TIME = ("tests/requests", "tests/cache", "tests/portable", "tests/sharding")
RELIABILITY = "tests/reliability/test_reliability.py"
HANDOFF = (
    "tests/portable/test_pull.py",
    "tests/portable/test_hostile_peers.py",
    "tests/portable/test_moved_checkpoints.py",
)
SHARDS = (
    "tests/sharding/test_plans.py",
    "tests/sharding/test_regroup.py",
    "tests/sharding/test_digest.py",
    "tests/sharding/test_torch_distributed.py",
)

TRITON_CHECKS = {
    "address": sampled("append_window or store_entries or gather_all or append_kv"),
    "append": sampled("append_window or append_rotated or append_kv or store_entries", shapes=WRITTEN),
    "tail": sampled("append_tail or append_index_tail or flush", "(packed or planar or tpu_tile)"),
    "flush": sampled("flush or compress", shapes=WRITTEN),
    "latent": sampled("flush or append_rotated"),
    "rows": sampled("append_window or append_kv or gather_kv or gather_window or store_entries or gather_all"),
    "codes": sampled("append_window or append_kv or store_entries"),
    "gather": sampled("gather"),
    "topk": sampled("select"),
    "scores": sampled("index_scores or index_select"),
    "attend": sampled("attend"),
    "softmax": sampled("attend"),
    "states": sampled("_state or _conv", shapes="(ragged or padded)"),
    "units": "copy_slots or copy_blocks or reset_slots or poison or (restore_ring and ragged)",
}
EVERY_LAYOUT = sampled("append or gather or store", "(packed or planar or tpu_tile or by_head or any)", "ragged")
JAX_CHECKS = {
    "buckets": sampled("append_window or append_kv", "planar", "ragged"),
    "rows": f"{EVERY_LAYOUT} or {sampled('append_kv or store_entries or gather_entries', 'packed', WRITTEN)}",
    "window": sampled("window", shapes="(ragged or longer)"),
    "tail": sampled("flush or compress or append_rotated"),
    "entries": sampled("entries or flush or closed"),
    "kv": sampled("kv or mask or batch", shapes="(ragged or padded)"),
    "blocks": f"{sampled('attend_kv', shapes='(ragged or padded)')} or (attend_kv and unseen and bf16)",
    "lifecycle": sampled("reset_slots or poison or copy_ or digest_rows or gather_rows or store_rows"),
    "indexer": sampled("index_scores or select"),
    "attention": f"{sampled('attend and not attend_kv')} or (attend_kv and unseen and bf16)",
    "encoding": f"{FORMATS_ALONE} or (append_kv and ragged and packed)",
}
PALLAS_CHECKS = {
    "store_rows": sampled("append_window or store_entries", "tpu_tile", "(ragged or padded)"),
    "compact": sampled("gather_entries or index_scores", "tpu_tile", "ragged"),
    "rings": sampled("attend and not attend_kv", "tpu_tile", "padded"),
    "gather_rows": sampled("gather_window or gather_entries or gather_all", "tpu_tile", "ragged"),
    "gather_blocks": sampled("gather_all", "tpu_tile", "ragged"),
    "flush": sampled("flush", "tpu_tile", "ragged"),
    "top_k": sampled("select and not index_select", "tpu_tile", "(ragged or one_over)"),
    "softmax": sampled("attend", "tpu_tile", "ragged"),
}
WAYS: dict[str, tuple[Run, ...]] = {
    **{
        file: (kit("torch_triton", checks, **INTERPRETED), suite("tests/kernels/test_interpreter.py"))
        for name, checks in TRITON_CHECKS.items()
        for file in (f"{TRITON}/{name}.py", f"{TRITON}/launches/{name}.py")
    },
    f"{TORCH}/replay.py": (
        kit("torch_triton", TRITON_CHECKS["append"], **INTERPRETED),
        suite("tests/kernels/test_replay.py"),
    ),
    f"{TORCH}/*": (
        kit("torch_triton"),
        lives("torch_triton"),
        suite("tests/backends", "tests/interop/test_transformers.py", *OVER_TIME),
    ),
    **{
        f"{PALLAS}/{name}.py": (
            kit("jax_pallas", checks, "--device=cpu:interpret", **QUICK_COMPILES),
            suite("tests/jax_pallas/test_fused_kernels.py", **QUICK_COMPILES),
        )
        for name, checks in PALLAS_CHECKS.items()
    },
    f"{PALLAS}/states.py": (
        # The kit's states are no whole tiles: it sees that those are left alone, and the suite the rest.
        kit("jax_pallas", sampled("read_state or select_state", "tpu_tile", "ragged"), "--device=cpu:interpret"),
        suite("tests/jax_pallas/test_recurrent.py", **QUICK_COMPILES),
    ),
    **{
        file: (
            kit("jax_pallas", checks, "--by-plan", **QUICK_COMPILES),
            suite("tests/jax_pallas", **QUICK_COMPILES),
        )
        for name, checks in JAX_CHECKS.items()
        # The arithmetic that its encoders share with the kernels.
        for file in (f"{JAX}/{name}.py", *([f"{PALLAS}/arithmetic.py"] if name == "encoding" else ()))
    },
    **{
        f"kvcore/{name}.py": (
            lives("torch_triton"),
            suite(*(f"tests/{module}.py" for module in modules), *LIVES),
            suite(RELIABILITY),
            *(suite(path, **QUICK_COMPILES) for path in CORE_TESTS_OF_JAX.get(name, ())),
        )
        for name, modules in CORE_TESTS.items()
    },
    "kvcore/portable/*": (lives("torch_triton"), suite(*HANDOFF)),
    "kvcore/sharding/*": (lives("torch_triton"), suite(*SHARDS)),
}
"""Pattern of files -> what judges their faults, in order; the first pattern that fits counts.

A backend that compiles or is interpreted for every shape is judged by the kit's checks of the verbs that the file is
behind, in formats that have every code between them; the others by the whole kit.
"""


def ways_of(file: str) -> tuple[Run, ...]:
    """What judges a fault of that file.

    Raises:
        KeyError: no pattern of ``WAYS`` fits.
    """
    return next(runs for pattern, runs in WAYS.items() if fnmatch.fnmatchcase(file, pattern))


def planted(source: str, fault: Fault) -> str:
    """The file's text with the fault in it.

    Raises:
        ValueError: what the fault replaces is not there, or more than once.
    """
    found = source.count(fault.old)
    if found != 1:
        raise ValueError(f"{fault.file}: {found} times {fault.old!r}")
    return source.replace(fault.old, fault.new)


def judge(fault: Fault, ways: str = "all") -> dict[str, Any]:
    """Plant one fault and say what noticed it: ``kit``, ``suite`` or nothing, with the first line that failed.

    Args:
        ways: what judges: ``kit``, ``suite`` or ``all``.
    """
    start = time.perf_counter()
    noticed, by, ran = "", "", []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = copied_tree(Path(folder) / "tree")
        if fault.new != fault.old:
            place = tree / fault.file
            text = planted(place.read_text(encoding="utf-8"), fault)
            place.unlink()  # a hard link: the tree's own file must not be written to
            place.write_text(text, encoding="utf-8")
        for run in ways_of(fault.file):
            if ways not in ("all", "kit" if run.kit else "suite"):
                continue
            code, output = judged_by(tree, run)
            ran.append(" ".join(run.arguments))
            if code:
                noticed, by = ("kit" if run.kit else "suite"), first_failure(output, code)
                break
    told = {"file": fault.file, "old": fault.old, "new": fault.new, "why": fault.why, "noticed": noticed, "by": by}
    if fault.equivalent:
        told["equivalent"] = fault.equivalent
    return {**told, "ran": ran, "seconds": round(time.perf_counter() - start, 1)}


def copied_tree(tree: Path) -> Path:
    """A copy of what tests need, by hard links where the file system has them."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tree / name, copy_function=_link, ignore=ignored)
        else:
            _link(str(ROOT / name), str(tree / name))
    return tree


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def judged_by(tree: Path, run: Run) -> tuple[int, str]:
    """(exit code, output) of a run in a copy of the tree; the code of a hang is 124.

    Raises:
        RuntimeError: nothing was chosen, or the backend cannot run here.
    """
    environment = {**os.environ, **ONE_THREAD, **dict(run.environment), "PYTHONPATH": str(tree)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    # Where kvcore is installed its entry point loads the plug-in of the kit already.
    known = any(entry.name == "kvcore" for entry in entry_points(group="pytest11"))
    plugin = () if known or "--pyargs" not in run.arguments else ("-p", "kvcore.testing.plugin")
    try:
        done = subprocess.run(
            [sys.executable, *run.arguments, *plugin],
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 124, "no end"
    output = done.stdout.decode(errors="replace")
    if done.returncode in (3, 4, 5) and not run.kit:
        raise RuntimeError(f"{' '.join(run.arguments)}\n{output[-2000:]}")
    return done.returncode, output


def first_failure(output: str, code: int) -> str:
    """The line that names what failed first."""
    for line in output.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            return line.split(" - ")[0][:200]
    last = [line for line in output.splitlines() if line.strip()][-1:] or [""]
    return f"exit code {code}: {last[0][:160]}"


def taken_over(record: dict[str, Any], faults: list[Fault]) -> tuple[list[dict[str, Any]], list[Fault]]:
    """What a record says of faults that something noticed, as far as they are still those; and the others."""
    noticed = {(one["file"], one["old"], one["new"]): one for one in record["told"] if one["noticed"]}
    told = [noticed.get(fault[:3]) for fault in faults]
    return (
        [one for one in told if one is not None],
        [fault for fault, one in zip(faults, told, strict=True) if one is None],
    )


def unplanted(files: list[str]) -> list[Fault]:
    """For every way that judges these files a fault that changes nothing: what must notice nothing."""
    by_way = {ways_of(file): file for file in files}
    return [Fault(file, "", "", "nothing planted") for file in by_way.values()]


def record_of(told: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The record: counts by area with kit and suite apart, and every fault."""
    counted = [one for one in told if one["old"] != one["new"]]
    alarms = [one for one in told if one["old"] == one["new"] and one["noticed"]]
    survivors = [one for one in counted if not one["noticed"] and "equivalent" not in one]
    wrong = [one for one in counted if one["noticed"] and "equivalent" in one]
    return {
        "figure": "planted faults",
        "faults": len(counted),
        "areas": {area: tally(some) for area, some in areas(counted).items()},
        "all": tally(counted),
        "survivors": len(survivors),
        "divergences": len(survivors) + len(alarms) + len(wrong),
        "failures": [*survivors, *alarms, *wrong],
        "seconds": round(seconds, 1),
        **command.versions({}),
        "told": sorted(told, key=lambda one: (one["file"], one["old"])),
    }


def areas(told: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Faults by what they are planted in: a backend, its kernels, or everything else."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in told:
        parts = Path(one["file"]).parts
        kind = {"backends": "backend", "kernels": "kernels of"}.get(parts[1])
        area = f"{kind} {parts[2]}" if kind else "cache, requests, files and shards"
        found.setdefault(area, []).append(one)
    return dict(sorted(found.items()))


def tally(told: list[dict[str, Any]]) -> dict[str, Any]:
    """How many were noticed by what; shares are of those that are not equivalent."""
    counts = Counter(one["noticed"] or ("equivalent" if "equivalent" in one else "nothing") for one in told)
    real = len(told) - counts["equivalent"]
    shares = {
        "kit_share": round(counts["kit"] / real, 4) if real else 1.0,
        "kit_and_suite_share": round((counts["kit"] + counts["suite"]) / real, 4) if real else 1.0,
    }
    return {"faults": len(told), **{name: counts[name] for name in ("kit", "suite", "equivalent", "nothing")}, **shares}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (default: %(default)s)")
    parser.add_argument("--only", default="*", help="files whose faults are planted, a pattern")
    parser.add_argument("--leave-out", default="", help="files whose faults are not planted, a pattern")
    parser.add_argument("--part", default="0/1", help="part I of N, from 0; merge parts with --merge")
    parser.add_argument(
        "--seconds", type=float, help="begin no further fault after this long; the record says how many"
    )
    parser.add_argument("--out", type=Path, help="write the record there, as JSON")
    parser.add_argument("--merge", type=Path, nargs="+", help="records of parts, to one; nothing is run")
    parser.add_argument("--json", action="store_true", help="print the record instead of a summary")
    parser.add_argument("--ways", choices=("all", "kit", "suite"), default="all", help="what judges")
    parser.add_argument("--after", type=Path, help="a record: what it says was noticed is taken over, and not run")
    given = parser.parse_args()
    start = time.perf_counter()
    if given.merge:
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in given.merge]
        told = list({(one["file"], one["old"], one["new"]): one for part in parts for one in part["told"]}.values())
        record = {**parts[0], **record_of(told, sum(part["seconds"] for part in parts))}
        record["command"] = parts[0]["command"]
        record["not_run"] = len(FAULTS) - record["faults"]
    else:
        number, _, total = given.part.partition("/")
        faults = [
            fault
            for fault in FAULTS
            if fnmatch.fnmatchcase(fault.file, given.only) and not fnmatch.fnmatchcase(fault.file, given.leave_out)
        ]
        known = list[dict[str, Any]]()
        if given.after:
            known, faults = taken_over(json.loads(given.after.read_text(encoding="utf-8")), faults)
        faults = faults[int(number) :: int(total)]

        def record_so_far(told: list[dict[str, Any]]) -> dict[str, Any]:
            found = record_of([*known, *told], time.perf_counter() - start)
            if given.out:
                command.write(found | {"not_run": len(known) + len(faults) - found["faults"]}, given.out)
            return found

        told = run_all(
            [*faults, *unplanted([fault.file for fault in faults])],
            given.jobs,
            given.seconds,
            ways=given.ways,
            # A process that is ended leaves a record of what it judged.
            so_far=record_so_far,
        )
        record = record_so_far(told)
        record["not_run"] = len(known) + len(faults) - record["faults"]
    if given.out:
        command.write(record, given.out)
    print(json.dumps(record, indent=2) if given.json else summary(record))
    return 1 if record["divergences"] else 0


def run_all(
    faults: list[Fault],
    jobs: int,
    seconds: float | None = None,
    *,
    ways: str = "all",
    so_far: Callable[[list[dict[str, Any]]], object] = len,
) -> list[dict[str, Any]]:
    """Judge all, some at a time; a line for each as it ends. After ``seconds`` no further one is begun."""
    told = []
    start = time.perf_counter()

    def in_time(fault: Fault) -> dict[str, Any] | None:
        return None if seconds and time.perf_counter() - start > seconds else judge(fault, ways)

    with ThreadPoolExecutor(jobs) as pool:
        for job in as_completed([pool.submit(in_time, fault) for fault in faults]):
            one = job.result()
            if one is None:
                continue
            told.append(one)
            verdict = one["noticed"] or ("equivalent" if "equivalent" in one else "NOT NOTICED")
            print(
                f"[{len(told)}/{len(faults)}] {verdict}: {one['file']}: {one['why']} {one['by']}",
                file=sys.stderr,
                flush=True,
            )
            so_far(told)
    return told


def summary(record: dict[str, Any]) -> str:
    """A table for people."""
    lines = [f"{'':36}{'faults':>8}{'kit':>6}{'suite':>7}{'equivalent':>12}{'nothing':>9}{'kit alone':>11}"]
    for area, counts in [*record["areas"].items(), ("all", record["all"])]:
        numbers = (counts[name] for name in ("faults", "kit", "suite", "equivalent", "nothing"))
        row = "".join(f"{number:>{width}}" for number, width in zip(numbers, (8, 6, 7, 12, 9), strict=True))
        lines.append(f"{area:36}{row}{counts['kit_share']:>11.1%}")
    lines += [
        f"{'noticed' if one['noticed'] else 'not noticed'}: {one['file']}: {one['why']} {one['by']}"
        for one in record["failures"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
