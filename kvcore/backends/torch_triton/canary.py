"""Sampled rows beside their check words where pools lie on a GPU: one launch looks at all layers, and nothing waits."""

from collections.abc import Sequence
from contextlib import nullcontext
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


class Report:
    """What a launch tells, copied to the host once it has run.

    Args:
        written: [ROOM] int32 where the launch wrote it.
    """

    def __init__(self, written: torch.Tensor) -> None:
        self._numbers, self._copied = written, None
        if written.is_cuda:
            self._numbers = torch.empty(len(written), dtype=written.dtype, pin_memory=True)
            self._numbers.copy_(written, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def ready(self) -> bool:
        """Whether the launch has run."""
        return self._copied is None or self._copied.query()

    def read(self) -> Sequence[tuple[int, int, int]]:
        """(role's number, request, row) of the faults."""
        if self._copied is not None:
            self._copied.synchronize()
        count, *numbers = self._numbers.tolist()
        faults = [numbers[n : n + FAULT] for n in range(0, min(count, MOST) * FAULT, FAULT)]
        return sorted((role, request, row) for role, request, row in faults)


class Watcher:
    """Looks at the rows of one plan's pools on one device."""

    def __init__(self, plan: CachePlan, device: str) -> None:
        self._plan = plan
        self._device = device
        self._tables: Tables | None = None
        names = (name for region in plan.stored for name, _ in region.buffers.values())
        self._names = tuple(names) if plan.canary else ()

    def watch(self, pools: Pools, index: StepIndex, asked: Asked) -> tuple[Pools, Report]:
        """Queue the look; see ``kvcore.ops.canary.watch``."""
        tables = self._tables_of(pools)
        requests = asked.numbers.shape[1]
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            numbers = torch.zeros(
                asked.numbers.size + ROOM, dtype=torch.int32, pin_memory=torch.device(self._device).type == "cuda"
            )
            numbers.numpy()[: asked.numbers.size] = asked.numbers.reshape(-1)
            numbers = numbers.to(self._device, non_blocking=True)
        arrays = index.slots, index.starts, index.lengths, index.block_table
        sizes = requests, self._plan.canary, asked.most, tables.narrow
        calls().watch_rows(numbers, *arrays, tables.roles, tables.pieces, *sizes)
        return pools, Report(numbers[-ROOM:])

    def _tables_of(self, pools: Pools) -> Tables:
        addresses = tuple(pools[name].data_ptr() for name in self._names)
        if self._tables is None or self._tables.addresses != addresses:
            self._tables = self._new_tables(pools, addresses)
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
