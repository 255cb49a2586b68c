"""``docs/architecture.md`` is right: what it names exists, no package is missing, an append goes the way it shows."""

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import append_trace

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATHS = re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:/|\.py))`", PAGE)
OUTSIDE = ("benchmarks", "docs", "kvcore", "tests")
MOST_FILES = 8
"""That a reader opens to follow one append on the reference."""
MOST_LINES = 600
"""Of a file that answers one reader's question."""


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def in_first_column(text: str) -> list[str]:
    return [path for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for path in re.findall(r"`(.*?)`", row)]


@pytest.mark.parametrize("path", sorted(set(PATHS)))
def test_what_is_named_exists(path):
    root = ROOT if path.split("/")[0] in OUTSIDE else ROOT / "kvcore"
    # In the line of its package a file goes by its name alone.
    homes = [root, *(root / folder for folder in PATHS if folder.endswith("/"))]
    assert any((home / path).is_dir() if path.endswith("/") else (home / path).is_file() for home in homes)


def test_every_package_and_module_has_a_line():
    found = {
        f"{entry.name}/" if entry.is_dir() else entry.name
        for entry in (ROOT / "kvcore").iterdir()
        if (entry / "__init__.py").is_file() or entry.suffix == ".py"
    }
    assert sorted(in_first_column(section("The tree"))) == sorted(found - {"__init__.py"})


@pytest.mark.parametrize("folder", ["kvcore", "tests", "benchmarks", "examples"])
def test_no_file_is_longer_than_a_reader_takes_in(folder):
    lines = {str(path): path.read_text(encoding="utf-8").count("\n") for path in (ROOT / folder).rglob("*.py")}
    assert lines
    assert not {path: count for path, count in lines.items() if count > MOST_LINES}


class Setting(NamedTuple):
    """Any tuple with names."""

    one: int


def names_of(tree: ast.Module) -> tuple[set[str], list[tuple[str, int]]]:
    """Underscored names that a module defines, and where it asks other objects than its own for one."""
    defined, asked = set(), []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                defined.add(name)
            case ast.Attribute(attr=name):
                asked.append((name, node.lineno))
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
    hidden = [(name, line) for name, line in asked if is_hidden(name)]
    return {name for name in defined if is_hidden(name)}, hidden


def is_hidden(name: str) -> bool:
    """One underscore in front; those of tuples with names are public."""
    return name.startswith("_") and not name.startswith("__") and not hasattr(Setting, name)


def test_what_is_underscored_stays_in_its_package():
    defined, asked = defaultdict(set), []
    for path in (ROOT / "kvcore").rglob("*.py"):
        package = str(path.parent.relative_to(ROOT))
        own, hidden = names_of(ast.parse(path.read_text(encoding="utf-8")))
        defined[package] |= own
        asked += [(package, f"{path.relative_to(ROOT)}:{line}", name) for name, line in hidden]
    everywhere = set().union(*defined.values())
    # What no package of kvcore defines is another library's, which its own tests name.
    assert [where for package, where, name in asked if name in everywhere - defined[package]] == []


def test_an_append_goes_the_way_that_is_shown():
    shown = in_first_column(section("The way of one append"))
    assert set(append_trace.trace("reference", "append_window")) == set(shown)
    assert len(shown) == len(set(shown)) <= MOST_FILES


@pytest.mark.parametrize("verb", append_trace.SPECS)
@pytest.mark.parametrize(("backend", "most"), [("reference", MOST_FILES), ("torch_triton", MOST_FILES + 3)])
def test_an_append_goes_through_few_files(backend, most, verb):
    files = append_trace.trace(backend, verb, "cpu" if backend == "torch_triton" else None)
    assert next(iter(files)) == "cache/layer.py"
    assert len(files) <= most


def test_the_trace_is_printed(capsys):
    append_trace.main(["--backend", "reference"])
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if not line.startswith(" ")] == [
        f"reference, {verb}: {found.total() and len(found)} files, {found.total()} calls"
        for verb in append_trace.SPECS
        for found in [append_trace.trace("reference", verb)]
    ]
