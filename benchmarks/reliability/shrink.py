"""A failing list of operations made short: drop what the failure does not need."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(operations: Sequence[T], fails: Callable[[Sequence[T]], bool], *, tries: int = 3000) -> list[T]:
    """A shorter list that still fails; larger pieces are tried first.

    Args:
        fails: True if running the operations from the start fails; operations must make sense in any state.
    """
    kept = list(operations)
    size = len(kept) // 2
    while size and tries > 0:
        start = 0
        while start < len(kept) and tries > 0:
            tries -= 1
            shorter = kept[:start] + kept[start + size :]
            if fails(shorter):
                kept = shorter
            else:
                start += size
        size //= 2
    return kept
