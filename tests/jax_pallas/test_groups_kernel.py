"""Decode attention on TPU tiles to int4 rows of eight heads and to keys over tokens, interpreted.

Races, bounds and unwritten memory are watched.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvcore.backends.jax_pallas import JaxOps
from kvcore.kernels.pallas import attend_groups, attend_heads
from kvcore.plan import plan_cache
from kvcore.spec import KV, CacheSpec, LayerSpec
from kvcore.step import StepRequest, build_index
from tests.jax_pallas.beside_reference import assert_alike, attended

LENGTHS = (583, 31, 97, 128)
"""More than a chunk, no group that is whole, an open group of one token, and none that is open."""


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


def beside_the_reference(kv, rng, *, heads, block=128, left_padding=(None,) * 4, **how):
    """((out, lse) of the reference, the same of the interpreted kernel)."""
    takes = (attend_groups if kv.tokens_per_row > 1 else attend_heads).supports
    sizes = {"heads": heads, "block": block, "blocks": 64, "columns": max(LENGTHS)}
    sink = rng.standard_normal(heads).astype(np.float32)
    return attended(kv, *steps(block, left_padding), rng, takes, sink=sink, **sizes, **how)


def spoil(k, v):
    """A channel of one head's keys, and a token of another's values, in groups that a token sees and others do not."""
    k[40, 0, 3], v[300, 1, 7] = np.nan, np.inf


@pytest.mark.parametrize(
    ("kv", "heads", "block", "left"),
    [
        pytest.param(of(8, 64), 8, 256, (None,) * 4, id="over 64 tokens, a query a head"),
        pytest.param(KV(key_heads=8, key_dim=128, key_format="int4_g32"), 16, 128, (5, None, 90, None), id="int4_g32"),
        pytest.param(of(2, 64, window=150), 20, 64, (10, 4, 70, None), id="a window, ten queries a head, left padding"),
    ],
)
def test_decode_attention_is_the_references(kv, heads, block, left, rng):
    want, got = beside_the_reference(kv, rng, heads=heads, block=block, left_padding=left)
    assert_alike(want, got)
    out, lse = got
    assert np.isneginf(lse[-1]).all()
    assert not out[-1].any()


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
    assert_alike(*beside_the_reference(kv, rng, heads=heads, block=512, bf16=True), bf16=True)


@pytest.mark.parametrize(
    ("kv", "heads"),
    [
        pytest.param(of(2, 32), 8, id="over 32 tokens"),
        pytest.param(KV(key_heads=8, key_dim=128, key_format="int4_g32"), 8, id="int4_g32"),
    ],
)
def test_what_is_not_finite_stays_with_its_head(kv, heads, rng):
    """What is finite is the reference's."""
    want, got = beside_the_reference(kv, rng, heads=heads, spoil=spoil)
    assert not np.isfinite(want[0]).all()
    assert np.isfinite(want[0]).any()
    assert_alike(want, got)


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
