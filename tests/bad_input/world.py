"""A small cache in use, what must not change when it is misused, and the check of one misuse.

No ``assert`` here: the whole catalogue also runs under ``python -O``.
"""

from collections.abc import Callable, Mapping
from functools import cache as memoise
from typing import Any, NamedTuple

import numpy as np

import kvcore
from kvcore import errors
from kvcore.spec import FORMATS, CacheSpec, Entries, IndexKeys, LayerSpec, Window
from tests.support import scene

BUILT_IN = {
    errors.SpecError: ValueError,
    errors.ShapeError: ValueError,
    errors.RequestError: ValueError,
    errors.RollbackError: ValueError,
    errors.SnapshotError: ValueError,
    errors.NonFiniteError: ValueError,
    errors.StepError: RuntimeError,
    errors.BackendError: RuntimeError,
    errors.OutOfBlocks: MemoryError,
    errors.OutOfSlots: MemoryError,
}

# Numbers of the layers below.
CSA, HCA, OWNER, SHARED, PAGED, SLIDING, SLOT, RING, FP16, FP4 = range(10)


def _pool(share: int | None) -> LayerSpec:
    return LayerSpec(
        window=Window(dim=8, window=4, format="bf16"),
        entries=Entries(dim=8, ratio=2, format="fp32", share=share),
        index_keys=IndexKeys(dim=8, ratio=2, heads=2, topk=2, format="fp32", share=share),
    )


SPEC = CacheSpec(
    layers=[
        scene.compressed(4),
        scene.compressed(4, overlap=False, indexer=False),
        _pool(None),
        _pool(OWNER),
        scene.classic(),
        scene.classic("ring", window=4),
        scene.classic("slot"),
        scene.ring(4),
        scene.ring(4, format="fp16"),
        scene.stored(4, format="v41_fp4_288", dim=512),
    ],
    block_tokens=4,
    name="misused",
)


class World:
    """Requests ``a`` (11 tokens) and ``b`` (3), one released, one of another cache."""

    def __init__(self, backend: str, *, check: bool = False, rollback: int = 2) -> None:
        # One layout, so that the names of pools are the same on every backend.
        sizes = {"max_requests": 3, "max_tokens": 48, "max_draft_tokens": rollback, "check": check, "layout": "packed"}
        self.backend = backend
        self.cache = scene.create(SPEC, backend, **sizes)
        self.stale = self.cache.admit()
        self.cache.release(self.stale)
        self.a, self.b = self.cache.admit(), self.cache.admit()
        scene.write(self.cache, {self.a: range(11), self.b: range(100, 103)})
        self.other = scene.create([scene.ring(2)], backend)
        self.foreign = self.other.admit()

    @property
    def both(self) -> dict[kvcore.Request, int]:
        """Tokens of the step that verbs are misused in: three in all, one entry closes for each request."""
        return {self.a: 2, self.b: 1}

    def proceed(self, first: Callable[[Any], object] | None = None) -> int:
        """A good step, and what the cache holds after it; ``first`` is done in the step before anything else."""
        with self.cache.step(self.both) as step:
            if first is not None:
                first(step)
            scene.fill(step, [11, 12, 103])
        return self.cache.digest([self.a, self.b])

    def state(self) -> dict[str, Any]:
        """All that a refused call must leave alone."""
        cache = self.cache
        return {
            "digest": cache.digest(),
            "bytes": scene.raw(cache),
            "free": (cache.free_slots, cache.free_blocks),
            "requests": [(r, r.id, r.slot, r.generation, r.length, r.blocks, r.tokens) for r in cache.requests],
            "formats": list(FORMATS),
        }


@memoise
def undisturbed(*, check: bool) -> int:
    """The digest after ``proceed`` where nothing went wrong; the same on every backend."""
    return World("reference", check=check).proceed()


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
    error: type[errors.KvcoreError]
    call: Callable[..., object]
    prepare: Callable[..., object] | None = None
    check: bool = False
    ends_step: bool = False
    tokens: Callable[[World], Mapping[Any, Any]] | None = None


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """An array of ones."""
    return np.ones(shape, dtype)


class Violation(Exception):
    """A misuse that was not answered as promised."""


def require(condition: bool, what: str) -> None:
    """Raise unless ``condition`` holds, also under ``python -O``."""
    if not condition:
        raise Violation(what)


def refused(case: Case, *arguments: object) -> None:
    """Make the call; it must raise exactly the error of the case, with its parts in the text."""
    try:
        case.call(*arguments)
    except errors.KvcoreError as error:
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


def check_building(case: Case) -> None:
    """A misuse that needs no cache; the registry of formats is all there is to change."""
    before = dict(FORMATS)
    refused(case)
    require(dict(FORMATS) == before, "the formats changed")


def check_at_rest(case: Case, backend: str) -> None:
    """A misuse between steps."""
    world = World(backend, check=case.check)
    if case.prepare is not None:
        case.prepare(world)
    before = world.state()
    refused(case, world)
    unchanged(before, world.state())
    require(world.proceed() == undisturbed(check=case.check), "a good step afterwards gave something else")


def check_in_step(case: Case, backend: str) -> None:
    """A misuse inside a step: no byte moves, the step rolls back, and a good step afterwards works.

    Where the misuse comes alone the good step begins with it again: the caller may catch the error and go on.
    """
    world = World(backend, check=case.check)
    before = world.state()
    step = world.cache.step(world.both if case.tokens is None else case.tokens(world))
    if case.prepare is not None:
        case.prepare(step, world)
    inside = scene.raw(world.cache), world.cache.free_blocks
    refused(case, step, world)
    if not case.ends_step:
        require((scene.raw(world.cache), world.cache.free_blocks) == inside, "bytes changed inside the step")
        step.abort()
    after = world.state()
    if case.prepare is not None:
        # What was rightly written before lies beyond the lengths, where nothing reads it.
        before["bytes"] = after["bytes"]
    unchanged(before, after)
    alone = case.prepare is None and case.tokens is None and not case.ends_step
    found = world.proceed(first=lambda step: refused(case, step, world)) if alone else world.proceed()
    require(found == undisturbed(check=case.check), "a good step afterwards gave something else")


def unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Compare two states part by part."""
    for part, value in before.items():
        require(after[part] == value, f"{part} changed")
