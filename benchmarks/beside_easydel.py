"""A layer's decode step through a view beside EasyDeL's ``TransformerCache``, on the CPU; inputs that each gets wrong.

    python -m benchmarks.beside_easydel --peer PYTHON [--out records/beside_easydel.json]

PYTHON is that of an environment of its own with easydel 0.2.0.2 and jax 0.8.2 (Python 3.11); kvcore need not be there.
Both sides get the same keys, values and queries, run in a process each, one after the other, and do the whole step in
one jit with the cache donated: update the cache, and attend, by one function, to the keys, values and mask that the
update gives; and kvcore once more by ``view.attend``, which reads rows where they lie. Full: 512 to 16,384 rows a
request, nearly all of them written. Sliding: windows of 128 and 4,096, full and more than once around.
"""

import argparse
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BATCH, HEADS, DIM, STEPS = 4, 8, 128, 40
CASES = {
    "full 512": (512, None),
    "full 1024": (1024, None),
    "full 4096": (4096, None),
    "full 16384": (16384, None),
    "sliding 128": (4096, 128),
    "sliding 4096": (4096, 4096),
}
"""Name -> rows a request may have, and the window, None where every row is kept."""

WINDOW = 8
CHUNKS = {"6 tokens, then 4": (6, 4), "12 tokens at once": (12,), "8 tokens, then 1": (8, 1)}
"""Name -> how many tokens come at once, into a window of 8."""


def attend(q: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention of q [B, 1, heads, dim] to keys and values [B, n, heads, dim] where mask [B, n] is True."""
    logits = jnp.einsum("bshd,bnhd->bhn", q, keys, preferred_element_type=jnp.float32) * DIM**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], logits, -jnp.inf), axis=2)
    return jnp.einsum("bhn,bnhd->bhd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)


def median_us(step: Callable[[Any, Any, Any, Any], Any], state: Any) -> tuple[float, float]:
    """Median µs of one step, after some that warm up, and the sum of the last outs: both sides see the same rows."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((BATCH, 1, HEADS, DIM)), jnp.bfloat16) for _ in range(3))
    times, out = [], None
    for _ in range(STEPS):
        started = time.perf_counter()
        state, out = jax.block_until_ready(step(state, q, k, v))
        times.append(1e6 * (time.perf_counter() - started))
    return float(np.median(times[STEPS // 10 :])), float(jnp.sum(out))


def kvcore_side() -> dict[str, Any]:
    """Times and outcomes of kvcore."""
    import kvcore
    from kvcore.interop.jax.views import init_views
    from kvcore.spec import KV, CacheSpec, LayerSpec

    def spec(window: int | None, heads: int = HEADS, dim: int = DIM) -> CacheSpec:
        storage = "slot" if window is None else "ring"
        return CacheSpec(layers=(LayerSpec(kv=KV(key_heads=heads, key_dim=dim, storage=storage, window=window)),))

    @partial(jax.jit, donate_argnums=0)
    def step(view: Any, q: Any, k: Any, v: Any) -> Any:
        keys, values, mask, _, view = view.append(k, v)
        return view, attend(q, keys, values, mask[:, 0])

    @partial(jax.jit, donate_argnums=0)
    def attended(view: Any, q: Any, k: Any, v: Any) -> Any:
        done = view.attend(q, k, v)
        return done.view, done.out[:, 0]

    times, in_place = {}, {}
    for name, (tokens, window) in CASES.items():
        length = tokens if window is None else 2 * window + STEPS
        for one, found in ((step, times), (attended, in_place)):
            view = init_views(spec(window), batch=BATCH, max_length=length)[0]
            start = jnp.full(BATCH, length - STEPS, jnp.int32)  # a buffer of its own: it is donated
            found[name] = median_us(one, view.replace(lengths=start))

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
    named = {f"{key} of attend": found for key, found in _named(in_place).items()}
    return {**_named(times), **named, "windows": outcomes, "versions": _versions("kvcore")}


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
        for name, (tokens, window) in CASES.items():

            def step(state: Any, q: Any, k: Any, v: Any) -> Any:
                keys, values, mask, state, _ = update(state, k, v)
                return state, attend(q, keys, values, mask.get_or_compute_attention_mask()[:, 0, 0])

            step = jax.jit(step, donate_argnums=0)
            state = view(window, BATCH, HEADS, DIM, tokens)
            start = tokens - STEPS if window is None else 2 * window
            state = state.replace(indexs=jnp.full(BATCH, start, jnp.int32))
            times[name] = median_us(step, state)
        for name, chunks in CHUNKS.items():
            state, first = view(WINDOW, 1, 1, 4, 64), 0
            for count in chunks:
                rows = np.arange(first + 1, first + count + 1, dtype=np.float32)[None, :, None, None]
                rows = jnp.asarray(np.broadcast_to(rows, (1, count, 1, 4)), jnp.bfloat16)
                state, first = update(state, rows, rows)[3], first + count
            outcomes[name] = {"rows": np.asarray(state.key, np.float32)[0, :, 0, 0].astype(int).tolist()}
    return {**_named(times), "windows": outcomes, "versions": _versions("easydel")}


def _named(times: dict[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    return {key: {name: found[number] for name, found in times.items()} for number, key in enumerate(("us", "outs"))}


def _versions(*names: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "numpy", *names) if _has(name)}


def _has(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


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
    # The peer's Python, which stopped above, need not have it.
    from benchmarks.apart import printed
    from benchmarks.written import write
    from kvcore import environment

    sides = {}
    for side, python in {"kvcore": sys.executable, "easydel": options.peer}.items():
        (sides[side],) = printed([python, str(Path(__file__).resolve()), "--side", side], JAX_PLATFORMS="cpu")
    ours, attended, theirs = sides["kvcore"]["us"], sides["kvcore"]["us of attend"], sides["easydel"]["us"]
    for name in CASES:
        wanted = sides["easydel"]["outs"][name]
        for key in ("outs", "outs of attend"):
            found = sides["kvcore"][key][name]
            assert abs(found - wanted) < 0.02 + 0.01 * abs(wanted), f"{name}, {key}: {found}, EasyDeL's {wanted}"
    record = {
        "kind": "beside_easydel",
        **environment.of_script(),
        "what": f"µs of one layer's decode step, update and attention, median of {STEPS}, CPU, one jit, cache donated",
        "sizes": {"batch": BATCH, "heads": HEADS, "head_dim": DIM, "dtype": "bfloat16"},
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "times_faster": {name: round(theirs[name] / ours[name], 2) for name in CASES},
        "times_faster_with_attend": {name: round(theirs[name] / attended[name], 2) for name in CASES},
        **sides,
    }
    write(record, options.out)
    print(json.dumps({name: found for name, found in record.items() if name.startswith("times_faster")}))


if __name__ == "__main__":
    main()
