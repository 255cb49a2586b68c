"""Ranks as threads of one process, of which one runs at a time: each until it has to wait for what others say.

A log on shards is thousands of small exchanges. Between processes that share cores each of them is a wait for the
scheduler; here it is a change of threads, and the order in which ranks run is the same every time.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from kvcore.interop.torch_distributed import TorchExchange


class Abandoned(Exception):
    """Another rank failed, or all wait for each other."""


class Turns:
    """``run(work)`` calls ``work(rank)`` of every rank, each in a thread of its own; ``gather`` is their exchange."""

    def __init__(self, count: int) -> None:
        self._locks = [threading.Lock() for _ in range(count)]
        self._live = [True] * count
        self._failure: BaseException | None = None
        self._rounds: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._said: dict[tuple[int, tuple[int, ...]], dict[int, Any]] = {}
        self._idle = 0

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What every rank answers; the first failure of a rank is raised."""
        answers: list[Any] = [None] * len(self._locks)

        def one(rank: int) -> None:
            self._locks[rank].acquire()
            torch.set_num_threads(1)
            try:
                if self._failure is None:
                    answers[rank] = work(rank)
            except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
                self._failure = self._failure or error
            self._live[rank], self._idle = False, 0
            self._hand_on(rank)

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(len(self._locks))]
        for lock in self._locks:
            lock.acquire()
        for thread in threads:
            thread.start()
        self._locks[0].release()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return answers

    def gather(self, rank: int, members: tuple[int, ...], value: Any) -> list[Any]:
        """What every member says, in their order, once all have; what is said must not be changed afterwards."""
        self._rounds[rank, members] += 1
        key = self._rounds[rank, members], members
        said = self._said.setdefault(key, {})
        said[rank] = value
        self._idle = 0
        while len(said) < len(members):
            self._idle += 1
            if self._idle > 2 * len(self._locks):
                raise Abandoned("every rank waits for another one: they do not make the same calls")
            self._hand_on(rank)
            self._locks[rank].acquire()
            if self._failure is not None:
                raise Abandoned
        self._idle = 0
        self._said.pop(key, None)
        return [said[member] for member in members]

    def _hand_on(self, rank: int) -> None:
        """Let the next rank run that has not ended."""
        for step in range(1, len(self._locks) + 1):
            after = (rank + step) % len(self._locks)
            if self._live[after]:
                self._locks[after].release()
                return


class TurnExchange(TorchExchange):
    """The exchange of context shards that are the ``members`` of ``turns``; sums are taken in order of shards."""

    def __init__(self, turns: Turns, members: tuple[int, ...], rank: int, device: str | torch.device = "cpu") -> None:
        self._turns, self._members, self._rank = turns, members, rank
        self._take_place(len(members), members.index(rank), device)

    def _sum(self, values):
        values.copy_(self._stack(values).sum(dim=0, dtype=values.dtype))

    def _stack(self, values):
        return torch.stack(self._turns.gather(self._rank, self._members, values.clone()))
