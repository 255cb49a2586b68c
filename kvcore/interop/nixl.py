"""Pulls through NIXL (``pip install "kvcore[nixl]"``): pages are read one-sided, straight from the exporter's memory.

Questions and answers are NIXL notifications: msgpack of integers, text and bytes, never pickle. The exporter checks
every reference before it gives out addresses; what is read although the export has gone meanwhile does not match the
digests of the handle. Pages of an export lie in one registered region, so a chunk is one descriptor for every page.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvcore.errors import BackendError, TransferError
from kvcore.foreign import UNREADABLE, shortened
from kvcore.portable.exporter import REASONS, Exports, Handle, check_range
from kvcore.portable.manifest import LARGEST_MANIFEST
from kvcore.portable.pages import Array

if TYPE_CHECKING:
    from kvcore.portable.manifest import Staged

PIECE_BYTES = 1 << 14
"""Of a manifest in one notification."""

POLL_SECONDS = 0.0005


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """From an importer: who asks, and what; ``first`` and ``count`` are bytes of the manifest, or pages."""

    agent: str
    metadata: bytes
    sequence: int
    verb: str
    exporter: str
    number: int
    generation: int
    first: int
    count: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """From the exporter: a reason if it refuses, else a piece of the manifest, or where the pages lie."""

    sequence: int
    reason: str = ""
    data: bytes = b""
    metadata: bytes = b""
    address: int = 0
    stride: int = 0
    memory: str = "DRAM"
    device: int = 0


def agent(name: str) -> Any:
    """A NIXL agent on UCX.

    Raises:
        BackendError: NIXL is not installed, or not for this machine.
    """
    try:
        from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]
    except ImportError as error:
        raise BackendError(
            got=str(error), where="nixl", allowed="NIXL", hint='pip install "kvcore[nixl]" brings it.'
        ) from error
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


class NixlServer:
    """The side of an exporter: gives out memory of its exports. ``poll`` answers what was asked meanwhile."""

    def __init__(self, exporter: Exports, nixl: Any) -> None:
        self._exporter = exporter
        self._nixl = nixl
        # Place -> the export whose pages are registered, and the registration.
        self._given: dict[int, tuple[Staged, Any]] = {}
        self._known: set[str] = set()

    @property
    def metadata(self) -> bytes:
        """What an importer needs of this agent to reach it."""
        return self._nixl.get_agent_metadata()

    def poll(self) -> int:
        """Answer all questions that are there; returns how many."""
        answered = 0
        for messages in self._nixl.get_new_notifs().values():
            for message in messages:
                question = _decoded(message, Question)
                if question is None:
                    continue
                # NIXL's own errors have no common base but Exception; who cannot be reached gets no answer, and the
                # others do.
                with contextlib.suppress(Exception):
                    if question.agent not in self._known:
                        self._nixl.add_remote_agent(question.metadata)
                        self._known.add(question.agent)
                    self._nixl.send_notif(question.agent, msgspec.msgpack.encode(self._answer(question)))
                    answered += 1
        return answered

    def serve(self, seconds: float) -> int:
        """Poll for a while; returns how many questions were answered."""
        end, answered = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            answered += self.poll()
            time.sleep(POLL_SECONDS)
        return answered

    def _answer(self, question: Question) -> Answer:
        reference = question.exporter, question.number, question.generation
        try:
            if question.verb == "manifest":
                manifest = self._exporter.manifest(*reference)
                check_range(question.first, 0, len(manifest))
                piece = manifest[question.first : question.first + question.count]
                return Answer(sequence=question.sequence, data=piece, stride=len(manifest))
            if question.verb == "finish":
                self._exporter.finish(*reference)
                return Answer(sequence=question.sequence)
            if question.verb != "pages":
                return Answer(sequence=question.sequence, reason="unknown")
            pages = self._exporter.pages(*reference, question.first, question.count)
            self._register(question.number, reference)
            address, memory, device = _address(pages)
            return Answer(
                sequence=question.sequence,
                metadata=self.metadata,
                address=address,
                stride=int(pages.shape[1]),
                memory=memory,
                device=device,
            )
        except TransferError as error:
            return Answer(sequence=question.sequence, reason=error.reason)

    def _register(self, number: int, reference: tuple[str, int, int]) -> None:
        """Register the pages of the export that a place holds now, once, and nothing else of that place."""
        staged = self._exporter.staged(*reference)
        if number in self._given:
            before, registration = self._given[number]
            if before is staged:
                return
            self._nixl.deregister_memory(registration)
        address, memory, device = _address(staged.pages)
        self._given[number] = staged, self._nixl.register_memory([(address, staged.pages.nbytes, device, "")], memory)


class NixlTransport:
    """The importer's side: asks a ``NixlServer`` in another process, whose metadata it was given."""

    def __init__(self, nixl: Any, metadata: bytes) -> None:
        self._nixl = nixl
        self._peer: str = _text(nixl.add_remote_agent(metadata))
        self._sequence = 0

    def manifest(self, handle: Handle, *, timeout: float) -> bytes:
        """In pieces, through notifications."""
        end, data, size = time.monotonic() + timeout, b"", 1
        while len(data) < size:
            answer = self._ask("manifest", handle, len(data), PIECE_BYTES, end)
            size = answer.stride
            if not 0 <= size <= LARGEST_MANIFEST or len(data) + len(answer.data) > size:
                raise _error("damaged", f"{len(data) + len(answer.data)} of {size} bytes of a manifest")
            if not answer.data:
                break
            data += answer.data
        return data

    def fetch(self, handle: Handle, first: int, into: Array, *, timeout: float) -> None:
        """Read from the exporter's memory."""
        end = time.monotonic() + timeout
        answer = self._ask("pages", handle, first, len(into), end)
        # By this stride the own memory is written too.
        if answer.stride != into.shape[1]:
            raise _error("damaged", f"pages of {answer.stride} bytes")
        if not len(into):
            return
        try:
            self._nixl.add_remote_agent(answer.metadata)
        except Exception as error:
            raise _error("peer_lost", f"{type(error).__name__}: {error}") from error
        address, memory, device = _address(into)
        registration = self._nixl.register_memory([(address, into.nbytes, device, "")], memory)
        transfer = None
        try:
            here = [(address + page * answer.stride, answer.stride, device) for page in range(len(into))]
            there = [(answer.address + page * answer.stride, answer.stride, answer.device) for page in range(len(into))]
            transfer = self._nixl.initialize_xfer(
                "READ",
                self._nixl.get_xfer_descs(here, memory),
                self._nixl.get_xfer_descs(there, answer.memory),
                self._peer,
            )
            state = self._nixl.transfer(transfer)
            for _ in _until(end):
                if state != "PROC":
                    break
                state = self._nixl.check_xfer_state(transfer)
            if state != "DONE":
                raise _error("peer_lost", f"a transfer in state {state}")
        except TransferError:
            raise
        except Exception as error:
            # NIXL's own errors have no common base but Exception.
            raise _error("peer_lost", f"{type(error).__name__}: {error}") from error
        finally:
            if transfer is not None:
                self._nixl.release_xfer_handle(transfer)
            self._nixl.deregister_memory(registration)

    def finish(self, handle: Handle, *, timeout: float) -> None:
        """Told, and answered."""
        self._ask("finish", handle, 0, 0, time.monotonic() + timeout)

    def _ask(self, verb: str, handle: Handle, first: int, count: int, end: float) -> Answer:
        self._sequence += 1
        question = Question(
            agent=self._nixl.name,
            metadata=self._nixl.get_agent_metadata(),
            sequence=self._sequence,
            verb=verb,
            exporter=handle.exporter,
            number=handle.number,
            generation=handle.generation,
            first=first,
            count=count,
        )
        try:
            self._nixl.send_notif(self._peer, msgspec.msgpack.encode(question))
            for _ in _until(end):
                for messages in self._nixl.get_new_notifs().values():
                    for message in messages:
                        answer = _decoded(message, Answer)
                        # An answer to an earlier question that was given up is of no use any more.
                        if answer is not None and answer.sequence == self._sequence:
                            if answer.reason:
                                told = answer.reason if answer.reason in REASONS else "damaged"
                                raise _error(told, f"{verb} of export {handle.number}: {shortened(answer.reason)}")
                            return answer
        except TransferError:
            raise
        except Exception as error:
            raise _error("peer_lost", f"{type(error).__name__}: {error}") from error
        raise _error("timeout", f"no answer to {verb}")


def _until(end: float) -> Iterator[None]:
    """Turns until ``end``, a moment apart.

    Raises:
        TransferError: ``timeout``: the time is over.
    """
    while time.monotonic() < end:
        yield
        time.sleep(POLL_SECONDS)
    raise _error("timeout", "no end in time")


def _decoded(message: Any, kind: Any) -> Any:
    """A notification of ours, or None."""
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except UNREADABLE:
        return None


def _error(reason: str, got: str) -> TransferError:
    return TransferError(reason=reason, got=got, where="nixl", allowed="a live export of a peer that answers")


def _address(array: Array) -> tuple[int, str, int]:
    """(address, memory, device) of pages."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0], "DRAM", 0
    cuda = array.device.type == "cuda"
    return array.data_ptr(), "VRAM" if cuda else "DRAM", (array.device.index or 0) if cuda else 0


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else name


NixlCarrier = NixlTransport
"""The name it had first."""
