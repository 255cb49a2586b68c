"""A step's numbers as host integers, asked of the tensors once for all layers and verbs; on the CPU only."""

from functools import cached_property
from typing import Any

from kvcore.ops import StepIndex

MOST_REQUESTS = 16
"""Requests up to which a loop over them is quicker than addresses for every row."""


class HostStep:
    """Lists by request of what a ``StepIndex`` holds, and what follows from them.

    Attributes:
        kept: what was worked out for one layer of the step and holds for others, by its kind and what it depends on.
    """

    def __init__(self, index: StepIndex) -> None:
        self._index = index
        self._tables: dict[int, list[int]] = {}
        self._whole: dict[int, bool] = {}
        self.kept: dict[Any, Any] = {}
        self.starts: list[int] = index.starts.tolist()
        self.lengths: list[int] = index.lengths.tolist()
        self.stored: list[int] = index.stored.tolist()
        self.slots: list[int] = index.slots.tolist()
        self.padding: list[int] = [0] * len(self.slots) if index.left_padding is None else index.left_padding.tolist()

    @cached_property
    def regular(self) -> bool:
        """True if the tokens are those from start to length, request by request: no padding, and no context shard.

        A shard counts its own rows only, and has fewer than there are new tokens, none among them.
        """
        if min(self.slots, default=0) < 0 or min(self.starts, default=0) < 0:
            return False
        expected = [
            position
            for start, length in zip(self.starts, self.lengths, strict=True)
            for position in range(start, length)
        ]
        return len(expected) == len(self._index.positions) and self._index.positions.tolist() == expected

    @cached_property
    def few(self) -> bool:
        """True if it is a regular step of few requests."""
        return len(self.slots) <= MOST_REQUESTS and self.regular

    def table(self, request: int) -> list[int]:
        """Block numbers of a request."""
        if request not in self._tables:
            self._tables[request] = self._index.block_table[request].tolist()
        return self._tables[request]

    def whole(self, rows: int) -> bool:
        """False where a block of some request's history is not in this pool: another context shard has it."""
        if rows not in self._whole:
            self._whole[rows] = not any(
                block < 0
                for request, length in enumerate(self.lengths)
                for block in self.table(request)[: -(-length // rows)]
            )
        return self._whole[rows]


class Memory:
    """Remembers the last step's numbers; a tensor that was written to since is read anew."""

    def __init__(self) -> None:
        self._kept: tuple[Any, list[Any], list[int], Any] = None, [], [], None

    def of(self, index: StepIndex) -> HostStep:
        """The index's numbers on the host."""
        kept, memory, seen, found = self._kept
        if kept is index and seen == [array._version for array in memory]:
            return found
        found = HostStep(index)
        # Tensors of inference mode don't tell whether they were written to.
        if not any(array.is_inference() for array in index.arrays):
            memory = memory_of(index)
            self._kept = index, memory, [array._version for array in memory], found
        return found


def memory_of(index: StepIndex) -> list[Any]:
    """What tells how often the arrays were written to: each, or one for all that are views of it, and count with it."""
    bases = [array if array._base is None else array._base for array in index.arrays]
    return list({id(array): array for array in bases}.values())
