"""Keys and values in formats over tokens on JAX: the kit's spec of them, and lives beside the reference."""

import jax
import numpy as np
import pytest

import kvcore
from kvcore.arrays import to_numpy
from kvcore.conformance.specs import over_tokens_spec
from kvcore.parity.run import run
from kvcore.plugins import registry
from kvcore.spec import KV, CacheSpec, LayerSpec

CHECKS = [f"{verb}/int4_ch32-int4_g32.full.paged/planar/ragged" for verb in ("append_kv", "gather_kv", "attend_kv")]


@pytest.mark.parametrize("check", [*CHECKS, "restore_ring/kv_tail.m32/planar/ragged", "encode/int4_g32/any/edges"])
def test_a_check_of_the_kit(check):
    report = run(over_tokens_spec(), [registry().backends["jax_pallas"]], device="cpu", only=check)
    assert [record.status for record in report.checks] == ["agree"], check


def test_steps_of_any_length_store_what_the_reference_stores():
    layer = LayerSpec(kv=KV(key_heads=1, key_dim=16, key_format="int4_ch32", value_format="int4_g32", value_dim=32))
    spec = CacheSpec(layers=[layer], block_tokens=64)
    rows = np.random.default_rng(3).standard_normal((80, 1, 64)).astype(np.float32)
    k, v, q = rows[:, :, :16], rows[:, :, 16:48], rows[:, :, 48:]
    caches = [
        kvcore.create_cache(spec, backend=name, max_requests=2, max_tokens=256, max_draft_tokens=2)
        for name in ("reference", "jax_pallas")
    ]
    requests, start = [cache.admit() for cache in caches], 0
    for end in (31, 32, 64, 80):
        found = []
        for cache, request in zip(caches, requests, strict=True):
            with cache.step({request: end - start}) as step:
                step.layer(0).append_kv(k[start:end], v[start:end])
                found.append(to_numpy(step.layer(0).attend(q[start:end])[0]))
        np.testing.assert_allclose(found[1], found[0], atol=1e-5)
        assert len({cache.digest([request]) for cache, request in zip(caches, requests, strict=True)}) == 1
        start = end
    for cache, request in zip(caches, requests, strict=True):
        cache.truncate(request, 78)
    assert caches[0].digest([requests[0]]) == caches[1].digest([requests[1]])


def test_in_one_program():
    spec = CacheSpec(layers=[LayerSpec(kv=KV(key_heads=1, key_dim=16, key_format="int4_ch32"))], block_tokens=32)
    cache = kvcore.create_cache(spec, backend="jax_pallas", max_requests=1, max_tokens=64)
    rows = np.random.default_rng(4).standard_normal((33, 1, 16)).astype(np.float32)

    @jax.jit
    def decode(pools, index, rows):
        pools = cache.ops.append_kv(pools, 0, index, rows, rows)
        return pools, cache.ops.attend_kv(pools, 0, index, rows)[0]

    request = cache.admit()
    with cache.step({request: 31}) as step:
        step.layer(0).append_kv(rows[:31], rows[:31])
    for token in (31, 32):
        with cache.step({request: 1}) as step:
            cache.pools, out = decode(cache.pools, step.index, rows[token : token + 1])
    other = kvcore.create_cache(spec, backend="reference", max_requests=1, max_tokens=64)
    beside = other.admit()
    with other.step({beside: 33}) as step:
        step.layer(0).append_kv(rows, rows)
        wanted = to_numpy(step.layer(0).attend(rows)[0])
    np.testing.assert_allclose(to_numpy(out)[0], wanted[32], atol=1e-5)
    assert cache.digest([request]) == other.digest([beside])
