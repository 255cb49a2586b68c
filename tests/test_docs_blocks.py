"""Python in the documentation: every block parses, and what is complete in itself runs. Doctests run with the docs."""

import ast

import pytest

from tests.support.docs_blocks import blocks, complete, missing


@pytest.mark.parametrize("name", blocks())
def test_a_block_parses(name):
    ast.parse(blocks()[name])


@pytest.mark.parametrize("name", complete(None))
def test_a_complete_block_runs(name):
    exec(compile(complete(None)[name], name, "exec"), {"__name__": "block"})


def test_there_are_complete_blocks():
    assert {"README.md:0", "start.md:0", "backends.md:0"} <= set(complete(None))


def test_what_a_block_lacks_is_seen():
    assert missing("import a.b as c\nx = c(y) + len(z)\ndef f(z): return x") == {"y"}
    assert missing("k = v = torch.randn(5)") == {"torch"}
