"""Layers of one kind in a scan: what views one by one give, with one trace, no pool copied, and a short compile."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvcore.errors import ShapeError, SpecError
from kvcore.interop.jax.stack import LayerStack, init_stack
from kvcore.interop.jax.views import CacheViews, init_views
from kvcore.spec import CacheSpec, presets
from tests.jax_pallas.view_kinds import BATCH, DIM, HEADS, KINDS, copied

LAYERS, LENGTH = 3, 90


def spec_of(kind: str, layers: int = LAYERS) -> CacheSpec:
    return CacheSpec(layers=(KINDS[kind],) * layers, block_tokens=16)


def layer(view: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    """One layer of a model of [B, S, heads, dim]."""
    if view.kind.layer.kv is None:
        out, _, view = view.attend_latents(x, x[:, :, 0])
    else:
        out, _, view = view.attend(x, x[:, :, :HEADS], x[:, :, HEADS:])
    return x + out, view


def scanned(stack: LayerStack, x: jax.Array) -> tuple[LayerStack, jax.Array]:
    def body(carry: Any, number: jax.Array) -> Any:
        x, stack = carry
        x, view = layer(stack.layer(number), x)
        return (x, stack.with_layer(number, view)), None

    (x, stack), _ = jax.lax.scan(body, (x, stack), jnp.arange(len(stack)))
    return stack, x


def one_by_one(views: CacheViews, x: jax.Array) -> tuple[CacheViews, jax.Array]:
    for number, view in enumerate(views):
        x, view = layer(view, x)
        views = views.with_layer(number, view)
    return views, x


@pytest.mark.parametrize("kind", ["full, paged", "full, contiguous", "fp8_row, sliding", "latent"])
def test_a_scan_over_layers_gives_what_views_give_and_copies_no_pool(kind: str) -> None:
    sizes = {"batch": BATCH, "max_length": LENGTH, "starts": [0, 3]}
    stack, views = init_stack(spec_of(kind), **sizes), init_views(spec_of(kind), **sizes)
    run = jax.jit(scanned, donate_argnums=0)
    for columns in (30, 1, 1):
        x = jnp.asarray(np.random.default_rng(columns).standard_normal((BATCH, columns, 2 * HEADS, DIM)), jnp.float32)
        if columns == 1:
            compiled = run.lower(stack, x).compile()
            assert not copied(compiled, stack.pools)
            assert compiled.memory_analysis().alias_size_in_bytes >= sum(pool.nbytes for pool in stack.pools.values())
        stack, out = run(stack, x)
        views, wanted = jax.jit(one_by_one)(views, x)
        np.testing.assert_allclose(np.asarray(out), np.asarray(wanted), rtol=2e-5, atol=2e-5)
    assert stack.lengths.tolist() == [[32, 32]] * LAYERS
    for name, array in stack.numbers.items():
        assert np.array_equal(np.asarray(array), np.stack([np.asarray(getattr(view, name)) for view in views]))


def test_forty_three_layers_compile_like_one() -> None:
    """CPU seconds of a whole decode step's trace and compile, beside those of a single layer."""

    def cost(layers: int) -> tuple[float, int]:
        stack = init_stack(presets.classic(layers=layers, key_heads=2, key_dim=32), batch=1, max_length=64)
        started = time.process_time()
        lowered = jax.jit(scanned, donate_argnums=0).lower(stack, jnp.ones((1, 1, 4, 32)))
        lowered.compile()
        return time.process_time() - started, len(lowered.as_text().splitlines())

    (_, one), (seconds, many) = cost(1), cost(43)
    assert many == one
    assert seconds < 6


def test_what_is_no_stack_is_refused() -> None:
    both = CacheSpec(layers=(KINDS["full, paged"], KINDS["sliding"]), block_tokens=16)
    with pytest.raises(SpecError, match="init_stack: spec: got 2 kinds of layers"):
        init_stack(both, batch=1, max_length=8)
    with pytest.raises(SpecError, match="init_stack: batch"):
        init_stack(spec_of("latent"), batch=0, max_length=8)
    with pytest.raises(ShapeError, match="init_stack: starts"):
        init_stack(spec_of("latent"), batch=1, max_length=8, starts=[0, 0])
    stack = init_stack(spec_of("latent"), batch=1, max_length=8)
    with pytest.raises(ShapeError, match="layer of a stack: got 3; allowed: 0 to 2"):
        stack.layer(3)
    assert repr(stack) == "LayerStack(3 of 1 sequences of 8)"
