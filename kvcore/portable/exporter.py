"""The exporter's side: requests laid out for others to pull, each for a while, and every reference checked.

An export lies in a numbered place; a place is used again, with the next generation. A handle names exporter, place and
generation, and carries the root of its manifest, so that whatever comes through a stale one does not verify.
"""

import math
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from kvcore.counts import check_count, is_count
from kvcore.errors import OutOfSlots, ShapeError, SpecError, TransferError
from kvcore.foreign import shortened
from kvcore.ops.arguments import check_seconds
from kvcore.portable.caches import CacheInTurn, SharedCache
from kvcore.portable.digests import HASHES
from kvcore.portable.manifest import ROOT_BYTES, Staged, stage
from kvcore.portable.pages import Array
from kvcore.requests.manager import Request
from kvcore.turns import locked

NAME = re.compile("[0-9a-fA-F]{32}")
"""What an exporter may be called: its name becomes part of files' names and of messages."""

LARGEST = 2**63 - 1

REASONS = ("unknown", "out_of_range", "consumed", "stale", "expired")
"""Why an exporter may refuse a reference; one that says something else is not believed."""


class Handle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reference to one export, to be sent to whoever pulls it. It comes from elsewhere, so every field is checked.

    Attributes:
        exporter: its own name, 32 hexadecimal digits, never used by another.
        number: the place of the export.
        generation: how often that place had been used.
        root: sha256 of the manifest.
        pages: pages of the export.
        page_bytes: of each.
        deadline: of the lease, in seconds of the exporter's clock.

    Raises:
        TransferError: ``damaged``: a field that no exporter gives.
    """

    exporter: str
    number: int
    generation: int
    root: bytes
    pages: int
    page_bytes: int
    deadline: float

    def __post_init__(self) -> None:
        if not isinstance(self.exporter, str) or not NAME.fullmatch(self.exporter):
            raise _no_handle("exporter", self.exporter, "32 hexadecimal digits")
        if not isinstance(self.root, bytes) or len(self.root) != ROOT_BYTES:
            raise _no_handle("root", self.root, f"{ROOT_BYTES} bytes")
        for name, least in (("number", 0), ("generation", 0), ("pages", 0), ("page_bytes", 1)):
            value = getattr(self, name)
            if not is_count(value, least) or value > LARGEST:
                raise _no_handle(name, value, f"an integer, {least} to {LARGEST}")
        if isinstance(self.deadline, bool) or not isinstance(self.deadline, int | float):
            raise _no_handle("deadline", self.deadline, "a finite number of seconds")
        if not math.isfinite(self.deadline):
            raise _no_handle("deadline", self.deadline, "a finite number of seconds")


def _no_handle(field: str, got: object, allowed: str) -> TransferError:
    return TransferError(reason="damaged", got=shortened(got), where=f"handle: {field}", allowed=allowed)


@dataclass
class _ExportSlot:
    generation: int = -1
    staged: Staged | None = None
    deadline: float = 0.0
    readers: int = 0


class Exports:
    """Exports in numbered places, each for a while; what transports ask. Safe to use from several threads.

    Args:
        places: how many are there at once.
        clock: that of leases.

    Attributes:
        name: 32 hexadecimal digits, never used by another.
    """

    def __init__(self, places: int, clock: Callable[[], float]) -> None:
        places = check_count(SpecError, "places", places, 1)
        self.name = uuid.uuid4().hex
        self._places = [_ExportSlot() for _ in range(places)]
        self._clock = clock
        self._lock = threading.RLock()

    def _lay_out(self, fill: Callable[[tuple[str, int, int]], Staged], lease_seconds: float, readers: int) -> Handle:
        """Put what ``fill`` makes for (exporter, number, generation) into a free place, under the lock.

        Raises:
            OutOfSlots: every place holds an export whose lease has not ended.
        """
        now = self._clock()
        free = [n for n, place in enumerate(self._places) if place.staged is None or place.deadline <= now]
        if not free:
            raise OutOfSlots(
                got=f"export number {len(self._places) + 1}", where="export", allowed=f"{len(self._places)} at once"
            )
        # The place that was used least often: a stale handle is then the likeliest to be told so.
        number = min(free, key=lambda n: self._places[n].generation)
        generation = self._places[number].generation + 1
        staged = fill((self.name, number, generation))
        self._places[number] = _ExportSlot(generation, staged, now + lease_seconds, readers)
        return self._handle(number)

    @locked
    def manifest(self, exporter: str, number: int, generation: int) -> bytes:
        """The manifest of an export.

        Raises:
            TransferError: ``unknown``, ``stale``, ``consumed`` or ``expired``.
        """
        return self._staged(exporter, number, generation).manifest

    @locked
    def pages(self, exporter: str, number: int, generation: int, first: int, count: int) -> Array:
        """Pages ``first`` to ``first + count - 1`` of an export, as they lie.

        Raises:
            TransferError: as ``manifest``, or ``out_of_range``.
        """
        pages = self._staged(exporter, number, generation).pages
        check_range(first, count, len(pages))
        return pages[first : first + count]

    @locked
    def finish(self, exporter: str, number: int, generation: int) -> None:
        """One reader has it; after the last one it is gone.

        Raises:
            TransferError: as ``manifest``.
        """
        self._staged(exporter, number, generation)
        place = self._places[number]
        if place.readers > 1:
            place.readers -= 1
        else:
            place.staged = None

    @locked
    def expire(self) -> int:
        """Drop every export whose lease has ended; returns how many."""
        ended = [place for place in self._places if place.staged is not None and place.deadline <= self._clock()]
        for place in ended:
            place.staged = None
        return len(ended)

    @locked
    def staged(self, exporter: str, number: int, generation: int) -> Staged:
        """Manifest and pages of an export, for transports that give out memory.

        Raises:
            TransferError: as ``manifest``.
        """
        return self._staged(exporter, number, generation)

    def _handle(self, number: int) -> Handle:
        place = self._places[number]
        assert place.staged is not None
        pages = place.staged.pages
        return Handle(
            exporter=self.name,
            number=number,
            generation=place.generation,
            root=place.staged.root,
            pages=len(pages),
            page_bytes=int(pages.shape[1]),
            deadline=place.deadline,
        )

    def _staged(self, exporter: str, number: int, generation: int) -> Staged:
        known = exporter == self.name and 0 <= number < len(self._places)
        place = self._places[number] if known else _ExportSlot()
        check_reference(
            f"export {number} of generation {generation}",
            generation,
            place.generation,
            consumed=place.staged is None,
            expired=place.deadline <= self._clock(),
        )
        assert place.staged is not None
        return place.staged


class Exporter(Exports):
    """Exports of one cache.

    ``digest`` is what pages on the host are verified by: ``xxh3_128`` finds damage at the speed of memory, ``sha256``
    is for pages that come by a way that is not trusted, to whoever has the handle from a trusted one. None: the first,
    or, of a cache on a GPU, ``lanes``, which the GPU works out as the rows leave it.
    """

    def __init__(
        self,
        cache: SharedCache,
        *,
        places: int = 64,
        on_device: bool = False,
        digest: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(places, clock)
        if digest is not None and digest not in HASHES:
            raise SpecError(got=digest, where="Exporter: digest", allowed=f"None, {' or '.join(HASHES)}")
        self._digest = digest
        self._cache = cache
        self._on_device = on_device

    def export(
        self, request: Request, *, lease_seconds: float = 60.0, readers: int = 1, checkpoints: bool = True
    ) -> Handle:
        """Copy a request into pages that can be pulled ``readers`` times within the lease; it may go on, or end.

        ``checkpoints``: whether those of its tokens lie there too, as for ``export_request``.

        Raises:
            OutOfSlots: every place holds an export whose lease has not ended. RequestError: stale or foreign.
            ShapeError: a lease that is not a finite number of seconds above 0, or fewer than one reader.
        """
        lease_seconds = check_seconds(lease_seconds, "export: lease_seconds")
        check_count(ShapeError, "export: readers", readers, 1)
        # The cache's turn comes before the exporter's: whoever waits for it keeps nobody from the exporter.
        return self._cache.exclusive("export", partial(self._export, request, lease_seconds, readers, checkpoints))

    @locked
    def _export(
        self, request: Request, lease_seconds: float, readers: int, checkpoints: bool, cache: CacheInTurn
    ) -> Handle:
        def fill(export: tuple[str, int, int]) -> Staged:
            return stage(
                cache,
                request,
                "export",
                export=export,
                checkpoints=checkpoints,
                on_device=self._on_device,
                digest=self._digest,
            )

        return self._lay_out(fill, lease_seconds, readers)


def check_reference(what: str, generation: int, current: int, *, consumed: bool, expired: bool) -> None:
    """Refuse every reference but a live one; ``current`` is the place's generation, -1 if it was never used.

    Raises:
        TransferError: with the reason.
    """
    if not 0 <= generation <= current:
        reason, allowed = "unknown", "an export that this exporter made"
    elif generation < current:
        reason, allowed = "stale", f"generation {current}: the place holds another export now"
    elif expired:
        reason, allowed = "expired", "an export whose lease has not ended"
    elif consumed:
        reason, allowed = "consumed", "an export that was not pulled yet"
    else:
        return
    raise TransferError(reason=reason, got=what, where="pull", allowed=allowed, hint="Export the request again.")


def check_range(first: int, count: int, pages: int) -> None:
    """Refuse pages that an export does not have.

    Raises:
        TransferError: ``out_of_range``.
    """
    if first < 0 or count < 0 or first + count > pages:
        raise TransferError(
            reason="out_of_range",
            got=f"pages {first} to {first + count - 1}",
            where="pull",
            allowed=f"0 to {pages - 1}",
        )
