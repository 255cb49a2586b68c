"""Classic K-V layers: append, gather, mask, attend."""

import math

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.conformance.case import Bench
from kvcore.conformance.checks.attention import before_newest, newest_faulty
from kvcore.conformance.checks.formats import edge_rows
from kvcore.conformance.checks.rings import kv_inputs
from kvcore.conformance.outputs import Output, close, exact
from kvcore.conformance.shapes import FP32
from kvcore.step import build_index


def append_kv(bench: Bench) -> list[Output]:
    """Keys and values of very different magnitude into poisoned pools."""
    pools = bench.ops.append_kv(bench.pools(), bench.layer, bench.index, *kv_inputs(bench, wild=True))
    return bench.stored(pools)


def append_edges(bench: Bench) -> list[Output]:
    """Keys and values of what encoders get wrong, encoded on the way."""
    case = bench.case
    k, v = (
        edge_rows(case.id, part.format, case.tokens * part.heads).reshape(case.tokens, part.heads, -1)
        for part in case.component("kv").given
    )
    return bench.stored(bench.ops.append_kv(bench.pools(), bench.layer, bench.index, bench.put(k), bench.put(v)))


def gather_kv(bench: Bench) -> list[Output]:
    """Before the step from the pool alone; during it from pool and step together, with left padding too."""
    pools = bench.pools(start=("kv",))
    k, v = kv_inputs(bench, wild=True)
    found = {
        "before the step": bench.ops.gather_kv(pools, bench.layer, bench.before, columns=columns(bench, ended=False)),
        "in the step": bench.ops.gather_kv(pools, bench.layer, bench.index, k, v, columns=columns(bench)),
        "with left padding": bench.ops.gather_kv(
            pools, bench.layer, bench.ops.index(bench.case.late_padded), k, v, columns=columns(bench)
        ),
    }
    return [
        output
        for name, (keys, values, positions) in found.items()
        for output in (
            exact(f"keys {name}", to_numpy(keys), "request", "row", "head", "channel"),
            exact(f"values {name}", to_numpy(values), "request", "row", "head", "channel"),
            exact(f"positions {name}", to_numpy(positions), "request", "row"),
        )
    ]


def kv_view(bench: Bench) -> list[Output]:
    """Each request alone and all at once, after the append: memory in place, or a copy, holds the same rows.

    The first that has new tokens, and all of them, are appended and viewed in one go, too, where it has a pool of
    its own.
    """
    pools, kv, found = bench.pools(end=("kv",)), bench.case.component("kv"), []

    def viewed_or_gathered(name, pools, index, wide, views):
        keys, values = views or bench.ops.gather_kv(pools, bench.layer, index, columns=wide)[:2]
        for part, array in (("keys", keys), ("values", values)):
            found.append(exact(f"{part} of {name}", to_numpy(array), "request", "row", "head", "channel"))

    alone = [bench.ops.index(build_index([row], max_blocks=bench.case.plan.max_blocks)) for row in bench.case.rows]
    width = [len(kv.visible(row.start, row.length)) for row in bench.case.rows]
    for number, (index, wide) in enumerate(zip(alone, width, strict=True)):
        views = bench.ops.kv_view(pools, bench.layer, index, columns=wide)
        viewed_or_gathered(f"request {number}", pools, index, wide, views)
    wide = columns(bench)
    views = bench.ops.kv_view(pools, bench.layer, bench.index, columns=wide)
    viewed_or_gathered("all requests", pools, bench.index, wide, views)
    number = next((number for number, row in enumerate(bench.case.rows) if row.new), None)
    if number is not None and kv.shared_from is None:
        k, v = (rows[: bench.case.rows[number].new] for rows in kv_inputs(bench, wild=True))
        index, wide, pools = alone[number], width[number], bench.pools(start=("kv",))
        pools, views = bench.ops.append_kv_view(pools, bench.layer, index, k, v, columns=wide)
        viewed_or_gathered("the appended request", pools, index, wide, views)
        found += bench.stored(pools)
    if kv.shared_from is None:
        k, v = kv_inputs(bench, wild=True)
        pools = bench.pools(start=("kv",))
        pools, views = bench.ops.append_kv_view(pools, bench.layer, bench.index, k, v, columns=columns(bench))
        viewed_or_gathered("all appended requests", pools, bench.index, columns(bench), views)
    return found


def mask(bench: Bench) -> list[Output]:
    """What each query may see, with a column to spare: as it is and with left padding, and the rows' positions."""
    wide = columns(bench) + 1
    found = [exact("mask", to_numpy(bench.ops.mask(bench.layer, bench.index, columns=wide)), "token", "row")]
    padded = {"left padding": bench.case.left_padded, "late left padding": bench.case.late_padded}
    indices = {"": bench.index, **{f" with {name}": bench.ops.index(index) for name, index in padded.items()}}
    for name, index in indices.items():
        positions, valid = bench.ops.visible_rows(bench.layer, index, columns=wide)
        found.append(exact(f"positions{name}", to_numpy(positions), "request", "row"))
        found.append(exact(f"valid{name}", to_numpy(valid), "token", "row"))
    return found


def from_batch(bench: Bench) -> list[Output]:
    """A batch padded on the right into step order and back, with a column to spare; what is padding is NaN."""
    case = bench.case
    new = case.index.lengths - case.index.starts
    width = int(new.max(initial=0)) + 1
    batch = case.floats("batch", len(new), width, 2, 3)
    batch[np.arange(width) >= new[:, None]] = np.nan
    rows = bench.ops.from_batch(bench.index, bench.put(batch))
    again = bench.ops.to_batch(bench.index, bench.put(case.token_floats("rows", 5)), width)
    return [
        exact("rows", to_numpy(rows), "token", "head", "channel"),
        exact("batch", to_numpy(again), "request", "column", "channel"),
    ]


def attend_kv(bench: Bench) -> list[Output]:
    """Grouped heads: alone, with sink and scale, with left padding; before the append and, if all is there, after."""
    case = bench.case
    kv = case.component("kv")
    heads = 2 * math.lcm(*[part.heads for part in kv.parts])
    q = bench.put(case.token_floats("q", heads, kv.key_dim))
    states = [("", bench.pools(start=("kv",)), kv_inputs(bench))]
    if case.holds("kv"):
        states.append((", stored", bench.pools(end=("kv",)), (None, None)))
    sink = bench.put(case.floats("sink", heads, dtype=FP32))
    found: list[Output] = []
    padded, late = bench.ops.index(case.left_padded), bench.ops.index(case.late_padded)
    ways = {
        "plain": (bench.index, {}),
        "sink": (bench.index, {"sink": sink, "scale": 0.11}),
        "padded": (padded, {}),
        "padded late": (late, {}),
    }
    for when, pools, own in states:
        for name, (index, options) in ways.items():
            out, lse = bench.ops.attend_kv(pools, bench.layer, index, q, *own, columns=columns(bench), **options)
            found.append(close(f"out {name}{when}", to_numpy(out), "attention", "token", "head", "channel"))
            found.append(close(f"lse {name}{when}", to_numpy(lse), "attention", "token", "head"))
    return found


def attend_kv_unseen(bench: Bench) -> list[Output]:
    """The newest key and value of every request are NaN: the queries before do not see them, beside the pools and in.

    Where K-V is another layer's nothing is appended, and nothing is faulty.
    """
    case, own = bench.case, bench.case.component("kv").shared_from is None
    kv = case.component("kv")
    heads = 2 * math.lcm(*[part.heads for part in kv.parts])
    q = bench.put(case.token_floats("q", heads, kv.key_dim))
    k, v = kv_inputs(bench)
    if own:
        k, v = (bench.put(newest_faulty(bench, to_numpy(rows).copy())) for rows in (k, v))
    states = [("", bench.pools(start=("kv",)), (k, v))]
    if own and case.holds("kv"):
        pools = bench.ops.append_kv(bench.pools(start=("kv",)), bench.layer, bench.index, k, v)
        states.append((", stored", pools, (None, None)))
    found: list[Output] = []
    for when, pools, given in states:
        attention = bench.ops.attend_kv(pools, bench.layer, bench.index, q, *given, columns=columns(bench))
        found += before_newest(bench, attention, when)
    return found


def columns(bench: Bench, *, ended: bool = True) -> int:
    """Most rows that the queries of a request may see."""
    kv = bench.case.component("kv")
    rows = bench.case.rows
    return max((len(kv.visible(row.start, row.length if ended else row.start)) for row in rows), default=0)
