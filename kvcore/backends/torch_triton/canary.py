"""Sampled rows beside their check words where pools lie on a GPU: one launch looks at all layers, and nothing waits."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcore.backends.torch_triton.launch import calls
from kvcore.check_words import WORD
from kvcore.digest import region_salt
from kvcore.kernels.triton.canary import FAULT, PIECE, ROLE
from kvcore.kernels.triton.launches.canary import MOST, ROOM
from kvcore.ops import StepIndex
from kvcore.ops.canary import Asked
from kvcore.ops.host import lines_of
from kvcore.plan import CachePlan, Watched
from kvcore.pools import Pools


class Tables(NamedTuple):
    """What a launch must know of the rows of some pools.

    Attributes:
        addresses: of the pools.
        roles, pieces: see ``kernels.triton.canary``.
        narrow: whether the pieces are of bytes.
    """

    addresses: tuple[int, ...]
    roles: torch.Tensor
    pieces: torch.Tensor
    narrow: bool


class Room(NamedTuple):
    """Where one look's numbers are: on the host, on the device, and on the host again what it reports; and when."""

    given: torch.Tensor
    numbers: torch.Tensor
    report: torch.Tensor
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, size: int, device: torch.device) -> "Room":
        """A new one."""
        with torch.inference_mode(False):
            if device.type != "cuda":
                numbers = torch.zeros(size + ROOM, dtype=torch.int32)
                return cls(numbers, numbers, numbers[size:], None)
            given, report = (torch.zeros(count, dtype=torch.int32, pin_memory=True) for count in (size + ROOM, ROOM))
            return cls(given, torch.zeros(size + ROOM, dtype=torch.int32, device=device), report, torch.cuda.Event())


class Report:
    """What a launch tells, copied to the host once it has run.

    Args:
        room: where it is told; used again once that was read.
        free: where it goes then.
    """

    def __init__(self, room: Room, free: list[Room]) -> None:
        self._room, self._free = room, free

    def ready(self) -> bool:
        """Whether the launch has run."""
        return self._room.done is None or self._room.done.query()

    def read(self) -> Sequence[tuple[int, int, int]]:
        """(role's number, request, row) of the faults; once."""
        room = self._room
        if room.done is not None:
            room.done.synchronize()
        count = int(room.report[0])
        numbers = room.report[1:].tolist() if count else []
        self._free.append(room)
        faults = [numbers[n : n + FAULT] for n in range(0, min(count, MOST) * FAULT, FAULT)]
        return sorted((role, request, row) for role, request, row in faults)


class Watcher:
    """Looks at the rows of one plan's pools on one device."""

    def __init__(self, plan: CachePlan, device: str) -> None:
        self._plan = plan
        self._device = torch.device(device)
        self._tables: Tables | None = None
        self._last: Pools | None = None
        self._rooms: dict[int, list[Room]] = {}
        names = (name for region in plan.stored for name, _ in region.buffers.values())
        self._names = tuple(names) if plan.canary else ()

    def watch(self, pools: Pools, index: StepIndex, asked: Asked) -> tuple[Pools, Report]:
        """Queue the look; see ``kvcore.ops.canary.watch``."""
        tables, size = self._tables_of(pools), asked.numbers.size
        free = self._rooms.setdefault(size, [])
        room = free.pop() if free else Room.of(size, self._device)
        given = room.given.numpy()
        given[:size], given[size:] = asked.numbers.reshape(-1), 0
        if room.done is not None:
            room.numbers.copy_(room.given, non_blocking=True)
        arrays = index.slots, index.starts, index.lengths, index.block_table
        sizes = asked.numbers.shape[1], self._plan.canary, asked.most, asked.turn, asked.seals, tables.narrow
        calls().watch_rows(room.numbers, *arrays, tables.roles, tables.pieces, *sizes)
        if room.done is not None:
            room.report.copy_(room.numbers[size:], non_blocking=True)
            room.done.record()
        return pools, Report(room, free)

    def _tables_of(self, pools: Pools) -> Tables:
        if self._tables is not None and self._last is pools:
            return self._tables
        addresses = tuple(pools[name].data_ptr() for name in self._names)
        if self._tables is None or self._tables.addresses != addresses:
            self._tables = self._new_tables(pools, addresses)
        self._last = pools
        return self._tables

    def _new_tables(self, pools: Pools, addresses: tuple[int, ...]) -> Tables:
        roles: list[tuple[int, ...]] = []
        pieces: list[tuple[int, ...]] = []
        for watched in self._plan.watched:
            first = len(pieces)
            pieces += _pieces(pools, watched)
            roles.append((first, len(pieces) - first, *_role(pools, self._plan, watched)))
        table = np.array(pieces, np.int64).reshape(-1, PIECE)
        narrow = bool((table[:, :6] % WORD).any())
        return Tables(addresses, self._put(np.array(roles, np.int64).reshape(-1, ROLE)), self._put(table), narrow)

    def _put(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.from_numpy(array).to(self._device)


def _pieces(pools: Pools, watched: Watched) -> list[tuple[int, ...]]:
    """Of one role's rows: every line of every part, for all heads."""
    found: list[tuple[int, ...]] = []
    before = 0
    for region in watched.regions:
        row_step, head_step = region.steps
        lines = lines_of(region)
        firsts = [*accumulate((-(-line.nbytes // WORD) for line in lines), initial=0)]
        for line, first in zip(lines, firsts, strict=False):
            pool = pools[region.buffers[line.buffer][0]]
            steps = row_step * line.stride, head_step * line.stride
            place = pool.data_ptr(), pool.stride(0), line.base, *steps, line.nbytes
            found.append((*place, region.heads, before + first, firsts[-1], region.copies))
        before += region.heads * firsts[-1]
    return found


def _role(pools: Pools, plan: CachePlan, watched: Watched) -> tuple[int, ...]:
    """What is behind the pieces in a role's entry."""
    region, words = watched.regions[0], watched.words
    pool = pools[words.buffers["word"][0]]
    copies = max(part.copies for part in watched.regions)
    rows = watched.kind, region.growth == "slot", region.rows, copies, plan.units(region)
    return (*rows, region_salt(watched.layer, watched.role), pool.data_ptr(), words.rows, watched.stride)
