"""Names in kvcore use the field's words: the glossary's last table says which others they do without."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")

# (file, or "" for any; a name that has such a word) -> why it stays.
STAY = {
    ("", "classic"): "a preset's published name: a decoder with nothing but keys and values",
    ("handoff.py", "handoff"): "the published name of the transfer's verbs",
    ("interop/jax/in_place.py", "chip"): "a TPU, by the name of its generation",
}


def words(name: str) -> list[str]:
    """``turned_back``, ``KVLayer`` -> their words, in small letters."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def left_to_others() -> list[list[str]]:
    """The table's words, each a list: some are two."""
    table = GLOSSARY.split("## Words that the code leaves to others")[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")][1:]
    return [one.split() for row in rows for one in row.split(",")]


def names(tree: ast.Module) -> Iterator[str]:
    """Functions, classes, parameters and fields."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
                given = node.args
                several = [one for one in (given.vararg, given.kwarg) if one]
                yield from (one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, *several))
            case ast.ClassDef():
                yield node.name
                fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
                yield from (one.id for one in fields if isinstance(one, ast.Name))


def has(name: str, unwanted: list[str]) -> bool:
    found, length = words(name), len(unwanted)
    return any(found[at : at + length] == unwanted for at in range(len(found) - length + 1))


def unusual(source: str, module: str) -> list[str]:
    """Names with a word that is left to others."""
    every = {module, *names(ast.parse(source))}
    return sorted(name for name in every if any(has(name, unwanted) for unwanted in left_to_others()))


def test_names_use_the_words_of_the_field():
    found, used = [], set()
    for path in sorted((ROOT / "kvcore").rglob("*.py")):
        file = path.relative_to(ROOT / "kvcore").as_posix()
        module = path.parent.name if path.stem == "__init__" else path.stem
        for name in unusual(path.read_text(encoding="utf-8"), module):
            reasons = {(file, name), ("", name)} & set(STAY)
            used |= reasons
            if not reasons:
                found.append(f"{file}: {name}")
    assert not found, "\n".join(found)
    assert used == set(STAY), "an exception that nothing needs any more"


def test_a_name_with_such_a_word_is_found():
    source = "class FileCarrier:\n    desk: int\n    def turn_backwards(self, *spots, turned_back): ...\n"
    assert unusual(source, "cut_for") == ["FileCarrier", "cut_for", "desk", "spots", "turned_back"]
    assert unusual("def spotless(turn, back, execute): ...", "carriers_of_kv") == []


def test_the_glossary_has_each_term_once_and_in_order():
    for table in re.findall(r"^\| term .*?\n\|[-| ]+\n((?:\|.*\n)+)", GLOSSARY, re.M):
        terms = [line.split("|")[1].strip() for line in table.splitlines()]
        assert len(terms) == len(set(terms))
        assert len(terms) > 20
        assert terms == sorted(terms, key=lambda term: term.replace("`", "").lower())
