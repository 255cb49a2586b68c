"""A model's decode steps on kernels: most layers go a short way, and give what the model's attention gives."""

import json

import pytest

from tests.support.interpreting import interpreted

pytest.importorskip("triton")
pytest.importorskip("transformers")


def test_layers_like_the_ones_before_go_the_short_way():
    said = interpreted("-W", "ignore", "-m", "tests.frameworks.interpreted_decode")
    found = json.loads(said.splitlines()[-1])
    assert all(worst < 2e-6 for worst, _ in found.values()), found
    # The first step's layers learn, the second's repeat; without a mask all of the third begin where those ended.
    (_, alone), (_, padded) = found.values()
    assert alone >= 2, found
    assert padded >= 1, found
