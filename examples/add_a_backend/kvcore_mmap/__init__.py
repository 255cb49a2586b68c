"""A kvcore backend whose pools are memory-mapped files: caches larger than memory, without torch or JAX.

This module is what kvcore imports to learn about the backend, so it imports no array library.
"""

from collections.abc import Iterator

import kvcore


def _probe() -> str | None:
    """Why the backend can't run here, in one sentence; None if it can."""
    import os
    import tempfile

    folder = os.environ.get("KVCORE_MMAP_DIR") or tempfile.gettempdir()
    return None if os.access(folder, os.W_OK) else f"{folder} is not writable; set KVCORE_MMAP_DIR"


def _load():
    from kvcore_mmap.backend import MmapBackend

    return MmapBackend()


@kvcore.hookimpl
def kvcore_backends() -> Iterator[kvcore.BackendInfo]:
    """The one record of this package."""
    yield kvcore.BackendInfo(
        name="mmap",
        summary="NumPy on memory-mapped files; caches larger than memory",
        requires=("numpy", "ml_dtypes"),
        devices=("cpu",),
        capabilities=frozenset(
            {"window", "tail", "entries", "index_tail", "index_keys", "kv", "attend", "select", "packed", "planar"}
        ),
        priority=None,
        install="pip install kvcore-mmap",
        probe=_probe,
        load=_load,
    )
