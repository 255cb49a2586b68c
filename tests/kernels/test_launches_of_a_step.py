"""How many kernels a decode step launches for one layer through its handle, whatever they take."""

import json

import pytest

from tests.support.interpreting import interpreted

pytest.importorskip("triton")
pytest.importorskip("torch")

KEPT = "move_rings_kernel"
"""What an abort would put back, saved only where a step takes the place of rows that are live without it."""

ATTENDED = {"append_kernel": 1, "attend_kernel": 1}
SELECTED = {"rotate_kernel": 1, "scores_kernel": 1, "best_kernel": 1, "rank_kernel": 1}
FLUSHED = {"flush_kernel": 1}  # both tails' rows, their entry, and its index key


def test_a_layer_launches_each_kernel_once():
    said = interpreted("-W", "ignore", "-m", "tests.kernels.launches")
    found = json.loads(said.splitlines()[-1])
    wanted = {"window": ATTENDED, "CSA": ATTENDED | FLUSHED | SELECTED, "HCA": ATTENDED | FLUSHED}
    for kind, launches in wanted.items():
        for step in ("closes", "closes nothing"):
            assert {name: n for name, n in found[kind][step].items() if name != KEPT} == launches, (kind, step)
