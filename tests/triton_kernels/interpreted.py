"""One group of kernel checks under Triton's interpreter; run in a process of its own, see ``test_interpreter``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import check_attention
import check_classic
import check_indexer
import numpy as np
from check_cuda import reference_rows
from check_flush import flush_problems
from checks_on_device import check_format, check_life, check_merge, check_pages, check_rotated

from kvcore import parity
from kvcore.backends.torch_triton.kernels import shape
from kvcore.conformance.specs import conformance_spec
from kvcore.parity.show import failure_text
from kvcore.plugins import registry
from kvcore.spec import FORMATS


def formats(names):
    for number, name in enumerate(names):
        # Both inputs take the same way but for the first load.
        count, dtype = ((17, "fp32"), (9, "bf16"))[number % 2]
        yield from check_format(name, count, dtype, *reference_rows(name, count, dtype, 5), "cpu")


def flushes(given):
    rng = np.random.default_rng(3)
    yield f"CSA {given}", flush_problems(rng, "cpu", 4, True, "v4_584", "index_fp4_68_h", [13, 1], given, after=3)
    yield f"CSA in chunks {given}", flush_problems(rng, "cpu", 4, True, "v4_584", None, [[7], [66]], given, after=1)
    yield f"HCA {given}", flush_problems(rng, "cpu", 128, False, "v4_584", None, [130, 5], given, after=1)
    yield (
        f"HCA in chunks {given}",
        flush_problems(rng, "cpu", 128, False, "v4_584", None, [[130, 5], [9, 127]], given, after=1),
    )
    yield (
        f"CSA, more than the ring spares {given}",
        flush_problems(rng, "cpu", 4, True, "v4_584", "index_fp8_132", [[6, 5], [3, 4], [5, 5]], given, after=1),
    )
    yield (
        f"ratio 3 in chunks {given}",
        flush_problems(rng, "cpu", 3, True, "fp32", "bf16", [[70, 2], [68, 3]], given, after=1),
    )
    held, shape.MOST_BESIDE_BORDER = shape.MOST_BESIDE_BORDER, 64
    keys = "index_fp8_132"
    yield (
        f"CSA, long {given}",
        flush_problems(rng, "cpu", 4, True, "v4_584", keys, [[7, 0], [66, 3], [3, 64]], given, after=0),
    )
    shape.MOST_BESIDE_BORDER = held
    yield f"ratio 3 {given}", flush_problems(rng, "cpu", 3, True, "fp32", "bf16", [9, 2], given, after=3)


def kit(*patterns):
    """Checks of the conformance kit, by their ids."""
    for pattern in patterns:
        report = parity.run(conformance_spec(), [registry().backends["torch_triton"]], device="cpu", only=pattern)
        yield from (
            (record.check, "" if record.status == "agree" else failure_text(record)) for record in report.checks
        )


def compiled():
    from capture_on_device import check_compiled

    yield from check_compiled("cpu", backend="aot_eager")


GROUPS = {
    "attention": lambda: check_attention.small("cpu"),
    "classic attention": lambda: check_classic.small("cpu"),
    "indexer": lambda: check_indexer.small("cpu"),
    "flush of fp32": lambda: flushes("fp32"),
    "flush of bf16": lambda: flushes("bf16"),
    "whole units": lambda: check_life(np.random.default_rng(4), "cpu"),
    "pages of exports": lambda: check_pages(np.random.default_rng(6), "cpu"),
    "strips in the kit": lambda: kit(
        "move_strips/v4_584+*/p*/longer", "move_strips/*.ring/by_head/ragged", "digest_strips/*fp8_132.m4/any/longer"
    ),
    "merge of shards": lambda: check_merge(np.random.default_rng(7), "cpu"),
    "rotated append": lambda: check_rotated(np.random.default_rng(2), "cpu"),
    "torch.compile": compiled,
    **{f"formats {n}": lambda n=n: formats(sorted(FORMATS)[n::4]) for n in range(4)},
}

if __name__ == "__main__":
    found = list(GROUPS[sys.argv[1]]())
    print(len(found), "checks")
    for what, problem in found:
        if problem:
            print(what, problem)
    sys.exit(any(problem for _, problem in found) or not found)
