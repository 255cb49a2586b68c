"""A decode step's cache update beside EasyDeL's ``TransformerCache``, on the CPU, and inputs that each gets wrong.

    python -m benchmarks.beside_easydel --peer PYTHON [--out records/beside_easydel.json]

PYTHON is that of an environment of its own with easydel 0.2.0.2 and jax 0.8.2 (Python 3.11); kvcore need not be there.
Both sides get the same keys and values, run in a process each, one after the other, and update their cache in one jit
with the cache donated. Full: 4,096 rows a request. Sliding: windows of 128 and 4,096.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BATCH, HEADS, DIM, STEPS, TOKENS = 4, 8, 128, 100, 4096
CASES = {"full 4096": None, "sliding 128": 128, "sliding 4096": 4096}
"""Name -> window, None where every row is kept."""

WINDOW = 8
CHUNKS = {"6 tokens, then 4": (6, 4), "12 tokens at once": (12,), "8 tokens, then 1": (8, 1)}
"""Name -> how many tokens come at once, into a window of 8."""


def median_us(step: Callable[[Any, Any, Any], Any], state: Any) -> float:
    """Median µs of one step, after some that fill the window and warm up."""
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((BATCH, 1, HEADS, DIM)), jnp.bfloat16) for _ in range(2))
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        state = jax.block_until_ready(step(state, k, v))
        times.append(1e6 * (time.perf_counter() - started))
    return float(np.median(times[STEPS // 10 :]))


def kvcore_side() -> dict[str, Any]:
    """Times and outcomes of kvcore."""
    import kvcore
    from kvcore.backends.jax_pallas import JaxOps
    from kvcore.ops import StepIndex
    from kvcore.plan import plan_cache
    from kvcore.spec import KV, CacheSpec, LayerSpec

    def spec(window: int | None, heads: int = HEADS, dim: int = DIM) -> CacheSpec:
        storage = "slot" if window is None else "ring"
        return CacheSpec(layers=(LayerSpec(kv=KV(key_heads=heads, key_dim=dim, storage=storage, window=window)),))

    times = {}
    for name, window in CASES.items():
        plan = plan_cache(spec(window), max_requests=BATCH, max_tokens=BATCH * 2 * TOKENS, layout="planar")
        ops = JaxOps(plan, "cpu", None)
        numbers = jnp.arange(BATCH, dtype=jnp.int32)

        @partial(jax.jit, donate_argnums=0)
        def step(state: Any, k: Any, v: Any, ops: Any = ops, numbers: Any = numbers) -> Any:
            pools, length = state
            table = jnp.zeros((BATCH, 0), jnp.int32)
            index = StepIndex(length, numbers, numbers, length, length + 1, table, jnp.zeros_like(length))
            return ops.append_kv(pools, 0, index, k[:, 0], v[:, 0]), length + 1

        start = jnp.full(BATCH, TOKENS - STEPS if window is None else 2 * (window or 0), jnp.int32)
        times[name] = median_us(step, (ops.allocate(), start))

    outcomes = {}
    for name, chunks in CHUNKS.items():
        cache = kvcore.create_cache(spec(WINDOW, 1, 4), backend="jax_pallas", max_requests=1, max_tokens=64)
        request, seen, first = cache.admit(), [], 0
        for count in chunks:
            with cache.step({request: count}) as one:
                rows = np.repeat(np.arange(first + 1, first + count + 1, dtype=np.float32)[:, None, None], 4, axis=2)
                one.layer(0).append_kv(rows, rows)
                seen += kvcore.to_numpy(one.layer(0).mask()).sum(axis=1).tolist()
            first += count
        with cache.step({request: 0}) as one:
            held = kvcore.to_numpy(one.layer(0).gather_kv()[0]).astype(np.float32)[0, :, 0, 0]
        outcomes[name] = {"rows": held.astype(int).tolist(), "keys seen by each query": seen}
    return {"us": times, "windows": outcomes, "versions": _versions("kvcore")}


def easydel_side() -> dict[str, Any]:
    """Times and outcomes of EasyDeL."""
    from easydel.infra.utils import AttnMaskType
    from easydel.layers.caching.transformer.cache import AttnMaskDetail, TransformerCacheConfig, TransformerCacheView
    from easydel.layers.quantization.quantizers import EasyQuantizer
    from eformer.escale import PartitionAxis, PartitionManager
    from ejkernel.types import MaskInfo

    mesh = jax.make_mesh((1, 1, 1, 1, 1), ("dp", "fsdp", "ep", "tp", "sp"))
    manager, quantizer = PartitionManager(PartitionAxis()), EasyQuantizer(quantization_config=None)

    def view(window: int | None, batch: int, heads: int, dim: int, tokens: int) -> Any:
        config = TransformerCacheConfig.create(batch, tokens, 1, num_heads=heads, head_dim=dim)
        details = None if window is None else AttnMaskDetail(mask_type=AttnMaskType.SLIDING, size=window)
        options = {"mesh": mesh, "partition_manager": manager, "masking_details": details}
        return TransformerCacheView.init(config, 0, **options)

    def update(state: Any, k: Any, v: Any) -> Any:
        batch, count = k.shape[:2]
        ones = jnp.ones((batch, 1, count, state.key.shape[1]), jnp.bool_)
        mask = MaskInfo.from_attention_mask(ones)
        return state.concatenate_to_cache(k, k, v, "decode", quantizer, None, mask, manager)

    times, outcomes = {}, {}
    with mesh:
        for name, window in CASES.items():
            step = jax.jit(lambda state, k, v: update(state, k, v)[3], donate_argnums=0)
            state = view(window, BATCH, HEADS, DIM, TOKENS)
            start = TOKENS - STEPS if window is None else 2 * window
            state = state.replace(indexs=jnp.full(BATCH, start, jnp.int32))
            times[name] = median_us(step, state)
        for name, chunks in CHUNKS.items():
            state, first = view(WINDOW, 1, 1, 4, 64), 0
            for count in chunks:
                rows = np.arange(first + 1, first + count + 1, dtype=np.float32)[None, :, None, None]
                rows = jnp.asarray(np.broadcast_to(rows, (1, count, 1, 4)), jnp.bfloat16)
                state, first = update(state, rows, rows)[3], first + count
            outcomes[name] = {"rows": np.asarray(state.key, np.float32)[0, :, 0, 0].astype(int).tolist()}
    return {"us": times, "windows": outcomes, "versions": _versions("easydel")}


def _versions(*names: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "numpy", *names) if _has(name)}


def _has(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def run(python: str, side: str) -> dict[str, Any]:
    """One side, in a process of its own."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    line = [python, str(Path(__file__).resolve()), "--side", side]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run both sides and write the record, or one side and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="the Python that has easydel")
    parser.add_argument("--side", choices=("kvcore", "easydel"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("records/beside_easydel.json"))
    options = parser.parse_args()
    if options.side:
        print(json.dumps({"kvcore": kvcore_side, "easydel": easydel_side}[options.side]()))
        return
    from kvcore.parity import environment  # the peer's Python, which stopped above, need not have it

    sides = {"kvcore": run(sys.executable, "kvcore"), "easydel": run(options.peer, "easydel")}
    ours, theirs = sides["kvcore"]["us"], sides["easydel"]["us"]
    record = {
        "kind": "beside_easydel",
        **environment.of_script(),
        "what": f"µs of one decode step's cache update, median of {STEPS}, CPU, one jit, cache donated",
        "sizes": {"batch": BATCH, "heads": HEADS, "head_dim": DIM, "dtype": "bfloat16", "tokens": TOKENS},
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "times_faster": {name: round(theirs[name] / ours[name], 1) for name in CASES},
        **sides,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["times_faster"]))


if __name__ == "__main__":
    main()
