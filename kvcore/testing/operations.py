"""Random operations that follow from a seed, done one after the other, and a failing list of them made short."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")

SECONDS = 120.0
"""Of processor time, for making one list short."""


class Operation(NamedTuple):
    """What to do, and numbers that choose among what is possible at that moment."""

    what: str
    a: int
    b: int
    c: int


def operations_of(seed: int, count: int, kinds: Mapping[str, float]) -> list[Operation]:
    """The operations of a seed; ``kinds``: how often each is drawn, as against the others."""
    choice = random.Random(seed)
    drawn = choice.choices(list(kinds), list(kinds.values()), k=count)
    return [Operation(what, *(choice.getrandbits(30) for _ in range(3))) for what in drawn]


class World(Protocol):
    """What operations are done to; they must make sense in any state."""

    def apply(self, operation: Any) -> None:
        """Do one, and raise if anything is then not as it should be."""
        ...

    def finish(self) -> None:
        """The same after the last one."""
        ...


def shrink(
    operations: Sequence[T], fails: Callable[[Sequence[T]], bool], *, tries: int = 3000, seconds: float = SECONDS
) -> list[T]:
    """A shorter list that still fails; larger pieces are tried first.

    Args:
        fails: True if running the operations from the start fails.
        tries: how often at most.
        seconds: how long at most, of processor time.
    """
    kept = list(operations)
    until = time.process_time() + seconds
    size = len(kept) // 2
    while size and tries > 0:
        start = 0
        while start < len(kept) and tries > 0 and time.process_time() < until:
            tries -= 1
            shorter = kept[:start] + kept[start + size :]
            if fails(shorter):
                kept = shorter
            else:
                start += size
        size //= 2
    return kept


def error_of(world: Callable[[], World], operations: Sequence[Any]) -> tuple[int, Exception] | None:
    """(how many operations it took, what went wrong) when they are done from the start, or None."""
    done = 0
    try:
        told = world()
        for operation in operations:
            done += 1
            told.apply(operation)
        told.finish()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return done, error
    return None


def failure(seed: int, world: Callable[[], World], operations: Sequence[Any], kind: type[Exception]) -> dict[str, Any]:
    """A failure's record, printed too: the seed, the error, and the shortest trace that still raises that kind."""

    def fails(some: Sequence[Any]) -> bool:
        found = error_of(world, some)
        return found is not None and type(found[1]) is kind

    short = shrink(operations, fails)
    found = error_of(world, short)
    error = "not again" if found is None else f"{kind.__name__}: {found[1]}"[:2000]
    print(f"seed {seed}: {error}", *short, sep="\n  ")
    return {"seed": seed, "error": error, "trace": [str(each) for each in short]}


def run_all(
    seed: int, world: Callable[[], World], operations: Sequence[Any]
) -> tuple[World | None, list[dict[str, Any]]]:
    """(the world after all operations, no failures), or (None, the failure with its shrunk trace)."""
    made: list[World] = []

    def remembered() -> World:
        made.append(world())
        return made[-1]

    found = error_of(remembered, operations)
    if found is None:
        return made[0], []
    done, error = found
    return None, [failure(seed, world, operations[:done], type(error))]
