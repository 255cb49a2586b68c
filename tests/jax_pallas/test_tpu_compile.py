"""Every kernel and a whole decode step, compiled by the TPU compiler for chips that are not here; nothing is run."""

from importlib.util import find_spec
from itertools import product
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kvcore import parity
from kvcore.interop.jax import assert_in_place
from kvcore.parity.html import LADDER
from tests.jax_pallas.compile_tpu import compiled, fault, record
from tests.jax_pallas.tpu_cases import CHIPS as EVERY_CHIP
from tests.jax_pallas.tpu_cases import KERNELS, STEPS
from tests.support.samples import fewest

RECORD = Path(__file__).parents[2] / "records" / "compile_tpu.json"
CHIPS = ("v6e", "v5e", "v5p", "v7x")
"""Each compiles one case of each verb at least, the first a whole step."""

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler (libtpu) is not installed")


def sample() -> list[tuple[str, str]]:
    """(chip, case): every verb on every chip, every case on some; of cases that show as much what compiles soonest."""
    seconds = {
        (one.how.split(",")[0].removeprefix("TPU "), one.check): one.seconds for one in parity.read(RECORD).checks
    }
    points = sorted(product(CHIPS, KERNELS), key=lambda point: seconds.get(point, 0.0))
    found = fewest(points, lambda point: {point[1], (point[0], verb_of(point[1]))})
    return [*found, *((CHIPS[0], step) for step in STEPS)]


def verb_of(case: str) -> str:
    return case.partition("/")[0]


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_and_a_step_compile_and_update_their_pools_in_place(chip: str, request: pytest.FixtureRequest) -> None:
    every = request.config.getoption("every")
    cases = [*KERNELS, *STEPS] if every else [case for other, case in sample() if other == chip]
    found = compiled(chip, *cases)
    assert [one["case"] for one in found] == cases
    assert not [(one["case"], fault(one)) for one in found if fault(one)]
    assert all(one["pool_bytes"] > 1 << 20 for one in found)


def test_every_case_is_compiled_and_every_verb_for_every_chip() -> None:
    chosen, cases = sample(), {*KERNELS, *STEPS}
    assert {case for _, case in chosen} == cases
    of_kernels = {(chip, verb_of(case)) for chip, case in chosen if case in KERNELS}
    assert of_kernels == set(product(CHIPS, map(verb_of, KERNELS)))


@needs_libtpu
def test_a_kernel_that_copies_its_pool_is_caught() -> None:
    (one,) = compiled("v6e", "copies its pool")
    assert record(one, "ahead of time").status == "disagree"
    assert "moved" in fault(one) or "in place" in fault(one)


def test_the_committed_record_speaks_of_every_kernel_and_chip() -> None:
    """As parity reports: readable, mergeable, and on the rung of what was compiled and not run."""
    found: dict[str, set[str]] = {}
    report = parity.merge({RECORD.name: parity.read(RECORD)})
    assert report.agrees
    for one in report.checks:
        assert [name for name, _, fits in LADDER if fits(one.how)] == ["compiled"], one.how
        found.setdefault(one.how.split(",")[0], set()).add(one.check)
    assert all({"jax", "libtpu"} <= run.versions.keys() for run in report.runs)
    assert found == {f"TPU {chip}": {*KERNELS, *STEPS} for chip in EVERY_CHIP}


def test_assert_in_place_passes_an_update_in_place() -> None:
    pools = {"a": np.zeros((64, 4096), np.uint8)}
    found = assert_in_place(lambda pools, row: {"a": pools["a"].at[row].set(1)}, pools, np.int32(3))
    assert found[0].alias_bytes >= found[0].pool_bytes == 64 * 4096


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        pytest.param(lambda pool: (pool.at[3].set(1), pool), "whole pool is moved", id="the old pool is kept too"),
        pytest.param(lambda pool: pool.astype(jnp.float32), "updated in place", id="another dtype comes back"),
        pytest.param(lambda pool: pool.at[3].set(1).sum(), "updated in place", id="no pool comes back"),
    ],
)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_assert_in_place_catches_a_lost_donation(fn, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_in_place(fn, jnp.zeros((512, 8192), jnp.uint8))
