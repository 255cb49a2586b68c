"""The misuses that every backend must survive: what is wrong, and the error that says so."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvcore.cache import Cache, Step, create_cache
from kvcore.errors import (
    KvcoreError,
    NonFiniteError,
    OutOfBlocks,
    OutOfSlots,
    RequestError,
    RollbackError,
    ShapeError,
    SnapshotError,
    StepError,
)
from kvcore.testing.tagged_rows import feed, life_spec

INDEXED, PLAIN, STORED, PAGED, RING = range(5)
"""Layers of ``life_spec``: with an indexer, without, with entries from the caller, classic paged, classic ring."""

DIM = 32
TOKENS = 4
"""Rows of the step in which verbs are misused: three of ``a``, which overwrite what counts, and one of ``b``."""


class Fixture:
    """A cache in use: ``a`` with 11 tokens, ``b`` with 3, one request that was released, one of another cache."""

    def __init__(self, backend: str, device: str | None, *, check: bool = False) -> None:
        def make(requests: int, tokens: int) -> Cache:
            return create_cache(
                life_spec(),
                backend=backend,
                device=None if backend == "reference" else device,
                max_requests=requests,
                max_tokens=tokens,
                max_draft_tokens=2,
                check=check,
            )

        self.cache = make(3, 48)
        self.stale = self.cache.admit()
        self.cache.release(self.stale)
        self.a, self.b = self.cache.admit(), self.cache.admit()
        feed(self.cache, {self.a: [1] * 11, self.b: [2] * 3})
        self.foreign = make(1, 8).admit()

    def open(self) -> Step:
        """A step of both requests, not yet filled."""
        return self.cache.step({self.a: 3, self.b: 1})

    def proceed(self) -> int:
        """A good step, and what the cache holds after it."""
        feed(self.cache, {self.a: [3] * 2, self.b: [4]})
        return self.cache.digest([self.a, self.b])

    def state(self) -> dict[str, Any]:
        """What a refused call leaves alone."""
        cache = self.cache
        held = [(request.id, request.slot, request.length, request.blocks) for request in cache.requests]
        return {"digest": cache.digest(), "requests": held, "free": (cache.free_slots, cache.free_blocks)}


class Misuse(NamedTuple):
    """One wrong call.

    Attributes:
        error: what it must raise.
        call: takes the fixture, or the fixture and its open step.
        check: on a cache with ``check=True``.
    """

    error: type[KvcoreError]
    call: Callable[..., object]
    check: bool = False


def array(*shape: int, dtype: Any = np.float32, last: float = 1.0) -> np.ndarray:
    """Ones, and another value in the last place."""
    found = np.ones(shape, dtype)
    found[(-1,) * len(shape)] = last
    return found


def fill_first(fixture: Fixture) -> None:
    """No slot is left."""
    fixture.cache.admit()
    fixture.cache.admit()


def damaged(blob: bytes) -> bytes:
    """One bit in the middle of a blob the other way round."""
    middle = len(blob) // 2
    return blob[:middle] + bytes([blob[middle] ^ 1]) + blob[middle + 1 :]


def commit_half(step: Step) -> None:
    """End a step that got rows for one layer only."""
    step.layer(STORED).append_window(array(TOKENS, DIM))
    step.commit()


BETWEEN_STEPS: dict[str, Misuse] = {
    "a step of a released request": Misuse(RequestError, lambda s: s.cache.step({s.a: 1, s.stale: 1})),
    "a step of another cache's request": Misuse(RequestError, lambda s: s.cache.step({s.a: 1, s.foreign: 1})),
    "a negative count": Misuse(ShapeError, lambda s: s.cache.step({s.a: 1, s.b: -1})),
    "a count that is no integer": Misuse(ShapeError, lambda s: s.cache.step({s.a: 1.5})),
    "fewer padding rows than tokens": Misuse(ShapeError, lambda s: s.cache.step({s.a: 2, s.b: 1}, pad_tokens=2)),
    "more tokens than the blocks hold": Misuse(OutOfBlocks, lambda s: s.cache.step({s.a: 1, s.b: 45})),
    "more requests than slots": Misuse(OutOfSlots, fill_first),
    "a length beyond what was written": Misuse(RollbackError, lambda s: s.cache.truncate(s.a, 12)),
    "a rollback deeper than the rings hold": Misuse(RollbackError, lambda s: s.cache.truncate(s.a, 2)),
    "a release of a released request": Misuse(RequestError, lambda s: s.cache.release(s.stale)),
    "a fork of another cache's request": Misuse(RequestError, lambda s: s.cache.fork(s.foreign)),
    "a digest of a released request": Misuse(RequestError, lambda s: s.cache.digest([s.a, s.stale])),
    "a blob with one bit flipped": Misuse(
        SnapshotError, lambda s: s.cache.import_request(damaged(s.cache.export_request(s.a)))
    ),
    "half a blob": Misuse(
        SnapshotError,
        lambda s: s.cache.import_request(s.cache.export_request(s.a)[: len(s.cache.export_request(s.a)) // 2]),
    ),
    "a blob into a request that has tokens": Misuse(
        RequestError, lambda s: s.cache.import_request(s.cache.export_request(s.a), s.b)
    ),
}

IN_A_STEP: dict[str, Misuse] = {
    "a second step": Misuse(StepError, lambda s, _: s.cache.step({s.a: 1})),
    "a release during a step": Misuse(StepError, lambda s, _: s.cache.release(s.a)),
    "a layer that there is not": Misuse(ShapeError, lambda _, step: step.layer(99)),
    "window rows: one too few": Misuse(
        ShapeError, lambda _, step: step.layer(PLAIN).append_window(array(TOKENS - 1, DIM))
    ),
    "window rows: one channel more": Misuse(
        ShapeError, lambda _, step: step.layer(PLAIN).append_window(array(TOKENS, DIM + 1))
    ),
    "window rows: integers": Misuse(
        ShapeError, lambda _, step: step.layer(PLAIN).append_window(array(TOKENS, DIM, dtype=np.int32))
    ),
    "window rows: fp64": Misuse(
        ShapeError, lambda _, step: step.layer(PLAIN).append_window(array(TOKENS, DIM, dtype=np.float64))
    ),
    "window rows: a list": Misuse(
        ShapeError, lambda _, step: step.layer(PLAIN).append_window(array(TOKENS, DIM).tolist())
    ),
    "tail scores: another width": Misuse(
        ShapeError, lambda _, step: step.layer(PLAIN).append_tail(array(TOKENS, DIM), array(TOKENS, DIM - 1))
    ),
    "keys: heads missing": Misuse(
        ShapeError, lambda _, step: step.layer(PAGED).append_kv(array(TOKENS, 1, 8), array(TOKENS, 2, 8))
    ),
    "entries: more than close": Misuse(
        ShapeError, lambda _, step: step.layer(STORED).store_entries(array(TOKENS + 4, DIM))
    ),
    "indices: floats": Misuse(ShapeError, lambda _, step: step.layer(STORED).gather_entries(array(TOKENS, 2))),
    "window rows on a classic layer": Misuse(
        StepError, lambda _, step: step.layer(PAGED).append_window(array(TOKENS, DIM))
    ),
    "a flush before the tail's rows": Misuse(StepError, lambda _, step: step.layer(PLAIN).flush()),
    "an indexer's scores without an indexer": Misuse(
        StepError, lambda _, step: step.layer(PLAIN).index_scores(array(TOKENS, 2, 16), array(TOKENS, 2))
    ),
    "a commit without all rows": Misuse(StepError, lambda _, step: commit_half(step)),
    "NaN in a window row": Misuse(
        NonFiniteError, lambda _, step: step.layer(PLAIN).append_window(array(TOKENS, DIM, last=np.nan)), check=True
    ),
    "infinity in a key": Misuse(
        NonFiniteError,
        lambda _, step: step.layer(RING).append_kv(array(TOKENS, 2, 8, last=np.inf), array(TOKENS, 2, 8)),
        check=True,
    ),
}
