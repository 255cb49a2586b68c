"""Where a run took place: versions, platform, commit. Nothing here may fail, and nothing imports a framework."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import kvcore

DISTRIBUTIONS = (
    "numpy",
    "ml_dtypes",
    "msgspec",
    "pluggy",
    "torch",
    "triton",
    "jax",
    "jaxlib",
    "transformers",
    "rich",
    "jinja2",
    "pytest",
)
"""What a reader of a report or of a bug report wants to know the version of."""

GIT_SECONDS = 5


def versions() -> dict[str, str]:
    """Distribution -> version, of those that are installed."""
    found: dict[str, str] = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe() -> dict[str, Any]:
    """The fields of a ``Run`` that do not depend on the backend."""
    return {
        "kvcore": kvcore.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "versions": versions(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def commit() -> str | None:
    """The checkout's commit, with ``+`` if tracked files were changed; None where kvcore is not run from a checkout.

    Where files were copied to a machine without their history, the variable ``KVCORE_COMMIT`` says what they are.
    """
    said = os.environ.get("KVCORE_COMMIT")
    if said:
        return said
    root = Path(kvcore.__file__).resolve().parent.parent
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    number = _ask([git, "-C", str(root), "rev-parse", "HEAD"])
    if not number:
        return None
    return number + ("+" if _ask([git, "-C", str(root), "status", "--porcelain", "--untracked-files=no"]) else "")


def command(arguments: Sequence[str] | None) -> str:
    """What was typed, without the path of the program."""
    return " ".join(["kvcore", *typed(sys.argv[1:] if arguments is None else arguments)])


def typed(words: Sequence[str]) -> list[str]:
    """Words of a command line; of an absolute path only the name, which is all that it says elsewhere.

    The path may be a word or the value of an option: ``--out=PATH``.
    """
    found: list[str] = []
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        found.append(f"{option}{equals}{Path(value).name if value.startswith(os.sep) else value}")
    return found


def of_script(device: str = "") -> dict[str, Any]:
    """Where a script's record comes from: what was typed, the device (the processor if none is named), versions."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = sys.argv[0] if module is None else f"-m {module.name}"
    return {
        "command": f"python {' '.join(typed([program, *sys.argv[1:]]))}",
        "device": device or processor(),
        **describe(),
    }


def processor() -> str:
    """The processor's name, where the system tells it, and how many threads it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} threads"


def _ask(line: list[str]) -> str | None:
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
