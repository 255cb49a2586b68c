"""Isolation: whatever happened in a cache before, every request reads its own rows and nobody else's.

Every stored value names the request, its generation, the layer and the position, so one value in the wrong place fails,
and the failure says whose it is.
"""

from collections.abc import Sequence
from typing import Any

import pytest

import kvcore
from kvcore.testing.isolated import SPEC, IsolatedRequests

# After these, rings have wrapped and no request has the slot or the blocks that its name suggests.
CROWDED: tuple[tuple[str, Any], ...] = (
    ("admit", "a"),
    ("admit", "b"),
    ("admit", "c"),
    ("write", {"b": 19, "a": 10}),
    ("write", {"c": 9, "a": 3, "b": 1}),
)

SCENARIOS: dict[str, tuple[tuple[str, Any], ...]] = {
    "several requests at once": CROWDED,
    "a reused slot, shorter than before": (*CROWDED, ("release", "b"), ("admit", "d"), ("write", {"d": 2, "c": 1})),
    "a reused slot, nothing written yet": (*CROWDED, ("release", "a"), ("admit", "d"), ("write", {"c": 1})),
    "reused blocks, interleaved": (
        *CROWDED,
        ("release", "b"),
        ("admit", "d"),
        *[("write", {"d": 7, "a": 5})] * 3,
        ("release", "a"),
        ("admit", "e"),
        ("write", {"e": 30, "c": 9}),
    ),
    "rings that wrap many times": (*CROWDED, *[("write", {"a": 4, "c": 1, "b": 3})] * 6),
    "steps longer than a ring": (*CROWDED, ("write", {"c": 23, "a": 0, "b": 17})),
    "a batch in another order every time": (
        *CROWDED,
        ("write", {"a": 1, "c": 2, "b": 1}),
        ("write", {"c": 1, "b": 2, "a": 1}),
        ("write", {"b": 1}),
    ),
    "padding": (*CROWDED, ("write_padded", {"c": 3, "a": 1}), ("write_padded", {"b": 1, "c": 0})),
    "shrunk and grown": (
        *CROWDED,
        *[("write", {"b": 2, "a": 3}), ("truncate", ("b", 2)), ("truncate", ("a", 1)), ("write", {"a": 2, "b": 1})] * 3,
    ),
    "a failed step": (
        *CROWDED,
        ("fail", {"a": 3, "c": 2}),
        ("write", {"a": 1}),
        ("fail", {"b": 17}),
        ("write", {"b": 5}),
    ),
    "forks that part": (
        *CROWDED,
        ("release", "c"),
        ("fork", ("a", "d")),
        ("write", {"d": 5, "a": 5}),
        ("write", {"a": 1, "b": 1}),
        ("release", "a"),
        ("write", {"d": 4}),
    ),
    "moved through a blob": (*CROWDED, ("release", "b"), ("move", ("a", "d")), ("write", {"d": 6, "a": 2, "c": 1})),
}


@pytest.mark.parametrize("scenario", list(SCENARIOS.values()), ids=list(SCENARIOS))
def test_isolation(kv_backend: str, kv_device: str | None, scenario: Sequence[tuple[str, Any]]) -> None:
    """Every row of every live request is looked at after every verb."""
    cache = kvcore.create_cache(
        SPEC,
        backend=kv_backend,
        device=None if kv_backend == "reference" else kv_device,
        max_requests=3,
        max_tokens=104,
        max_draft_tokens=2,
    )
    requests = IsolatedRequests(cache)
    for verb, given in scenario:
        call = getattr(requests, verb)
        if isinstance(given, dict):
            call(**given)
        else:
            call(*((given,) if isinstance(given, str) else given))
        requests.look()
