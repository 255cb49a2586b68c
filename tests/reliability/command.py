"""What the figures' commands share: seeds, time limits, several processes, and the record that they write.

Most figures are a range of seeds, each of which tells a story of its own. A shard is a part of that range, told by one
process anywhere; ``python -m tests.reliability.merge`` adds shards up.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from kvcore import environment
from kvcore.portable.disk import Disk, write_whole

SEEDS_A_JOB = 1_000_000
"""Jobs of one command take their seeds from ranges that lie this far apart."""

ENOUGH_FAILURES = 5
SECONDS_BETWEEN_RECORDS = 20

_stop_at: list[float] = []


def spent() -> bool:
    """True once the time that ``--seconds`` gave is over: a figure then stops, and records what it did."""
    return bool(_stop_at) and time.perf_counter() > _stop_at[-1]


class Told(NamedTuple):
    """What one seed gave: counts, which are summed (mappings by key), and failures: seed, error, shrunk trace."""

    counts: dict[str, Any]
    failures: list[dict[str, Any]]


class Figure(NamedTuple):
    """A figure whose seeds can be told apart from each other.

    Attributes:
        name: for example ``R5``.
        counted: the count that says how far it got.
        short: how many of those the short form takes.
        full: how many the full form takes.
        tell: (seed, options) -> what it gave.
        options: what else the command line may set, with defaults.
    """

    name: str
    counted: str
    short: int
    full: int
    tell: Callable[[int, dict[str, str]], Told]
    options: Mapping[str, str] = {}


def work(
    figure: Figure,
    target: int,
    *,
    first_seed: int = 0,
    seconds: float | None = None,
    out: Path | None = None,
    **options,
) -> dict[str, Any]:
    """Tell seeds from ``first_seed`` on until there is enough of what is counted, or the time is over.

    Args:
        out: where the record so far is put now and then, so that a process that is ended leaves one.
    """
    if seconds:
        _stop_at.append(time.perf_counter() + seconds)
    start = last = time.perf_counter()
    options = {**figure.options, **options}
    counts: dict[str, Any] = {figure.counted: 0}
    failures: list[dict[str, Any]] = []
    seed = first_seed
    record = _record(figure, target, options, seed, 0, 0.0, counts, failures)
    while counts[figure.counted] < target and len(failures) < ENOUGH_FAILURES and not spent():
        told = figure.tell(seed, options)
        seed += 1
        counts = added(counts, told.counts)
        failures += told.failures
        now = time.perf_counter()
        record = _record(figure, target, options, first_seed, seed - first_seed, now - start, counts, failures)
        if out and now - last > SECONDS_BETWEEN_RECORDS:
            write(record, out)
            last = now
    if seconds:
        _stop_at.pop()
    return record


def _record(figure, target, options, first_seed, seeds, seconds, counts, failures) -> dict[str, Any]:
    return {
        "figure": figure.name,
        "counted": figure.counted,
        "target": target,
        "full": figure.full,
        "options": options,
        "ran": [{"first_seed": first_seed, "seeds": seeds, "seconds": round(seconds, 1), **versions(options)}],
        "counts": counts,
        "divergences": len(failures),
        "failures": failures,
    }


def added(a: Any, b: Any) -> Any:
    """Sums of numbers, key by key where they are mappings."""
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        a, b = a or {}, b or {}
        return {key: added(a.get(key, 0), b.get(key, 0)) for key in dict.fromkeys([*a, *b])}
    return a + b


def versions(options: Mapping[str, str]) -> dict[str, str]:
    """Command, device, commit, and versions of what a figure may run on; what there is not is left out."""
    gpu = ""
    if "cuda" in " ".join(options.values()):
        import torch

        gpu = torch.cuda.get_device_name()
    told = environment.of_script(gpu)
    found = {name: told[name] for name in ("command", "device", "commit", "python") if told[name]}
    for name in ("numpy", "torch", "jax"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def finished(record: dict[str, Any]) -> dict[str, Any]:
    """A record that says how much of the full form it is."""
    done = record["counts"][record["counted"]]
    form = "full" if done >= record["full"] else "short" if done >= record["target"] else "a part"
    return {"figure": record["figure"], **record, "form": form}


def merged(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of several shards of a figure.

    Raises:
        ValueError: they are of other figures or options, or tell a seed twice.
    """
    first = records[0]
    for other in records[1:]:
        for key in ("figure", "counted", "full", "options"):
            if other[key] != first[key]:
                raise ValueError(f"{key}: {other[key]} beside {first[key]}")
    ran = sorted((part for record in records for part in record["ran"]), key=lambda part: part["first_seed"])
    for one, next_one in pairwise(ran):
        if one["first_seed"] + one["seeds"] > next_one["first_seed"]:
            raise ValueError(f"seed {next_one['first_seed']} is told twice")
    counts: dict[str, Any] = {}
    for record in records:
        counts = added(counts, record["counts"])
    failures = [failure for record in records for failure in record["failures"]]
    return finished(
        {
            **{key: first[key] for key in ("figure", "counted", "full", "options")},
            "target": first["full"],
            "ran": ran,
            "counts": counts,
            "divergences": len(failures),
            "failures": failures,
        }
    )


def write(record: dict[str, Any], out: Path) -> None:
    """Put a record in place of a file, whole."""
    write_whole(Disk(), out, (json.dumps(record, indent=2) + "\n").encode())


def run_figure(description: str, figure: Figure) -> None:
    """Run a figure of many seeds from the command line; the exit code is 1 if it did not hold."""
    parser = _parser(description)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help=f"processes; their seeds lie {SEEDS_A_JOB} apart")
    parser.add_argument("--count", type=int, help=f"how many {figure.counted}, instead of a form's")
    for name, default in figure.options.items():
        parser.add_argument(f"--{name}", default=default)
    given = parser.parse_args()
    target = given.count or (figure.full if given.full else figure.short)
    options = {name: getattr(given, name) for name in figure.options}
    if given.jobs == 1:
        records = [work(figure, target, first_seed=given.first_seed, seconds=given.seconds, out=given.out, **options)]
    else:
        share = -(-target // given.jobs)
        with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
            jobs = [
                pool.submit(
                    work,
                    figure,
                    share,
                    first_seed=given.first_seed + number * SEEDS_A_JOB,
                    seconds=given.seconds,
                    out=given.out and given.out.with_name(f"{given.out.stem}.job{number}.json"),
                    **options,
                )
                for number in range(given.jobs)
            ]
            records = [job.result() for job in jobs]
    _end(finished({**merged(records), "target": target}), given.out)


def main(description: str, run: Callable[..., dict[str, Any]], options: Mapping[str, str] = {}) -> None:
    """Run a figure that is told in one piece from the command line; the exit code is 1 if it did not hold.

    Args:
        run: (full, seed, and the options by name) -> the record; ``divergences`` in it must be 0.
        options: what else the command line may set, with defaults.
    """
    parser = _parser(description)
    parser.add_argument("--seed", type=int, default=0)
    for name, default in options.items():
        parser.add_argument(f"--{name}", default=default)
    given = parser.parse_args()
    start = time.perf_counter()
    if given.seconds:
        _stop_at.append(start + given.seconds)
    record = {
        "form": "full" if given.full else "short",
        **run(given.full, given.seed, **{name: getattr(given, name) for name in options}),
        "stopped_early": spent(),
        "seconds": round(time.perf_counter() - start, 1),
        **versions({name: str(getattr(given, name)) for name in options}),
    }
    _end(record, given.out)


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the full form, as recorded")
    parser.add_argument("--seconds", type=float, help="stop early, after this long; the record says what was run")
    parser.add_argument("--out", type=Path, help="write the record there, as JSON")
    return parser


def _end(record: dict[str, Any], out: Path | None) -> None:
    print(json.dumps(record, indent=2))
    if out:
        write(record, out)
    sys.exit(1 if record["divergences"] else 0)
