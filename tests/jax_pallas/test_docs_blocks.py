"""What the documentation shows of JAX and is complete in itself runs."""

import pytest

from tests.support.docs_blocks import complete


@pytest.mark.parametrize("name", complete("jax"))
def test_a_complete_block_runs(name):
    exec(compile(complete("jax")[name], name, "exec"), {"__name__": "block"})


def test_there_are_such_blocks():
    assert "jax_views.md:0" in complete("jax")
