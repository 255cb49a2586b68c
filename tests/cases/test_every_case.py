"""Each of the seventy cases is a test or waits in the README's table, with the reason."""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent

CASES = {
    "RING": (1, 2, 3, 5, 6, 7, 9, 10, 13),
    "CLS": (2, 3, 4, 6),
    "CMP": (1, 2, 3, 5, 6, 7, 9, 12, 13),
    "IDX": (1, 4, 5, 6, 8, 9),
    "POOL": (1, 2, 3, 4, 6, 7, 9, 10, 11, 13, 14, 15, 16),
    "ALC": (1, 2, 4, 5, 7),
    "PFX": (1, 3, 4, 5, 7),
    "SPC": (1,),
    "BAT": (1, 4),
    "QNT": (1, 2, 3, 5, 6, 7, 9, 10),
    "JIT": (1, 2, 4),
    "MEM": (1,),
    "SER": (1, 3, 4),
    "TPX": (1,),
}
IDS = [f"{group}-{number:02}" for group, numbers in CASES.items() for number in numbers]


def ids_in_tests() -> set[str]:
    """Ids in the names of test functions."""
    names = [
        node.name
        for path in HERE.glob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    ]
    found = (re.match(r"test_([a-z]+)_(\d\d)_", name) for name in names)
    return {f"{match[1].upper()}-{match[2]}" for match in found if match}


def listed(heading: str) -> list[list[str]]:
    """Cells of the rows of the README's table under a heading."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| [A-Z]+-\d\d ", line)]
    assert rows
    return rows


def test_there_are_seventy():
    assert len(IDS) == len(set(IDS)) == 70


@pytest.mark.parametrize("case", IDS)
def test_case_is_a_test_or_waits_for_a_reason(case):
    waiting = {row[0] for row in listed("Cases that wait")}
    assert (case in ids_in_tests()) != (case in waiting)


def test_no_other_ids_and_no_empty_reasons():
    waiting, partly = listed("Cases that wait"), listed("Cases that are tested in part")
    assert ids_in_tests() | {row[0] for row in waiting} == set(IDS)
    assert {row[0] for row in partly} <= ids_in_tests()
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in waiting + partly)
