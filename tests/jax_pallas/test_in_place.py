"""No verb makes XLA copy a pool: each in one jit with what reads the same pools, donated; the compiled program is read.

Where a ring's old rows must be read before the step's own take their place, ``read_first`` puts the write after it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcore
from kvcore.interop.jax import read_first
from kvcore.ops import RawRows, StepIndex
from kvcore.spec import KV, CacheSpec, Conv, LayerSpec, State
from tests.jax_pallas import whole_step
from tests.jax_pallas.view_kinds import copied

TOKENS, CLOSED = 5, 2
LATENT = whole_step.CSA_HCA.layers[0]
DELTA = LayerSpec(state=State(heads=2, key_dim=8, value_dim=4), conv=Conv(dim=12, width=4))
CLASSIC = LayerSpec(kv=KV(key_heads=2, key_dim=32, key_format="int8_row", storage="ring", window=24))

Case = Callable[[Any, StepIndex], Any]


def floats(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32))


def world(layer: LayerSpec, layout: str) -> tuple[Any, Any, StepIndex]:
    """Verbs, pools, and the index of a padded step of two tokens of two requests."""
    spec = CacheSpec(layers=(layer,), block_tokens=16)
    # More slots than the step has requests, so that no array that is read has as many elements as a pool.
    sizes = {"max_requests": 4, "max_tokens": 3000, "max_draft_tokens": 3}
    cache = kvcore.create_cache(spec, backend="jax_pallas", layout=layout, **sizes)
    with cache.step({cache.admit(): 2, cache.admit(): 2}, pad_tokens=TOKENS, pad_requests=3) as step:
        step.abort()
        return cache.ops, cache.pools, step.index


def cases(ops: Any) -> dict[str, tuple[LayerSpec, Case]]:
    """What is done to the pools of a layer: new pools, and what was read."""
    dim, width, index_width = LATENT.window.dim, LATENT.tail.width, LATENT.index_tail.width
    rows, kv, index_kv = floats(TOKENS, dim), floats(TOKENS, width), floats(TOKENS, index_width)
    entries, keys = floats(CLOSED, dim), floats(CLOSED, LATENT.index_keys.dim)
    query, picks = floats(TOKENS, 4, dim), jnp.zeros((TOKENS, 6), jnp.int32)
    heads = LATENT.index_keys.heads
    queries, weights = floats(TOKENS, heads, LATENT.index_keys.dim), floats(TOKENS, heads)
    k = floats(TOKENS, 2, 32)

    def after(write: Callable[..., Any], *reads: Callable[..., Any]) -> Case:
        def run(pools: Any, index: StepIndex) -> Any:
            pools = write(pools, 0, index)
            return pools, [read(pools, 0, index) for read in reads]

        return run

    def before(read: Callable[..., Any], write: Callable[..., Any]) -> Case:
        def run(pools: Any, index: StepIndex) -> Any:
            found, index = read_first(lambda pools: read(pools, 0, index), pools, index)
            return write(pools, 0, index), found

        return run

    def bound(verb: str, *arrays: Any, **options: Any) -> Callable[..., Any]:
        return lambda pools, layer, index: getattr(ops, verb)(pools, layer, index, *arrays, **options)

    window, tail = bound("append_window", rows), bound("append_tail", kv, kv)
    append_kv = bound("append_kv", k, k)
    latent = {
        "window": after(window, bound("gather_window"), bound("attend", query, picks)),
        "rotated window": after(bound("append_rotated_window", rows, rope=jnp.ones(4)), bound("attend", query)),
        "flush, then tails": after(bound("append_flush", kv, kv, index_kv, index_kv, closed=CLOSED)),
        "tail, then flush": lambda pools, index: after(bound("flush", kv, kv, closed=CLOSED))(
            tail(pools, 0, index), index
        ),
        "entries": after(
            bound("store_entries", entries, keys),
            bound("gather_all_entries", columns=500),
            bound("index_select", queries, weights, 4, columns=100),
        ),
        "slots are copied": lambda pools, _: ops.copy_slots(pools, jnp.array([0]), jnp.array([1])),
        "blocks are copied": lambda pools, _: ops.copy_blocks(pools, jnp.array([0]), jnp.array([1])),
        "slots are reset": lambda pools, _: ops.reset_slots(pools, jnp.array([0])),
        "slots and blocks are poisoned": lambda pools, _: ops.poison(pools, jnp.array([0]), jnp.array([1])),
        "rows are moved": lambda pools, index: ops.store_rows(
            pools, 0, "window", index, RawRows(*ops.gather_rows(pools, 0, "window", index, columns=8))
        ),
        "attention before the window": before(bound("attend", query, picks, rows=rows), window),
        "window's rows before it": before(bound("gather_window", rows), window),
        "ring's bytes before the window": before(
            lambda pools, n, index: ops.read_ring(pools, n, "window", index), window
        ),
        "compression before the tail": before(bound("compress", kv, kv, closed=CLOSED), tail),
    }
    classic = {
        "keys and values": after(
            append_kv, bound("gather_kv", columns=27), bound("attend_kv", floats(TOKENS, 4, 32), columns=27)
        ),
        "attention before keys and values": before(
            bound("attend_kv", floats(TOKENS, 4, 32), k, k, columns=27), append_kv
        ),
    }
    states = floats(TOKENS, 2, 8, 4)
    read, write = bound("read_state"), bound("write_state", floats(3, 2, 8, 4), newest=2)
    recurrent = {
        "state before the next": before(read, write),
        "states of all tokens": before(read, bound("append_state", states)),
        "the state of what is taken": before(read, bound("select_state", states, jnp.ones(3, jnp.int32))),
        "inputs of a convolution": before(bound("gather_conv"), bound("append_conv", floats(TOKENS, 12))),
    }
    return {
        **{name: (DELTA, case) for name, case in recurrent.items()},
        **{name: (LATENT, case) for name, case in latent.items()},
        **{name: (CLASSIC, case) for name, case in classic.items()},
    }


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["planar", "packed"])
@pytest.mark.parametrize("name", cases(None))
def test_no_verb_makes_xla_copy_a_pool(name: str, layout: str) -> None:
    ops, pools, index = world(cases(None)[name][0], layout)
    run = jax.jit(cases(ops)[name][1], donate_argnums=0)
    assert not copied(run.lower(pools, index).compile(), pools)


@pytest.mark.parametrize("rope", [None, 4], ids=["as they are", "rotated"])
def test_append_flush_stores_the_same_inside_jit(rope: int | None) -> None:
    """Six tokens at once, more than the tails have to spare, then three: every byte as by a step that is not traced."""
    spec = CacheSpec(layers=(LATENT,), block_tokens=16)
    pools, rng = [], np.random.default_rng(1)
    widths = LATENT.tail.width, LATENT.index_tail.width
    given = {new: [jnp.asarray(rng.standard_normal((new, width), np.float32)) for width in widths] for new in (9, 3)}
    weights = {"norm_weight": floats(LATENT.entries.dim), "index_norm_weight": floats(LATENT.index_keys.dim)}
    for jitted in (False, True):
        cache = kvcore.create_cache(spec, backend="jax_pallas", max_requests=1, max_tokens=64)
        request = cache.admit()
        for new, (kv, index_kv) in given.items():
            with cache.step({request: new}) as step:

                def run(
                    pools: Any, index: StepIndex, kv: Any = kv, index_kv: Any = index_kv, cache: Any = cache
                ) -> Any:
                    options = {"closed": 3, "rope": None if rope is None else jnp.ones(rope), **weights}
                    return cache.ops.append_flush(pools, 0, index, kv, kv, index_kv, index_kv, **options)

                cache.pools = (jax.jit(run, donate_argnums=0) if jitted else run)(cache.pools, step.index)
        pools.append({name: np.asarray(pool) for name, pool in cache.pools.items()})
    assert all(np.array_equal(pools[0][name], pools[1][name]) for name in pools[0])
    assert any(pools[0][name].any() for name in pools[0] if "entries" in name)


@pytest.mark.parametrize("index_is", ["an argument", "a constant"])
def test_read_first_gives_what_was_there_and_the_write_comes_after(index_is: str) -> None:
    """More tokens than a ring of 24: a query's rows are those of before, and the ring holds the last of the step's."""
    ops, pools, index = world(CLASSIC, "planar")
    new = 30
    index = StepIndex(
        positions=jnp.arange(20, 20 + new, dtype=jnp.int32),
        request_index=jnp.zeros(new, jnp.int32),
        slots=index.slots[:1],
        starts=jnp.array([20], jnp.int32),
        lengths=jnp.array([20 + new], jnp.int32),
        block_table=index.block_table[:1],
        stored=jnp.zeros(1, jnp.int32),
    )
    earlier = index._replace(
        positions=jnp.arange(20, dtype=jnp.int32),
        request_index=jnp.zeros(20, jnp.int32),
        starts=jnp.zeros(1, jnp.int32),
        lengths=jnp.array([20], jnp.int32),
    )
    rows, query = floats(20 + new, 2, 32), floats(new, 2, 32)
    pools = ops.append_kv(pools, 0, earlier, rows[:20], rows[:20])

    def step(pools: Any, index: StepIndex) -> Any:
        read = partial(ops.attend_kv, layer=0, index=index, q=query, k=rows[20:], v=rows[20:], columns=60)
        found, after = read_first(read, pools, index)
        return ops.append_kv(pools, 0, after, rows[20:], rows[20:]), found

    wanted = ops.attend_kv(pools, 0, index, query, rows[20:], rows[20:], columns=60)
    held = ops.append_kv(jax.tree.map(jnp.copy, pools), 0, index, rows[20:], rows[20:])
    run = (
        jax.jit(step, donate_argnums=0)
        if index_is == "an argument"
        else jax.jit(lambda p, _: step(p, index), donate_argnums=0)
    )
    assert not copied(run.lower(pools, index).compile(), pools)
    got, found = run(pools, index)
    for one, other in zip(jax.tree.leaves((got, found)), jax.tree.leaves((held, wanted)), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-6, atol=1e-6)


def test_what_read_first_is_for_is_seen_without_it() -> None:
    ops, pools, index = world(CLASSIC, "planar")
    k, query = floats(TOKENS, 2, 32), floats(TOKENS, 4, 32)

    def step(pools: Any, index: StepIndex) -> Any:
        found = ops.attend_kv(pools, 0, index, query, k, k, columns=27)
        return ops.append_kv(pools, 0, index, k, k), found

    assert copied(jax.jit(step, donate_argnums=0).lower(pools, index).compile(), pools)
