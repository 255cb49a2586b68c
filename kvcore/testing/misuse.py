"""The misuses that every backend must survive: what is wrong, the error that says so, and the check of one misuse.

No ``assert`` here: the checks hold under ``python -O`` too.
"""

# ruff: noqa: ARG005 - the cases of a table share one signature

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kvcore import errors
from kvcore.arrays import to_numpy
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
from kvcore.requests.manager import Request
from kvcore.spec import FORMATS
from kvcore.testing.tagged_rows import feed, fill, life_spec

INDEXED, PLAIN, STORED, PAGED, RING = range(5)
"""Layers of ``life_spec``: with an indexer, without, with entries from the caller, classic paged, classic ring."""

DIM = 32
TOKENS = 4
"""Rows of the step in which verbs are misused: three of ``a``, which overwrite what counts, and one of ``b``."""

BUILT_IN: dict[type[KvcoreError], type[Exception]] = {
    errors.SpecError: ValueError,
    ShapeError: ValueError,
    RequestError: ValueError,
    RollbackError: ValueError,
    SnapshotError: ValueError,
    NonFiniteError: ValueError,
    StepError: RuntimeError,
    errors.BackendError: RuntimeError,
    OutOfBlocks: MemoryError,
    OutOfSlots: MemoryError,
}
"""Error -> the built-in one that it is as well."""


class World:
    """A cache in use: ``a`` with 11 tokens, ``b`` with 3, one request that was released, one of another cache.

    Whoever misuses another spec overrides ``make``, ``elsewhere``, ``write``, ``both`` and ``fill``.
    """

    def __init__(self, backend: str, device: str | None = None, *, check: bool = False) -> None:
        self.backend, self.device, self.check = backend, device, check
        self.cache = self.make(3, 48)
        self.stale = self.cache.admit()
        self.cache.release(self.stale)
        self.a, self.b = self.cache.admit(), self.cache.admit()
        self.write()
        self.other = self.elsewhere()
        self.foreign = self.other.admit()

    def make(self, requests: int, tokens: int) -> Cache:
        """A cache of the spec that is misused."""
        return create_cache(
            life_spec(),
            backend=self.backend,
            device=None if self.backend == "reference" else self.device,
            max_requests=requests,
            max_tokens=tokens,
            max_draft_tokens=2,
            check=self.check,
        )

    def elsewhere(self) -> Cache:
        """Another cache, whose requests this one does not know."""
        return self.make(1, 8)

    def write(self) -> None:
        """Give both requests their tokens."""
        feed(self.cache, {self.a: [1] * 11, self.b: [2] * 3})

    def fill(self, step: Step) -> None:
        """The rows of a good step of ``both``."""
        fill(step, [[3] * 3, [4]])

    @property
    def both(self) -> dict[Request, int]:
        """Tokens of a step to be misused; more of ``a`` than spare rows, so that its rings lose what counts."""
        return {self.a: 3, self.b: 1}

    def proceed(self, first: Callable[[Step], object] | None = None) -> int:
        """A good step, and what the cache holds after it; ``first`` is done in the step before anything else."""
        with self.cache.step(self.both) as step:
            if first is not None:
                first(step)
            self.fill(step)
        return self.cache.digest([self.a, self.b])

    def undisturbed(self) -> int:
        """The same where nobody did anything wrong."""
        return type(self)(self.backend, self.device, check=self.check).proceed()

    def content(self) -> dict[str, bytes]:
        """Every byte of the cache, by pool."""
        return {name: to_numpy(array).tobytes() for name, array in self.cache.pools.items()}

    def state(self) -> dict[str, Any]:
        """All that a refused call must leave alone."""
        cache = self.cache
        return {
            "digest": cache.digest(),
            "bytes": self.content(),
            "free": (cache.free_slots, cache.free_blocks),
            "requests": [(r, r.id, r.slot, r.generation, r.length, r.blocks, r.tokens) for r in cache.requests],
            "formats": list(FORMATS),
        }


class Case(NamedTuple):
    """One misuse.

    Attributes:
        name: in plain words.
        error: what it must raise.
        call: the misuse; takes the world, or (step, world) inside a step.
        prepare: legitimate calls before it, with the same arguments.
        check: on a cache with ``check=True``.
        ends_step: the call ends the step whatever happens (commit, abort).
        tokens: of the step, instead of ``world.both``.
    """

    name: str
    error: type[KvcoreError]
    call: Callable[..., object]
    prepare: Callable[..., object] | None = None
    check: bool = False
    ends_step: bool = False
    tokens: Callable[[Any], Mapping[Any, Any]] | None = None


class Violation(AssertionError):
    """A misuse that was not answered as promised."""


def require(condition: bool, what: str) -> None:
    """Raise unless ``condition`` holds, also under ``python -O``."""
    if not condition:
        raise Violation(what)


def refused(case: Case, *arguments: object) -> None:
    """Make the call; it must raise exactly the error of the case, with its parts in the text."""
    try:
        case.call(*arguments)
    except KvcoreError as error:
        require(type(error) is case.error, f"raised {error!r} instead of {case.error.__name__}")
        require(isinstance(error, BUILT_IN[case.error]), "is not the built-in error that fits")
        for part in ("got", "where", "allowed"):
            text = getattr(error, part)
            require(isinstance(text, str) and bool(text.strip()), f"{part} is empty")
            require(text in str(error), f"{part} is not in the message")
        require(error.hint in str(error), "the hint is not in the message")
        return
    except Exception as error:
        raise Violation(f"raised {type(error).__name__}: {error}, which is not one of kvcore's errors") from error
    raise Violation("was accepted")


def check_at_rest(case: Case, world: World) -> None:
    """A misuse between steps."""
    if case.prepare is not None:
        case.prepare(world)
    before = world.state()
    refused(case, world)
    _unchanged(before, world.state())
    require(world.proceed() == world.undisturbed(), "a good step afterwards gave something else")


def check_in_step(case: Case, world: World) -> None:
    """A misuse inside a step: no byte moves, the step rolls back, and a good step afterwards works.

    Where the misuse comes alone the good step begins with it again: the caller may catch the error and go on.
    """
    before = world.state()
    step = world.cache.step(world.both if case.tokens is None else case.tokens(world))
    if case.prepare is not None:
        case.prepare(step, world)
    inside = world.content(), world.cache.free_blocks
    refused(case, step, world)
    if not case.ends_step:
        require((world.content(), world.cache.free_blocks) == inside, "bytes changed inside the step")
        step.abort()
    after = world.state()
    if case.prepare is not None:
        # What was rightly written before lies beyond the lengths, where nothing reads it.
        before["bytes"] = after["bytes"]
    _unchanged(before, after)
    alone = case.prepare is None and case.tokens is None and not case.ends_step
    found = world.proceed(first=lambda step: refused(case, step, world)) if alone else world.proceed()
    require(found == world.undisturbed(), "a good step afterwards gave something else")


def _unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Compare two states part by part."""
    for part, value in before.items():
        require(after[part] == value, f"{part} changed")


def array(*shape: int, dtype: Any = np.float32, last: float = 1.0) -> np.ndarray:
    """Ones, and another value in the last place."""
    found = np.ones(shape, dtype)
    found[(-1,) * len(shape)] = last
    return found


def damaged(blob: bytes) -> bytes:
    """One bit in the middle of a blob the other way round."""
    middle = len(blob) // 2
    return blob[:middle] + bytes([blob[middle] ^ 1]) + blob[middle + 1 :]


BETWEEN_STEPS = [
    Case("a step of a released request", RequestError, lambda w: w.cache.step({w.a: 1, w.stale: 1})),
    Case("a step of another cache's request", RequestError, lambda w: w.cache.step({w.a: 1, w.foreign: 1})),
    Case("a negative count", ShapeError, lambda w: w.cache.step({w.a: 1, w.b: -1})),
    Case("a count that is no integer", ShapeError, lambda w: w.cache.step({w.a: 1.5})),
    Case("fewer padding rows than tokens", ShapeError, lambda w: w.cache.step({w.a: 2, w.b: 1}, pad_tokens=2)),
    Case("more tokens than the blocks hold", OutOfBlocks, lambda w: w.cache.step({w.a: 1, w.b: 45})),
    Case("more requests than slots", OutOfSlots, lambda w: w.cache.admit(), prepare=lambda w: w.cache.admit()),
    Case("a length beyond what was written", RollbackError, lambda w: w.cache.truncate(w.a, 12)),
    Case("a rollback deeper than the rings hold", RollbackError, lambda w: w.cache.truncate(w.a, 2)),
    Case("a release of a released request", RequestError, lambda w: w.cache.release(w.stale)),
    Case("a fork of another cache's request", RequestError, lambda w: w.cache.fork(w.foreign)),
    Case("a digest of a released request", RequestError, lambda w: w.cache.digest([w.a, w.stale])),
    Case(
        "a blob with one bit flipped",
        SnapshotError,
        lambda w: w.cache.import_request(damaged(w.cache.export_request(w.a))),
    ),
    Case(
        "half a blob",
        SnapshotError,
        lambda w: w.cache.import_request(w.cache.export_request(w.a)[: len(w.cache.export_request(w.a)) // 2]),
    ),
    Case(
        "a blob into a request that has tokens",
        RequestError,
        lambda w: w.cache.import_request(w.cache.export_request(w.a), w.b),
    ),
]

IN_A_STEP = [
    Case("a second step", StepError, lambda step, w: w.cache.step({w.a: 1})),
    Case("a release during a step", StepError, lambda step, w: w.cache.release(w.a)),
    Case("a layer that there is not", ShapeError, lambda step, w: step.layer(99)),
    Case(
        "window rows: one too few",
        ShapeError,
        lambda step, w: step.layer(PLAIN).append_window(array(TOKENS - 1, DIM)),
    ),
    Case(
        "window rows: one channel more",
        ShapeError,
        lambda step, w: step.layer(PLAIN).append_window(array(TOKENS, DIM + 1)),
    ),
    Case(
        "window rows: integers",
        ShapeError,
        lambda step, w: step.layer(PLAIN).append_window(array(TOKENS, DIM, dtype=np.int32)),
    ),
    Case(
        "window rows: fp64",
        ShapeError,
        lambda step, w: step.layer(PLAIN).append_window(array(TOKENS, DIM, dtype=np.float64)),
    ),
    Case(
        "window rows: a list",
        ShapeError,
        lambda step, w: step.layer(PLAIN).append_window(array(TOKENS, DIM).tolist()),
    ),
    Case(
        "tail scores: another width",
        ShapeError,
        lambda step, w: step.layer(PLAIN).append_tail(array(TOKENS, DIM), array(TOKENS, DIM - 1)),
    ),
    Case(
        "keys: heads missing",
        ShapeError,
        lambda step, w: step.layer(PAGED).append_kv(array(TOKENS, 1, 8), array(TOKENS, 2, 8)),
    ),
    Case(
        "entries: more than close",
        ShapeError,
        lambda step, w: step.layer(STORED).store_entries(array(TOKENS + 4, DIM)),
    ),
    Case("indices: floats", ShapeError, lambda step, w: step.layer(STORED).gather_entries(array(TOKENS, 2))),
    Case(
        "window rows on a classic layer",
        StepError,
        lambda step, w: step.layer(PAGED).append_window(array(TOKENS, DIM)),
    ),
    Case("a flush before the tail's rows", StepError, lambda step, w: step.layer(PLAIN).flush()),
    Case(
        "an indexer's scores without an indexer",
        StepError,
        lambda step, w: step.layer(PLAIN).index_scores(array(TOKENS, 2, 16), array(TOKENS, 2)),
    ),
    Case(
        "a commit without all rows",
        StepError,
        lambda step, w: step.commit(),
        prepare=lambda step, w: step.layer(STORED).append_window(array(TOKENS, DIM)),
        ends_step=True,
    ),
    Case(
        "NaN in a window row",
        NonFiniteError,
        lambda step, w: step.layer(PLAIN).append_window(array(TOKENS, DIM, last=np.nan)),
        check=True,
    ),
    Case(
        "infinity in a key",
        NonFiniteError,
        lambda step, w: step.layer(RING).append_kv(array(TOKENS, 2, 8, last=np.inf), array(TOKENS, 2, 8)),
        check=True,
    ),
]
