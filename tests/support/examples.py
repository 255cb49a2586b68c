"""Running the examples as a reader does."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(script: str) -> str:
    """What an example prints, with its options behind its name; a warning of its is an error."""
    name, *options = script.split()
    line = [sys.executable, "-W", "error", EXAMPLES / name, *options]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
