"""Latent attention (MLA) in layer views: what DeepSeek-V2, V3 and V3.2 keep, against plain jnp."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvcore.backends.reference import ReferenceBackend
from kvcore.errors import OutOfBlocks, ShapeError, SpecError, StepError
from kvcore.interop.jax.views import CacheViews, init_views
from kvcore.plan import plan_cache
from kvcore.spec import CacheSpec, Entries, LayerSpec, from_hf_config, presets
from tests.support import scene

RANK, ROTARY, HEADS, LENGTH = 24, 8, 2, 16
CONFIG = {"num_hidden_layers": 2, "kv_lora_rank": RANK, "qk_rope_head_dim": ROTARY, "num_attention_heads": HEADS}
INDEXER = {"index_head_dim": 128, "index_n_heads": 2, "index_topk": 2}
GIVEN = {"deepseek_v2": {}, "deepseek_v3": {}, "deepseek_v32": {**INDEXER, "kv_lora_rank": 512, "qk_rope_head_dim": 64}}


def spec_of(model: str, **formats: str) -> CacheSpec:
    config = SimpleNamespace(model_type=model, **{**CONFIG, **GIVEN[model]})
    return from_hf_config(config, formats=formats or None, block_tokens=4)


def inputs(spec: CacheSpec, batch: int, columns: int) -> list[tuple[jax.Array, ...]]:
    """Every layer's rows [B, S, dim], and index keys where it has them."""
    rng = np.random.default_rng(0)
    dims = [[part.dim for _, part in layer.components()] for layer in spec.layers]
    return [tuple(jnp.asarray(rng.standard_normal((batch, columns, dim), np.float32)) for dim in some) for some in dims]


def attention(rows: jax.Array, query: jax.Array, mask: jax.Array) -> jax.Array:
    """Queries [B, S, heads, dim] in the latent's space over rows [B, n, dim], whose first channels are the values."""
    logits = jnp.einsum("bshd,bnd->bhsn", query, rows.astype(jnp.float32))
    weights = jnp.where(mask[:, None], jnp.exp(logits - jnp.max(logits, axis=3, keepdims=True)), 0)
    total = jnp.sum(weights, axis=3, keepdims=True)
    values = rows.astype(jnp.float32)[:, :, :RANK]
    return jnp.einsum("bhsn,bnd->bshd", weights / jnp.where(total == 0, 1, total), values)


def rounded(rows: jax.Array, format: str) -> jax.Array:
    """Rows as a format keeps them: plain jnp's bf16, or the reference's codes."""
    if format == "bf16":
        return rows.astype(jnp.bfloat16)
    plan = plan_cache(CacheSpec(layers=[scene.classic()]), max_requests=1, max_tokens=256)
    ops, flat = ReferenceBackend().create(plan), np.asarray(rows).reshape(-1, rows.shape[2])
    return jnp.asarray(ops.decode(format, ops.encode(format, flat)), jnp.float32).reshape(rows.shape)


@pytest.mark.sampled
@pytest.mark.parametrize("model", GIVEN)
@pytest.mark.parametrize("cut", [(11,), (6, 1, 4)], ids=str)
def test_latent_attention_is_that_of_plain_jnp(model: str, cut: tuple[int, ...]) -> None:
    spec = spec_of(model)
    given, starts = inputs(spec, 2, sum(cut)), jnp.asarray([2, 0])
    queries = jnp.asarray(
        np.random.default_rng(1).standard_normal((2, sum(cut), HEADS, given[0][0].shape[2]), np.float32)
    )

    @jax.jit
    def step(views: CacheViews, arrays: Any, query: jax.Array) -> tuple[CacheViews, list[jax.Array]]:
        outs = []
        for layer, view in enumerate(views):
            rows, mask, _, view, _ = view.append_latents(*arrays[layer])
            views = views.with_layer(layer, view)
            outs.append(attention(rows, query, mask))
        return views, outs

    views, first, outs = init_views(spec, batch=2, max_length=LENGTH, starts=starts), 0, []
    for new in cut:
        arrays = jax.tree.map(lambda array, a=first, b=first + new: array[:, a:b], given)
        views, found = step(views, arrays, queries[:, first : first + new])
        outs.append(found)
        first += new
    column = jnp.arange(sum(cut), dtype=jnp.int32)
    causal = (column[None] <= column[:, None])[None] & (column[None, None] >= starts[:, None, None])
    for layer, (rows, *_) in enumerate(given):
        wanted = attention(rounded(rows, spec.layers[layer].entries.format), queries, causal)
        got = jnp.concatenate([found[layer] for found in outs], axis=1)
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=2e-5, atol=2e-5)


def test_bf16_rows_come_back_as_they_were_given() -> None:
    spec = spec_of("deepseek_v3")
    (rows,), _ = inputs(spec, 1, 5)
    rows = rows.astype(jnp.bfloat16)
    found = init_views(spec, batch=1, max_length=LENGTH)[0].append_latents(rows, new=[4])
    assert found.index_keys is None
    assert found.positions[0, :5].tolist() == [0, 1, 2, 3, -1]
    assert np.array_equal(np.asarray(found.rows[:, :4], np.float32), np.asarray(rows[:, :4], np.float32))
    assert found.mask[0].sum(axis=1).tolist() == [1, 2, 3, 4, 0]
    assert found.view.lengths.tolist() == [4]


def test_the_preset_of_v3_2_has_its_index_keys() -> None:
    spec = presets.deepseek_v3_2()
    views = init_views(CacheSpec(layers=spec.layers[:1], block_tokens=64), batch=1, max_length=LENGTH)
    rows, keys = jnp.ones((1, 3, 576)), jnp.ones((1, 3, 128))
    found = views[0].append_latents(rows, keys)
    assert found.index_keys.shape == (1, LENGTH, 128)
    assert np.asarray(found.index_keys)[0, :, 0].tolist() == [1.0] * 3 + [0.0] * 13
    assert np.asarray(found.rows)[0, :, 0].tolist() == [1.0] * 3 + [0.0] * 13
    assert "latent, entries 576 v32_656, index_keys 128" in repr(views)
    for wrong in ((rows,), (rows, keys[:, :2]), (rows, rows)):
        with pytest.raises(ShapeError, match="append_latents"):
            views[0].append_latents(*wrong)
    with pytest.raises(StepError, match="allowed: append_latents"):
        views[0].append(rows, keys)


def test_latent_views_are_inserted_shortened_and_taken_apart() -> None:
    spec = spec_of("deepseek_v2")
    many, one = (init_views(spec, batch=batch, max_length=LENGTH) for batch in (2, 1))
    new = jnp.broadcast_to(jnp.arange(5, dtype=jnp.float32)[None, :, None], (1, 5, RANK + ROTARY))
    for layer in range(2):
        one = one.with_layer(layer, one[layer].append_latents(new).view)
    placed = many.insert(one, 1).insert_index([3], 1)
    arrays, metadata = placed.to_pure()
    again = CacheViews.from_pure(jax.tree.map(np.asarray, arrays), metadata)
    found = again[1].append_latents(jnp.full((2, 1, RANK + ROTARY), 9.0))
    assert np.asarray(found.rows, np.float32)[1, np.asarray(found.mask)[1, 0], 0].tolist() == [0, 1, 2, 9]
    assert np.asarray(found.rows, np.float32)[0, np.asarray(found.mask)[0, 0], 0].tolist() == [9]


def test_columns_beyond_the_end_are_refused_and_dropped_inside_jit() -> None:
    view = init_views(spec_of("deepseek_v2"), batch=1, max_length=LENGTH)[0]
    rows = jnp.ones((1, LENGTH + 1, RANK + ROTARY))
    with pytest.raises(OutOfBlocks, match="append_latents: got 17 columns"):
        view.append_latents(rows)
    found = jax.jit(lambda view, rows: view.append_latents(rows))(view, rows)
    assert found.view.overflowed.tolist() == [True]
    assert found.mask[0].sum(axis=1).tolist() == [*range(1, LENGTH + 1), 0]


def test_entries_that_the_caller_compresses_are_refused_with_what_to_do() -> None:
    layer = LayerSpec(entries=Entries(dim=512, ratio=4))
    with pytest.raises(SpecError, match=r"layers\[0\].*entries of one token each.*create_cache"):
        init_views(CacheSpec(layers=(layer,), block_tokens=256), batch=1, max_length=LENGTH)


def test_layers_that_share_entries_are_refused() -> None:
    mine = LayerSpec(entries=Entries(dim=32, ratio=1, format="bf16"))
    shared = LayerSpec(entries=Entries(dim=32, ratio=1, format="bf16", share=0))
    with pytest.raises(SpecError, match=r"layers\[1\]"):
        init_views(CacheSpec(layers=(mine, shared), block_tokens=4), batch=1, max_length=LENGTH)
