"""Rings in a slot: append, gather, and putting back what an aborted step overwrote."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.cache.outside import store_own
from kvcore.conformance.case import Bench
from kvcore.conformance.checks.formats import edge_rows
from kvcore.conformance.outputs import Output, exact
from kvcore.conformance.shapes import FP32
from kvcore.plan import Region
from kvcore.pools import Pools
from kvcore.spec import TAIL_OF


def append_window(bench: Bench) -> list[Output]:
    """Rows of very different magnitude into poisoned rings: the whole pool is compared afterwards."""
    rows = bench.case.token_floats("rows", bench.case.component("window").dim, wild=True)
    pools = bench.ops.append_window(bench.pools(), bench.layer, bench.index, bench.put(rows))
    return bench.stored(pools)


def append_edges(bench: Bench) -> list[Output]:
    """Rows of what encoders get wrong, encoded on the way."""
    (region,) = bench.case.plan.region(bench.layer, "window")
    rows = edge_rows(bench.case.id, region.format, bench.case.tokens)
    return bench.stored(bench.ops.append_window(bench.pools(), bench.layer, bench.index, bench.put(rows)))


def append_tail(bench: Bench) -> list[Output]:
    """Raw rows of the compressor."""
    kv, score = tail_inputs(bench, "tail", wild=True)
    return bench.stored(bench.ops.append_tail(bench.pools(), bench.layer, bench.index, kv, score))


def append_index_tail(bench: Bench) -> list[Output]:
    """Raw rows of the indexer's compressor."""
    kv, score = tail_inputs(bench, "index_tail", wild=True)
    return bench.stored(bench.ops.append_index_tail(bench.pools(), bench.layer, bench.index, kv, score))


def gather_window(bench: Bench) -> list[Output]:
    """From the pool at the end of the step; and from pool and step together, while the pool is still as before."""
    rows = bench.case.token_floats("rows", bench.case.component("window").dim, wild=True)
    ops, layer, index = bench.ops, bench.layer, bench.index
    found = {
        "stored": ops.gather_window(bench.pools(end=("window",)), layer, index),
        "with the step's own": ops.gather_window(bench.pools(start=("window",)), layer, index, bench.put(rows)),
        "before the step": ops.gather_window(bench.pools(start=("window",)), layer, bench.before),
    }
    return [
        output
        for name, gathered in found.items()
        for output in (
            exact(f"values {name}", to_numpy(gathered.values), "request", "row", "channel"),
            exact(f"positions {name}", to_numpy(gathered.positions), "request", "row"),
        )
    ]


def restore_ring(role: str) -> Callable[[Bench], list[Output]]:
    """Read what a step will overwrite, overwrite it, put it back: every live row has its old bytes."""

    def drive(bench: Bench) -> list[Output]:
        ops, layer, index = bench.ops, bench.layer, bench.index
        pools = bench.pools(start=(role,))
        saved = ops.read_ring(pools, layer, role, index)
        if role == "window":
            rows = bench.case.token_floats("rows", bench.case.component(role).dim)
            pools = ops.append_window(pools, layer, index, bench.put(rows))
        elif role == "kv":
            k, v = kv_inputs(bench)
            pools = ops.append_kv(pools, layer, index, k, v)
        elif role in TAIL_OF.values():
            append = ops.append_tail if role == "tail" else ops.append_index_tail
            pools = append(pools, layer, index, *tail_inputs(bench, role))
        else:
            pools = _store_own(bench, pools, role)
        return bench.stored(ops.restore_ring(pools, layer, role, index, saved))

    return drive


def store_own_rows(role: str) -> Callable[[Bench], list[Output]]:
    """A step's own rows of a role without a verb of its own, as a handle stores them."""

    def drive(bench: Bench) -> list[Output]:
        return bench.stored(_store_own(bench, bench.pools(), role))

    return drive


def _store_own(bench: Bench, pools: Pools, role: str) -> Pools:
    case, own = bench.case, own_rows(bench, role)
    regions = case.plan.region(bench.layer, role)
    return store_own(bench.ops, pools, regions, case.component(role), bench.index, case.rows, own)


def tail_inputs(bench: Bench, role: str, *, wild: bool = False, dtype: np.dtype = FP32) -> tuple[object, object]:
    """The compressor's kv and score, [T, width] each, on the device; some are NaN, which have no weight.

    One channel has no weight in any of the step's rows: of the windows that are all in the step nothing is left there.
    """
    width = bench.case.component(role).width
    kv = bench.case.token_floats(f"{role} kv", width, dtype=dtype, wild=wild)
    score = bench.case.token_floats(f"{role} score", width, dtype=dtype)
    kv[2::5, 1::3], score[2::5, 1::3] = np.nan, -np.inf
    channel = min(5, width // 2 - 1)
    score[:, [channel, width // 2 + channel]] = -np.inf
    return bench.put(kv), bench.put(score)


def kv_inputs(bench: Bench, *, wild: bool = False) -> tuple[Any, Any]:
    """The step's keys [T, key_heads, key_dim] and values [T, value_heads, value_dim] on the device."""
    parts = bench.case.component("kv").given
    k, v = (bench.case.token_floats(part.name, part.heads, part.format.dim or 0, wild=wild) for part in parts)
    return bench.put(k), bench.put(v)


def own_rows(bench: Bench, role: str) -> tuple[object, ...]:
    """The step's own rows of a ring or of K-V, as ``gather_rows`` takes them: one array a part."""
    if role == "window":
        return (bench.put(bench.case.token_floats("rows", bench.case.component(role).dim, wild=True)),)
    if role == "kv":
        return kv_inputs(bench, wild=True)
    if role in TAIL_OF.values():
        kv, score = tail_inputs(bench, role, wild=True)
        return (bench.ops.join(kv, score),)
    return tuple(
        bench.put(bench.case.token_floats(f"{role} {region.part}", *_heads(region), region.format.dim or 0, wild=True))
        for region in bench.case.plan.region(bench.layer, role)
    )


def _heads(region: Region) -> tuple[int, ...]:
    return (region.heads,) if region.heads > 1 else ()


def join(bench: Bench) -> list[Output]:
    """Kv and score side by side."""
    joined = to_numpy(bench.ops.join(*tail_inputs(bench, "tail", wild=True)))
    return [exact("joined", np.asarray(joined), "token", "channel")]
