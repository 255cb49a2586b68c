"""Nothing here rests on what torch keeps to itself: how often a tensor was written to, whose view it is, its C."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvcore

PACKAGE = Path(kvcore.__file__).parent
PRIVATE = ("_version", "_base", "_C", "_cdata", "_use_count")

MAY = {"interop/transformers/tensors.py: tensor._version"}
"""Spares comparing what a model was handed, and weights that were put in order, with copies."""


def private(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        # An attribute of one's own may have any name.
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE and not is_self(node.value):
            yield ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch._"):
            yield ast.unparse(node)


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


@pytest.mark.parametrize("folder", sorted(path.name for path in PACKAGE.iterdir() if path.is_dir()))
def test_no_private_names(folder: str) -> None:
    files = sorted((PACKAGE / folder).rglob("*.py"))
    found = {f"{file.relative_to(PACKAGE)}: {name}" for file in files for name in private(file.read_text("utf-8"))}
    assert found == {name for name in MAY if name.startswith(f"{folder}/")}


@pytest.mark.parametrize("line", ["x._version", "array._base is None", "torch._C.f()", "from torch._C import f"])
def test_private_names_are_seen(line: str) -> None:
    assert list(private(line))
