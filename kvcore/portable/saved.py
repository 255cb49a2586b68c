"""What a snapshot of any version is to whoever loads or checks it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from kvcore.counts import check_count
from kvcore.errors import SpecError
from kvcore.ops import Ops
from kvcore.portable.caches import CacheInTurn
from kvcore.portable.record import RequestRecord
from kvcore.requests.manager import Request
from kvcore.spec import CacheSpec


class Sizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the saved cache was created with."""

    max_requests: int
    max_tokens: int | None
    max_draft_tokens: int
    max_request_tokens: int | None = None


class Damage(NamedTuple):
    """A piece of a request that is not what was saved."""

    request: int
    piece: str

    def __str__(self) -> str:
        return f"request {self.request}: {self.piece}"


class Saved(Protocol):
    """A snapshot whose directory and root are right; its pages are yet to be checked."""

    @property
    def spec(self) -> CacheSpec: ...
    @property
    def sizes(self) -> Sizes: ...
    @property
    def records(self) -> Sequence[RequestRecord | None]:
        """Of every request; None where that is damaged."""
        ...

    def damage(self, number: int, ops: Ops) -> list[Damage]:
        """The damaged pieces of one request."""
        ...

    def take_in(self, cache: CacheInTurn, number: int) -> Request:
        """Make a request of one that is whole; its salt is taken at its word."""
        ...


def check_sizes(spec: CacheSpec, sizes: Sizes) -> None:
    """Refuse sizes that no cache of the spec was created with.

    Raises:
        SpecError: the first of them.
    """
    for name, least in (("max_requests", 1), ("max_draft_tokens", 0)):
        check_count(SpecError, name, getattr(sizes, name), least)
    for name in ("max_tokens", "max_request_tokens"):
        if getattr(sizes, name) is not None:
            check_count(SpecError, name, getattr(sizes, name), 1)
    if sizes.max_tokens is None and any(component.growth == "block" for _, _, component in spec.components()):
        raise SpecError(got=None, where="max_tokens", allowed="an integer, 1 or more: the spec has paged components")
