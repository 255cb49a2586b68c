"""Every kernel on small data: what ``compute-sanitizer`` is run on.

    compute-sanitizer --tool memcheck python -m tests.device.small_run [PART ...] [--device cuda]

Parts are for several processes, since the sanitizer slows each down. The last line names the kernels that ran.
"""

import argparse
import sys
from collections.abc import Iterator

import numpy as np
import torch
from triton import knobs

from tests.device import check_attention, check_canary, check_classic, check_flush, check_groups, check_indexer
from tests.device import checks_on_device as checks
from tests.device.check_cuda import reference_rows
from tests.device.check_kit import SMALL, kit

FORMATS = {"v4_584": 17, "v32_656": 5, "v41_fp4_288": 5, "index_fp4_68_h": 33, "int8_row": 9, "nf4_b64": 3}
"""Rows by format: every way to code and to scale."""


def formats(device: str) -> Iterator[tuple[str, str]]:
    """Stores and gathers of every kind of format."""
    for name, count in FORMATS.items():
        yield from checks.check_format(name, count, "bf16", *reference_rows(name, count, "bf16", 1), device)


def written(check, *options):
    """A part that takes random numbers first."""
    return lambda device: check(np.random.default_rng(0), device, *options)


PARTS = {
    "formats": formats,
    "rotated": written(checks.check_rotated),
    "flush": written(check_flush.check_flush, ("packed",)),
    "planar": written(check_flush.check_flush, ("planar",)),
    "life": written(checks.check_life),
    "pages": written(checks.check_pages),
    "merge": written(checks.check_merge),
    "attention": check_attention.small,
    "classic": check_classic.small,
    "groups": check_groups.small,
    "indexer": check_indexer.small,
    "canary": check_canary.check_words,
    "kit": lambda device: kit(*SMALL, device=device),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--list", action="store_true", help="name the parts and end")
    chosen = parser.parse_args()
    if chosen.list:
        print(*PARTS, sep="\n")
        return
    if unknown := set(chosen.parts) - set(PARTS):
        parser.error(f"no parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    launched: set[str] = set()
    knobs.runtime.launch_enter_hook.add(lambda metadata: launched.add(metadata.get()["name"]))
    problems = []
    for part in chosen.parts or PARTS:
        torch.manual_seed(0)
        problems += [f"{what}: {problem}" for what, problem in PARTS[part](chosen.device) if problem]
    if torch.device(chosen.device).type == "cuda":
        torch.cuda.synchronize()
    print("small run:", "; ".join(problems) or "ok")
    print("kernels:", *sorted(launched))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
