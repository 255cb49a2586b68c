"""How pages come from an exporter, as one small Protocol: the file, torch.distributed and NIXL carriers are alike."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from kvcore.portable.exporter import Desk, Handle
from kvcore.portable.pages import Array


class Carrier(Protocol):
    """One way to an exporter. Every verb ends within ``timeout`` seconds.

    A carrier may have ``begin`` too, with the arguments of ``fetch``: it returns while pages are on the way, and the
    function that it returns waits for them.

    Raises:
        TransferError: what the exporter refuses (``unknown``, ``out_of_range``, ``consumed``, ``stale``, ``expired``),
            or ``peer_lost`` or ``timeout``. Nothing that has come so far is valid then.
    """

    def manifest(self, handle: Handle, *, timeout: float) -> bytes:
        """The manifest's bytes."""
        ...

    def fetch(self, handle: Handle, first: int, into: Array, *, timeout: float) -> None:
        """Fill ``into`` [count, page_bytes] with pages from ``first`` on."""
        ...

    def finish(self, handle: Handle, *, timeout: float) -> None:
        """Tell the exporter that this reader has the export."""
        ...


class Direct:
    """From a desk in the same process: what the others are compared with."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def manifest(self, handle: Handle, *, timeout: float) -> bytes:
        """From the desk itself."""
        del timeout
        return self._desk.manifest(*reference(handle))

    def fetch(self, handle: Handle, first: int, into: Array, *, timeout: float) -> None:
        """Copied."""
        del timeout
        pages = self._desk.pages(*reference(handle), first, len(into))
        into[:] = pages if isinstance(pages, type(into)) else np.asarray(pages)

    def finish(self, handle: Handle, *, timeout: float) -> None:
        """Told at once."""
        del timeout
        self._desk.finish(*reference(handle))


def begin(carrier: Carrier, handle: Handle, first: int, into: Array, *, timeout: float) -> Callable[[], None]:
    """Begin a fetch, or do all of it where the carrier cannot; what is returned waits for the pages."""
    start: Any = getattr(carrier, "begin", None)
    if start is not None:
        return start(handle, first, into, timeout=timeout)
    carrier.fetch(handle, first, into, timeout=timeout)
    return lambda: None


def reference(handle: Handle) -> tuple[str, int, int]:
    """What names an export to its desk."""
    return handle.exporter, handle.number, handle.generation
