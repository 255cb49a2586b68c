"""Pages in the host's memory and pools on a GPU: rows go through buffers of the device, chunk by chunk.

One is copied while kernels work on the other. Memory that a GPU can read by itself (pinned) is copied straight; any
other goes through pinned buffers that torch keeps. What comes in is digested where it has arrived, so that what was
verified is what is stored; what goes out is digested where it waits to go, and the digests are here before all of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

CHUNK, SMALLER_CHUNK, CHUNKS = 64 << 20, 32 << 20, 6
"""Bytes of a buffer: enough for a link's full rate and for the host to keep ahead of it. What would be fewer than
``CHUNKS`` of them goes through smaller ones, so that the first copy begins soon, and the last one ends soon.
"""

BUFFERS = 3
"""As much is on its way to the device before anybody knows what it is."""

LAST = 8
"""Of many chunks that come in the last one is so many times smaller: nothing is copied any more while it is stored."""


class Buffers:
    """Chunks of pages on their way, in turn through ``BUFFERS`` buffers.

    Args:
        device: of the pools; on the CPU, where kernels are interpreted, everything waits for everything.
        pages: [pages, bytes] in the host's memory, written to unless they only come in.
        rows: pages of a chunk.
        incoming: they come in.
    """

    def __init__(self, device: torch.device, pages: np.ndarray[Any, Any], rows: int, *, incoming: bool) -> None:
        self.pages, self.rows, self._incoming = pages, rows, incoming
        self._starts = self._chunks()
        self._cuda = device.type == "cuda"
        shape = min(rows, len(pages)), pages.shape[1]
        self._rooms = torch.empty((min(BUFFERS, -(-len(pages) // rows)), *shape), dtype=torch.uint8, device=device)
        host = torch.from_numpy(writable(pages))
        self._host = host if not self._cuda or host.is_pinned() else None
        self._stages: list[torch.Tensor] = []
        if self._host is None:
            self._stages = [torch.empty(shape, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)]
        self._copied: list[Any] = [None] * BUFFERS
        self._used: list[Any] = [None] * BUFFERS
        self._leaving: list[tuple[int, slice]] = []
        self._lanes: list[torch.Tensor] = []
        self._known: torch.Tensor | None = None
        self._arrived: Any = None
        self._held: tuple[int, slice] | None = None
        if self._cuda:
            self._here = torch.cuda.current_stream(device)
            self._copies = torch.cuda.Stream(device)
            # The buffers may have been somebody's on this stream.
            self._copies.wait_stream(self._here)

    def of_first(self, count: int) -> "Buffers":
        """The same, of the first pages alone."""
        self.pages = self.pages[:count]
        self._starts = self._chunks()
        return self

    def _chunks(self) -> list[int]:
        """First pages of all chunks. The first ``BUFFERS`` are the same however many pages follow."""
        end = len(self.pages)
        starts = [*range(0, end, self.rows)]
        last = max(1, self.rows // LAST)
        if self._incoming and len(starts) > BUFFERS and end - starts[-1] > last:
            starts.append(end - last)
        return starts

    def begin(self) -> None:
        """Bring the first chunks, of pages that come in; ``chunks`` brings the others, each as its buffer is free."""
        for turn in range(BUFFERS):
            self._bring_chunk(turn)

    def chunks(self, *, incoming: bool) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """(buffer, pages, its bytes on the device) of every chunk: what came in, or room to be written to."""
        for number in range(len(self._starts)):
            some, turn = self._pages_of(number), number % BUFFERS
            self._wait(self._copied[turn])
            yield turn, some, self._rooms[turn][: some.stop - some.start]
            if self._cuda:
                self._used[turn] = self._here.record_event()
            if incoming:
                self._bring_chunk(number + BUFFERS)

    def add(self, turn: int, some: slice, first: int) -> None:
        """Copy pages of a chunk from page ``first`` on to its buffer: those of which not all is written there."""
        if first < some.stop:
            self._bring(turn, some, max(some.start, first))
            self._wait(self._copied[turn])

    def _pages_of(self, number: int) -> slice:
        first, *after = self._starts[number : number + 2] or [len(self.pages)]
        return slice(first, after[0] if after else len(self.pages))

    def _bring_chunk(self, number: int) -> None:
        some = self._pages_of(number)
        if some.start < some.stop:
            self._bring(number % BUFFERS, some, some.start)

    def _bring(self, turn: int, some: slice, first: int) -> None:
        """Copy a chunk's pages from page ``first`` on to its buffer, behind what uses that."""
        room, some = self._rooms[turn][first - some.start : some.stop - some.start], slice(first, some.stop)
        if not self._cuda:
            room.copy_(torch.from_numpy(writable(self.pages[some])))
            return
        if self._host is None:
            stage = self._stages[turn][: len(room)]
            self._land(turn)
            if self._copied[turn] is not None:
                self._copied[turn].synchronize()
            np.copyto(stage.numpy(), self.pages[some])
        else:
            stage = self._host[some]
        with self._on_copies(turn):
            room.copy_(stage, non_blocking=True)

    def send(self, turn: int, some: slice) -> None:
        """Copy a chunk from its buffer to the pages, where it is when ``wait`` has returned."""
        room = self._rooms[turn][: some.stop - some.start]
        if not self._cuda:
            self.pages[some] = room.numpy()
            return
        self._land(turn)
        self._used[turn] = self._here.record_event()
        stage = self._stages[turn][: len(room)] if self._host is None else self._host[some]
        with self._on_copies(turn):
            stage.copy_(room, non_blocking=True)
        if self._host is None:
            self._leaving.append((turn, some))

    def keep(self, lanes: torch.Tensor) -> None:
        """Keep the lanes [pages, 2] int32 of the next chunk."""
        self._lanes.append(lanes)

    def is_late(self, some: slice) -> bool:
        """Whether a chunk is the last of many: long enough on its way for the host to work with lanes meanwhile."""
        return some.stop == len(self.pages) and some.start >= BUFFERS * self.rows

    def hold(self, turn: int, some: slice) -> None:
        """Send a chunk later: with ``go_on``, behind lanes that were asked for."""
        self._held = turn, some

    def ask(self) -> None:
        """Have the lanes that were kept copied to the host, all at once."""
        if self._lanes and self._known is None:
            whole = torch.cat(self._lanes)
            self._known = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=self._cuda)
            self._known.copy_(whole, non_blocking=True)
            self._arrived = self._here.record_event() if self._cuda else None

    def go_on(self) -> None:
        """Send what was held."""
        if self._held is not None:
            held, self._held = self._held, None
            self.send(*held)

    def lanes(self) -> np.ndarray[Any, Any] | None:
        """The lanes that were asked for, [pages, 2] uint32, as soon as those are here; None where none were kept."""
        if self._known is None:
            return None
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._known.numpy().view(np.uint32)

    def wait(self) -> None:
        """Returns when nothing reads or writes the pages any more."""
        self.go_on()
        while self._leaving:
            self._land(self._leaving[0][0])
        for event in self._copied:
            if event is not None:
                event.synchronize()
        if self._cuda:
            self._rooms.record_stream(self._copies)

    def _land(self, turn: int) -> None:
        """Put what has arrived in a stage where it belongs."""
        while any(waiting == turn for waiting, _ in self._leaving):
            first, some = self._leaving.pop(0)
            self._copied[first].synchronize()
            self.pages[some] = self._stages[first][: some.stop - some.start].numpy()

    def _wait(self, event: Any) -> None:
        if event is not None:
            self._here.wait_event(event)

    @contextmanager
    def _on_copies(self, turn: int) -> Iterator[None]:
        """On the stream of copies, behind what uses the buffer."""
        if self._used[turn] is not None:
            self._copies.wait_event(self._used[turn])
        with torch.cuda.stream(self._copies):
            yield
        self._copied[turn] = self._copies.record_event()


def writable(pages: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same bytes, for torch, which has no arrays that are only read; nobody writes to those that come in."""
    return pages if pages.flags.writeable else np.asarray(_Memory(pages))


class _Memory:
    """Bytes of an array, which it keeps alive."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
