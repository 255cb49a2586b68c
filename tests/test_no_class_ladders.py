"""Outside ``spec`` and ``interop`` nobody asks which class a component has: what a component is, it says as data.

A ladder of classes decides for those that it knows and, in silence, for one that it does not.
"""

import ast
from pathlib import Path

import pytest

import kvcore
from kvcore.spec import Component

PACKAGE = Path(kvcore.__file__).parent
MAY = ("spec", "interop")


def kinds(base: type = Component) -> set[str]:
    return {base.__name__}.union(*(kinds(kind) for kind in base.__subclasses__() if kind.__module__[:6] == "kvcore"))


def names(node: ast.AST) -> set[str]:
    return {found.attr if isinstance(found, ast.Attribute) else found.id
            for found in ast.walk(node) if isinstance(found, (ast.Name, ast.Attribute))}  # fmt: skip


def ladders(source: str) -> list[int]:
    """Lines that ask for the class of a component: isinstance, issubclass, type(x) is, match."""
    found: list[int] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, asked]):
                pass
            case ast.MatchClass(cls=asked):
                pass
            case ast.Compare(left=ast.Call(func=ast.Name(id="type")), comparators=[asked]):
                pass
            case _:
                continue
        if names(asked) & kinds():
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(x, Window)",
        "isinstance(x, (int, spec.KV))",
        "issubclass(x, Entries | Tail)",
        "type(x) is IndexKeys",
        "match x:\n    case Tail():\n        pass",
        "match x:\n    case spec.KV(storage='ring'):\n        pass",
        "isinstance(x, Component)",
    ],
)
def test_a_ladder_is_seen(source):
    assert ladders(source)


@pytest.mark.parametrize("source", ["isinstance(x, int)", "Window(dim=4, window=2)", "type(x) is int", "x.window"])
def test_other_code_is_not(source):
    assert not ladders(source)


def test_the_library_has_none():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in MAY
        for line in ladders(path.read_text(encoding="utf-8"))
    ]
    assert found == []
