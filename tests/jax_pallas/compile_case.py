"""Compile one case for one TPU that is not here, and print what the compiled program does to its pools, as JSON.

A process of its own for each case: libtpu may abort the process on what it does not support.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import whole_step

from kvcore.backends.jax_pallas import JaxOps
from kvcore.backends.jax_pallas.pallas.read_rows import read_rows
from kvcore.backends.jax_pallas.pallas.write_rows import write_parts, write_rows
from kvcore.interop.jax import inspect_in_place
from kvcore.plan import plan_cache
from kvcore.step import Row, build_index

ROWS = jax.ShapeDtypeStruct((100,), jnp.int32)
BYTES = jax.ShapeDtypeStruct((8, 1024, 4, 128), jnp.uint8)
WORDS = jax.ShapeDtypeStruct((8, 64, 8, 128), jnp.float32)


def tiles(shape, dtype):
    return jax.ShapeDtypeStruct((100, *shape), dtype)


def copies_its_pool(pool, unit, row, new):
    """The negative control: the donated pool is kept alive by a second output that needs its old value."""
    return write_rows(pool, unit, row, new), pool


def reads(pool, unit, row):
    """Readers return the pool too, so that the same questions can be asked of them."""
    return pool, read_rows(pool, unit, row)


def decode(*, flush: bool):
    plan = plan_cache(whole_step.CSA_HCA, max_requests=64, max_tokens=64 * 1024, max_draft_tokens=1, layout="tpu_tile")
    ops = JaxOps(plan, "tpu", None, "tpu")
    pools = jax.eval_shape(JaxOps(plan, "cpu", None).allocate)
    index = build_index([Row(i, 100 + i, 1, (i,)) for i in range(8)], max_blocks=256)
    inputs = whole_step.given(plan.spec, 8, 8, np.random.default_rng(0))

    def fn(pools, index, inputs):
        return whole_step.functional(ops, pools, index, inputs, flush=flush, closed=8)

    return fn, pools, index, inputs


CASES = {
    "write_rows, bytes": lambda: (write_rows, BYTES, ROWS, ROWS, tiles((4, 128), jnp.uint8)),
    "write_rows, fp32": lambda: (write_rows, WORDS, ROWS, ROWS, tiles((8, 128), jnp.float32)),
    "write_parts, quarters": lambda: (write_parts, BYTES, ROWS, ROWS, tiles((4, 1, 128), jnp.uint8)),
    "write_parts, halves": lambda: (write_parts, BYTES, ROWS, ROWS, tiles((2, 2, 128), jnp.uint8)),
    "read_rows, bytes": lambda: (reads, BYTES, ROWS, ROWS),
    "read_rows, fp32": lambda: (reads, WORDS, ROWS, ROWS),
    "a decode step, entries given": lambda: decode(flush=False),
    "a decode step, compressing": lambda: decode(flush=True),
    "copies its pool": lambda: (copies_its_pool, BYTES, ROWS, ROWS, tiles((4, 128), jnp.uint8)),
}

if __name__ == "__main__":
    chip = sys.argv[1]
    for name in sys.argv[2:]:
        fn, *args = CASES[name]()
        print(json.dumps({"case": name, **inspect_in_place(fn, *args, chip=chip)._asdict()}), flush=True)
