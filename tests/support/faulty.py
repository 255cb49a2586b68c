"""A verb of the backend that fails, whichever: every row is as before, or the request is lost and says so."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.errors import RequestError
from kvcore.ops.fused import FUSED, REQUIRED
from kvcore.spec import CacheSpec, Rope
from tests.support import scene, stories, version_1
from tests.support.scene import numbered

NOT_PLANTED = {
    **dict.fromkeys(
        (
            "encode",
            "decode",
            "pack_page",
            "unpack_page",
            "from_batch",
            "to_batch",
            "attend_kv",
        ),
        "a handle does not call it by that name, and who calls it as a function has pools that nobody replaced",
    ),
    **dict.fromkeys(("how", "explain"), "says what there is, and is given no pools"),
    "allocate": "before there is a cache",
    "rotated_rows": "given no pools, on the way to verbs that are planted",
    "store_entries": "its step stores what others compressed, like the steps that flush",
    "join": "the two arrays of a tail side by side, on the way to verbs that are planted",
    "asarray": "an array that is handed over, before every verb that is planted",
    **dict.fromkeys(
        ("append_state", "write_state", "select_state", "read_state", "append_conv", "gather_conv"),
        "of recurrent layers, whose rings a step writes like windows, which are planted",
    ),
    "move_strips": "pages of a hand-off: a file of its own is about peers that fail",
    "digest_strips": "pages of a hand-off, likewise",
}
"""Verbs of a backend that no fault is planted at, and why; at all others of the Protocol one is."""

PLANTED = sorted({*REQUIRED, *FUSED} - set(NOT_PLANTED))

SPEC = CacheSpec(
    layers=[scene.ring(5), scene.ring(5), scene.compressed(4, window=3), scene.classic(heads=1)],
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
        # What keeps the tables of padded steps is their index under another name.
        name = "padded_index" if name == "kept_index" else name
        if name not in PLANTED:
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


def plant(cache: kvcore.Cache, ops: Any) -> None:
    """Let a cache, and its functional verbs, call those of a backend."""
    cache._state.ops = ops
    vars(cache.ops)["_verbs"] = ops


def world(backend: str) -> tuple[kvcore.Cache, kvcore.Request, kvcore.Request]:
    cache = stories.create(SPEC, backend, prefix="full", max_requests=5)
    a, b = cache.admit(), cache.admit()
    stories.tell(cache, {a: OLD, b: OTHER})
    return cache, a, b


def read_all(cache: kvcore.Cache, request: kvcore.Request) -> None:
    """A long step in which everything is read that a layer has."""
    with cache.step({request: NEW}) as step:
        stories.feed(step, NEW)
        queries = cache.asarray(np.ones((len(NEW), 2, scene.DIM), np.float32))
        step.layer(0).gather_window()
        step.layer(0).gather_rows("window")
        step.layer(0).attend(queries)
        latent, classic = step.layer(2), step.layer(3)
        latent.closed  # noqa: B018 - asks the backend
        latent.gather_all_entries()
        latent.gather_all_index_keys()
        picks = latent.select(latent.index_scores(queries, cache.asarray(np.ones((len(NEW), 2), np.float32))), 2)
        latent.index_select(queries, cache.asarray(np.ones((len(NEW), 2), np.float32)))
        latent.gather_entries(picks)
        latent.attend(queries, picks)
        classic.gather_kv()
        classic.kv_view()
        classic.mask()
        classic.visible_rows()
        classic.attend(cache.asarray(np.ones((len(NEW), 1, 4), np.float32)))


def append_and_read(cache: kvcore.Cache, request: kvcore.Request) -> None:
    """A padded step: latents before they are flushed, and keys that are lent as they are appended."""
    with cache.step({request: [200]}, pad_tokens=2, pad_requests=2) as step:
        rows = {width: cache.asarray(np.ones((2, width), np.float32)) for width in (8, 16)}
        step.layer(0).append_window(rows[8], rope=Rope(dim=4, theta=1e4))
        for layer in (1, 2):
            step.layer(layer).append_window(rows[8])
        latent = step.layer(2)
        latent.append_tail(rows[16], rows[16])
        latent.append_index_tail(rows[16], rows[16])
        latent.compress()
        latent.flush()
        keys, values = (cache.asarray(np.ones((2, 1, width), np.float32)) for width in (4, 6))
        step.layer(3).append_kv_view(keys, values)


def undo(cache: kvcore.Cache, request: kvcore.Request) -> None:
    """A step that overwrites rows at once, and is given up."""
    with cache.step({request: [200]}) as step:
        stories.feed(step, [200])
        step.abort()


def part(cache: kvcore.Cache, request: kvcore.Request) -> None:
    """A fork goes on in the block that it shares."""
    stories.tell(cache, {cache.fork(request): [201]})


VERBS: dict[str, Callable[[kvcore.Cache, kvcore.Request], Any]] = {
    "a long step": lambda cache, a: stories.tell(cache, {a: NEW}),
    "a decode step": lambda cache, a: stories.tell(cache, {a: [200]}),
    "a step that reads": read_all,
    "a padded step": append_and_read,
    "a step that is given up": undo,
    "a step of a fork": part,
    "fork": lambda cache, a: cache.fork(a),
    "admit": lambda cache, _: cache.admit(OLD),
    "release": lambda cache, a: cache.release(a),
    "truncate": lambda cache, a: cache.truncate(a, 9),
    "checkpoint": lambda cache, a: cache.checkpoint(a),
    "import_request": lambda cache, a: cache.import_request(cache.export_request(a)),
    "import_request of 0.1.0": lambda cache, a: cache.import_request(version_1.blob(cache, a)),
    "import_request into": lambda cache, a: cache.import_request(cache.export_request(a), into=cache.admit()),
}


def planted_calls(backend: str) -> set[str]:
    """Names of all calls that the verbs here make, at each of which a fault is planted."""
    called: set[str] = set()
    for verb in VERBS.values():
        cache, a, _ = world(backend)
        real = cache._state.ops
        plant(cache, counting := Faulty(real))
        verb(cache, a)
        called |= set(counting.calls)
    return called


def told(cache: kvcore.Cache) -> dict[int, Any]:
    live = cache.requests
    found = cache.exclusive("digest", lambda state: state.digest_lanes(live))
    return {request.id: lanes for request, lanes in zip(live, found, strict=True)}


def check_one_fault(backend: str, verb: str, *, late: bool) -> None:
    """Each call that a verb makes to the backend fails once: nothing has happened, and everything can be released."""
    cache, a, _ = world(backend)
    real = cache._state.ops
    plant(cache, counting := Faulty(real))
    VERBS[verb](cache, a)
    for n in range(1, len(counting.calls) + 1):
        cache, a, b = world(backend)
        before, free, real = told(cache), (cache.free_slots, cache.free_blocks), cache._state.ops
        plant(cache, Faulty(real, lambda call, _, n=n: call == n, late=late))
        with pytest.raises(MemoryError):
            VERBS[verb](cache, a)
        plant(cache, real)
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
    plant(cache, Faulty(real, fails))
    try:
        with cache.step({request: 7}) as step:
            for layer in range(2):
                step.layer(layer).append_window(cache.asarray(np.full((7, scene.DIM), 50, np.float32)))
    finally:
        plant(cache, real)


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
