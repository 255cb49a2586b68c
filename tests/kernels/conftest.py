"""What kernels take of GPUs that are not there, as recorded and as found."""

import json
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def record(request):
    """The record that compiled kernels are held against; a new one is written in the end if that is asked for."""
    import triton

    from tests.support import ahead_of_time

    known = json.loads(ahead_of_time.RECORD.read_text())
    rows = {(row["kernel"], row["arch"], row["case"]): row for row in known["rows"]}
    path = os.environ.get(ahead_of_time.WRITES)
    every = path or request.config.getoption("every")
    held = ahead_of_time.Record(known["triton"], rows, [], frozenset(rows) if every else ahead_of_time.sample(rows))
    yield held
    if path:
        rows = sorted(held.found, key=lambda row: tuple(map(str, row.values())))
        lines = ",\n".join(json.dumps(row) for row in rows)
        head = f'"kind": "compiled ahead of time", "triton": "{triton.__version__}"'
        Path(path).write_text(f'{{{head}, "rows": [\n{lines}\n]}}\n')
