"""Pages by key over tiers: the first is asked first, what it has no room for goes to the next."""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcore.errors import ShapeError
from kvcore.foreign import shortened
from kvcore.store.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvcore.store.seal import Seal
from kvcore.store.tiers import Sealed, Tier

LONGEST_KEY = 64
"""Bytes: a file of a disk's tier is named by them."""


class About(NamedTuple):
    """What an event says of a block beside its key: the key before it, its tokens, and how many a block has."""

    parent: bytes | None
    tokens: Sequence[int]
    block_tokens: int


class BlockStore:
    """Pages under keys; every one is verified whenever it is read, wherever it lay.

    Args:
        tiers: the nearest first: ``[HostTier(64 << 30), DiskTier(folder, 1 << 40)]``.
        secret: where others can write to a tier and are not trusted: see ``Seal``.
        events: called with what came and went, outside of any lock.

    Attributes:
        damaged: keys of pages that did not verify, and are gone.

    Example:
        >>> from kvcore.store import BlockStore, HostTier
        >>> store = BlockStore([HostTier(1 << 20)])
        >>> store.put(b"a" * 32, b"a page")
        True
        >>> bytes(store.get(b"a" * 32)), store.get(b"b" * 32), store.longest([b"a" * 32, b"b" * 32])
        (b'a page', None, 1)
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        secret: bytes | None = None,
        events: Callable[[list[Event]], None] | None = None,
    ) -> None:
        if not tiers:
            raise ShapeError(got="no tiers", where="BlockStore", allowed="one or more")
        self.tiers = tuple(tiers)
        self.damaged: list[bytes] = []
        self._seal = Seal(secret)
        self._events = events
        self._about: dict[bytes, About] = {}
        self._lock = threading.RLock()

    def has(self, key: bytes) -> bool:
        """Whether a page is there, as far as can be said without reading it."""
        return any(tier.has(key) for tier in self.tiers)

    def longest(self, keys: Sequence[bytes]) -> int:
        """How many of the keys, from the first on, are there; no page is read."""
        return next((number for number, key in enumerate(keys) if not self.has(key)), len(keys))

    def put(self, key: bytes, page: bytes | memoryview, about: About | None = None) -> bool:
        """Keep a page; what it is about is said to whoever listens.

        Returns:
            Whether it is there now: a tier may be too small for it, and a disk may refuse.

        Raises:
            ShapeError: a key that is not 1 to 64 bytes. Nothing is changed.
        """
        if not (isinstance(key, bytes) and 0 < len(key) <= LONGEST_KEY):
            raise ShapeError(got=shortened(key), where="BlockStore.put: key", allowed=f"1 to {LONGEST_KEY} bytes")
        sealed = self._seal.close(key, memoryview(page).cast("B"))
        with self._lock:
            if about is not None:
                self._about[key] = about
            events = self._put(0, key, sealed)
            kept = self.has(key)
        self._tell(events)
        return kept

    def get(self, key: bytes) -> memoryview | None:
        """A page, verified; None if it is nowhere, or damaged wherever it is. A page from further away moves up."""
        events: list[Event] = []
        found: memoryview | None = None
        with self._lock:
            for number, tier in enumerate(self.tiers):
                data = tier.get(key)
                if data is None:
                    continue
                found = self._seal.open(key, data)
                if found is not None:
                    if number:
                        events += self._put(0, key, bytes(data))
                    break
                # Whoever asks next is not given it, either.
                tier.remove(key)
                self.damaged.append(key)
                events.append(BlockRemoved([key], tier.medium))
        self._tell(events)
        return found

    def remove(self, key: bytes) -> bool:
        """Let a page go, wherever it lies; whether it was there."""
        with self._lock:
            holding = [tier for tier in self.tiers if tier.has(key)]
            for tier in holding:
                tier.remove(key)
            self._about.pop(key, None)
        self._tell([BlockRemoved([key], tier.medium) for tier in holding])
        return bool(holding)

    def clear(self) -> None:
        """Let all pages go."""
        with self._lock:
            for tier in self.tiers:
                for key in tier.held():
                    tier.remove(key)
            self._about.clear()
        self._tell([AllBlocksCleared()])

    def flush(self) -> bool:
        """Copy what only the first tiers have to the last one, durably; whether it has all of it now."""
        last, events, whole = self.tiers[-1], list[Event](), True
        with self._lock:
            for tier in self.tiers[:-1]:
                for key in tier.held():
                    data = None if last.has(key) else tier.get(key)
                    if data is not None:
                        events += self._put(len(self.tiers) - 1, key, data)
                        whole = whole and last.has(key)
        self._tell(events)
        return whole

    def _put(self, number: int, key: bytes, data: Sealed) -> list[Event]:
        """Into a tier, and what has to go for it into the next."""
        tier = self.tiers[number]
        gone = tier.put(key, data)
        events: list[Event] = []
        if tier.has(key):
            about = self._about.get(key)
            if about is not None:
                tokens, size = list(about.tokens), about.block_tokens
                events.append(BlockStored([key], about.parent, tokens, size, None, tier.medium, None))
        for lost, held in gone:
            if lost != key:
                events.append(BlockRemoved([lost], tier.medium))
            if held is not None and number + 1 < len(self.tiers):
                if not self.tiers[number + 1].has(lost):
                    events += self._put(number + 1, lost, held)
            elif not self.has(lost):
                self._about.pop(lost, None)
        return events

    def _tell(self, events: list[Event]) -> None:
        if events and self._events is not None:
            self._events(events)
