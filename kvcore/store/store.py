"""Pages by key over tiers: the first is asked first, what it has no room for goes to the next.

Behind the tiers there may be peers, other processes' stores: they are asked for what no tier has.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvcore.errors import ShapeError, TransferError
from kvcore.foreign import shortened
from kvcore.store.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvcore.store.peers import Peer
from kvcore.store.seal import Seal
from kvcore.store.tiers import Sealed, Tier

LONGEST_KEY = 64
"""Bytes: a file of a disk's tier is named by them."""


class About(NamedTuple):
    """What an event says of a block beside its key: the key before it, its tokens, and how many a block has."""

    parent: bytes | None
    tokens: Sequence[int]
    block_tokens: int


def abouts(keys: Sequence[bytes], tokens: Sequence[int], block_tokens: int, numbers: Iterable[int]) -> list[About]:
    """What some of a prompt's blocks are about, by their numbers.

    Args:
        keys: of all blocks.
        tokens: of the prompt.
        block_tokens: of a block.
        numbers: which.
    """
    return [
        About(keys[at - 1] if at else None, tokens[at * block_tokens : (at + 1) * block_tokens], block_tokens)
        for at in numbers
    ]


class BlockStore:
    """Pages under keys; every one is verified whenever it is read, wherever it lay.

    Args:
        tiers: the nearest first: ``[HostTier(64 << 30), DiskTier(folder, 1 << 40)]``.
        peers: other processes' stores, asked in this order; what comes from one is kept in the first tier.
        secret: where others can write to a tier, or answer as a peer, and are not trusted: see ``Seal``.
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
        peers: Sequence[Peer] = (),
        secret: bytes | None = None,
        events: Callable[[list[Event]], None] | None = None,
    ) -> None:
        if not tiers:
            raise ShapeError(got="no tiers", where="BlockStore", allowed="one or more")
        self.tiers = tuple(tiers)
        self.peers = tuple(peers)
        self.damaged: list[bytes] = []
        self._seal = Seal(secret)
        self._events = events
        self._about: dict[bytes, About] = {}
        self._lock = threading.RLock()

    def has(self, key: bytes) -> bool:
        """Whether a tier has a page, as far as can be said without reading it; no peer is asked."""
        return any(tier.has(key) for tier in self.tiers)

    def look_up(self, keys: Sequence[bytes]) -> Callable[[bytes], bool]:
        """What says of each of the keys whether a tier or a peer has its page; no page is read.

        Peers are asked about all of the keys at once, when a tier lacks the first of them.
        """
        away: set[bytes] | None = None

        def there(key: bytes) -> bool:
            nonlocal away
            if self.has(key):
                return True
            if away is None:
                away = self._away(keys)
            return key in away

        return there

    def longest(self, keys: Sequence[bytes]) -> int:
        """How many of the keys, from the first on, are there, in tiers or at peers; no page is read."""
        there = self.look_up(keys)
        return next((number for number, key in enumerate(keys) if not there(key)), len(keys))

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
            events = self._put(0, key, sealed, about)
            kept = self.has(key)
        self._tell(events)
        return kept

    def get(self, key: bytes, about: About | None = None) -> memoryview | None:
        """A page, verified; None if it is nowhere, or damaged wherever it is. A page from further away moves up.

        Args:
            key: of the page.
            about: for the event of one that comes to the first tier: from a peer, or from a tier that another process
                filled, comes a page alone.
        """
        found = self._get(key, about)
        if found is None:
            # Nobody else waits while a peer is asked.
            found = next((page for _, page in self._from_peers([key], {} if about is None else {key: about})), None)
        return found

    def fetch(self, keys: Sequence[bytes], about: Mapping[bytes, About] | None = None) -> int:
        """Bring pages that no tier has from peers to the first tier, many at a time, verified; how many came.

        It is what ``get`` does for one page, with a question for many. ``about``: for the events, by key.
        """
        return sum(1 for _ in self._from_peers(keys, about or {}))

    def peek(self, key: bytes) -> Sealed | None:
        """A page of a tier with its head, not verified, for somebody else; which pages go first stays as it is."""
        return next((data for tier in self.tiers if (data := tier.peek(key)) is not None), None)

    def _get(self, key: bytes, about: About | None = None) -> memoryview | None:
        """From the tiers."""
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
                        events += self._put(0, key, bytes(data), about)
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

    def _away(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys that peers have and no tier."""
        found: set[bytes] = set()
        for peer in self.peers:
            missing = [key for key in dict.fromkeys(keys) if key not in found and not self.has(key)]
            found |= peer.held(missing) if missing else set()
        return found

    def _from_peers(self, keys: Sequence[bytes], about: Mapping[bytes, About]) -> Iterator[tuple[bytes, memoryview]]:
        """Pages that no tier has, as they come from peers: each verified, and in the first tier."""
        wanted = [key for key in dict.fromkeys(keys) if not self.has(key)] if self.peers else []
        for peer in self.peers:
            asked = list(wanted)
            while asked and (coming := peer.fetch(asked)):
                for key, data in coming.items():
                    sealed = bytes(data)
                    page = self._seal.open(key, sealed)
                    if page is None:
                        self.damaged.append(key)
                        allowed = "a page of its key with its head"
                        peer.note(TransferError(reason="damaged", got="another", where="Peer", allowed=allowed))
                        continue
                    with self._lock:
                        events = self._put(0, key, sealed, about.get(key))
                    self._tell(events)
                    wanted.remove(key)
                    yield key, page
                asked = [key for key in asked if key not in coming]

    def _put(self, number: int, key: bytes, data: Sealed, about: About | None = None) -> list[Event]:
        """Into a tier, and what has to go for it into the next; ``about``: if it was not known before."""
        tier = self.tiers[number]
        if about is not None:
            self._about[key] = about
        gone = tier.put(key, data)
        events: list[Event] = []
        if tier.has(key):
            known = self._about.get(key)
            if known is not None:
                tokens, size = list(known.tokens), known.block_tokens
                events.append(BlockStored([key], known.parent, tokens, size, None, tier.medium, None))
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
