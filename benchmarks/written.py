"""What benchmarks write: a record as JSON, beside it what is read of it, a table or a picture, under the same name."""

import json
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
