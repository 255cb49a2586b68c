"""Slots are reset alike, whether what a fresh one holds is kept on the device or not."""

import json

import pytest

from tests.support.interpreting import interpreted

pytest.importorskip("triton")
pytest.importorskip("torch")


def test_large_slots_are_reset_as_small_ones_and_nothing_is_kept():
    said = interpreted("-W", "ignore", "-m", "tests.kernels.fresh")
    small, large = json.loads(said.splitlines()[-1])
    assert (small["kept"], large["kept"]) == (True, False)
    assert small["pools"] == large["pools"]
    # One slot of every pool that has them, of two and the one that nobody owns, holds something else than before.
    changed = [[any(byte != 0xFF for byte in unit) for unit in pool] for pool in small["pools"].values()]
    assert {sum(units) for units in changed} == {0, 1}
