"""Gradients: refused where a row is stored, whatever the transformation; right where a query reads what is stored."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcore
from kvcore.errors import ShapeError
from kvcore.interop.jax.views import init_views
from kvcore.ops import StepIndex
from kvcore.pools import Pools
from kvcore.spec import KV, CacheSpec, Entries, LayerSpec
from tests.jax_pallas import whole_step

TOKENS, HEADS, DIM = 7, 4, 8
CLASSIC = {"key_heads": 2, "key_dim": DIM, "key_format": "fp32"}
REFUSED = "a differentiated array; allowed: arrays that no gradient is asked of"


class World(NamedTuple):
    """Pools with five tokens of one request and of another, and the index of a step that brought them, padded."""

    ops: Any
    pools: Pools
    index: StepIndex


def floats(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.fixture(scope="module")
def classic() -> World:
    spec = CacheSpec(layers=[LayerSpec(kv=KV(**CLASSIC))], block_tokens=4)
    cache = kvcore.create_cache(spec, backend="jax_pallas", max_requests=3, max_tokens=32)
    with cache.step({cache.admit(): 3, cache.admit(): 2}, pad_tokens=TOKENS, pad_requests=3) as step:
        k, v = floats(TOKENS, 2, DIM, seed=1), floats(TOKENS, 2, DIM, seed=2)
        pools = jax.jit(lambda pools, index: cache.ops.append_kv(pools, 0, index, k, v))(cache.pools, step.index)
        index = step.index
        step.abort()
    return World(cache.ops, pools, index)


@pytest.fixture(scope="module")
def latent() -> World:
    """A V4 layer with compressed entries and an indexer."""
    spec = whole_step.CSA_HCA
    cache = kvcore.create_cache(spec, backend="jax_pallas", max_requests=3, max_tokens=192, max_draft_tokens=8)
    given = whole_step.given(spec, TOKENS, 2, np.random.default_rng(0))
    with cache.step({cache.admit(): 6, cache.admit(): 1}) as step:
        pools, _ = jax.jit(partial(whole_step.functional, cache.ops))(cache.pools, step.index, given)
        index = step.index
        step.abort()
    return World(cache.ops, pools, index)


def stores_kv(world: World, k: jax.Array) -> jax.Array:
    """A loss of a step that stores rows made of k and reads them again."""
    pools = world.ops.append_kv(Pools(dict(world.pools)), 0, world.index, k, k)
    return world.ops.attend_kv(pools, 0, world.index, floats(TOKENS, HEADS, DIM)).out.sum()


def reads_own_rows(world: World, k: jax.Array) -> jax.Array:
    return world.ops.gather_kv(world.pools, 0, world.index, k, k)[0].sum()


TRANSFORMED: dict[str, Callable[[Callable[..., Any], jax.Array], Any]] = {
    "grad": lambda loss, k: jax.grad(loss)(k),
    "jvp": lambda loss, k: jax.jvp(loss, (k,), (k,)),
    "vjp": lambda loss, k: jax.vjp(loss, k),
    "linearize": lambda loss, k: jax.linearize(loss, k),
    "hessian": lambda loss, k: jax.jacfwd(jax.grad(loss))(k),
    "jit of grad": lambda loss, k: jax.jit(jax.grad(loss))(k),
    "grad of jit": lambda loss, k: jax.grad(jax.jit(loss))(k),
    "vmap of grad": lambda loss, k: jax.vmap(jax.grad(loss))(k[None]),
    "grad of vmap": lambda loss, k: jax.grad(lambda k: jax.vmap(loss)(k[None]).sum())(k),
    "checkpoint": lambda loss, k: jax.grad(jax.checkpoint(loss))(k),
    "scan": lambda loss, k: jax.grad(lambda k: jax.lax.scan(lambda c, x: (c + loss(k * x), None), 0.0, jnp.ones(2))[0])(
        k
    ),
    "cond": lambda loss, k: jax.grad(lambda k: jax.lax.cond(jnp.sum(k) > 1e9, jnp.sum, loss, k))(k),
    "shard_map": lambda loss, k: jax.grad(
        jax.shard_map(loss, mesh=mesh(), in_specs=P(), out_specs=P(), check_vma=False)
    )(k),
}
P = jax.sharding.PartitionSpec


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((1,), ("data",))


@pytest.mark.parametrize("way", TRANSFORMED)
def test_a_gradient_of_rows_that_are_stored_is_refused_under_every_transformation(classic: World, way: str) -> None:
    k = floats(TOKENS, 2, DIM)
    with pytest.raises(ShapeError, match=f"append_kv: got {REFUSED}.*stop_gradient"):
        TRANSFORMED[way](partial(stores_kv, classic), k)
    with pytest.raises(ShapeError, match=f"gather_kv: got {REFUSED}"):
        TRANSFORMED[way](partial(reads_own_rows, classic), k)


def latent_losses(world: World) -> dict[str, tuple[Callable[..., Any], Any]]:
    """Verb -> (loss, what it is differentiated by): every float that a verb stores or takes for a row."""
    ops, pools, index = world
    layer = whole_step.CSA_HCA.layers[0]
    dim, width, index_width = layer.window.dim, layer.tail.width, layer.index_tail.width
    rows, kv, index_kv = floats(TOKENS, dim), floats(TOKENS, width), floats(TOKENS, index_width)
    weight, query = jnp.ones(dim), floats(TOKENS, HEADS, dim)

    def total(found: Any) -> jax.Array:
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(found))

    def fresh() -> Pools:
        return Pools(dict(pools))

    return {
        "append_window": (lambda x: total(ops.append_window(fresh(), 0, index, x)), rows),
        "append_rotated_window": (
            lambda x: total(ops.append_rotated_window(fresh(), 0, index, rows, rope=jnp.ones(4), norm_weight=x)),
            weight,
        ),
        "append_tail": (lambda x: total(ops.append_tail(fresh(), 0, index, x, kv)), kv),
        "append_index_tail": (lambda x: total(ops.append_index_tail(fresh(), 0, index, index_kv, x)), index_kv),
        "compress": (lambda x: total(ops.compress(pools, 0, index, kv, x, closed=2)), kv),
        "flush": (lambda x: total(ops.flush(fresh(), 0, index, kv, kv, closed=2, norm_weight=x)), weight),
        "append_flush": (lambda x: total(ops.append_flush(fresh(), 0, index, x, kv, closed=2)), kv),
        "store_entries": (lambda x: total(ops.store_entries(fresh(), 0, index, x)), floats(2, dim)),
        "gather_window": (lambda x: total(ops.gather_window(pools, 0, index, x)), rows),
        "attend": (lambda x: total(ops.attend(pools, 0, index, query, rows=x)), rows),
        "attend: q": (lambda x: ops.attend(pools, 0, index, x).out.sum(), query),
        "gather_rows": (lambda x: total(ops.gather_rows(pools, 0, "window", index, (x,), columns=4)), rows),
        "encode": (lambda x: total(ops.encode("v4_584", x)), rows),
    }


@pytest.mark.parametrize("verb", latent_losses(World(None, None, None)))
def test_every_verb_refuses_gradients_of_what_it_stores(latent: World, verb: str) -> None:
    loss, given = latent_losses(latent)[verb]
    where = {"append_index_tail": "append_tail", "append_flush": "flush"}.get(verb, verb)
    with pytest.raises(ShapeError, match=f"{where}: got {REFUSED}"):
        jax.grad(loss)(given)


@pytest.mark.parametrize("layer", ["classic", "latent"])
def test_views_refuse_gradients_of_what_is_appended(layer: str) -> None:
    latents = LayerSpec(entries=Entries(dim=DIM, ratio=1, format="fp32"))
    layers = {"classic": LayerSpec(kv=KV(**CLASSIC)), "latent": latents}
    view = init_views(CacheSpec(layers=[layers[layer]], block_tokens=4), batch=1, max_length=8)[0]
    rows = floats(1, 3, 2, DIM) if layer == "classic" else floats(1, 3, DIM)

    def loss(view: Any, rows: jax.Array) -> jax.Array:
        found = view.append(rows, rows) if layer == "classic" else view.append_latents(rows)
        return jnp.sum(found[0])

    for run in (jax.grad(loss, 1), jax.jit(jax.grad(loss, 1)), jax.grad(jax.checkpoint(loss), 1)):
        with pytest.raises(ShapeError, match=f"got {REFUSED}"):
            run(view, rows)
    frozen = jax.grad(lambda rows: loss(view, jax.lax.stop_gradient(rows)) + jnp.sum(rows**2))
    assert np.array_equal(np.asarray(frozen(rows)), 2 * np.asarray(rows))


def test_handles_refuse_them_too_and_the_step_can_be_ended() -> None:
    spec = CacheSpec(layers=[LayerSpec(kv=KV(**CLASSIC))], block_tokens=4)
    cache = kvcore.create_cache(spec, backend="jax_pallas", max_requests=1, max_tokens=32)
    request, before = cache.admit(), cache.digest()
    step = cache.step({request: 3})

    def loss(k: jax.Array) -> jax.Array:
        step.layer(0).append_kv(k, k)
        return jnp.sum(k)

    with pytest.raises(ShapeError, match=f"append_kv: got {REFUSED}"):
        jax.grad(loss)(floats(3, 2, DIM))
    step.abort()
    assert cache.digest() == before
    with cache.step({request: 3}) as step:
        step.layer(0).append_kv(floats(3, 2, DIM), floats(3, 2, DIM))
    assert request.length == 3


def test_nothing_of_the_refusal_is_compiled(classic: World) -> None:
    """One equation of a trace holds all of a verb's arrays; the lowered program is what it is without."""
    traced = jax.make_jaxpr(lambda k: classic.ops.append_kv(classic.pools, 0, classic.index, k, k))(
        floats(TOKENS, 2, DIM)
    )
    assert str(traced).count("custom_jvp_call") == 1
    lowered = jax.jit(lambda k: classic.ops.append_kv(classic.pools, 0, classic.index, k, k)).lower(
        floats(TOKENS, 2, DIM)
    )
    assert "custom" not in lowered.as_text()


def plain(world: World, gathered: Any, q: jax.Array, sink: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``attend_kv`` in plain jnp, a token at a time, over rows that were gathered: out and lse, zeros for padding."""
    keys, values, mask = gathered
    outs, lses = [], []
    for token, request in enumerate(np.asarray(world.index.request_index)):
        if request < 0:
            outs.append(jnp.zeros((HEADS, DIM)))
            lses.append(jnp.zeros(HEADS))
            continue
        k, v = (np.repeat(part[request][mask[token]], HEADS // 2, axis=1) for part in (keys, values))
        logits = jnp.einsum("hd,nhd->hn", q[token], k) * scale
        lse = jax.nn.logsumexp(logits, axis=1)
        weights = jnp.exp(logits - jnp.logaddexp(lse, sink)[:, None])
        outs.append(jnp.einsum("hn,nhd->hd", weights, v))
        lses.append(lse)
    return jnp.stack(outs), jnp.stack(lses)


@pytest.mark.parametrize("sink", [0.0, -1000.0, 1000.0], ids=["a sink", "a sink of nothing", "a sink of everything"])
def test_gradients_of_a_query_over_stored_keys_are_those_of_plain_jnp(classic: World, sink: float) -> None:
    """Query, sink and scale; with tokens that are padding, which see nothing."""
    query, sinks, weights = floats(TOKENS, HEADS, DIM), jnp.full(HEADS, sink), floats(TOKENS, HEADS, DIM, seed=3)
    keys, values, _ = classic.ops.gather_kv(classic.pools, 0, classic.index)
    gathered = jax.tree.map(np.asarray, (keys, values, classic.ops.mask(0, classic.index)))

    def ours(q: jax.Array, sink: jax.Array, scale: jax.Array) -> jax.Array:
        found = classic.ops.attend_kv(classic.pools, 0, classic.index, q, sink=sink, scale=scale)
        lse = jnp.where(jnp.isneginf(found.lse), 0, found.lse)
        return jnp.sum(found.out * weights) + jnp.sum(lse**2)

    def theirs(q: jax.Array, sink: jax.Array, scale: jax.Array) -> jax.Array:
        out, lse = plain(classic, gathered, q, sink, scale)
        return jnp.sum(out * weights) + jnp.sum(lse**2)

    given = query, sinks, jnp.float32(0.3)
    got, wanted = (jax.jit(jax.grad(loss, (0, 1, 2)))(*given) for loss in (ours, theirs))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-5)
    assert np.abs(np.asarray(got[0])).max() > 0.1


def test_gradients_of_a_query_over_window_and_selected_entries_are_those_of_plain_jnp(latent: World) -> None:
    ops, pools, index = latent
    gathered = ops.gather_window(pools, 0, index), ops.gather_all_entries(pools, 0, index)
    window, entries = jax.tree.map(lambda array: np.array(array, np.float32), gathered)
    dim = window.values.shape[2]
    picks = (np.arange(TOKENS * 2).reshape(TOKENS, 2) % 3 - 1).astype(np.int32)
    sink, query, weights = floats(HEADS, seed=4), floats(TOKENS, HEADS, dim), floats(TOKENS, HEADS, dim, seed=5)
    spec = whole_step.CSA_HCA.layers[0]

    def ours(q: jax.Array, sink: jax.Array) -> jax.Array:
        return jnp.sum(ops.attend(pools, 0, index, q, jnp.asarray(picks), sink=sink).out * weights)

    def theirs(q: jax.Array, sink: jax.Array) -> jax.Array:
        total = jnp.zeros(())
        for token, (request, position) in enumerate(zip(*map(np.asarray, index[1::-1]), strict=True)):
            numbers = window.positions[request]
            seen = (numbers >= 0) & (numbers <= position) & (numbers > position - spec.window.window)
            count = (position + 1) // spec.entries.ratio
            chosen = [pick for pick in picks[token] if 0 <= pick < count]
            keys = np.concatenate([window.values[request][seen], entries.values[request][np.asarray(chosen, int)]])
            logits = q[token] @ keys.T * dim**-0.5
            lse = jnp.logaddexp(jax.nn.logsumexp(logits, axis=1), sink)
            total += jnp.sum((jnp.exp(logits - lse[:, None]) @ keys) * weights[token])
        return total

    got, wanted = (jax.jit(jax.grad(loss, (0, 1)))(query, sink) for loss in (ours, theirs))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-3, atol=1e-4)
        assert np.abs(np.asarray(one)).max() > 1e-3


def test_gradients_of_index_scores_and_of_a_norms_weight_are_those_of_plain_jnp(latent: World) -> None:
    ops, pools, index = latent
    layer = whole_step.CSA_HCA.layers[0]
    heads, dim = layer.index_keys.heads, layer.index_keys.dim
    keys = ops.gather_all_entries(pools, 0, index, role="index_keys", columns=2).values.astype(jnp.float32)
    query, weights = floats(TOKENS, heads, dim), floats(TOKENS, heads, seed=6)
    turned = layer.index_keys.parts[0].format.hadamard
    basis = jnp.asarray(hadamard(dim)) if turned else jnp.eye(dim)

    def ours(q: jax.Array, weights: jax.Array) -> jax.Array:
        scores = ops.index_scores(pools, 0, index, q, weights, columns=2)
        return jnp.sum(jnp.where(jnp.isneginf(scores), 0, scores) ** 2)

    def theirs(q: jax.Array, weights: jax.Array) -> jax.Array:
        total = jnp.zeros(())
        for token, (request, position) in enumerate(zip(*map(np.asarray, index[1::-1]), strict=True)):
            count = min((position + 1) // layer.index_keys.ratio, 2)
            products = jnp.maximum((q[token] @ basis) @ keys[request][:count].T, 0)
            total += jnp.sum((weights[token] @ products) ** 2)
        return total

    got, wanted = (jax.jit(jax.grad(loss, (0, 1)))(query, weights) for loss in (ours, theirs))
    for one, other in zip(got, wanted, strict=True):
        # A turned query is rounded to bf16, and so is what comes back through it.
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-2, atol=5e-2)
        assert np.abs(np.asarray(one)).max() > 1e-3

    kv, score = floats(TOKENS, layer.tail.width), floats(TOKENS, layer.tail.width, seed=7)
    latents = ops.compress(pools, 0, index, kv, score, closed=1)

    def normed(weight: jax.Array) -> jax.Array:
        return jnp.sum(ops.compress(pools, 0, index, kv, score, closed=1, norm_weight=weight))

    weight = jnp.ones(layer.entries.dim)
    numeric = (normed(weight + 0.5) - normed(weight - 0.5)) - jnp.sum(jax.grad(normed)(weight))
    assert latents.shape[0] == 1
    assert abs(float(numeric)) < 0.05 * float(jnp.sum(jnp.abs(jax.grad(normed)(weight))))


def hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix, orthonormal."""
    found = np.ones((1, 1), np.float32)
    while len(found) < size:
        found = np.block([[found, found], [found, -found]])
    return found / np.float32(size**0.5)
