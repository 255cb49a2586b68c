"""Compressed entries and index keys in blocks: store, count, gather."""

from collections.abc import Callable

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.conformance.case import Bench
from kvcore.conformance.checks.formats import edge_rows
from kvcore.conformance.outputs import Output, exact
from kvcore.spec import TAIL_OF


def store_entries(bench: Bench) -> list[Output]:
    """Entries that the caller compressed, with index keys where the layer has them."""
    case = bench.case
    entries = _wild(bench, "entries")
    keys = bench.put(_wild(bench, "index_keys")) if case.has("index_keys") else None
    pools = bench.ops.store_entries(bench.pools(start=("entries",)), bench.layer, bench.index, bench.put(entries), keys)
    return bench.stored(pools)


def store_edges(bench: Bench) -> list[Output]:
    """Entries, and index keys, of what encoders get wrong."""
    case, regions = bench.case, bench.case.plan.region
    values = {
        role: bench.put(edge_rows(case.id, regions(bench.layer, role)[0].format, case.closed(role)))
        for role in TAIL_OF
        if case.has(role)
    }
    pools = bench.pools(start=("entries",))
    return bench.stored(
        bench.ops.store_entries(pools, bench.layer, bench.index, values["entries"], values.get("index_keys"))
    )


def closed(bench: Bench) -> list[Output]:
    """Entries that the step completes, and two rows more than there are."""
    count = bench.case.closed("entries")
    found: list[Output] = []
    for rows in (count, count + 2):
        requests, entries = bench.ops.closed(bench.layer, bench.index, rows)
        found.append(exact(f"request_index of {rows}", to_numpy(requests), "entry"))
        found.append(exact(f"entry_index of {rows}", to_numpy(entries), "entry"))
    return found


def gather_entries(bench: Bench) -> list[Output]:
    """Picks of every kind: valid ones, repeated ones, -1, and beyond the last entry."""
    case = bench.case
    picks = case.rng("picks").integers(-2, case.columns("entries") + 3, (case.tokens, 7), np.int32)
    picks[:, 1] = picks[:, 0]
    picks[:, 2] = -1
    pools = bench.pools(end=("entries",))
    gathered = bench.ops.gather_entries(pools, bench.layer, bench.index, bench.put(picks))
    return [
        exact("values", to_numpy(gathered.values), "token", "pick", "channel"),
        exact("valid", to_numpy(gathered.valid), "token", "pick"),
    ]


def gather_all(role: str) -> Callable[[Bench], list[Output]]:
    """Every entry of every request, with a column to spare."""

    def drive(bench: Bench) -> list[Output]:
        columns = bench.case.columns(role) + 1
        pools = bench.pools(end=(role,))
        gathered = bench.ops.gather_all_entries(pools, bench.layer, bench.index, columns=columns, role=role)
        return [
            exact("values", to_numpy(gathered.values), "request", "entry", "channel"),
            exact("counts", to_numpy(gathered.counts), "request"),
            exact("positions", to_numpy(gathered.positions), "request", "entry"),
        ]

    return drive


def _wild(bench: Bench, role: str) -> np.ndarray:
    """[closed, d] of very different magnitude."""
    assert role in TAIL_OF
    shape = bench.case.closed(role), bench.case.component(role).dim
    values = bench.case.floats(role, *shape, dtype=np.dtype(np.float32))
    steps = bench.case.rng(f"{role} magnitude").integers(-12, 8, (shape[0], 1))
    return (values * np.exp2(steps).astype(np.float32)).astype(bench.case.shape.dtype)
