"""Bytes that are given out as they were filled: an object of Python's that nobody has written zeros into first."""

import ctypes
import sys
from collections.abc import Callable

import numpy as np

LARGE = 1 << 25
"""Bytes from which on a request for memory is a mapping of its own, whose pages come as they are first written to."""

PAGE = 1 << 12
HUGE_PAGES = 14
"""``MADV_HUGEPAGE``."""


def bytes_of_any_content(size: int) -> bytes:
    """An object of that many bytes, for its only owner to fill before anybody sees it.

    Raises:
        MemoryError: there is no memory for it.
    """
    if sys.implementation.name != "cpython" or size < PAGE:
        return bytes(size)
    made: bytes = _make()(None, size)
    if size >= LARGE and sys.platform == "linux":
        # Thousands of small pages take longer to come than their bytes to be copied; a kernel without others declines.
        first = np.frombuffer(made, np.uint8).ctypes.data
        begin, end = first + -first % PAGE, (first + size) // PAGE * PAGE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), HUGE_PAGES)
    return made


def _make() -> Callable[[None, int], bytes]:
    """``PyBytes_FromStringAndSize``."""
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)
    return prototype(("PyBytes_FromStringAndSize", ctypes.pythonapi))
