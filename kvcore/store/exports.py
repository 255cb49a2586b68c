"""Blocks of a store for other processes: some at a time are laid out as an export, which any transport fetches.

A question (which of some keys are here; lay out what is here of them) and its answer are bytes, msgpack, and go by
whatever channel the processes have; pages go by a transport of ``kvcore.handoff``. Every page goes with the head that
it is kept with, so that whoever gets it verifies it as a page of its own tiers. What others read is no use of a page
here: the order in which pages go stays as it is.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from kvcore.counts import check_count
from kvcore.errors import OutOfBlocks, OutOfSlots, ShapeError
from kvcore.foreign import UNREADABLE
from kvcore.ops.arguments import check_seconds
from kvcore.portable.exporter import Exports, Handle
from kvcore.portable.importer import encode_handle
from kvcore.portable.manifest import Staged, root_of
from kvcore.store.questions import FORM, MOST_BYTES, MOST_KEYS, NO_ROOM, VERSION, Answer, Listed, Listing, Question
from kvcore.store.store import LONGEST_KEY, BlockStore
from kvcore.store.tiers import Sealed
from kvcore.turns import locked


class BlockExporter(Exports):
    """Answers what ``Peer`` of another process asks of a store, and holds what was laid out until it is fetched.

    Args:
        store: whose tiers are looked at.
        most_bytes: of pages that are laid out for one question; a single larger page is.
        places: exports at once: so many times ``most_bytes`` are held at most.
        lease_seconds: how long one is kept for a reader that does not come.
        exported: called with every handle before it is given out: where pages go through a folder, it publishes them.
        clock: that of leases.

    Raises:
        SpecError, ShapeError: a number that is none.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        most_bytes: int = MOST_BYTES,
        places: int = 8,
        lease_seconds: float = 30.0,
        exported: Callable[[Handle], object] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(places, clock)
        self._store = store
        self._most_bytes = check_count(ShapeError, "BlockExporter: most_bytes", most_bytes, 1)
        self._lease_seconds = check_seconds(lease_seconds, "BlockExporter: lease_seconds")
        self._exported = exported

    def answer(self, question: bytes) -> bytes:
        """Answer a question, whoever asks; bytes that are none get an answer, too."""
        try:
            asked = msgspec.msgpack.decode(question, type=Question)
        except UNREADABLE:
            return _answered(0, reason="damaged")
        if len(asked.keys) > MOST_KEYS or any(not 0 < len(key) <= LONGEST_KEY for key in asked.keys):
            return _answered(asked.number, reason="damaged")
        if asked.verb == "held":
            return _answered(asked.number, held=bytes(map(self._store.has, asked.keys)))
        try:
            handle = self.export(asked.keys)
        except (OutOfSlots, OutOfBlocks):
            return _answered(asked.number, reason=NO_ROOM)
        return _answered(asked.number, handle=b"" if handle is None else encode_handle(handle))

    def export(self, keys: Sequence[bytes]) -> Handle | None:
        """Lay out the first blocks of some keys that are here, as far as ``most_bytes``; None: none of them is.

        Raises:
            OutOfSlots: every place holds an export whose lease has not ended. OutOfBlocks: there is no memory.
        """
        handle = self._export(list(dict.fromkeys(keys)))
        if handle is not None and self._exported is not None:
            self._exported(handle)
        return handle

    @locked
    def _export(self, keys: Sequence[bytes]) -> Handle | None:
        self.expire()
        found: dict[bytes, Sealed] = {}
        left = self._most_bytes
        for key in keys:
            page = self._store.peek(key)
            if page is None:
                continue
            if found and len(page) > left:
                break
            found[key] = page
            left -= len(page)
        if not found:
            return None

        def fill(export: tuple[str, int, int]) -> Staged:
            listing = Listing(form=FORM, version=VERSION, export=export, blocks=list(map(_listed, found.items())))
            manifest = msgspec.msgpack.encode(listing)
            return Staged(manifest, _pages(list(found.values())), root_of(manifest))

        return self._lay_out(fill, self._lease_seconds, 1)


def _listed(item: tuple[bytes, Sealed]) -> Listed:
    return Listed(item[0], len(item[1]))


def _pages(blocks: Sequence[Sealed]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Blocks in pages as large as most of them are: one each, and several for one that is larger."""
    page_bytes = Counter(map(len, blocks)).most_common(1)[0][0]
    counts = [-(-len(block) // page_bytes) for block in blocks]
    try:
        pages = np.empty((sum(counts), page_bytes), np.uint8)
    except MemoryError as error:
        raise OutOfBlocks(
            got=f"{sum(counts)} pages of {page_bytes} bytes", where="BlockExporter", allowed="what there is memory for"
        ) from error
    first = 0
    for block, count in zip(blocks, counts, strict=True):
        place = pages[first : first + count].reshape(-1)
        place[: len(block)] = np.frombuffer(block, np.uint8)
        place[len(block) :] = 0
        first += count
    return pages


def _answered(number: int, *, held: bytes = b"", handle: bytes = b"", reason: str = "") -> bytes:
    return msgspec.msgpack.encode(Answer(number=number, held=held, handle=handle, reason=reason))
