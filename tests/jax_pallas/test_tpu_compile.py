"""The kernels and a whole decode step, compiled by the TPU compiler for chips that are not here; nothing is run."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kvcore.interop.jax import assert_in_place

CHIPS = ("v5e", "v5p", "v6e", "v7x")
KERNELS = (
    "write_rows, bytes",
    "write_rows, fp32",
    "write_parts, quarters",
    "write_parts, halves",
    "read_rows, bytes",
    "read_rows, fp32",
)
TEMPORARY_BYTES = 1 << 20
STEP_TEMPORARY_BYTES = 8 << 20
"""A step's gathered rows, scores and queries; its pools are 26 MiB."""

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler (libtpu) is not installed")


def compiled(chip: str, *cases: str) -> list[dict]:
    """What the compiled programs do to their pools, from a process of their own."""
    here = Path(__file__)
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    env["PYTHONPATH"] = os.pathsep.join([str(here.parent), str(here.parents[1]), *sys.path])
    env |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run(
        [sys.executable, here.with_name("compile_case.py"), chip, *cases],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_every_kernel_compiles_and_updates_its_pool_in_place(chip: str) -> None:
    found = compiled(chip, *KERNELS)
    assert [one["case"] for one in found] == list(KERNELS)
    for one in found:
        assert one["alias_bytes"] >= one["pool_bytes"], one
        assert one["temporary_bytes"] <= TEMPORARY_BYTES, one
        assert not one["moves"], one


@needs_libtpu
@pytest.mark.parametrize("case", ["a decode step, entries given", "a decode step, compressing"])
@pytest.mark.parametrize("chip", CHIPS)
def test_a_decode_step_compiles_and_updates_every_pool_in_place(chip: str, case: str) -> None:
    (one,) = compiled(chip, case)
    assert one["alias_bytes"] >= one["pool_bytes"] > 16 << 20
    assert one["temporary_bytes"] <= STEP_TEMPORARY_BYTES, one
    assert not one["moves"], one


@needs_libtpu
def test_a_kernel_that_copies_its_pool_is_caught() -> None:
    (one,) = compiled("v6e", "copies its pool")
    assert one["moves"] or one["alias_bytes"] < one["pool_bytes"] or one["temporary_bytes"] >= one["pool_bytes"], one


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
