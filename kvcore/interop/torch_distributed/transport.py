"""Pulls over torch.distributed point to point: the importer asks, the exporter's ``serve`` answers.

A question is seven integers (verb, place, generation, first page, count, the exporter's name as two), an answer two
(status, bytes) and then the bytes. Tensors are bytes and integers only, on the host for gloo, on the device for NCCL.
"""

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from kvcore.errors import TransferError
from kvcore.portable.exporter import REASONS, Exports, Handle
from kvcore.portable.manifest import LARGEST_MANIFEST
from kvcore.portable.pages import Array

VERBS = ("manifest", "fetch", "finish", "goodbye")
"""By number. Any other is answered as an export that is not known."""

FINE = 0
SPIN_SECONDS, SOON_SECONDS, NAP_SECONDS = 0.005, 0.05, 0.0001
"""How long a device is asked without letting others run, how long without a pause, and the pauses afterwards."""


class PeerTransport:
    """The importer's side: pulls from the rank ``peer`` of a group, whose process is in ``serve``."""

    def __init__(self, peer: int, group: Any = None, device: str | torch.device = "cpu") -> None:
        self._peer = peer
        self._group = group
        self._device = device
        self._stream: Any = None
        self._memory: int | None = None

    def manifest(self, handle: Handle, *, timeout: float) -> bytes:
        """Asked for and received."""
        self._memory = None
        size = self._ask("manifest", handle, 0, 0, timeout)
        if not 0 <= size <= LARGEST_MANIFEST:
            raise _damaged(f"a manifest of {size} bytes", f"0 to {LARGEST_MANIFEST} bytes")
        data = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._receive(data, timeout)
        return data.cpu().numpy().tobytes()

    def fetch(self, handle: Handle, first: int, into: Array, *, timeout: float) -> None:
        """Straight into a tensor on the transport's kind of device, through a copy otherwise."""
        self.begin(handle, first, into, timeout=timeout)()

    def begin(self, handle: Handle, first: int, into: Array, *, timeout: float) -> Callable[[], None]:
        """Ask, and let the pages come; what is returned waits for them."""
        wire, own = torch.device(self._device).type, isinstance(into, np.ndarray)
        straight = wire == ("cpu" if own else into.device.type)
        with self._aside(into):
            size = self._ask("fetch", handle, first, len(into), timeout)
            if size != into.nbytes:
                raise _damaged(f"{size} bytes", f"{into.nbytes} bytes of pages")
            data: Any = torch.empty(0 if straight else into.shape, dtype=torch.uint8, device=self._device)
            if straight:
                data = torch.from_numpy(into) if own else into
            wait = _begin(dist.irecv, data, self._peer, self._group, timeout)

        def here() -> None:
            with self._aside(into):
                wait()
            if not straight and own:
                into[:] = data.cpu().numpy()
            elif not straight:
                into.copy_(data)

        return here

    def _aside(self, into: Array) -> Any:
        """A stream of its own on a GPU, so that these pages come while those before them are verified."""
        if isinstance(into, np.ndarray) or not into.is_cuda or torch.device(self._device).type != "cuda":
            return contextlib.nullcontext()
        memory = into.untyped_storage().data_ptr()
        if memory != self._memory:
            # Whoever made the memory may still be filling it.
            torch.cuda.current_stream(into.device).synchronize()
            self._memory = memory
        if self._stream is None:
            self._stream = torch.cuda.Stream(into.device)
        return torch.cuda.stream(self._stream)

    def finish(self, handle: Handle, *, timeout: float) -> None:
        """Told, and answered."""
        self._ask("finish", handle, 0, 0, timeout)

    def goodbye(self) -> None:
        """End the exporter's ``serve``."""
        question = torch.tensor([VERBS.index("goodbye"), *[0] * 6], dtype=torch.int64, device=self._device)
        _send(question, self._peer, self._group, 10.0)

    def _ask(self, verb: str, handle: Handle, first: int, count: int, timeout: float) -> int:
        name = np.frombuffer(bytes.fromhex(handle.exporter), np.int64).tolist()
        question = [VERBS.index(verb), handle.number, handle.generation, first, count, *name]
        asked = torch.tensor(question, dtype=torch.int64, device=self._device)
        answer = torch.empty(2, dtype=torch.int64, device=self._device)
        # The answer is waited for already when it is sent.
        waits = [
            _begin(start, data, self._peer, self._group, timeout)
            for start, data in ((dist.isend, asked), (dist.irecv, answer))
        ]
        for wait in waits:
            wait()
        status, size = answer.tolist()
        if not FINE <= status <= len(REASONS):
            raise _damaged(f"status {status}", f"{FINE} to {len(REASONS)}")
        if status != FINE:
            raise TransferError(
                reason=REASONS[status - 1],
                got=f"{verb} of export {handle.number}, generation {handle.generation}",
                where="pull",
                allowed="a live export of this peer",
                hint="Export the request again.",
            )
        return size

    def _receive(self, data: torch.Tensor, timeout: float) -> None:
        _receive(data, self._peer, self._group, timeout)


def serve(
    exporter: Exports,
    peer: int,
    group: Any = None,
    device: str | torch.device = "cpu",
    *,
    seconds: float = 3600.0,
    idle_seconds: float = 10.0,
) -> int:
    """The exporter's side: answer one peer until it says goodbye; returns how many questions it asked.

    Args:
        exporter: what is exported.
        peer: rank of the importer.
        group: of both.
        device: of the tensors on the way.
        seconds: of the whole service.
        idle_seconds: how long to wait for a question, and for each piece of an answer to be taken.

    Raises:
        TransferError: ``peer_lost`` or ``timeout``: the peer went away. Its exports stay until their leases end.
    """
    end, served = time.monotonic() + seconds, 0
    question = torch.empty(7, dtype=torch.int64, device=device)
    while time.monotonic() < end:
        _receive(question, peer, group, idle_seconds)
        verb, number, generation, first, count, *name = question.tolist()
        # A peer may send any numbers; one that is no verb's must not be taken for that of another.
        asked = VERBS[verb] if 0 <= verb < len(VERBS) else ""
        if asked == "goodbye":
            return served
        reference = np.array(name, np.int64).tobytes().hex(), number, generation
        answer, data = FINE, None
        try:
            if asked == "manifest":
                data = torch.frombuffer(bytearray(exporter.manifest(*reference)), dtype=torch.uint8).to(device)
            elif asked == "fetch":
                pages = exporter.pages(*reference, first, count)
                data = torch.from_numpy(pages).to(device) if isinstance(pages, np.ndarray) else pages.to(device)
            elif asked == "finish":
                exporter.finish(*reference)
            else:
                answer = 1 + REASONS.index("unknown")
        except TransferError as error:
            answer = 1 + REASONS.index(error.reason)
        head = torch.tensor([answer, 0 if data is None else data.numel()], dtype=torch.int64, device=device)
        waits = [_begin(dist.isend, part, peer, group, idle_seconds) for part in (head, data) if part is not None]
        for wait in waits:
            wait()
        served += 1
    return served


def _damaged(got: str, allowed: str) -> TransferError:
    return TransferError(reason="damaged", got=got, where="pull", allowed=allowed)


def _send(data: torch.Tensor, peer: int, group: Any, timeout: float) -> None:
    _wait(dist.isend, data, peer, group, timeout)


def _receive(data: torch.Tensor, peer: int, group: Any, timeout: float) -> None:
    _wait(dist.irecv, data, peer, group, timeout)


def _wait(start: Any, data: torch.Tensor, peer: int, group: Any, timeout: float) -> None:
    """Run one transfer to its end, or say who failed."""
    _begin(start, data, peer, group, timeout)()


def _begin(start: Any, data: torch.Tensor, peer: int, group: Any, timeout: float) -> Callable[[], None]:
    """Begin one transfer; what is returned waits for its end, or says who failed."""
    if not data.numel():
        return lambda: None
    began = time.monotonic()

    def failure(error: RuntimeError) -> TransferError:
        # What torch.distributed raises for a lost peer and for a timeout differs by backend and release.
        late = time.monotonic() - began >= timeout * 0.9
        return TransferError(
            reason="timeout" if late else "peer_lost",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            where=f"rank {peer}",
            allowed="a peer that answers in time",
        )

    # Held until the end: the transfer may have begun from a copy.
    moved = data.contiguous() if start is dist.isend else data
    try:
        work = start(moved, peer, group=group)
    except RuntimeError as error:
        raise failure(error) from error

    def wait() -> None:
        try:
            if moved.is_cuda:
                _wait_for_device(work, moved.device, began + timeout)
            else:
                work.wait(timedelta(seconds=max(began + timeout - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise failure(error) from error

    return wait


def _wait_for_device(work: Any, device: torch.device, end: float) -> None:
    """Until the bytes are there.

    ``work.wait`` with a timeout looks every millisecond at best: longer than a question takes, or a hundred pages.
    """
    start = time.monotonic()
    while not work.is_completed():
        now = time.monotonic()
        if now > end:
            raise RuntimeError("the transfer did not end in time")
        # On a busy host whoever yields is asked again milliseconds later.
        if now > start + SPIN_SECONDS:
            time.sleep(0 if now < start + SOON_SECONDS else NAP_SECONDS)
    work.wait()
    torch.cuda.current_stream(device).synchronize()
