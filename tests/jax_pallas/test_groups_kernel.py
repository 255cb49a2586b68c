"""Decode attention on TPU tiles to int4 rows of eight heads and to keys over tokens, interpreted.

Races, bounds and unwritten memory are watched.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvcore.backends.jax_pallas import JaxOps
from kvcore.backends.reference import ReferenceBackend
from kvcore.kernels.pallas import attend_groups, attend_heads
from kvcore.plan import plan_cache
from kvcore.spec import KV, CacheSpec, LayerSpec
from kvcore.step import StepRequest, build_index

LENGTHS = (583, 31, 97, 128)
"""More than a chunk, no group that is whole, an open group of one token, and none that is open."""
SCALE = 0.2


def of(heads, tokens, *, dim=128, key=None, value=None, **more):
    formats = {"key_format": key or f"int4_ch{tokens}", "value_format": value or f"int4_g{tokens}"}
    return KV(key_heads=heads, key_dim=dim, **formats, **more)


def steps(block, left_padding):
    free = iter(np.random.default_rng(7).permutation(64).tolist())
    rows = [
        StepRequest(
            slot=slot,
            start=length - 1,
            new=1,
            blocks=tuple(next(free) for _ in range(-(-length // block))),
            left_padding=left,
        )
        for slot, (length, left) in enumerate(zip(LENGTHS, left_padding, strict=True))
    ]
    most = max(len(row.blocks) for row in rows)
    read = build_index(rows, max_blocks=most, pad_tokens=6, pad_requests=5)
    return build_index([row._replace(start=0, new=row.length) for row in rows], max_blocks=most), read


def beside_the_reference(kv, rng, *, heads, block=128, spoiled=False, left_padding=(None,) * 4, bf16=False):
    """((out, lse) of the reference, the same of the interpreted kernel)."""
    spec, found = CacheSpec(layers=[LayerSpec(kv=kv)], block_tokens=block), []
    written, read = steps(block, left_padding)
    tokens = len(written.positions)
    k, v = (rng.standard_normal((tokens, kv.key_heads, 128)).astype(np.float32) for _ in range(2))
    if spoiled:
        # A channel of one head's keys, and a token of another's values, in groups that a token sees and others do not.
        k[40, 0, 3], v[300, 1, 7] = np.nan, np.inf
    q = rng.standard_normal((len(read.positions), heads, 128)).astype(np.float32)
    q = q.astype(ml_dtypes.bfloat16).astype(np.float32) if bf16 else q
    sink = rng.standard_normal(heads).astype(np.float32)
    for layout in ("packed", "tpu_tile"):
        plan = plan_cache(spec, max_requests=5, max_tokens=64 * block, layout=layout)
        if layout == "packed":
            write = read_with = ReferenceBackend().create(plan)
        else:
            assert (attend_groups if kv.tokens_per_row > 1 else attend_heads).supports(*plan.region(0, "kv"))
            write, read_with = JaxOps(plan, "cpu", None), JaxOps(plan, "cpu", None, "interpret")
        pools = write.poison(write.allocate(), *(write.asarray(np.arange(count, dtype=np.int32)) for count in (5, 64)))
        pools = write.append_kv(pools, 0, write.index(written), write.asarray(k), write.asarray(v))
        asked = write.asarray(q).astype(jnp.bfloat16) if bf16 and layout != "packed" else write.asarray(q)
        options = {"columns": max(LENGTHS), "sink": write.asarray(sink), "scale": SCALE}
        got = read_with.attend_kv(pools, 0, write.index(read), asked, **options)
        found.append([np.asarray(array, np.float64) for array in got])
    return found


@pytest.mark.parametrize(
    ("kv", "heads", "block", "left"),
    [
        pytest.param(of(8, 64), 8, 256, (None,) * 4, id="over 64 tokens, a query a head"),
        pytest.param(KV(key_heads=8, key_dim=128, key_format="int4_g32"), 16, 128, (5, None, 90, None), id="int4_g32"),
        pytest.param(of(2, 64, window=150), 20, 64, (10, 4, 70, None), id="a window, ten queries a head, left padding"),
    ],
)
def test_decode_attention_is_the_references(kv, heads, block, left, rng):
    (out, lse), (got, got_lse) = beside_the_reference(kv, rng, heads=heads, block=block, left_padding=left)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got, out, rtol=1e-5, atol=1e-5)
    assert np.isneginf(got_lse[-1]).all()
    assert not got[-1].any()


@pytest.mark.parametrize(
    ("kv", "heads"),
    [
        pytest.param(of(4, 32, chunk=200), 12, id="over tokens"),
        pytest.param(
            KV(key_heads=8, key_dim=128, key_format="int4_g64", window=99), 40, id="int4_g64, five queries a head"
        ),
    ],
)
def test_queries_in_bf16_are_as_exact_as_their_result(kv, heads, rng):
    (out, lse), (got, got_lse) = beside_the_reference(kv, rng, heads=heads, block=512, bf16=True)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got, out, rtol=2.0**-7, atol=2.0**-8 * np.abs(out).max())


@pytest.mark.parametrize(
    ("kv", "heads"),
    [
        pytest.param(of(2, 32), 8, id="over 32 tokens"),
        pytest.param(KV(key_heads=8, key_dim=128, key_format="int4_g32"), 8, id="int4_g32"),
    ],
)
def test_what_is_not_finite_stays_with_its_head(kv, heads, rng):
    """What is finite is the reference's."""
    (out, lse), (got, got_lse) = beside_the_reference(kv, rng, heads=heads, spoiled=True)
    assert not np.isfinite(out).all()
    assert np.isfinite(out).any()
    np.testing.assert_allclose(got_lse, lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got, out, rtol=1e-5, atol=1e-5)


def test_blocks_of_lanes_are_exchanged():
    given = np.random.default_rng(0).permutation(8 * 16 * 128).reshape(8, 16, 128)
    got = jax.jit(lambda given: jnp.stack(attend_groups.exchanged(list(given))))(given)
    want = given.reshape(8, 16, 8, 16).transpose(2, 1, 0, 3).reshape(given.shape)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("kv", "block", "why"),
    [
        pytest.param(KV(key_heads=2, key_dim=128, key_format="int4_ch32"), 128, "values of int4_ch32", id="both"),
        pytest.param(of(2, 32, value="bf16"), 128, "values of bf16", id="other values"),
        pytest.param(of(2, 32, key="bf16", value="int4_ch32"), 128, "keys of bf16", id="values alone"),
        pytest.param(of(2, 32, dim=64), 128, "channels", id="half a line"),
        pytest.param(of(1, 32), 128, "registers", id="half a register"),
        pytest.param(of(2, 32), 96, "blocks of 96", id="blocks across sets"),
    ],
)
def test_what_the_kernel_does_not_take(kv, block, why):
    spec = CacheSpec(layers=[LayerSpec(kv=kv)], block_tokens=block)
    plan = plan_cache(spec, max_requests=1, max_tokens=2 * block, layout="tpu_tile")
    assert why in attend_groups.declined(*plan.region(0, "kv"))
    said = JaxOps(plan, "cpu", None, "interpret").explain()
    assert why in str(said)


def test_the_groups_are_one_kernel():
    """The other two read raw rows of the open group."""
    spec = CacheSpec(layers=[LayerSpec(kv=of(2, 32))], block_tokens=128)
    plan = plan_cache(spec, max_requests=5, max_tokens=64 * 128, layout="tpu_tile")
    ops = JaxOps(plan, "cpu", None, "interpret")
    index = ops.index(steps(128, (None,) * 4)[1])
    call = functools.partial(ops.attend_kv, layer=0, columns=max(LENGTHS))
    traced = str(jax.make_jaxpr(lambda pools, index, q: call(pools, index=index, q=q))(
        ops.allocate(), index, jnp.zeros((len(index.positions), 8, 128))
    ))  # fmt: skip
    assert traced.count("pallas_call") == 3
