"""Attention over the window and the compressed entries of a latent layer."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.conformance.case import Bench
from kvcore.conformance.checks.compression import THETA, rotated
from kvcore.conformance.outputs import Output, close
from kvcore.conformance.shapes import FP32
from kvcore.ops import Attention
from kvcore.spec import Rope, Yarn

HEADS = 3
TOPK = 5


def attend(role: str, *, back: bool = False) -> Callable[[Bench], list[Output]]:
    """Every visible row; some in any order, of which not all are visible; no entries at all; with a sink and a scale.

    With the step's own rows beside the pools, and from pools alone where the ring still holds all that is seen.

    Args:
        back: outputs are turned back, by a Rope with YaRN or by its frequencies.
    """

    def drive(bench: Bench) -> list[Output]:
        case = bench.case
        dim = case.component(role).dim
        q = bench.put(case.token_floats("q", HEADS, dim))
        rows = None
        filled: dict[str, tuple[str, ...]] = {}
        if case.has("window"):
            rows = bench.put(case.token_floats("rows", dim))
            filled["start"] = ("window",)
        sink = {"sink": bench.put(case.floats("sink", HEADS, dtype=FP32)), "scale": 0.11}
        calls: dict[str, dict[str, Any]] = {"all": {}}
        if case.has("entries"):
            filled["end"] = ("entries",)
            calls["picks, sink"] = {"selected": bench.put(_selected(bench)), **sink}
            calls["none"] = {"selected": bench.put(np.zeros((case.tokens, 0), np.int32))}
        else:
            calls["sink"] = sink
        if back:
            rope = Rope(dim=rotated(dim), theta=THETA, yarn=Yarn(factor=16.0, original_length=65536))
            frequencies = bench.put(np.array(rope.inverse_frequencies, np.float32))
            for options, given in zip(calls.values(), cycle((frequencies, rope)), strict=False):
                options["rope"] = given
        states = [("", bench.pools(**filled), rows)]
        if rows is not None and case.holds("window"):
            states.append((", stored", bench.pools(end=("window", *filled.get("end", ()))), None))
        found: list[Output] = []
        operation = "inverse rope" if back else "attention"
        for when, pools, own in states:
            for name, options in calls.items():
                out, lse = bench.ops.attend(pools, bench.layer, bench.index, q, rows=own, **options)
                found.append(close(f"out {name}{when}", to_numpy(out), operation, "token", "head", "channel"))
                found.append(close(f"lse {name}{when}", to_numpy(lse), "attention", "token", "head"))
        return found

    return drive


def attend_unseen(bench: Bench) -> list[Output]:
    """The newest row of every request is NaN: the queries before it do not see it, beside the pools and within."""
    case = bench.case
    dim = case.component("window").dim
    q = bench.put(case.token_floats("q", HEADS, dim))
    rows = bench.put(newest_faulty(bench, case.token_floats("rows", dim)))
    start = ("window",), ("entries",) if case.has("entries") else ()
    states = [("", bench.pools(start=start[0], end=start[1]), rows)]
    if case.holds("window"):
        pools = bench.pools(start=start[0], end=start[1])
        states.append((", stored", bench.ops.append_window(pools, bench.layer, bench.index, rows), None))
    found: list[Output] = []
    for when, pools, own in states:
        attention = bench.ops.attend(pools, bench.layer, bench.index, q, rows=own)
        found += before_newest(bench, attention, when)
    return found


def newest_faulty(bench: Bench, rows: np.ndarray) -> np.ndarray:
    """The step's rows [T, ...] with NaN in every channel of each request's last."""
    rows[_newest(bench)] = np.nan
    return rows


def before_newest(bench: Bench, attention: Attention, when: str) -> list[Output]:
    """What queries before each request's last token got."""
    seeing = np.setdiff1d(np.flatnonzero(bench.case.index.request_index >= 0), _newest(bench))
    out, lse = (to_numpy(array)[seeing] for array in attention)
    return [
        close(f"out{when}", out, "attention", "token", "head", "channel"),
        close(f"lse{when}", lse, "attention", "token", "head"),
    ]


def _newest(bench: Bench) -> np.ndarray:
    """Each request's last token among the step's."""
    new = np.array([row.new for row in bench.case.rows])
    return (np.cumsum(new) - 1)[new > 0]


def _selected(bench: Bench) -> np.ndarray:
    """[T, k] distinct entries of each token in any order, -1 and entries that it may not see among them."""
    case = bench.case
    rng = case.rng("picks")
    count = case.columns("entries") + 2
    selected = np.stack([rng.permutation(count + TOPK)[:TOPK] for _ in range(case.tokens)] or [np.zeros(TOPK)])
    selected = selected[: case.tokens].astype(np.int32)
    selected[selected >= count] = -1
    return selected
