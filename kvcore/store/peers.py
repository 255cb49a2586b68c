"""Other processes' stores behind the tiers of one's own: asked for what no tier has, and never waited for twice.

A peer is no tier: nothing is put there, nothing of it is counted or goes. Whatever it does not answer, or answers
wrongly, is a page that is not there, like what a disk refuses; ``Peer.error`` says what it was.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from kvcore.counts import check_count
from kvcore.errors import ShapeError, TransferError
from kvcore.foreign import UNREADABLE, shortened
from kvcore.ops.arguments import check_seconds
from kvcore.portable.exporter import REASONS, Handle
from kvcore.portable.importer import decode_handle
from kvcore.portable.manifest import root_of
from kvcore.portable.transport import Transport
from kvcore.store.questions import MOST_BYTES, MOST_KEYS, NO_ROOM, Answer, Listing, Question

Ask = Callable[[bytes, float], bytes]
"""(question, seconds that it may take) -> the answer of the other process's ``BlockExporter.answer``."""

SILENT = ("peer_lost", "timeout")
"""Why a peer is left alone for a while."""


class Peer:
    """Another process's store, whose ``BlockExporter`` answers.

    Args:
        ask: the channel of questions: a call that raises ``OSError`` (``TimeoutError``, ``ConnectionError``) or
            ``EOFError`` where nobody answers in time. One question at a time is asked; the answer to one that was given
            up is to be dropped, and is refused where it comes for a later one.
        transport: the way of pages, to that exporter.
        timeout: seconds until an answer, or the pages of one export, have to be here.
        pause: seconds for which one that was silent is not asked again: whoever looks for pages waits once.
        most_bytes: of one export; a larger one is refused.

    Attributes:
        error: why the last that failed brought nothing; None if none did.
        failures: how many did.

    Raises:
        ShapeError: a number that is none.
    """

    def __init__(
        self,
        ask: Ask,
        transport: Transport,
        *,
        timeout: float = 2.0,
        pause: float = 10.0,
        most_bytes: int = 2 * MOST_BYTES,
    ) -> None:
        self._ask = ask
        self._transport = transport
        self._timeout = check_seconds(timeout, "Peer: timeout")
        self._pause = check_seconds(pause, "Peer: pause")
        self._most_bytes = check_count(ShapeError, "Peer: most_bytes", most_bytes, 1)
        self.error: TransferError | None = None
        self.failures = 0
        self._number = 0
        self._again = 0.0
        self._lock = threading.Lock()

    def held(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys whose pages are there, as far as it says."""
        found: set[bytes] = set()
        for first in range(0, len(keys), MOST_KEYS):
            some = keys[first : first + MOST_KEYS]
            with self._noted() as end:
                flags = self._answer("held", some, end).held if end else b""
                if end and len(flags) != len(some):
                    raise _damaged(f"{len(flags)} flags", f"one for each of {len(some)} keys")
                found |= {key for key, flag in zip(some, flags, strict=False) if flag}
        return found

    def fetch(self, keys: Sequence[bytes]) -> dict[bytes, memoryview]:
        """Pages with their heads, not verified, of the first of the keys that are there; empty: none came."""
        found: dict[bytes, memoryview] = {}
        with self._noted() as end:
            if end and keys:
                found = self._fetched(keys[:MOST_KEYS], end)
        return found

    def note(self, error: TransferError) -> None:
        """Remember why pages are not there; one that was silent is left alone for a while."""
        self.error = error
        self.failures += 1
        if error.reason in SILENT:
            self._again = time.monotonic() + self._pause

    @contextlib.contextmanager
    def _noted(self) -> Iterator[float]:
        """Alone with the peer until the moment that is given; 0.0: it is left alone. What fails is noted."""
        with self._lock:
            now = time.monotonic()
            try:
                yield now + self._timeout if now >= self._again else 0.0
            except TransferError as error:
                self.note(error)

    def _fetched(self, keys: Sequence[bytes], end: float) -> dict[bytes, memoryview]:
        answer = self._answer("export", keys, end)
        if not answer.handle:
            return {}
        handle = decode_handle(answer.handle)
        try:
            return self._pages(handle, keys, end)
        finally:
            # Here or refused: nobody comes for them again, and the exporter's lease ends by itself.
            with contextlib.suppress(TransferError):
                self._transport.finish(handle, timeout=_left(end))

    def _pages(self, handle: Handle, keys: Sequence[bytes], end: float) -> dict[bytes, memoryview]:
        if handle.pages * handle.page_bytes > self._most_bytes:
            raise _damaged(f"{handle.pages} pages of {handle.page_bytes} bytes", f"{self._most_bytes} bytes at most")
        manifest = self._transport.manifest(handle, timeout=_left(end))
        if root_of(manifest) != handle.root:
            raise _damaged("a manifest of another export", "bytes of the handle's root")
        try:
            blocks = msgspec.msgpack.decode(manifest, type=Listing).blocks
        except UNREADABLE as error:
            raise _damaged(shortened(str(error)), "a manifest of blocks") from error
        listed = [block.key for block in blocks]
        if len(set(listed)) != len(listed) or not set(listed) <= set(keys):
            raise _damaged("other keys than were asked for", "those, each once")
        counts = [-(-block.nbytes // handle.page_bytes) for block in blocks]
        if any(block.nbytes < 1 for block in blocks) or sum(counts) != handle.pages:
            raise _damaged(f"blocks of {sum(counts)} pages", f"{handle.pages} pages")
        pages = np.empty((handle.pages, handle.page_bytes), np.uint8)
        self._transport.fetch(handle, 0, pages, timeout=_left(end))
        found: dict[bytes, memoryview] = {}
        first = 0
        for block, count in zip(blocks, counts, strict=True):
            found[block.key] = pages[first : first + count].reshape(-1)[: block.nbytes].data
            first += count
        return found

    def _answer(self, verb: Literal["held", "export"], keys: Sequence[bytes], end: float) -> Answer:
        self._number += 1
        question = msgspec.msgpack.encode(Question(number=self._number, verb=verb, keys=list(keys)))
        try:
            given = self._ask(question, _left(end))
        except (OSError, EOFError) as error:
            reason = "timeout" if isinstance(error, TimeoutError) else "peer_lost"
            raise TransferError(
                reason=reason,
                got=f"{type(error).__name__}: {error}",
                where="Peer: ask",
                allowed="an answer of the other process",
            ) from error
        try:
            answer = msgspec.msgpack.decode(given, type=Answer)
        except UNREADABLE as error:
            raise _damaged(shortened(str(error)), "an answer of BlockExporter") from error
        if answer.reason:
            known = answer.reason in (*REASONS, NO_ROOM)
            raise TransferError(
                reason=answer.reason if known else "damaged",
                got=shortened(answer.reason),
                where="Peer: ask",
                allowed="an exporter with a free place",
            )
        if answer.number != self._number:
            # That of a question that was given up, or somebody else's.
            raise _damaged(f"an answer to question {answer.number}", f"one to question {self._number}")
        return answer


def _left(end: float) -> float:
    """Seconds left.

    Raises:
        TransferError: ``timeout``: none.
    """
    left = end - time.monotonic()
    if left <= 0:
        raise TransferError(reason="timeout", got="no end in time", where="Peer", allowed="all within the timeout")
    return left


def _damaged(got: str, allowed: str) -> TransferError:
    return TransferError(reason="damaged", got=got, where="Peer", allowed=allowed)
