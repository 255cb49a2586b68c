"""Verbs that a layer does not have, verbs out of turn, and steps that end without their rows."""

# ruff: noqa: ARG005 - the entries of a table share one signature

import numpy as np

from kvcore.errors import StepError
from tests.bad_input.world import CSA, HCA, OWNER, PAGED, RING, SHARED, SLIDING, SLOT, Case, World, ones
from tests.support import scene

T = 3


def _wrong_layer() -> list[Case]:
    """Verbs of components that the layer does not have."""
    calls = {
        "append_window on a classic layer": lambda s: s.layer(PAGED).append_window(ones(T, 8)),
        "append_tail on a window layer": lambda s: s.layer(RING).append_tail(ones(T, 8), ones(T, 8)),
        "append_index_tail without an indexer": lambda s: s.layer(HCA).append_index_tail(ones(T, 8), ones(T, 8)),
        "append_kv on a latent layer": lambda s: s.layer(CSA).append_kv(ones(T, 2, 4), ones(T, 2, 6)),
        "flush on a window layer": lambda s: s.layer(RING).flush(),
        "flush without a tail": lambda s: s.layer(OWNER).flush(),
        "flush on a layer that shares its pool": lambda s: s.layer(SHARED).flush(),
        "compress on a layer that shares its pool": lambda s: s.layer(SHARED).compress(),
        "compress without a tail": lambda s: s.layer(OWNER).compress(),
        "store_entries on a classic layer": lambda s: s.layer(SLOT).store_entries(ones(2, 8)),
        "store_entries on a layer that shares its pool": lambda s: s.layer(SHARED).store_entries(ones(2, 8)),
        "index keys without an indexer": lambda s: s.layer(HCA).store_entries(ones(2, 8), ones(2, 8)),
        "closed on a classic layer": lambda s: s.layer(PAGED).closed,
        "gather_window on a classic layer": lambda s: s.layer(PAGED).gather_window(),
        "gather_entries on a window layer": lambda s: s.layer(RING).gather_entries(ones(T, 1, dtype=np.int32)),
        "gather_all_entries on a classic layer": lambda s: s.layer(SLOT).gather_all_entries(),
        "gather_all_index_keys without an indexer": lambda s: s.layer(HCA).gather_all_index_keys(),
        "gather_kv on a latent layer": lambda s: s.layer(CSA).gather_kv(),
        "mask on a latent layer": lambda s: s.layer(RING).mask(),
        "index_scores without an indexer": lambda s: s.layer(HCA).index_scores(ones(T, 2, 8), ones(T, 2)),
        "window_view on a classic layer": lambda s: s.layer(SLIDING).window_view(),
        "entries_view on a window layer": lambda s: s.layer(RING).entries_view(),
        "indexer_view without an indexer": lambda s: s.layer(HCA).indexer_view(),
        "gather_rows of a role the layer lacks": lambda s: s.layer(CSA).gather_rows("kv"),
        "gather_rows of an unknown role": lambda s: s.layer(CSA).gather_rows("rows"),
        "gather_rows of a number": lambda s: s.layer(CSA).gather_rows(3),
        "gather_rows of a list": lambda s: s.layer(CSA).gather_rows(["window"]),
    }
    return [Case(name, StepError, lambda s, w, call=call: call(s)) for name, call in calls.items()]


def _turns() -> list[Case]:
    """Verbs, steps and life cycle out of turn."""
    append_tail = lambda s, w: s.layer(CSA).append_tail(ones(T, 16), ones(T, 16))  # noqa: E731
    append_kv = lambda s, w: s.layer(PAGED).append_kv(ones(T, 2, 4), ones(T, 2, 6))  # noqa: E731
    append_window = lambda s, w: s.layer(RING).append_window(ones(T, 8))  # noqa: E731
    verbs = {
        "flush before append_tail": (lambda s, w: s.layer(HCA).flush(), None),
        "flush before append_index_tail": (lambda s, w: s.layer(CSA).flush(), append_tail),
        "compress before append_tail": (lambda s, w: s.layer(HCA).compress(), None),
        "attend before append_window": (lambda s, w: s.layer(RING).attend(ones(T, 2, 8)), None),
        "attend before append_kv": (lambda s, w: s.layer(PAGED).attend(ones(T, 2, 4)), None),
        "index_scores before the keys": (lambda s, w: s.layer(OWNER).index_scores(ones(T, 2, 8), ones(T, 2)), None),
        "a second append_window": (append_window, append_window),
        "a second append_tail": (append_tail, append_tail),
        "a second append_kv": (append_kv, append_kv),
        "a step inside a step": (lambda s, w: w.cache.step({w.b: 1}), None),
        "an empty step inside a step": (lambda s, w: w.cache.step({}), None),
        "truncate inside a step": (lambda s, w: w.cache.truncate(w.a, 10), None),
        "release inside a step": (lambda s, w: w.cache.release(w.b), None),
        "release of an outsider inside a step": (lambda s, w: w.cache.release(w.a), None),
        "digest inside a step": (lambda s, w: w.cache.digest(), None),
        "fork inside a step": (lambda s, w: w.cache.fork(w.a), None),
        "export inside a step": (lambda s, w: w.cache.export_request(w.a), None),
        "save inside a step": (lambda s, w: w.cache.save("never-written.kv"), None),
        "checkpoint inside a step": (lambda s, w: w.cache.checkpoint(w.a), None),
    }
    return [Case(name, StepError, call, prepare) for name, (call, prepare) in verbs.items()]


def _fill_all_but(missing: int):
    """A legitimate step, except that one layer gets nothing."""

    def prepare(step, world: World) -> None:
        for number, layer in enumerate(world.cache.spec.layers):
            if number != missing:
                scene.fill_layer(step.layer(number), layer, np.arange(T, dtype=np.float32))

    return prepare


def _forget_to_flush(step, world: World) -> None:
    _fill_all_but(HCA)(step, world)
    step.layer(HCA).append_window(ones(T, 8))
    step.layer(HCA).append_tail(ones(T, 8), ones(T, 8))


def _ends() -> list[Case]:
    """Commits that miss something, and verbs after the end."""
    names = {CSA: "window and tail", OWNER: "window of a shared pool's owner", SHARED: "window of a sharing layer"}
    names |= {PAGED: "paged keys", SLIDING: "sliding keys", SLOT: "keys in a slot", RING: "window"}
    missing = [
        Case(f"commit without the {name}", StepError, lambda s, w: s.commit(), _fill_all_but(number), ends_step=True)
        for number, name in names.items()
    ]
    calls = {
        "layer": lambda s, w: s.layer(0),
        "commit": lambda s, w: s.commit(),
        "abort": lambda s, w: s.abort(),
        "with": lambda s, w: s.__enter__(),
        "append_window": lambda s, w: w.handle.append_window(ones(T, 8)),
        "gather_window": lambda s, w: w.handle.gather_window(),
        "attend": lambda s, w: w.handle.attend(ones(T, 2, 8)),
        "window_view": lambda s, w: w.handle.window_view(),
        "gather_rows": lambda s, w: w.handle.gather_rows("window"),
        "digest": lambda s, w: w.handle.digest(),
    }

    def end(step, world: World) -> None:
        world.handle = step.layer(RING)
        step.abort()

    return [
        *missing,
        Case("commit without anything", StepError, lambda s, w: s.commit(), ends_step=True),
        Case(
            "commit without a flush", StepError, lambda s, w: s.commit(), _forget_to_flush, check=True, ends_step=True
        ),
        *[Case(f"{name} after the end", StepError, call, end, ends_step=True) for name, call in calls.items()],
    ]


CASES = [
    *_wrong_layer(),
    *_turns(),
    *_ends(),
    Case(
        "window_view of a step longer than the spare rows",
        StepError,
        lambda s, w: s.layer(RING).window_view(),
        lambda s, w: s.layer(RING).append_window(ones(6, 8)),
        tokens=lambda w: {w.b: 6},
    ),
]
