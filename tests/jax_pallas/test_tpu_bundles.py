"""What kernels come to by the TPU compiler's bundles, held against the record; compiled, not run."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import compile_tpu
from benchmarks.tpu_bundles import Bundles
from benchmarks.tpu_kernels import KERNELS

RECORD = Path(__file__).parents[2] / "records" / f"{compile_tpu.NAME}.json"
CHIP = "v6e"
WORSE = 0.9


def recorded() -> dict[tuple[str, str], dict]:
    """(kernel, chip) -> what the record says."""
    return {(one["kernel"], one["chip"]): one for one in json.loads(RECORD.read_text(encoding="utf-8"))["kernels"]}


@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler (libtpu) is not installed")
def test_no_kernel_gets_a_tenth_worse_than_the_record(request: pytest.FixtureRequest) -> None:
    every = request.config.getoption("every")
    names = [name for name, kernel in KERNELS.items() if kernel.quick or (every and kernel.whose == "kvcore")]
    found, before = compile_tpu.compiled(CHIP, names), recorded()
    assert [one["kernel"] for one in found] == names
    assert not [one for one in found if "refused" in one]
    worse = {
        one["kernel"]: (one["share"], before[one["kernel"], CHIP]["share"])
        for one in found
        if one["share"] < WORSE * before[one["kernel"], CHIP]["share"]
    }
    assert not worse, f"share of the memory rate now, and in {RECORD.name}: {worse}"


def test_the_record_speaks_of_every_kernel_and_chip_and_says_that_nothing_ran() -> None:
    found = recorded()
    assert {(name, chip) for name in KERNELS for chip in compile_tpu.CHIPS} <= set(found)
    assert all(one.get("word") == "compiled, not run" or "refused" in one for one in found.values())
    assert all(
        "share" in found[name, chip]
        for name in KERNELS
        for chip in compile_tpu.CHIPS
        if KERNELS[name].whose == "kvcore"
    )


DUMP = """\
     0   :  { %s1 = smov 0 }
   0x1 LB: > { %p2_p0 = scmp.ne.s32.totalorder %s1, 0 } /* Start region 7 */
   0x2   : > { %9 = sbr.rel (%p2_p0) target = $region3 }
   0x3   :  {}
   0x4   :  {}
   0x5   :  {}
   0x6   :  {}
   0x7   : > { %5 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1, /*size_in_granules=*/16, /*vmem=*/%s2 }
   0x8 PF: > { %s3 = smov 0 } /* Start/End empty region 3 */
   0x9 LB: >> { %6 = shalt.err (!%p1) /* for %5 = dma.hbm_to_vmem /*size_in_granules=*/16, x */ } /* Start region 5 */
   0xa   : >> { %5 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1, /*size_in_granules=*/16, /*vmem=*/%s2 }
   0xb   : >> { %p8_p1 = scmp.ge.s32.totalorder %s3, 4 /* loop exit test */ }
   0xc   : > { %7 = sbr.rel (!%p8_p1) target = $region5 }
   0xd   :  {}
   0xe   :  {}
   0xf   :  {}
  0x10   :  {}
  0x11   : > { %p9_p2 = scmp.ge.s32.totalorder %s1, 32 /* loop exit test */ }
  0x12   :  { %8 = sbr.rel (!%p9_p2) target = $region7 }
  0x13   :  {}
  0x14   :  {}
  0x15   :  {}
  0x16   :  {}
"""


def test_loops_count_as_often_as_they_turn_and_a_first_turn_not() -> None:
    used = "== CAPACITY:\nMXU, VLOAD:FILL, VSTORE:SPILL\n 2 3 2\n== UTILIZATION:\n" + "1 0 1\n" * 23
    hot = Bundles(DUMP, used).hot(inner=False)
    inner, around, first_turn = 0x10 - 0x8, 0x16 - 0x10 + 0x8, 1
    assert hot.bundles == 4 * inner + around - first_turn
    assert (hot.dmas, hot.moved, hot.spills, hot.loops) == (4, 4 * 16 * 32, hot.bundles, 1)
