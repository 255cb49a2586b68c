"""Attention of layer views, where rows lie: what plain attention to an append's rows gives, donated, no pool copied."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvcore.errors import OutOfBlocks, ShapeError, StepError
from kvcore.interop.jax import inspect_in_place
from kvcore.interop.jax.view_kinds import Kind
from kvcore.interop.jax.views import LayerView, init_views
from kvcore.spec import presets
from tests.jax_pallas.view_kinds import BATCH, DIM, HEADS, KINDS, appended, copied, given, made

RINGS = [kind for kind, layer in KINDS.items() if layer.kv is not None and layer.kv.storage == "ring"]
QUERIES = 2 * HEADS


def query(new: int) -> jax.Array:
    rng = np.random.default_rng(new)
    return jnp.asarray(rng.standard_normal((BATCH, new, QUERIES, DIM)), jnp.float32)


def attend(view: LayerView, arrays: tuple[jax.Array, ...], new: Any = None, **options: Any) -> Any:
    q = options.pop("query", query(arrays[0].shape[1]))
    verb = view.attend if view.kind.layer.kv is not None else view.attend_latents
    return verb(q, *arrays, new=new, **options)


def plainly(found: Any, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Outs and log-sum-exps [B, S, H, ...] of softmax attention to what an append shows."""
    parts = (found.keys, found.values) if hasattr(found, "keys") else (found.rows[:, :, None],) * 2
    keys, values = (jnp.repeat(part.astype(jnp.float32), QUERIES // part.shape[2], axis=2) for part in parts)
    logits = jnp.einsum("bshd,bnhd->bshn", query(found.mask.shape[1]), keys) * DIM**-0.5
    logits = jnp.where(found.mask[:, :, None], logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=3)
    over = jnp.logaddexp(lse, jnp.broadcast_to(sink, lse.shape))
    return jnp.einsum("bshn,bnhd->bshd", jnp.exp(logits - over[..., None]), values), lse


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_attends_to_what_an_append_shows(kind: str) -> None:
    """A prompt that outgrows the rings, left padding, right padding, then single tokens past the ring's end."""
    ours = theirs = made(kind, layers=1, starts=[0, 3])[0]
    sink = jnp.linspace(-1.0, 1.0, QUERIES)

    @jax.jit
    def both(ours: LayerView, theirs: LayerView, rows: Any, new: Any) -> Any:
        seen = appended_with(theirs, rows, new)
        found = attend(ours, rows, new, sink=sink)
        return (found.out, found.lse), plainly(seen, sink), found.view, seen.view

    for columns, new in ((30, [30, 26]), (1, [1, 1]), (1, [0, 1])):
        rows = given(kind, columns, seed=columns)
        got, wanted, ours, theirs = both(ours, theirs, rows, jnp.asarray(new, jnp.int32))
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=2e-5)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


def appended_with(view: LayerView, rows: tuple[jax.Array, ...], new: Any) -> Any:
    return view.append(*rows, new=new) if view.kind.layer.kv is not None else view.append_latents(*rows, new=new)


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "new"), [(kind, 1) for kind in KINDS] + [(kind, 20) for kind in RINGS])
def test_a_compiled_loop_of_steps_copies_no_pool(kind: str, new: int) -> None:
    views = made(kind)

    def step(views: Any, rows: Any) -> Any:
        out = jnp.zeros(())
        for number, view in enumerate(views):
            found = attend(view, rows)
            views, out = views.with_layer(number, found.view), out + found.out.sum()
        return views, out

    def run(views: Any, rows: Any) -> Any:
        return jax.lax.scan(lambda carry, _: step(carry, rows), views, None, length=3)

    compiled = jax.jit(run, donate_argnums=0).lower(views, given(kind, new)).compile()
    pools = [pool for view in views for pool in view.pools.values()]
    assert not copied(compiled, pools)
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(pool.nbytes for pool in pools)


def test_nothing_of_a_pools_size_is_made_on_the_cpu_and_on_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(chip: str | None) -> tuple[int, int]:
        spec = presets.classic(layers=1, key_heads=8, key_dim=128)
        views = jax.eval_shape(lambda: init_views(spec, batch=8, max_length=4096))
        q, k = (jax.ShapeDtypeStruct((8, 1, heads, 128), jnp.bfloat16) for heads in (16, 8))
        found = inspect_in_place(lambda view, q, k: view.attend(q, k, k)[::-1], views[0], q, k, chip=chip)
        assert found.alias_bytes >= found.pool_bytes
        return found.temporary_bytes, found.pool_bytes

    # A piece of the rows, decoded, is what there is on a CPU.
    temporary, pools = sizes(None)
    assert temporary <= 0.4 * pools
    monkeypatch.setattr("kvcore.backends.jax_pallas.backend.choice.word", lambda _device: "tpu")
    temporary, pools = sizes("v6e")
    assert temporary <= 0.01 * pools


def test_rows_that_a_ring_has_lost_are_not_attended_to() -> None:
    """Inside jit a shorter length is not refused: what is left is seen, by both ways."""
    kind = "sliding"
    view = made(kind, layers=1)[0]
    view = view.append(*given(kind, 40)).view
    short = view.replace(lengths=jnp.asarray([22, 30], jnp.int32))
    rows = given(kind, 1, seed=3)
    found, seen = attend(short, rows), appended(short, rows)
    out, lse = plainly(seen, jnp.full(QUERIES, -jnp.inf))
    np.testing.assert_allclose(np.asarray(found.out), np.asarray(out), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(np.asarray(found.lse), np.asarray(lse), rtol=2e-5, atol=2e-5)
    assert int(seen.mask.sum()) < 2 * 24


def test_pieces_beyond_the_longest_sequence_are_not_read() -> None:
    """What lies there is NaN: a query must not even multiply it by 0."""
    view = made("full, contiguous", layers=1)[0]
    rows = given("full, contiguous", 4)
    dirty = view.replace(pools={name: jnp.full_like(pool, 0xFF) for name, pool in view.pools.items()})
    for verb in (attend, lambda view, rows: attend(view, rows, [2, 4])):
        clean, found = verb(view, rows), verb(dirty, rows)
        assert np.array_equal(np.asarray(clean.out), np.asarray(found.out))


def test_gradients_of_queries_are_right_and_of_what_is_stored_refused() -> None:
    kind = "full, paged"
    view = made(kind, layers=1)[0].append(*given(kind, 5)).view
    rows = given(kind, 1, seed=1)

    def ours(q: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(view.attend(q, *rows).out))

    def theirs(q: jax.Array) -> jax.Array:
        seen = view.append(*rows)
        keys, values = (jnp.repeat(part.astype(jnp.float32), 2, axis=2) for part in (seen.keys, seen.values))
        logits = jnp.einsum("bshd,bnhd->bshn", q, keys) * DIM**-0.5
        shares = jax.nn.softmax(jnp.where(seen.mask[:, :, None], logits, -jnp.inf), axis=3)
        return jnp.sum(jnp.square(jnp.einsum("bshn,bnhd->bshd", shares, values)))

    one, other = (jax.grad(function)(query(1)) for function in (ours, theirs))
    np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-5)
    with pytest.raises(ShapeError, match="a differentiated array"):
        jax.grad(lambda k: jnp.sum(view.attend(query(1), k, rows[1]).out))(rows[0])
    latent = made("latent", layers=1)[0]
    with pytest.raises(ShapeError, match=r"attend_latents: query.*append_latents"):
        jax.grad(lambda q: jnp.sum(latent.attend_latents(q, *given("latent", 1)).out))(query(1))


def test_what_does_not_fit_is_refused_and_nothing_is_stored() -> None:
    view, latent = made("full, paged", layers=1)[0], made("latent", layers=1)[0]
    rows, q = given("full, paged", 2), query(2)
    for wrong in (q[:1], q[:, :1], q[..., :8], q[:, :, :3], q.astype(jnp.int32)):
        with pytest.raises(ShapeError, match="attend: query"):
            view.attend(wrong, *rows)
    with pytest.raises(ShapeError, match="attend: sink"):
        view.attend(q, *rows, sink=jnp.zeros(3))
    with pytest.raises(ShapeError, match="attend_latents: value_dim: got 33; allowed: 1 to 32"):
        latent.attend_latents(q, *given("latent", 2), value_dim=33)
    with pytest.raises(StepError, match="allowed: attend_latents"):
        latent.attend(q, *rows)
    with pytest.raises(StepError, match=r"got attend_latents.*allowed: attend"):
        view.attend_latents(q, rows[0][:, :, 0])
    with pytest.raises(OutOfBlocks, match="attend: got 91 columns"):
        view.replace(lengths=jnp.full(BATCH, 90, jnp.int32)).attend(q[:, :1], *(part[:, :1] for part in rows))
    assert view.is_empty


def test_value_dim_is_the_first_channels() -> None:
    view, rows, q = made("latent", layers=1)[0], given("latent", 3), query(3)
    whole, part = view.attend_latents(q, *rows), view.attend_latents(q, *rows, value_dim=24)
    assert np.array_equal(np.asarray(whole.out[..., :24]), np.asarray(part.out))


def test_a_cpu_keeps_heads_together_where_nothing_is_overwritten() -> None:
    layouts = {kind: Kind(layer, 1, 64, 16).ops.plan.layout for kind, layer in KINDS.items()}
    assert layouts["full, paged"] == layouts["int8_row"] == layouts["sliding, paged"] == "by_head"
    assert layouts["sliding"] == layouts["latent"] == "planar"
