"""How pages come from an exporter, as one small Protocol: the file, torch.distributed and NIXL carriers are alike."""

from typing import Protocol

import numpy as np

from kvcore.handoff.desk import Desk, Handle
from kvcore.handoff.pages import Array


class Carrier(Protocol):
    """One way to an exporter. Every verb ends within ``timeout`` seconds.

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


def reference(handle: Handle) -> tuple[str, int, int]:
    """What names an export to its desk."""
    return handle.exporter, handle.number, handle.generation
