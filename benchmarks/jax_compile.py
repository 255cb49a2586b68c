"""What a decode step costs to compile: 43 layers as DeepSeek-V4-Flash has them, scanned over stacks of each kind.

    python -m benchmarks.jax_compile [--out records/jax_compile_cpu.json]

Rows, formats and the order of layers are V4-Flash's, windows and ratios those of its tiny twin, projections 64 wide:
two layers of a window, then pairs of CSA and HCA. Process CPU seconds of the trace and of the compilation, on the CPU,
as XLA comes and without its fusion emitters; copies of pools in what was compiled, and milliseconds of a step.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcore import environment
from kvcore.interop.jax import inspect_in_place
from kvcore.interop.jax.stack import init_stack
from kvcore.spec import CacheSpec, Rope, presets

WINDOW, CSA, HCA = presets.deepseek_v4_flash_tiny(draft=False).layers[:3]
KINDS = {"window": (WINDOW, 2), "csa": (CSA, 21), "hca": (HCA, 20)}
BATCH, LENGTH, WIDTH, HEADS, DIM, STEPS = 2, 1024, 64, 4, 512, 20
ROPE = Rope(dim=64, theta=160000.0)
OPTIONS = {"as it comes": None, "without fusion emitters": {"xla_cpu_use_fusion_emitters": False}}


def weights() -> dict[str, dict[str, jax.Array]]:
    """Projections of every kind's layers, stacked."""
    rng, found = np.random.default_rng(0), {}
    for kind, (layer, count) in KINDS.items():
        sizes = {"query": HEADS * DIM, "rows": DIM}
        for name in ("tail", "index_tail"):
            if (tail := getattr(layer, name)) is not None:
                sizes |= {name: 2 * tail.width}
        if (keys := layer.index_keys) is not None:
            sizes |= {"index": keys.heads * keys.dim, "index_weights": keys.heads}
        made = {name: rng.standard_normal((count, WIDTH, size)) * 0.02 for name, size in sizes.items()}
        made["out"] = rng.standard_normal((count, HEADS * DIM, WIDTH)) * 0.02
        found[kind] = {name: jnp.asarray(array, jnp.float32) for name, array in made.items()}
    return found


def layer_of(stacks: Any, kind: str, number: Any, x: jax.Array, given: Any) -> Any:
    """One layer: x [B, 1, width] and the stacks after it."""
    own = {name: lax.dynamic_index_in_dim(array, number, keepdims=False) for name, array in given[kind].items()}
    batch, new, _ = x.shape
    made = {name: x @ own[name] for name in own if name != "out"}
    pairs = {name: tuple(jnp.split(made[name], 2, axis=-1)) for name in ("tail", "index_tail") if name in made}
    if "index" in made:
        pairs["index"] = made["index"].reshape(batch, new, -1, 128), made["index_weights"]
    query = made["query"].reshape(batch, new, HEADS, DIM)
    found = stacks[kind].layer(number).attend_compressed(query, made["rows"], **pairs, rope=ROPE)
    x = x + found.out.reshape(batch, new, -1) @ own["out"]
    return {**stacks, kind: stacks[kind].with_layer(number, found.view)}, x


def step(stacks: Any, x: jax.Array, given: Any) -> Any:
    """All 43 layers; the last pair has no second layer."""

    def windows(carry: Any, number: Any) -> Any:
        return layer_of(carry[0], "window", number, carry[1], given), None

    def pair(carry: Any, number: Any) -> Any:
        carry = layer_of(carry[0], "csa", number, carry[1], given)
        last = KINDS["hca"][1]

        def second(carry: Any) -> Any:
            return layer_of(carry[0], "hca", jnp.minimum(number, last - 1), carry[1], given)

        return lax.cond(number < last, second, lambda carry: carry, carry), None

    carry, _ = lax.scan(windows, (stacks, x), jnp.arange(KINDS["window"][1]))
    carry, _ = lax.scan(pair, carry, jnp.arange(KINDS["csa"][1]))
    return carry


def stacks_of() -> dict[str, Any]:
    """Fresh stacks."""
    return {
        kind: init_stack(CacheSpec(layers=(layer,) * count, block_tokens=32), batch=BATCH, max_length=LENGTH)
        for kind, (layer, count) in KINDS.items()
    }


def cost(function: Callable[..., Any], options: dict[str, Any] | None) -> dict[str, float]:
    """CPU seconds of a trace and of a compilation, and milliseconds of a step."""
    stacks, x, given = stacks_of(), jnp.ones((BATCH, 1, WIDTH)), weights()
    jitted = jax.jit(lambda *arrays: function(*arrays), donate_argnums=0, compiler_options=options)
    started = time.process_time()
    lowered = jitted.lower(stacks, x, given)
    traced = time.process_time()
    compiled = lowered.compile()
    done, times = time.process_time(), []
    for _ in range(STEPS):
        before = time.process_time()
        stacks, x = jax.block_until_ready(compiled(stacks, x, given))
        times.append(1e3 * (time.process_time() - before))
    return {
        "trace_s": round(traced - started, 2),
        "compile_s": round(done - traced, 2),
        "whole_s": round(done - started, 2),
        "step_ms": round(float(np.median(times)), 1),
    }


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("records/jax_compile_cpu.json"))
    options = parser.parse_args()
    found = {name: cost(step, one) for name, one in OPTIONS.items()}
    place = inspect_in_place(step, stacks_of(), jnp.ones((BATCH, 1, WIDTH)), weights())
    record = {
        "kind": "jax_compile",
        **environment.of_script(),
        "what": "CPU seconds of the trace and compilation of a decode step of 43 layers of V4-Flash's kinds",
        "sizes": {"layers": {kind: count for kind, (_, count) in KINDS.items()}, "batch": BATCH, "length": LENGTH},
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "pools_moved": len(place.moves),
        "bytes_aliased": place.alias_bytes,
        "bytes_of_pools": place.pool_bytes,
        "costs": found,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["costs"]), record["pools_moved"])


if __name__ == "__main__":
    main()
