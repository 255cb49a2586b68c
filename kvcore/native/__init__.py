"""Inner loops in C, of the digest and of attention to coded rows: compiled by the machine's own compiler.

In the background, once a process digests much; before the first attention that is worth it. Nothing is asked of an
installation: without a compiler, or with ``KVCORE_NATIVE=0``, NumPy and torch do the same at a tenth of the speed. A
library lies in a folder of its own that only this user can write, and is gone from there as soon as it is loaded.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "KVCORE_NATIVE"

_ADDRESS, _NUMBER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

FUNCTIONS: dict[str, list[Any]] = {
    "lanes": [_ADDRESS, _NUMBER],
    "attend": [_ADDRESS, _NUMBER, _NUMBER, _REAL, *[_ADDRESS] * 4, _NUMBER, _NUMBER, *[_ADDRESS] * 3],
}
"""Source -> what its function, ``kvcore_`` and that name, is given."""

OF_THE_MACHINE = {"attend": "-march=native"}
"""Source -> what has the compiler use all vectors that the machine has; left out where that fails or errs."""

WORTH = 1 << 28
"""Bytes that a process digests before it compiles: as long as NumPy takes for them, a compiler takes."""

SECONDS = 60.0
"""For a compiler."""

Lanes = Callable[..., None]
"""A function of ``FUNCTIONS``; ``kvcore_lanes`` takes the address of some ``kvcore.digest.Rows``, and how many."""


class Native:
    """A function that is there as soon as it is worth it and has shown that it is right, or never.

    Args:
        right: whether a function does what it has to.
        source: of the function.
    """

    def __init__(self, right: Callable[[Lanes], bool], source: str = "lanes") -> None:
        self._right = right
        self._source = source
        self._seen = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._found: Lanes | None = None

    def __call__(self, nbytes: int) -> Lanes | None:
        """The function, where it is there already; so many bytes more were to be digested."""
        if self._found is None and self._thread is None:
            self._seen += nbytes
            if self._seen >= WORTH:
                self.begin()
        return self._found

    def begin(self) -> None:
        """Compile in the background, unless that was begun before."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._compile, name="kvcore.native", daemon=True)
                self._thread.start()

    def wait(self) -> Lanes | None:
        """The function, compiled now if it was not; None where that cannot be."""
        if self._found is not None:
            return self._found
        self.begin()
        if self._thread is not None:
            self._thread.join()
        return self._found

    def _compile(self) -> None:
        self._found = compiled(self._right, self._source)


def compiled(right: Callable[[Lanes], bool], source: str = "lanes") -> Lanes | None:
    """A function, compiled and loaded, that has shown that it is right: for the machine, else for any like it.

    None without a compiler that can, and where words have another order. One that takes too long is asked once.
    """
    compiler = _compiler()
    if os.environ.get(VARIABLE) == "0" or not compiler or sys.byteorder != "little" or os.name != "posix":
        return None
    for flags in ([OF_THE_MACHINE[source]], []) if source in OF_THE_MACHINE else ([],):
        try:
            found = _compiled(compiler, source, flags)
        except subprocess.TimeoutExpired:
            return None
        except (OSError, subprocess.SubprocessError, AttributeError):
            continue
        if right(found):
            return found
    return None


def _compiler() -> list[str]:
    """What ``CC`` names, with its options, and what is before it (``ccache gcc``); nothing where there is none."""
    try:
        words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError:
        return []
    return words if shutil.which(words[0]) else []


def _compiled(compiler: list[str], source: str, flags: list[str]) -> Lanes:
    with tempfile.TemporaryDirectory(prefix="kvcore") as folder:
        library, code = Path(folder) / f"{source}.so", Path(__file__).with_name(f"{source}.c")
        line = [*compiler, "-O3", *flags, "-shared", "-fPIC", "-o", str(library), str(code)]
        subprocess.run(line, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=SECONDS)
        function: Any = getattr(ctypes.CDLL(str(library)), f"kvcore_{source}")
    function.restype, function.argtypes = None, FUNCTIONS[source]
    return function
