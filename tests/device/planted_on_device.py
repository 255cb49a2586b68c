"""Faults planted in the kernels in Gluon, one at a time, on a GPU: do small cases against fp64 notice each of them?

    python -m tests.device.planted_on_device --jobs 8 --out planted.json
    python -m tests.device.planted_on_device --judge attend_hopper.py

The faults are the table in ``tests/reliability/faults/hopper.py``; each is written into a copy of the tree, in which a
process of its own runs the file's cases. Copies without a fault are judged, too: there nothing may be noticed.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from kvcore import environment
from tests.device import check_attention, check_indexer
from tests.device.check_attention import V4_ROPE, layer_of
from tests.device.check_indexer import E4M3, keys_layer
from tests.device.reading_scene import scene
from tests.reliability import planted
from tests.reliability.faults import ON_HOPPER

Problem = tuple[str, str]
FOLDER = "kvcore/kernels/triton"
SECONDS = 100
"""After which a run is taken for a hang, which is noticed."""


def attention(device: str) -> Iterator[Problem]:
    """Programs of several tiles: whole queries turned back, parts of queries, every entry."""
    csa, hca = layer_of("v4_584", "v4_584"), layer_of("v4_584", "v4_584", ratio=128)
    many = [3 + 97 * n for n in range(72)]
    yield from check_attention.check("whole", csa, many, [1] * 72, device, heads=128, count=300, rope=V4_ROPE)
    yield from check_attention.check("parts", csa, [5003, 129, 1], [2, 1, 1], device, count=512)
    yield from check_attention.check("every entry", hca, [70000, 127], [1, 1], device, heads=5)


def scores(device: str) -> Iterator[Problem]:
    """Keys in FP8 and FP4, one query of a request and several."""
    for name, news in (("index_fp8_132", [1, 1]), ("index_fp4_68", [1, 1]), ("index_fp4_68", [5, 2])):
        yield from check_indexer.check(f"{name} {news}", keys_layer(name), [5000, 300], news, device)
    yield from check_indexer.check("e4m3 queries", keys_layer("index_fp8_132"), [5000, 300], [1, 1], device, dtype=E4M3)


def nibbles(device: str) -> Iterator[Problem]:
    """FP4 keys by queries in e4m3, with scales alike and far apart."""
    yield from check_indexer.of_codes(device)


def top(device: str) -> Iterator[Problem]:
    """Rows of one part and of several."""
    found = scene(keys_layer("bf16"), [8], [1], device)
    yield from check_indexer.check_select(device, [(16384, 512), (262144, 512)], found.ops)
    yield from check_indexer.many_rows(device, 16384, 512, found.ops)


JUDGES: dict[str, Callable[[str], Iterator[Problem]]] = {
    "attend_hopper.py": attention,
    "scores_hopper.py": scores,
    "scores_nibbles.py": nibbles,
    "topk_hopper.py": top,
}


def judge(name: str, device: str) -> int:
    """Run a file's cases until one fails: 1 if one does."""
    torch.manual_seed(0)
    problem = next((f"{what}: {problem}" for what, problem in JUDGES[name](device) if problem), "")
    print(problem or "ok")
    return int(bool(problem))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=4, help="faults at a time (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the record there, as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--judge", choices=JUDGES, help="run a file's cases here, in the tree as it is")
    given = parser.parse_args()
    if given.judge:
        return judge(given.judge, given.device)
    module = ("-m", "tests.device.planted_on_device", "--device", given.device)
    planted.WAYS = {f"{FOLDER}/{name}": (planted.Run((*module, "--judge", name), (), kit=False),) for name in JUDGES}
    planted.COPIED, planted.SECONDS = ("kvcore", "tests", "pyproject.toml"), SECONDS
    start = time.perf_counter()
    told = planted.run_all([*planted.unplanted(sorted(planted.WAYS)), *ON_HOPPER], given.jobs)
    found = planted.record_of(told, time.perf_counter() - start)
    record = {"kind": "planted on a GPU", **environment.of_script(torch.cuda.get_device_name(given.device)), **found}
    if given.out:
        given.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for one in told:
        print(
            f"{'noticed' if one['noticed'] else 'NOT noticed':12} {one['seconds']:5} s  {one['why']}: {one['by'][:100]}"
        )
    print(f"{found['faults']} faults, {found['divergences']} divergences, {found['seconds']} s")
    return int(found["divergences"] > 0)


if __name__ == "__main__":
    sys.exit(main())
