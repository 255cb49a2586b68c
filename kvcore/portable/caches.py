"""What moves requests needs this much of a cache, as small protocols; it knows nothing of the cache itself."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from kvcore.ops import Ops
from kvcore.plan import CachePlan
from kvcore.pools import Pools
from kvcore.portable.record import RequestRecord
from kvcore.portable.rows import Content
from kvcore.requests.manager import Manager, Request
from kvcore.spec import CacheSpec
from kvcore.step import StepRequest

R = TypeVar("R")


class CacheInTurn(Protocol):
    """What a cache holds, while nobody else changes it: what ``Cache.exclusive`` hands out."""

    spec: CacheSpec
    plan: CachePlan
    ops: Ops
    pools: Pools
    manager: Manager

    def row(self, request: Request) -> StepRequest:
        """The request as it is now, as a part of a step without tokens."""
        ...

    def least_length(self, request: Request) -> int:
        """Smallest length that ``truncate`` accepts for the request."""
        ...

    def kept_states(self, request: Request) -> list[tuple[int, Content]]:
        """Checkpoints that the request's own tokens lead to, to go with it where it goes."""
        ...

    @property
    def most_checkpoints(self) -> int:
        """How many it keeps at once; 0 where prefixes are not reused."""
        ...

    def restore(
        self,
        left: RequestRecord,
        rows: Content | Callable[[Ops, Pools, StepRequest], Pools],
        into: Request | None = None,
        *,
        salt: str | None = None,
        shares: bool | None = None,
        states: Sequence[tuple[int, Content]] = (),
    ) -> Request:
        """A request that holds ``rows``, or what a function writes, as it was when it left another cache."""
        ...


class SharedCache(Protocol):
    """A cache that others use too: its parts, and a turn of one's own on it."""

    spec: CacheSpec
    plan: CachePlan
    ops: Ops

    @property
    def pools(self) -> Pools:
        """``"L.role.field"`` -> array."""
        ...

    def exclusive(self, verb: str, act: Callable[[CacheInTurn], R], *, in_step: bool = False) -> R:
        """Do something with what the cache holds, alone."""
        ...


class Buffers(Protocol):
    """The pools of a plan."""

    spec: CacheSpec
    plan: CachePlan

    @property
    def pools(self) -> Pools:
        """``"L.role.field"`` -> array."""
        ...
