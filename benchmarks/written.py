"""What benchmarks write: a record as JSON, beside it what is read of it, a table or a picture, under the same name."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write(record: dict[str, Any], path: Path | None, **beside: str) -> None:
    """Write a record where a file is named for it, and texts beside it, by their endings.

    Benchmarks do so after every row: a run that is cut off leaves what it had.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for ending, text in beside.items():
        path.with_name(f"{path.stem}.{ending}").write_text(text, encoding="utf-8")


def markdown(said: str, columns: str, rows: Iterable[str]) -> str:
    """What is said, and a table of rows whose cells have ``|`` between them.

    Args:
        said: above the table.
        columns: their names, likewise; with a colon behind those of numbers.
        rows: without their first and last stroke.
    """
    names = [name.strip() for name in columns.split("|")]
    below = "|".join("---:" if name.endswith(":") else "---" for name in names)
    head = " | ".join(name.removesuffix(":") for name in names)
    return "\n".join([said, "", f"| {head} |", f"|{below}|", *(f"| {row} |" for row in rows)]) + "\n"


def versions_of(record: dict[str, Any]) -> str:
    """Versions of torch and of transformers."""
    return ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "transformers"))
