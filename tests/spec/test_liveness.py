"""One rule of liveness for ints and for arrays: equal to what later tokens need, token by token."""

import numpy as np
import pytest

from tests.support.cases_of_liveness import COMPONENTS, check

torch = pytest.importorskip("torch")
from kvcore.backends.torch_triton.rows import maximum  # noqa: E402


def test_numpy():
    check(lambda values: values, np.maximum, list)


def test_torch():
    check(torch.from_numpy, maximum, lambda values: values.tolist())


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_ring_never_needs_more_than_its_span(name):
    component = COMPONENTS[name]
    if component.span is None:
        assert component.live(500).start == 0
    else:
        assert max(len(component.live(length)) for length in range(500)) <= component.span
