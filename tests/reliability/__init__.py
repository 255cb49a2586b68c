"""What can go wrong over time, provoked on purpose and counted: figures R1 to R11, each a command.

``python -m benchmarks.reliability.<name>`` from the repository's root runs the short form, ``--full`` the full one, and
``--out FILE`` writes the record. A failure prints its seed and a shrunk trace. The requests told here are those of the
tests, so the folder of the tests is put on the path.
"""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[2] / "tests")
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)
