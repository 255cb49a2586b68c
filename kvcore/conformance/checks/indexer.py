"""The lightning indexer: scores, and the choice made from them."""

from typing import Any

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.conformance.case import Bench
from kvcore.conformance.outputs import Output, close, exact, selection
from kvcore.conformance.shapes import E4M3, FP32
from kvcore.ops import StepIndex
from kvcore.pools import Pools

HEADS = 3


def index_scores(bench: Bench) -> list[Output]:
    """Scores of every query over every entry, -inf where it is not visible; of queries in e4m3 too."""
    pools, layer, index, q, weights = _inputs(bench)
    columns = bench.case.columns("index_keys")
    codes = bench.put(to_numpy(q).astype(E4M3))
    found = [bench.ops.index_scores(pools, layer, index, given, weights, columns=columns) for given in (q, codes)]
    return [
        close("scores", to_numpy(found[0]), "scores", "token", "entry"),
        close("scores of e4m3", to_numpy(found[1]), "scores of e4m3", "token", "entry"),
    ]


def select(bench: Bench) -> list[Output]:
    """From given scores with ties, NaN and -inf, exactly; and from the backend's own scores, up to rounding."""
    case = bench.case
    given = np.round(case.floats("scores", case.tokens, 9, dtype=FP32))
    given[:, 4] = -np.inf
    given[::2, 7] = np.nan
    found = [
        exact(f"top {k} of given scores", to_numpy(bench.ops.select(bench.put(given), k)), "token", "pick")
        for k in (0, 3, 12)
    ]
    scores = _scores(bench)
    topk = case.component("index_keys").topk
    found.append(selection(f"top {topk} of own scores", to_numpy(bench.ops.select(scores, topk)), to_numpy(scores)))
    return found


def index_select(bench: Bench) -> list[Output]:
    """In one go what scoring and selecting give, up to rounding of scores; more picks than entries too."""
    scores = to_numpy(_scores(bench))
    topk = bench.case.component("index_keys").topk
    columns = bench.case.columns("index_keys")
    pools, layer, index, q, weights = _inputs(bench)
    return [
        selection(
            f"top {k} at once",
            to_numpy(bench.ops.index_select(pools, layer, index, q, weights, k, columns=columns)),
            scores,
        )
        for k in (topk, columns + 3)
    ]


def _scores(bench: Bench) -> object:
    return bench.ops.index_scores(*_inputs(bench), columns=bench.case.columns("index_keys"))


def _inputs(bench: Bench) -> tuple[Pools, int, StepIndex, Any, Any]:
    case = bench.case
    q = case.token_floats("q", HEADS, case.component("index_keys").dim)
    weights = case.token_floats("weights", HEADS)
    return bench.pools(end=("index_keys",)), bench.layer, bench.index, bench.put(q), bench.put(weights)
