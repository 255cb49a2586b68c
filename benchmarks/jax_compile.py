"""What a decode step costs to compile: 43 layers as DeepSeek-V4-Flash has them, scanned over stacks of each kind.

    python -m benchmarks.jax_compile [--out records/jax_compile_cpu.json]

Rows, formats and the order of layers are V4-Flash's, windows and ratios those of its tiny twin, projections 64 wide:
two layers of a window, then pairs of CSA and HCA. Process CPU seconds of the trace and of the compilation, on the CPU,
as XLA comes and without its fusion emitters; copies of pools in what was compiled, and milliseconds of a step. And what
the verbs compile outside of ``jit`` while prompts of 1 to 512 tokens come, of which no two are alike.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, monitoring

import kvcore
from benchmarks.written import write
from kvcore import environment
from kvcore.interop.jax import inspect_in_place
from kvcore.interop.jax.stack import init_stack
from kvcore.spec import KV, CacheSpec, LayerSpec, Rope, presets

WINDOW, CSA, HCA = presets.deepseek_v4_flash_tiny(draft=False).layers[:3]
V4 = CacheSpec(layers=(WINDOW, CSA, HCA), block_tokens=128)
CLASSIC = presets.classic(layers=2, key_heads=2, key_dim=16)
PROMPTS = (1, 2, 3, 9, 16, 17, 40, 64, 65, 100, 129, 255, 256, 257, 300, 511, 512)
KINDS = {"window": (WINDOW, 2), "csa": (CSA, 21), "hca": (HCA, 20)}
BATCH, LENGTH, WIDTH, HEADS, DIM, STEPS = 2, 1024, 64, 4, 512, 20
ROPE = Rope(dim=64, theta=160000.0)
EAGER = {
    "a window, CSA and HCA": (V4, False),
    "the same, a layer in one call": (V4, True),
    "keys and values": (CLASSIC, False),
}
"""What prompts are given to, and how."""
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


@contextmanager
def compilations() -> Iterator[list[str]]:
    """A list of what XLA compiles, by name."""
    found: list[str] = []

    def listen(event: str, duration_secs: float, **said: Any) -> None:  # noqa: ARG001 - JAX gives it
        if "backend_compile" in event:
            found.append(str(said.get("fun_name", event)).removeprefix("jit(").removesuffix(")"))

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        monitoring.unregister_event_duration_listener(listen)


def eager_compilations(spec: CacheSpec, prompts: Sequence[int], *, whole: bool = False) -> Counter[str]:
    """How often XLA compiles what, by name, for a cache and its prompts, each of which is a request's only step.

    Args:
        spec: of its layers.
        prompts: their tokens.
        whole: DeepSeek-V4's layers are one call each, and not one for each verb.
    """
    with compilations() as found:
        cache = kvcore.create_cache(spec, backend="jax_pallas", max_requests=2, max_tokens=2 * LENGTH)
        for tokens in prompts:
            request = cache.admit()
            with cache.step({request: tokens}) as step:
                for number, layer in enumerate(spec.layers):
                    handle = step.layer(number)
                    if layer.kv is None:
                        (whole_layer if whole else eager_layer)(handle, layer, tokens)
                    else:
                        classic_layer(handle, layer.kv, tokens)
            cache.release(request)
    return Counter(found)


def eager_cost(spec: CacheSpec, whole: bool) -> dict[str, Any]:
    """What is compiled, and the process' CPU seconds of it and of what it computes."""
    started = time.process_time()
    found = eager_compilations(spec, PROMPTS, whole=whole)
    seconds = round(time.process_time() - started, 2)
    return {"compilations": dict(sorted(found.items())), "total": found.total(), "whole_s": seconds}


def floats(*shape: int) -> np.ndarray:
    """Rows of a prompt."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def classic_layer(handle: Any, kv: KV, tokens: int) -> None:
    """A layer of keys and values."""
    rows = floats(tokens, kv.key_heads, kv.key_dim)
    handle.append_kv(rows, rows)
    handle.attend(np.concatenate([rows, rows], axis=1))


def eager_layer(handle: Any, layer: LayerSpec, tokens: int) -> None:
    """A layer of DeepSeek-V4, verb by verb."""
    rows = tails_of(layer, tokens)
    handle.append(window=floats(tokens, DIM), **rows)
    selected, keys = None, layer.index_keys
    if rows:
        handle.flush(norm_weight=np.ones(DIM, np.float32), rope=ROPE)
    if keys is not None:
        selected = handle.index_select(floats(tokens, keys.heads, keys.dim), floats(tokens, keys.heads))
    handle.attend(floats(tokens, HEADS, DIM), selected)


def whole_layer(handle: Any, layer: LayerSpec, tokens: int) -> None:
    """The same in one call."""
    given: dict[str, Any] = tails_of(layer, tokens)
    if given:
        given |= {"norm_weight": np.ones(DIM, np.float32)}
    if (keys := layer.index_keys) is not None:
        given["index"] = floats(tokens, keys.heads, keys.dim), floats(tokens, keys.heads)
    handle.decode(floats(tokens, HEADS, DIM), floats(tokens, DIM), rope=ROPE, **given)


def tails_of(layer: LayerSpec, tokens: int) -> dict[str, Any]:
    """Rows of the tails that a layer has, by role."""
    tails = {role: getattr(layer, role) for role in ("tail", "index_tail")}
    return {role: (floats(tokens, one.width), floats(tokens, one.width)) for role, one in tails.items() if one}


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
        "eager": {"prompts": PROMPTS, **{name: eager_cost(spec, whole) for name, (spec, whole) in EAGER.items()}},
    }
    write(record, options.out)
    print(json.dumps(record["costs"]), record["pools_moved"], json.dumps(record["eager"]))


if __name__ == "__main__":
    main()
