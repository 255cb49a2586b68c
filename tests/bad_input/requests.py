"""Misuse of requests between steps: handles, lengths, counts and token ids."""

# ruff: noqa: ARG005 - the entries of a table share one signature

import numpy as np

from kvcore.errors import OutOfBlocks, OutOfSlots, RequestError, RollbackError, ShapeError
from tests.bad_input.world import Case, World
from tests.support import scene


def _counts() -> list[Case]:
    wrong = {
        "a fraction": 1.5,
        "a whole float": 2.0,
        "text": "2",
        "nothing": None,
        "a negative number": -1,
        "a boolean": True,
        "a NumPy float": np.float32(2),
        "a NumPy array of floats": np.ones(2, np.float32),
        "a zero-dimensional array": np.array(2.5),
        "ids with a negative one": [1, -5],
        "ids with a fraction": [1, 2.5],
        "ids with a boolean": [True],
        "ids with nothing": [None],
        "ids of ids": [[1, 2]],
        "two-dimensional ids": np.ones((2, 2), np.int32),
        "bytes": b"12",
        "a mapping": {1: 2},
        "a set": {1, 2},
    }
    cases = [
        Case(f"step count: {kind}", ShapeError, lambda w, value=value: w.cache.step({w.b: 1, w.a: value}))
        for kind, value in wrong.items()
    ]
    prompts = {kind: wrong[kind] for kind in ("text", "a fraction", "ids with a negative one", "ids with a fraction")}
    prompts |= {"an integer": 7, "two-dimensional ids": np.ones((2, 2), np.int32), "bytes": b"12"}
    return cases + [
        Case(f"admit tokens: {kind}", ShapeError, lambda w, value=value: w.cache.admit(value))
        for kind, value in prompts.items()
    ]


def _paddings() -> list[Case]:
    wrong = {"too small": 2, "text": "8", "a fraction": 8.5, "a boolean": True, "negative": -1}
    return [
        Case(
            f"{pad}: {kind}", ShapeError, lambda w, pad=pad, value=value: w.cache.step({w.a: 2, w.b: 1}, **{pad: value})
        )
        for pad in ("pad_tokens", "pad_requests")
        for kind, value in wrong.items()
        if (pad, kind) != ("pad_requests", "too small")
    ] + [Case("pad_requests: too small", ShapeError, lambda w: w.cache.step({w.a: 2, w.b: 1}, pad_requests=1))]


def _requests() -> list[Case]:
    wrong = {
        "released": lambda w: w.stale,
        "of another cache": lambda w: w.foreign,
        "nothing": lambda w: None,
        "a slot number": lambda w: 0,
        "text": lambda w: "request 0",
    }
    verbs = {
        "release": lambda w, r: w.cache.release(r),
        "truncate": lambda w, r: w.cache.truncate(r, 0),
        "digest": lambda w, r: w.cache.digest([w.a, r]),
        "step": lambda w, r: w.cache.step({w.a: 3, r: 1}),
        "fork": lambda w, r: w.cache.fork(r),
        "export": lambda w, r: w.cache.export_request(r),
        "checkpoint": lambda w, r: w.cache.checkpoint(r),
        "save": lambda w, r: w.cache.save("never-written.kv", [w.a, r]),
        "import into": lambda w, r: w.cache.import_request(w.cache.export_request(w.a), r),
    }
    skipped = {("import into", "nothing")}  # None is its default: a new request
    cases = [
        Case(f"{verb} of a request that is {kind}", RequestError, lambda w, call=call, pick=pick: call(w, pick(w)))
        for verb, call in verbs.items()
        for kind, pick in wrong.items()
        if (verb, kind) not in skipped
    ]
    fields = ("slot", "generation", "length", "cached_tokens", "blocks", "tokens")
    return cases + [
        Case(f"{field} of a released request", RequestError, lambda w, field=field: getattr(w.stale, field))
        for field in fields
    ]


def _lengths() -> list[Case]:
    wrong = {
        "beyond the length": 12,
        "negative": -1,
        "a fraction": 10.5,
        "a whole float": 11.0,
        "text": "10",
        "nothing": None,
        "a boolean": True,
        "deeper than the spare rows": 8,
        "zero, after the rings wrapped": 0,
    }
    return [
        Case(f"truncate to {kind}", RollbackError, lambda w, value=value: w.cache.truncate(w.a, value))
        for kind, value in wrong.items()
    ] + [
        Case(
            "truncate twice, deeper together than the spare rows",
            RollbackError,
            lambda w: w.cache.truncate(w.a, 8),
            prepare=_draft_and_reject,
        )
    ]


def _draft_and_reject(w: World) -> None:
    """Two tokens written and undone: 13 stays the highest position, but 11 the length."""
    scene.write(w.cache, {w.a: [70.0, 71.0]})
    w.cache.truncate(w.a, 11)


CASES = [
    *_requests(),
    *_lengths(),
    *_counts(),
    *_paddings(),
    Case("digest of a number", RequestError, lambda w: w.cache.digest(5)),
    Case("digest of a request, not in a sequence", RequestError, lambda w: w.cache.digest(w.a)),
    Case("save of a number", RequestError, lambda w: w.cache.save("never-written.kv", 5)),
    Case("step: a list", ShapeError, lambda w: w.cache.step([w.a])),
    Case("step: nothing", ShapeError, lambda w: w.cache.step(None)),
    Case("step: a number", ShapeError, lambda w: w.cache.step(3)),
    Case("step beyond what one request may hold", OutOfBlocks, lambda w: w.cache.step({w.a: 38})),
    Case("step beyond the free blocks", OutOfBlocks, lambda w: w.cache.step({w.a: 30, w.b: 10})),
    Case("step beyond the free blocks in its last request", OutOfBlocks, lambda w: w.cache.step({w.a: 1, w.b: 45})),
    Case("step with an absurd count", OutOfBlocks, lambda w: w.cache.step({w.a: 10**12})),
    Case("ids beyond the free blocks", OutOfBlocks, lambda w: w.cache.step({w.a: range(40)})),
    Case("admit more requests than slots", OutOfSlots, lambda w: w.cache.admit(), prepare=lambda w: w.cache.admit()),
    Case("fork without a free slot", OutOfSlots, lambda w: w.cache.fork(w.a), prepare=lambda w: w.cache.admit()),
    Case("admit: a salt that is no text", ShapeError, lambda w: w.cache.admit([1], salt=7)),
    Case("admit: an empty salt", ShapeError, lambda w: w.cache.admit([1], salt="")),
    Case("restorable: a salt that is no text", ShapeError, lambda w: w.cache.restorable([1], salt=b"a")),
    Case("restorable: text", ShapeError, lambda w: w.cache.restorable("abc")),
    Case("restorable: more than there is", ShapeError, lambda w: w.cache.restorable([1, 2], 3)),
    Case("restorable: a fraction", ShapeError, lambda w: w.cache.restorable([1, 2], 1.5)),
]
