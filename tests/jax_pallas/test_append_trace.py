"""An append on JAX goes through no more files than a reader can keep in mind."""

import pytest

from tests.support import append_trace

MOST_FILES = 11


@pytest.mark.parametrize("verb", append_trace.SPECS)
def test_an_append_goes_through_few_files(verb):
    files = append_trace.trace("jax_pallas", verb, "cpu")
    assert next(iter(files)) == "cache/layer.py"
    assert len(files) <= MOST_FILES
