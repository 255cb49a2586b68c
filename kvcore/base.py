"""What a cache is made of, and the rules that all its verbs keep: one at a time, none inside a step, freed is gone."""

# pyright: reportPrivateUsage=false

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.blocks import BlockStatistics
from kvcore.content import Content, Left, write_rows
from kvcore.errors import KvcoreError, OutOfBlocks, StepError
from kvcore.growth import Growth
from kvcore.manager import Manager, Request
from kvcore.ops import Backend, Ops
from kvcore.plan import CachePlan
from kvcore.pools import Pools, check_same_tree
from kvcore.prefix import Policy
from kvcore.reuse import PrefixCache
from kvcore.step import Row

if TYPE_CHECKING:
    from kvcore.open_step import Step


MOST_BYTES = 1 << 62
"""Of all pools: what frameworks can count."""


class CacheBase:
    """A plan, its pools, a backend's verbs, and the requests that live in them.

    What begins with an underscore here, on steps and on handles is for the library's own parts, which keep the rules
    that the verbs keep for a user: ``_exclusive`` around every change, clean slots, whole requests.
    """

    def __init__(
        self, plan: CachePlan, backend: Backend, ops: Ops, *, prefix: Policy = "off", check: bool = False
    ) -> None:
        self.spec = plan.spec
        self.plan = plan
        self.backend = backend
        self.ops = ops
        self._check = check
        self.damaged: tuple[str, ...] = ()
        # Before anything that grows with the plan: whatever is too much for the machine is said at once.
        self._pools = _allocated(ops)
        self._manager = Manager(plan)
        self._prefix = PrefixCache(plan.spec, prefix, self._manager)
        self._step: Step | None = None
        self._stepping = 0
        self._turns = threading.Condition(threading.RLock())

    @property
    def pools(self) -> Pools:
        """The pools, ``"L.role.field"`` -> array. Assign what functional ops returned to put it back."""
        return self._pools

    @pools.setter
    def pools(self, pools: Mapping[str, Any]) -> None:
        self._pools = check_same_tree(pools, self._pools)
        if self._step is not None:
            self._step._pools_replaced = True

    def _replace_pools(self, pools: Pools) -> None:
        """Take what a handle's verb returned; nothing is checked."""
        self._pools = pools

    def _to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """The backend's array as NumPy."""
        return to_numpy(array)

    def asarray(self, array: Any) -> Any:
        """A NumPy array (bf16 as ml_dtypes) as the backend's array on its device; inverse of ``kvcore.to_numpy``."""
        return self.ops.asarray(array)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return self._pools.nbytes

    @property
    def free_slots(self) -> int:
        """Requests that can still be admitted."""
        return self._manager.free_slots

    @property
    def free_blocks(self) -> int:
        """Blocks that steps can still take."""
        return self._manager.free_blocks

    @property
    def block_statistics(self) -> BlockStatistics:
        """Blocks taken, dropped and evicted so far, and key look-ups of prefix reuse that hit and missed."""
        return self._manager.blocks.statistics

    @property
    def requests(self) -> tuple[Request, ...]:
        """Live requests in order of admission."""
        return self._manager.requests

    def _row(self, request: Request) -> Row:
        """The request as it is now, as a part of a step without tokens."""
        return self._rows([request], [0])[0]

    def _least_length(self, request: Request) -> int:
        """Smallest length that ``truncate`` accepts for the request."""
        return self._manager.deepest_truncation(self._manager.check(request))

    def _check_whole(self, request: Request, where: str) -> None:
        """Refuse a request whose rings are not complete yet; see ``Manager.check_whole``."""
        self._manager.check_whole(request, where)

    def _install(self, request: Request, left: Left, rows: Content | Callable[[Ops, Pools, Row], Pools]) -> None:
        """Make a fresh request hold ``rows``, or what a function writes, as it was when it left another cache.

        Raises:
            OutOfBlocks: no room; the request is still fresh.
        """
        self._manager.take_over(request, length=left.length, floor=left.floor, tokens=left.tokens, salt=left.salt)
        row = self._row(request)
        self._pools = (
            rows(self.ops, self._pools, row) if callable(rows) else write_rows(self.ops, self._pools, row, rows)
        )
        self._prefix.publish(self._manager.place(request))

    def _fresh(self, salt: str | None = None) -> Request:
        """A request with a clean slot and nothing else.

        Raises:
            OutOfSlots: ``max_requests`` requests are live.
        """
        request = self._manager.admit(salt)
        try:
            self._pools = self.ops.reset_slots(self._pools, self._integers([request.slot]))
        except BaseException:
            self._manager.release(request)
            raise
        return request

    def _empty(self, request: Request) -> None:
        """Make a live request as it was when it was admitted: its blocks are taken back, its slot is clean."""
        self._poison([], self._manager.empty(request))
        self._pools = self.ops.reset_slots(self._pools, self._integers([request.slot]))

    def _give_back(self, request: Request) -> None:
        """Take a request's slot and blocks back."""
        slot = self._manager.place(request).slot
        self._poison([slot], self._manager.release(request))

    def _begin_step(self, step: "Step") -> None:
        """Let nobody but this thread touch the cache until the step ends."""
        self._step, self._stepping = step, threading.get_ident()

    def _end_step(self) -> None:
        """Let the others go on; called by the step that ends, from any thread."""
        with self._turns:
            self._step = None
            self._turns.notify_all()

    def _poison(self, slots: list[int], blocks: list[int]) -> None:
        """Under ``check=True``, make what was freed unreadable."""
        if self._check and (slots or blocks):
            self._pools = self.ops.poison(self._pools, self._integers(slots), self._integers(blocks))

    @contextmanager
    def _exclusive(self, verb: str, *, in_step: bool = False) -> Generator[None, None, None]:
        """One verb at a time. Other threads wait until an open step has ended; its own thread is refused, or let in."""
        with self._turns:
            while self._step is not None and self._stepping != threading.get_ident():
                self._turns.wait()
            if self._step is not None and not in_step:
                raise StepError(
                    got=f"{verb} while a step is open", where="cache", allowed="one step at a time, then others"
                )
            yield

    def _rows(self, requests: Sequence[Request], new: Sequence[int]) -> list[Row]:
        """The requests' parts in a step that brings ``new`` tokens."""
        places = [self._manager.place(request) for request in requests]
        return [
            Row(place.slot, place.length, count, tuple(place.blocks), place.stored)
            for place, count in zip(places, new, strict=True)
        ]

    def _prepare_blocks(self, rows: Sequence[Row], grown: Sequence[Growth]) -> None:
        """Copy shared blocks into those that replaced them; under check, poison all others that are new."""
        pairs = [
            (old, row.blocks[column])
            for row, growth in zip(rows, grown, strict=True)
            for column, old in growth.replaced
        ]
        self._poison([], [block for row, growth in zip(rows, grown, strict=True) for block in _added(row, growth)])
        if pairs:
            sources, targets = (self._integers(list(side)) for side in zip(*pairs, strict=True))
            self._pools = self.ops.copy_blocks(self._pools, sources, targets)

    def _integers(self, values: list[int]) -> Any:
        return self.ops.asarray(np.array(values, np.int32))


def _allocated(ops: Ops) -> Pools:
    """Fresh pools.

    Raises:
        OutOfBlocks: the device has no room for them.
    """
    try:
        if ops.plan.nbytes > MOST_BYTES:
            raise MemoryError
        return ops.allocate()
    except KvcoreError:
        raise
    except (MemoryError, RuntimeError, ValueError) as error:
        # NumPy, torch and JAX each have errors of their own for memory, and for sizes that are beyond any.
        raise OutOfBlocks(
            got=f"pools of {ops.plan.nbytes} bytes",
            where="create_cache",
            allowed=f"what {ops.device} has room for",
            hint=(str(error).splitlines() or [""])[0][:200],
        ) from error


def _added(row: Row, growth: Growth) -> Sequence[int]:
    return row.blocks[len(row.blocks) - growth.added :]
