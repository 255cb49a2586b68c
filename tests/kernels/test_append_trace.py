"""An append by kernels goes through no more files than a reader can keep in mind, those of the kernels among them."""

import re

from tests.support.interpreting import interpreted

MOST_FILES = 11


def test_an_append_goes_through_few_files():
    said = interpreted("-W", "ignore", "-m", "tests.support.append_trace", "--backend", "torch_triton")
    found = {verb: int(files) for verb, files in re.findall(r"torch_triton, (\w+): (\d+) files", said)}
    assert list(found) == ["append_window", "append_kv"]
    assert max(found.values()) <= MOST_FILES
    assert said.count("kernels/triton/append.py") == 2
