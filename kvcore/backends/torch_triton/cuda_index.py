"""The indexer's verbs on CUDA: scores of the keys, and the selection of the best."""

from typing import Any, NamedTuple

import torch

from kvcore.backends.torch_triton import launch
from kvcore.backends.torch_triton.cuda import PLAIN, Kernel, Ready, declined, name_of_kernels
from kvcore.kernels.triton.device import native as is_native
from kvcore.kernels.triton.launches.indexer import (
    MOST_BEST,
    MOST_SCORES,
    RUN,
    as_they_are,
    best_workspace,
    runs_of,
    seen_of,
    seen_workspace,
)
from kvcore.kernels.triton.launches.launching import Part
from kvcore.kernels.triton.scores import scored, takes_codes
from kvcore.kernels.triton.topk import LARGEST_K, select_workspace
from kvcore.ops import bounds
from kvcore.ops.choices import Decision, Declined

TOO_MANY = Declined(f"k > {LARGEST_K}")


class Scored(NamedTuple):
    """Where a layer's index keys lie, tokens of each, whether queries are rotated first, and may be e4m3."""

    part: Part
    ratio: int
    rotated: bool
    codes: bool

    def queries(self, q, requests=0, columns=0):
        """Queries as the kernels take them; bf16 holds what e4m3 does.

        ``requests`` and ``columns`` are of a call that keeps all scores, else 0.
        """
        if q.dtype == torch.float8_e4m3fn and not self.codes:
            to: Any = launch.run_triton
            codes = requests > 0 and as_they_are(to, q, self.part.number, requests, len(q) * columns)
            q = q if codes else q.to(torch.bfloat16)
        return q.contiguous()


def bind_scores(*but):
    """A binding to a layer's index keys."""

    def bind(ops, layer):
        without = declined(ops, layer, "index_keys")
        if without is not None:
            return without
        (part,) = ops.records[layer, "index_keys"]
        record = launch.BOUND[part.number].record
        found = scored(record)
        if isinstance(found, Declined):
            return found
        codes = takes_codes(record) and is_native(ops.props.capability) and not launch.INTERPRETED
        given = Scored(part, ops.component(layer, "index_keys").ratio, record.hadamard, codes)
        return Ready(given, ("index_keys",), but)

    return bind


def index_scores(bound, ops, pools, layer, index, q, weights, *, columns=None):
    """``sum_h weights[t,h] · relu(q[t,h] · key[s])`` -> [T, columns] fp32; -inf unless s < (t + 1) div m."""
    columns = bounds.columns(ops.plan, layer, "index_keys", index) if columns is None else columns
    if not len(index.slots) or not q.numel() or not columns:  # there is nothing to launch
        return PLAIN.index_scores(ops, pools, layer, index, q, weights, columns=columns)
    return launch.calls().score_rows(
        *_given(bound, ops, pools, index, q, weights, len(index.block_table), columns),
        bound.part.number,
        bound.ratio,
        columns,
    )


def bind_select(ops, layer):
    """The same kernels for all layers."""
    del layer
    return Ready(None, decision=Decision(name_of_kernels(), f"kernels find the best k, else torch: {TOO_MANY.reason}"))


def select_covers(bound, scores, k):
    """All but long lists."""
    return TOO_MANY if k > LARGEST_K else bound


def select(bound, ops, scores, k):
    """Top k of scores [T, n] -> [T, k] int32: highest first, ties to the lowest index, -1 where score is -inf."""
    del bound
    if not k or not scores.numel():  # there is nothing to launch
        return PLAIN.select(ops, scores, k)
    room = select_workspace(len(scores), scores.shape[1], k)
    return launch.calls().select_rows(scores.to(torch.float32).contiguous(), *_pairs(ops, room), k)


def index_select(bound, ops, pools, layer, index, q, weights, k, *, columns=None, run=None):
    """``select(index_scores(...), k)``, of wide tables on what queries see; else, beyond MOST_SCORES, in one go.

    Args:
        run: entries of a program that keeps its run's best, in one go whatever there are.
    """
    columns = bounds.columns(ops.plan, layer, "index_keys", index) if columns is None else columns
    some, number = len(index.slots) and q.numel() and 0 < k <= MOST_BEST, bound.part.number
    if some and run is None:
        queries = bound.queries(q)
        to: Any = launch.run_triton
        seen = seen_of(to, ops.props, queries, index.block_table, number, columns, k)
        if seen is not None:
            *room, held = seen_workspace(seen, len(q), columns, k)
            given = *_given(bound, ops, pools, index, q, weights), *_pairs(ops, room)
            held = ops.workspaces.take("scores", held)
            return launch.calls().seen_select_rows(*given, held, number, bound.ratio, columns, k)
    if not some or (run is None and len(q) * columns <= MOST_SCORES):
        return ops.select(index_scores(bound, ops, pools, layer, index, q, weights, columns=columns), k)
    run = run or RUN
    *room, held = best_workspace(runs_of(ops.props, len(q), columns, run, k), k)
    return launch.calls().score_select_rows(
        *_given(bound, ops, pools, index, q, weights),
        *_pairs(ops, room),
        ops.workspaces.take("scores", held),
        number,
        bound.ratio,
        columns,
        k,
        run,
    )


def _given(bound, ops, pools, index, q, weights, requests=0, columns=0):
    """What launches of scores take first: what is scored, where the keys lie, and room for rotated queries."""
    return (
        bound.queries(q, requests, columns),
        weights.contiguous(),
        index.positions,
        index.request_index,
        index.block_table,
        [pools[name] for name in bound.part.names],
        ops.workspaces.take("queries", q.numel() if bound.rotated else 1, torch.bfloat16),
    )


def _pairs(ops, room):
    pairs, counts = room
    return ops.workspaces.take("pairs", pairs, torch.int64), ops.workspaces.take("counts", counts, torch.int32)


KERNELS = {
    "index_scores": Kernel(index_scores, bind_scores(), replayed=True),
    "select": Kernel(select, bind_select, select_covers, replayed=True),
    "index_select": Kernel(index_select, bind_scores(TOO_MANY.reason), replayed=True),
}
"""Verbs of the indexer."""
