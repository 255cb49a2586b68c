"""Recurrent layers: states written, of a step's last tokens or of all, and read; a short convolution's inputs."""

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.conformance.case import Bench
from kvcore.conformance.outputs import Output, exact


def append_state(bench: Bench) -> list[Output]:
    """The state after every token, of very different magnitude, into poisoned rings."""
    states = bench.case.token_floats("states", *bench.case.component("state").shape, wild=True)
    return bench.stored(bench.ops.append_state(bench.pools(), bench.layer, bench.index, bench.put(states)))


def write_state(bench: Bench) -> list[Output]:
    """The state after each request's last token; those in between are gone, whether the caller counts them or not."""
    states, newest = last_states(bench), max((row.new for row in bench.case.rows), default=0)
    rows = bench.case.plan.region(bench.layer, "state")[0].rows
    pools = bench.ops.write_state(
        bench.pools(start=("state",)), bench.layer, bench.index, bench.put(states), newest=min(newest, rows)
    )
    uncounted = bench.ops.write_state(bench.pools(), bench.layer, bench.index, bench.put(states))
    return [*bench.stored(pools), *bench.stored(uncounted)]


def select_state(bench: Bench) -> list[Output]:
    """Of the states after every token that of those taken: none of a request, all, or some; and what is read then."""
    ops, layer, case = bench.ops, bench.layer, bench.case
    states = case.token_floats("states", *case.component("state").shape, wild=True)
    new = case.index.lengths - case.index.starts
    outputs: list[Output] = []
    for name, taken in (("all", new), ("some", (new + 1) // 2), ("none", new * 0)):
        shorter = ops.index(case.index._replace(starts=case.index.starts + taken))
        given = bench.put(states), bench.put(taken.astype(np.int32))
        pools = ops.select_state(bench.pools(start=("state",)), layer, bench.index, *given)
        outputs += bench.stored(pools)
        outputs.append(_of_requests(f"states after {name}", ops.read_state(pools, layer, shorter)))
    return outputs


def read_state(bench: Bench) -> list[Output]:
    """What the step goes on from; and, at its end, what was appended and what was written last."""
    ops, layer, case = bench.ops, bench.layer, bench.case
    after = ops.index(case.index._replace(starts=case.index.lengths))
    states = case.token_floats("states", *case.component("state").shape, wild=True)
    found = {
        "before the step": ops.read_state(bench.pools(start=("state",)), layer, bench.index),
        "stored": ops.read_state(bench.pools(end=("state",)), layer, after),
        "appended": ops.read_state(
            ops.append_state(bench.pools(start=("state",)), layer, bench.index, bench.put(states)), layer, after
        ),
        "written": ops.read_state(
            ops.write_state(bench.pools(start=("state",)), layer, bench.index, bench.put(last_states(bench))),
            layer,
            after,
        ),
    }
    return [_of_requests(f"states {name}", array) for name, array in found.items()]


def append_conv(bench: Bench) -> list[Output]:
    """Inputs of very different magnitude into poisoned rings."""
    rows = bench.case.token_floats("inputs", bench.case.component("conv").channels, wild=True)
    return bench.stored(bench.ops.append_conv(bench.pools(), bench.layer, bench.index, bench.put(rows)))


def gather_conv(bench: Bench) -> list[Output]:
    """Inputs before the step, and those at its end."""
    ops, case = bench.ops, bench.case
    after = ops.index(case.index._replace(starts=case.index.lengths))
    found = {
        "before the step": ops.gather_conv(bench.pools(start=("conv",)), bench.layer, bench.index),
        "stored": ops.gather_conv(bench.pools(end=("conv",)), bench.layer, after),
    }
    return [_of_requests(f"inputs {name}", array) for name, array in found.items()]


def last_states(bench: Bench) -> np.ndarray:
    """One state for each request of the step, [Q, *shape]; padding's are NaN, since nobody may look at them."""
    index = bench.case.index
    states = bench.case.floats("last states", len(index.slots), *bench.case.component("state").shape)
    states[index.slots < 0] = np.nan
    return states


def _of_requests(name: str, array: object) -> Output:
    found = to_numpy(array)
    return exact(name, found.reshape(*found.shape[:1], -1), "request", "channel")
