"""A token through layer views beside plain ``jax.numpy``, and a layer of them beside flax NNX's, on the CPU.

    python -m benchmarks.jax_views [--contexts 512 4096 16384] [--peer PYTHON] [--out records/jax_views_cpu.json]

A model of SmolLM2-135M's sizes, with 4 of its 30 layers and random weights, decodes one token at a context that is
nearly full, cache donated. The floor is the same model without a cache. One layer alone: 4 requests of 8 heads of 128.
PYTHON is that of an environment with flax; kvcore need not be there. Process CPU time, medians.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LAYERS, WIDTH, HEADS, KEY_HEADS, DIM, INNER, WORDS = 4, 576, 9, 3, 64, 1536, 49152
BATCH, ONE_HEADS, ONE_DIM, ONE_TOKENS = 4, 8, 128, 4096
STEPS, WARM = 24, 4


def median_ms(step: Callable[..., Any], cache: Any, *arrays: Any) -> float:
    """Median CPU milliseconds of a step that takes its cache and returns it first."""
    run, times = jax.jit(step, donate_argnums=0), []
    for _ in range(STEPS):
        started = time.process_time()
        cache, *_ = jax.block_until_ready(run(cache, *arrays))
        times.append(1e3 * (time.process_time() - started))
    return round(float(np.median(times[WARM:])), 2)


def weights(dtype: Any) -> dict[str, jax.Array]:
    """Of all layers, stacked, and the embedding."""
    rng = np.random.default_rng(0)
    shapes = {
        "q": (WIDTH, HEADS * DIM),
        "k": (WIDTH, KEY_HEADS * DIM),
        "v": (WIDTH, KEY_HEADS * DIM),
        "o": (HEADS * DIM, WIDTH),
        "up": (WIDTH, INNER),
        "gate": (WIDTH, INNER),
        "down": (INNER, WIDTH),
    }
    found = {name: jnp.asarray(rng.standard_normal((LAYERS, *size)) * 0.02, dtype) for name, size in shapes.items()}
    return {**found, "words": jnp.asarray(rng.standard_normal((WORDS, WIDTH)) * 0.02, dtype)}


def model(given: dict[str, jax.Array], token: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
    """Logits [1, words] of the next token; ``attend(layer, q, k, v)`` -> [1, 1, heads, dim]."""

    def normed(x: jax.Array) -> jax.Array:
        return x * lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + 1e-5).astype(x.dtype)

    x = given["words"][token][:, None]
    for layer in range(LAYERS):
        one = {name: array[layer] for name, array in given.items() if name != "words"}
        y = normed(x)
        q, k, v = ((y @ one[name]).reshape(1, 1, -1, DIM) for name in "qkv")
        x = x + attend(layer, q, k, v).astype(x.dtype).reshape(1, 1, HEADS * DIM) @ one["o"]
        y = normed(x)
        x = x + (jax.nn.silu(y @ one["gate"]) * (y @ one["up"])) @ one["down"]
    return normed(x[:, 0]) @ given["words"].T


def attention(q: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped softmax attention of q [B, S, H, d] to [B, n, heads, d] where mask [n]."""
    batch, new, heads, dim = q.shape
    grouped = q.reshape(batch, new, keys.shape[2], heads // keys.shape[2], dim)
    logits = jnp.einsum("bskgd,bnkd->bkgsn", grouped, keys, preferred_element_type=jnp.float32) * dim**-0.5
    shares = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1).astype(values.dtype)
    return jnp.einsum("bkgsn,bnkd->bskgd", shares, values).reshape(batch, new, heads, dim)


def plain(cache: Any, given: Any, token: jax.Array, at: jax.Array) -> Any:
    """A step with keys and values [1, n, heads, dim] of every layer."""
    cache = list(cache)

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        keys, values = cache[layer]
        keys = lax.dynamic_update_slice(keys, k.astype(keys.dtype), (0, at, 0, 0))
        values = lax.dynamic_update_slice(values, v.astype(values.dtype), (0, at, 0, 0))
        cache[layer] = keys, values
        return attention(q, keys, values, jnp.arange(keys.shape[1]) <= at)

    out = model(given, token, attend)
    return cache, out


def floor(cache: Any, given: Any, token: jax.Array) -> Any:
    """A step without a cache."""
    return cache, model(given, token, lambda _layer, q, k, v: q + jnp.repeat(k + v, HEADS // KEY_HEADS, axis=2))


def of_views(views: Any, given: Any, token: jax.Array) -> Any:
    """A step with views."""
    held = [views]

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out, _, view = held[0][layer].attend(q, k, v)
        held[0] = held[0].with_layer(layer, view)
        return out

    out = model(given, token, attend)
    return held[0], out


def models(context: int) -> dict[str, float]:
    """Milliseconds of a token by kind of cache."""
    from kvcore.interop.jax.views import init_views
    from kvcore.spec import presets

    token, start = jnp.zeros(1, jnp.int32), context - STEPS - 1
    found = {}
    for name in ("bf16", "fp32"):
        dtype = {"bf16": jnp.bfloat16, "fp32": jnp.float32}[name]
        given, shape = weights(dtype), (1, context, KEY_HEADS, DIM)
        found[f"floor {name}"] = median_ms(floor, jnp.zeros(()), given, token)
        cache = [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(LAYERS)]
        found[f"plain {name}"] = median_ms(plain, cache, given, token, jnp.int32(start))
        for format in {"bf16": ("bf16", "int8_row"), "fp32": ("fp32",)}[name]:
            spec = presets.classic(layers=LAYERS, key_heads=KEY_HEADS, key_dim=DIM, key_format=format)
            views = init_views(spec, batch=1, max_length=context)
            for layer, view in enumerate(views):
                views = views.with_layer(layer, view.replace(lengths=jnp.full(1, start, jnp.int32)))
            found[f"views {format}"] = median_ms(of_views, views, given, token)
    return found


def one_layer() -> dict[str, float]:
    """Milliseconds of one attention layer's cache and attention, bf16."""
    from kvcore.interop.jax.views import init_views
    from kvcore.spec import presets

    q = jnp.ones((BATCH, 1, ONE_HEADS, ONE_DIM), jnp.bfloat16)
    start = ONE_TOKENS - STEPS - 1

    def plain_step(cache: Any, q: jax.Array, at: jax.Array) -> Any:
        keys, values = (lax.dynamic_update_slice(part, q, (0, at, 0, 0)) for part in cache)
        return (keys, values), attention(q, keys, values, jnp.arange(ONE_TOKENS) <= at)

    def views_step(view: Any, q: jax.Array) -> Any:
        out, _, view = view.attend(q, q, q)
        return view, out

    shape = (BATCH, ONE_TOKENS, ONE_HEADS, ONE_DIM)
    cache = (jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape, jnp.bfloat16))
    spec = presets.classic(layers=1, key_heads=ONE_HEADS, key_dim=ONE_DIM)
    view = init_views(spec, batch=BATCH, max_length=ONE_TOKENS)[0]
    view = view.replace(lengths=jnp.full(BATCH, start, jnp.int32))
    return {"plain": median_ms(plain_step, cache, q, jnp.int32(start)), "views": median_ms(views_step, view, q)}


def flax_layer() -> dict[str, float]:
    """The same by flax NNX's ``MultiHeadAttention`` in decode mode, its projections' time taken off."""
    from flax import nnx

    width = ONE_HEADS * ONE_DIM
    layer = nnx.MultiHeadAttention(
        ONE_HEADS, width, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, decode=True, use_bias=False, rngs=nnx.Rngs(0)
    )
    layer.init_cache((BATCH, ONE_TOKENS, width), dtype=jnp.bfloat16)
    layer.cache_index[...] = ONE_TOKENS - STEPS - 1
    parts, state = nnx.split(layer)
    x = jnp.ones((BATCH, 1, width), jnp.bfloat16)

    def step(state: Any, x: jax.Array) -> Any:
        layer = nnx.merge(parts, state)
        out = layer(x)
        return nnx.state(layer), out

    def projections(state: Any, x: jax.Array) -> Any:
        layer = nnx.merge(parts, state)
        q, k, v = layer.query(x), layer.key(x), layer.value(x)
        return state, layer.out(q + k + v)

    without = median_ms(projections, jax.tree.map(jnp.copy, state), x)
    whole = median_ms(step, state, x)
    return {"flax nnx": round(whole - without, 2), "flax nnx with projections": whole}


def run(python: str, *arguments: str) -> Any:
    """One part, in a process of its own."""
    from benchmarks.apart import printed

    (found,) = printed([python, str(Path(__file__).resolve()), *arguments], JAX_PLATFORMS="cpu")
    return found


def main() -> None:
    """Run all parts and write the record, or one part and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 4096, 16384])
    parser.add_argument("--peer", help="a Python that has flax")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("records/jax_views_cpu.json"))
    options = parser.parse_args()
    if options.part:
        parts = {"one": one_layer, "flax": flax_layer}
        found = parts[options.part]() if options.part in parts else models(int(options.part))
        print(json.dumps(found))
        return
    # The peer's Python, which stopped above, need not have it.
    from benchmarks.written import write
    from kvcore import environment

    contexts = {}
    for context in options.contexts:
        found = run(sys.executable, "--part", str(context))
        ours, plains = (found[f"{side} bf16"] - found["floor bf16"] for side in ("views", "plain"))
        contexts[str(context)] = {**found, "views beyond the floor, of plain": round(ours / plains, 2)}
        print(context, json.dumps(contexts[str(context)]))
    layer = run(sys.executable, "--part", "one")
    if options.peer:
        layer |= run(options.peer, "--part", "flax")
        layer["views, of flax nnx"] = round(layer["views"] / layer["flax nnx"], 3)
    print(json.dumps(layer))
    record = {
        "kind": "jax_views",
        **environment.of_script(),
        "what": f"CPU ms of a decoded token, median of {STEPS - WARM}, cache donated, context nearly full",
        "sizes": {"layers": LAYERS, "heads": HEADS, "key_heads": KEY_HEADS, "dim": DIM, "width": WIDTH, "words": WORDS},
        "one_layer": {"batch": BATCH, "heads": ONE_HEADS, "dim": ONE_DIM, "context": ONE_TOKENS, "ms": layer},
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "contexts": contexts,
    }
    write(record, options.out)


if __name__ == "__main__":
    main()
