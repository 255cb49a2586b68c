"""Decode inside your own jit: donated pools go in and come back, the index is an argument, one trace serves all."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import kvcore
from kvcore.interop.jax import assert_in_place
from kvcore.spec import presets

spec = presets.classic(layers=2, key_heads=2, key_dim=64, window=128, key_format="int8_row")
cache = kvcore.create_cache(spec, backend="jax_pallas", max_requests=4)
ops = cache.ops


def decode(pools, index, q, k, v):
    """One token a request through both layers."""
    for layer in range(len(spec.layers)):
        pools = ops.append_kv(pools, layer, index, k, v)
        q = ops.attend_kv(pools, layer, index, q).out
    return pools, q


step_in_place = partial(jax.jit, donate_argnums=0)(decode)
requests = [cache.admit() for _ in range(4)]
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.standard_normal((4, heads, 64)), jnp.float32) for heads in (8, 2, 2))

for _ in range(300):
    with cache.step(dict.fromkeys(requests, 1)) as step:
        cache.pools, out = step_in_place(cache.pools, step.index, q, k, v)

with cache.step(dict.fromkeys(requests, 1)) as step:
    (found,) = assert_in_place(decode, cache.pools, step.index, q, k, v, temporary_bytes=8 << 20)
    step.abort()
print(f"{requests[0].length} tokens each; {step_in_place._cache_size()} trace; {found.alias_bytes} bytes in place")
