"""Attention of JAX's interpreted kernels for TPUs beside the reference's, on the same rows."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kvcore.backends.jax_pallas import JaxOps
from kvcore.backends.reference import ReferenceBackend
from kvcore.plan import plan_cache
from kvcore.spec import CacheSpec, LayerSpec


def attended(kv, written, read, rng, takes, *, heads, block, blocks, columns, sink=None, spoil=None, bf16=False):
    """((out, lse) of the reference, the same of the interpreted kernel).

    Args:
        kv: the layer's keys and values.
        written, read: the step that writes them, and that whose tokens attend.
        rng: of keys, values and queries.
        takes: whether the kernel takes regions of keys and values.
        heads: query heads.
        block, blocks: tokens of a block, and how many there are.
        columns: most positions of a request.
        sink: of every head.
        spoil: what is done to keys and values before they are written.
        bf16: queries are.
    """
    spec, found, requests = CacheSpec(layers=[LayerSpec(kv=kv)], block_tokens=block), [], len(read.slots)
    tokens = len(written.positions)
    k, v = (rng.standard_normal((tokens, part.heads, part.format.dim)).astype(np.float32) for part in kv.given)
    if spoil:
        spoil(k, v)
    q = rng.standard_normal((len(read.positions), heads, kv.key_dim)).astype(np.float32)
    q = q.astype(ml_dtypes.bfloat16).astype(np.float32) if bf16 else q
    for layout in ("packed", "tpu_tile"):
        plan = plan_cache(spec, max_requests=requests, max_tokens=blocks * block, layout=layout)
        if layout == "packed":
            write = read_with = ReferenceBackend().create(plan)
        else:
            assert takes(*plan.region(0, "kv"))
            write, read_with = JaxOps(plan, "cpu", None), JaxOps(plan, "cpu", None, "interpret")
        every = (write.asarray(np.arange(count, dtype=np.int32)) for count in (requests, blocks))
        pools = write.poison(write.allocate(), *every)
        pools = write.append_kv(pools, 0, write.index(written), write.asarray(k), write.asarray(v))
        asked = write.asarray(q).astype(jnp.bfloat16) if bf16 and layout != "packed" else write.asarray(q)
        options = {"columns": columns, "sink": None if sink is None else write.asarray(sink), "scale": 0.2}
        got = read_with.attend_kv(pools, 0, write.index(read), asked, **options)
        found.append([np.asarray(array, np.float64) for array in got])
    return found


def assert_alike(want, got, *, bf16=False):
    """As close as fp32 is, or as results in ``bf16``."""
    (out, lse), (got_out, got_lse) = want, got
    np.testing.assert_allclose(got_lse, lse, rtol=1e-5, atol=1e-5)
    close = {"rtol": 2.0**-7, "atol": 2.0**-8 * np.abs(out).max()} if bf16 else {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(got_out, out, **close)
