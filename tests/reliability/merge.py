"""Shards of one figure, added up: ``python -m tests.reliability.merge OUT RECORD...``.

Refuses shards of different figures or options, and seeds that were told twice.
"""

import argparse
import json
import sys
from pathlib import Path

from tests.reliability.command import merged, write


def main(arguments: list[str] | None = None) -> int:
    """Merge; the exit code is 1 if a shard has a divergence, 2 if the shards do not fit together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("records", type=Path, nargs="+")
    given = parser.parse_args(arguments)
    try:
        record = merged([json.loads(path.read_text(encoding="utf-8")) for path in given.records])
    except ValueError as error:
        print(f"not merged: {error}", file=sys.stderr)
        return 2
    write(record, given.out)
    done = record["counts"][record["counted"]]
    print(f"{record['figure']}: {done} {record['counted']}, {record['divergences']} divergences, {record['form']}")
    return 1 if record["divergences"] else 0


if __name__ == "__main__":
    sys.exit(main())
