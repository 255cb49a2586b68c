"""Classic decode attention on TPU tiles, interpreted with races, bounds and unwritten memory watched."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.backends.jax_pallas import JaxOps
from kvcore.kernels.pallas import block_lines, walks
from kvcore.plan import plan_cache
from kvcore.spec import KV, CacheSpec, LayerSpec
from kvcore.step import StepRequest, build_index
from tests.jax_pallas.beside_reference import assert_alike, attended

LENGTHS, NEWS = (19, 5, 30), (1, 2, 1)
BLOCKS = ((3, 0, 6), (5,), (1, 7, 2, 8))


def steps(left_padding=(None, None, None)):
    rows = [
        StepRequest(slot=slot, start=length - new, new=new, blocks=blocks, left_padding=left)
        for slot, (length, new, blocks, left) in enumerate(zip(LENGTHS, NEWS, BLOCKS, left_padding, strict=True))
    ]
    read = build_index(rows, max_blocks=4, pad_tokens=6, pad_requests=4)
    return build_index([row._replace(start=0, new=row.length) for row in rows], max_blocks=4), read


def beside_the_reference(kv, rng, *, left_padding=(None, None, None), **how):
    """((out, lse) of the reference, the same of the interpreted kernel)."""
    return attended(kv, *steps(left_padding), rng, walks.supports, block=8, blocks=10, columns=30, **how)


def spoil(k, v):
    """One head's row of one request, which its later tokens see, and the other heads do not."""
    k[12, 0], v[12, 1, 3], v[13, 0] = np.nan, np.inf, np.nan


@pytest.mark.parametrize(
    ("kv", "heads"),
    [
        pytest.param(KV(key_heads=2, key_dim=128), 8, id="bf16"),
        pytest.param(KV(key_heads=4, key_dim=64), 4, id="bf16, two rows a line"),
        pytest.param(KV(key_heads=2, key_dim=64), 4, id="bf16, heads in two slots each"),
        pytest.param(KV(key_heads=2, key_dim=256), 4, id="bf16, two lines a row"),
        pytest.param(KV(key_heads=2, key_dim=160, value_dim=256), 4, id="bf16, padded"),
        pytest.param(KV(key_heads=2, key_dim=96), 4, id="bf16, a line with some of another"),
        pytest.param(KV(key_heads=2, key_dim=48), 4, id="bf16, shorter than half a line"),
        pytest.param(KV(key_heads=3, key_dim=128, key_format="fp32"), 3, id="fp32, a head each"),
        pytest.param(KV(key_heads=1, key_dim=160, key_format="fp32"), 2, id="fp32, padded"),
        pytest.param(KV(key_heads=2, key_dim=128, key_format="fp8_row", window=11), 4, id="fp8_row, a window"),
        pytest.param(KV(key_heads=1, key_dim=64, key_format="int8_row", chunk=12), 5, id="int8_row, chunks, one head"),
        pytest.param(KV(key_heads=2, key_dim=400, key_format="int8_row"), 2, id="int8_row, four lines a row"),
        pytest.param(KV(key_heads=4, key_dim=64, key_format="mxfp4"), 8, id="mxfp4"),
        pytest.param(KV(key_heads=3, key_dim=128, key_format="mxfp4"), 6, id="mxfp4, heads in two slots each"),
        pytest.param(KV(key_heads=2, key_dim=256, key_format="mxfp4"), 4, id="mxfp4, eight scales a row"),
        pytest.param(KV(key_heads=2, key_dim=512, value_dim=512, key_format="mxfp4"), 2, id="mxfp4, two lines a row"),
        pytest.param(KV(key_heads=2, key_dim=96, key_format="mxfp4"), 2, id="mxfp4, padded"),
        pytest.param(KV(key_heads=4, key_dim=128, key_format="nf4_b64"), 8, id="nf4_b64, two scales a row"),
        pytest.param(KV(key_heads=2, key_dim=64, key_format="nf4_b64"), 2, id="nf4_b64, heads in two slots each"),
        pytest.param(KV(key_heads=4, key_dim=128, key_format="int4_g64"), 8, id="int4_g64, two heads a line"),
        pytest.param(KV(key_heads=3, key_dim=64, key_format="int4_g64"), 3, id="int4_g64, heads in four slots each"),
        pytest.param(KV(key_heads=2, key_dim=256, key_format="int4_g64"), 4, id="int4_g64, four scales a row"),
        pytest.param(KV(key_heads=4, key_dim=128, key_format="int4_g32"), 4, id="int4_g32"),
        pytest.param(KV(key_heads=2, key_dim=96, key_format="int4_g32"), 2, id="int4_g32, padded"),
        pytest.param(
            KV(key_heads=2, key_dim=128, key_format="int4_g64", value_format="mxfp4"), 4, id="int4_g64 beside mxfp4"
        ),
        pytest.param(
            KV(key_heads=2, key_dim=96, value_dim=128, key_format="fp8_row", value_format="bf16"), 4, id="dims differ"
        ),
        pytest.param(KV(key_heads=1, key_dim=192, value_dim=256, key_format="fp8_row"), 4, id="longer dims differ"),
    ],
)
def test_decode_attention_is_the_references(kv, heads, rng):
    sink = rng.standard_normal(heads).astype(np.float32)
    want, got = beside_the_reference(kv, rng, heads=heads, sink=sink)
    assert_alike(want, got)
    out, lse = got
    assert np.isneginf(lse[-1]).all()
    assert not out[-1].any()


@pytest.mark.parametrize("chunk", [None, 12], ids=["full", "chunks of tokens"])
def test_left_padding_is_not_seen(chunk, rng):
    """Some of a block, all but the last token, and all there is up to the first of two queries."""
    kv = KV(key_heads=2, key_dim=128, chunk=chunk)
    want, got = beside_the_reference(kv, rng, heads=4, left_padding=(10, 4, 29))
    assert_alike(want, got)
    assert np.isneginf(want[1][1]).all()  # the query at position 3 of the second request, before its first token


@pytest.mark.parametrize("format", ["bf16", "fp8_row", "mxfp4", "nf4_b64", "int4_g32"])
def test_a_large_block_is_taken_in_pieces(format, rng, monkeypatch):
    monkeypatch.setattr(walks, "PIECE_LINES", 128)
    kv = KV(key_heads=32, key_dim=128, key_format=format, window=11)
    assert_alike(*beside_the_reference(kv, rng, heads=32))


def test_queries_in_bf16_are_as_exact_as_their_result(rng):
    kv = KV(key_heads=2, key_dim=128, key_format="fp8_row")
    assert_alike(*beside_the_reference(kv, rng, heads=4, bf16=True), bf16=True)


def test_every_e4m3_code_is_cast_by_the_bias_of_another(rng):
    """Denormals, -0 and NaN among them."""
    kv = KV(key_heads=1, key_dim=128, key_format="fp8_row")
    (region, _) = plan_cache(
        CacheSpec(layers=[LayerSpec(kv=kv)], block_tokens=8), max_requests=1, max_tokens=8, layout="tpu_tile"
    ).region(0, "kv")
    how = block_lines.lie(region)
    codes = rng.permutation(np.arange(8 * 512, dtype=np.int32) % 256).astype(np.uint8)
    words = codes.reshape(8, 4, 128).swapaxes(1, 2).copy().view(np.int32)[:, :, 0]
    cast = pl.pallas_call(
        lambda words, out: out.__setitem__(
            ..., block_lines.matrices(how, words[...], native=False, sublanes=False)[0].astype(jnp.float32)
        ),
        out_shape=jax.ShapeDtypeStruct((32, 128), jnp.float32),
        interpret=pltpu.InterpretParams(),
    )(words)
    want = codes.reshape(32, 128).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(cast) * block_lines.factor(how, False), want)


@pytest.mark.parametrize(
    "kv",
    [
        pytest.param(KV(key_heads=4, key_dim=128), id="a line each"),
        pytest.param(KV(key_heads=4, key_dim=64), id="two heads in a line"),
        pytest.param(KV(key_heads=4, key_dim=128, key_format="mxfp4"), id="scales that are no numbers"),
        pytest.param(KV(key_heads=4, key_dim=128, key_format="nf4_b64"), id="scales apart that are no numbers"),
        pytest.param(KV(key_heads=4, key_dim=128, key_format="int4_g64"), id="offsets that are no numbers"),
    ],
)
def test_what_is_not_finite_stays_with_its_head(kv, rng):
    want, got = beside_the_reference(kv, rng, heads=4, spoil=spoil)
    assert not np.isfinite(want[0]).all()
    assert_alike(want, got)


@pytest.mark.parametrize(
    "kv",
    [
        pytest.param(KV(key_heads=2, key_dim=128, storage="slot"), id="contiguous"),
        pytest.param(KV(key_heads=2, key_dim=512, key_format="nf4_b64"), id="several fp32 scales in two lines a row"),
        pytest.param(KV(key_heads=2, key_dim=256, value_dim=128), id="lines differ"),
        pytest.param(KV(key_heads=2, key_dim=64, key_format="fp8_row", value_format="bf16"), id="order differs"),
        pytest.param(KV(key_heads=2, key_dim=1024, key_format="fp8_row"), id="long rows"),
        pytest.param(KV(key_heads=2, key_dim=64, value_heads=1), id="heads differ"),
    ],
)
def test_what_the_kernel_does_not_take(kv):
    plan = plan_cache(CacheSpec(layers=[LayerSpec(kv=kv)]), max_requests=1, max_tokens=256, layout="tpu_tile")
    assert not walks.supports(*plan.region(0, "kv"))


def test_the_verb_is_one_kernel():
    plan = plan_cache(
        CacheSpec(layers=[LayerSpec(kv=KV(key_heads=2, key_dim=128))], block_tokens=8),
        max_requests=4, max_tokens=80, layout="tpu_tile",
    )  # fmt: skip
    ops = JaxOps(plan, "cpu", None, "interpret")
    index = ops.index(steps()[1])
    call = functools.partial(ops.attend_kv, layer=0, columns=30)
    traced = str(jax.make_jaxpr(lambda pools, index, q: call(pools, index=index, q=q))(
        ops.allocate(), index, jnp.zeros((len(index.positions), 4, 128))
    ))  # fmt: skip
    assert traced.count("pallas_call") == 1
