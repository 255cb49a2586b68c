"""A verb of the backend that fails, whichever: every row is as before, or the request is lost and says so."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scene
import stories
from scene import numbered

import kvcore
from kvcore.errors import RequestError
from kvcore.spec import CacheSpec

WRITERS = (
    "append_",
    "flush",
    "store_",
    "restore_ring",
    "read_ring",
    "copy_",
    "reset_slots",
    "poison",
    "index",
    "gather_rows",
)

SPEC = CacheSpec(
    layers=[scene.ring(5), scene.ring(5), scene.compressed(4, window=3, indexer=False), scene.classic()],
    block_tokens=4,
    name="faulty",
)
OLD, OTHER, NEW = list(range(9)), list(range(100, 106)), list(range(200, 207))


class Faulty:
    """A backend's verbs, of which those calls fail whose numbers are given; before the work is done, or after it."""

    def __init__(self, ops: Any, fails: Callable[[int, str], bool] = lambda *_: False, *, late: bool = False) -> None:
        self.calls: list[str] = []
        self._ops = ops
        self._fails = fails
        self._late = late

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._ops, name)
        if not name.startswith(WRITERS):
            return verb

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            failing = self._fails(len(self.calls), name)
            # A backend that gives its arrays away has none to give back once it is done.
            if failing and not (self._late and self._ops.in_place):
                raise MemoryError(name)
            found = verb(*args, **kwargs)
            if failing:
                raise MemoryError(name)
            return found

        return call


def world(backend: str) -> tuple[kvcore.Cache, kvcore.Request, kvcore.Request]:
    cache = stories.create(SPEC, backend, prefix="full", max_requests=5)
    a, b = cache.admit(), cache.admit()
    stories.tell(cache, {a: OLD, b: OTHER})
    return cache, a, b


VERBS: dict[str, Callable[[kvcore.Cache, kvcore.Request], Any]] = {
    "a long step": lambda cache, a: stories.tell(cache, {a: NEW}),
    "a decode step": lambda cache, a: stories.tell(cache, {a: [200]}),
    "fork": lambda cache, a: cache.fork(a),
    "admit": lambda cache, _: cache.admit(OLD),
    "release": lambda cache, a: cache.release(a),
    "truncate": lambda cache, a: cache.truncate(a, 9),
    "checkpoint": lambda cache, a: cache.checkpoint(a),
    "import_request": lambda cache, a: cache.import_request(cache.export_request(a)),
    "import_request into": lambda cache, a: cache.import_request(cache.export_request(a), into=cache.admit()),
}


def told(cache: kvcore.Cache) -> dict[int, Any]:
    live = cache.requests
    found = cache.exclusive("digest", lambda state: state.digest_lanes(live))
    return {request.id: lanes for request, lanes in zip(live, found, strict=True)}


def check_one_fault(backend: str, verb: str, *, late: bool) -> None:
    """Each call that a verb makes to the backend fails once: nothing has happened, and everything can be released."""
    cache, a, _ = world(backend)
    real = cache._state.ops
    cache._state.ops = counting = Faulty(real)
    VERBS[verb](cache, a)
    for n in range(1, len(counting.calls) + 1):
        cache, a, b = world(backend)
        before, free, real = told(cache), (cache.free_slots, cache.free_blocks), cache._state.ops
        cache._state.ops = Faulty(real, lambda call, _, n=n: call == n, late=late)
        with pytest.raises(MemoryError):
            VERBS[verb](cache, a)
        cache._state.ops = real
        after = told(cache)
        assert after[b.id] == before[b.id]
        if a in cache.requests:
            assert after[a.id] == before[a.id], counting.calls[n - 1]
        for request in cache.requests:
            cache.release(request)
        assert (cache.free_slots, cache.free_blocks) == (5, cache.plan.blocks), (counting.calls[n - 1], free)


def a_long_step(cache: kvcore.Cache, request: kvcore.Request, fails: Callable[[int, str], bool]) -> None:
    """Seven tokens for two rings of five, whose rows wait for the commit."""
    real = cache._state.ops
    cache._state.ops = Faulty(real, fails)
    try:
        with cache.step({request: 7}) as step:
            for layer in range(2):
                step.layer(layer).append_window(cache.asarray(np.full((7, scene.DIM), 50, np.float32)))
    finally:
        cache._state.ops = real


def nth(name: str, number: int) -> Callable[[int, str], bool]:
    """Whether a call is the n-th of that name, or a later one."""
    calls = []

    def fails(_: int, called: str) -> bool:
        calls.extend([called] if called == name else [])
        return called == name and len(calls) >= number

    return fails


def check_a_commit(backend: str) -> None:
    """The second layer's write fails after the first layer's ring was overwritten."""
    cache = scene.create([scene.ring(5), scene.ring(5)], backend)
    a = cache.admit()
    scene.write(cache, {a: range(9)})
    before = cache.digest()
    with pytest.raises(MemoryError):
        a_long_step(cache, a, nth("append_window", 2))
    assert (a.length, cache.digest()) == (9, before)
    for layer in range(2):
        assert scene.read(cache, scene.window_of, a, layer=layer) == [numbered(4, 8)]


def check_a_loss(backend: str) -> None:
    """The device fails, and goes on failing when the rows are put back."""
    cache = scene.create([scene.ring(5), scene.ring(5)], backend)
    a, b = cache.admit(), cache.admit()
    scene.write(cache, {a: range(9), b: range(20, 26)})
    other = cache.digest([b])
    second = nth("append_window", 2)

    def fails(call: int, name: str) -> bool:
        return second(call, name) or name == "restore_ring"

    with pytest.raises(MemoryError):
        a_long_step(cache, a, fails)
    # The step's handles still have the device that fails, when the next verb tries to put the rows back.
    assert cache.digest([b]) == other
    uses: list[Callable[[], Any]] = [
        lambda: a.length,
        lambda: cache.step({a: 1}),
        lambda: cache.fork(a),
        lambda: cache.truncate(a, 3),
        lambda: cache.export_request(a),
        lambda: cache.digest([a]),
        lambda: cache.digest(),
    ]
    for use in uses:
        with pytest.raises(RequestError, match="lost"):
            use()
    assert repr(a) == f"Request({a.id}, lost)"
    cache.release(a)
    scene.write(cache, {b: [26]})
    assert scene.read(cache, scene.window_of, b) == [{p: p + 20.0 for p in range(2, 7)}]
    fresh = cache.admit()
    scene.write(cache, {fresh: range(3)})
    assert scene.read(cache, scene.window_of, fresh) == [numbered(0, 2)]
