"""A decode loop on the device: tokens, bytes and blocks of a host's loop, with as many steps as the device chose."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvcore
from kvcore.errors import ShapeError, StepError
from kvcore.interop.jax.loop import by_request, next_tokens
from kvcore.spec import KV, CacheSpec, LayerSpec

SPEC = CacheSpec(
    layers=tuple(
        LayerSpec(kv=KV(key_heads=2, key_dim=16, **fields)) for fields in ({}, {"storage": "ring", "window": 8})
    ),
    block_tokens=4,
)
TABLE = jnp.asarray(np.random.default_rng(0).standard_normal((50, 2, 16)), jnp.float32)
MOST, COUNTS = 20, (20, 7, 13)


def model(ops: Any, pools: Any, index: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
    x = TABLE[ids]
    for layer in range(len(SPEC.layers)):
        pools = ops.append_kv(pools, layer, index, x, x)
        x = x + ops.attend_kv(pools, layer, index, x).out
    return pools, jnp.argmax(jnp.einsum("thd,vhd->tv", x, TABLE), axis=1).astype(jnp.int32)


def started() -> tuple[Any, list[Any], Any, jax.Array]:
    """A cache with three prompts, a step of its model, and the last token of each."""
    cache = kvcore.create_cache(SPEC, backend="jax_pallas", max_requests=3, max_tokens=256)
    requests, run = [cache.admit() for _ in range(3)], jax.jit(partial(model, cache.ops), donate_argnums=0)
    with cache.step({request: 3 + number for number, request in enumerate(requests)}) as step:
        cache.pools, ids = run(cache.pools, step.index, jnp.arange(12, dtype=jnp.int32))
    return cache, requests, run, ids[jnp.array([2, 6, 11])]


def looped(ops: Any, pools: Any, index: Any, last: jax.Array, most: jax.Array) -> Any:
    """Tokens of every request until each has its number of them."""

    def body(state: Any) -> Any:
        pools, last, out, taken, number = state
        at = next_tokens(index, taken, taken < most)
        pools, ids = model(ops, pools, at, last[jnp.maximum(at.request_index, 0)])
        last = by_request(at, ids, last)
        out = lax.dynamic_update_index_in_dim(out, by_request(at, ids, -jnp.ones(3, jnp.int32)), number, 0)
        return pools, last, out, taken + at.lengths - at.starts, number + 1

    state = pools, last, jnp.zeros((MOST, 3), jnp.int32), jnp.zeros(3, jnp.int32), 0
    pools, _, out, taken, _ = lax.while_loop(lambda state: jnp.any(state[3] < most), body, state)
    return pools, out, taken


def test_a_loop_on_the_device_does_what_the_host_would() -> None:
    cache, requests, run, last = started()
    wanted = []
    for _ in range(MOST):
        going = [request for request, count in zip(requests, COUNTS, strict=True) if len(wanted) < count]
        with cache.step(dict.fromkeys(going, 1)) as step:
            cache.pools, ids = run(cache.pools, step.index, last[jnp.asarray([requests.index(one) for one in going])])
        last = last.at[jnp.asarray([requests.index(one) for one in going])].set(ids)
        row = dict(zip(going, ids.tolist(), strict=True))
        wanted.append([row.get(request, -1) for request in requests])
    other, theirs, _, first = started()
    loop = jax.jit(partial(looped, other.ops), donate_argnums=0)
    with other.step(dict.fromkeys(theirs, MOST)) as step:
        reserved = other.free_blocks
        other.pools, out, taken = loop(other.pools, step.index, first, jnp.asarray(COUNTS))
        assert taken.tolist() == list(COUNTS)
        step.commit(dict(zip(theirs, taken.tolist(), strict=True)))
    assert np.asarray(out).tolist() == wanted
    assert [request.length for request in theirs] == [request.length for request in requests]
    assert [len(request.blocks) for request in theirs] == [len(request.blocks) for request in requests]
    assert other.free_blocks == cache.free_blocks > reserved
    digests = [[holder.digest([one]) for one in some] for holder, some in ((cache, requests), (other, theirs))]
    assert digests[0] == digests[1]


def test_an_abort_after_a_loop_leaves_what_was() -> None:
    cache, requests, run, last = started()
    before, free = [cache.digest([request]) for request in requests], cache.free_blocks
    loop = jax.jit(partial(looped, cache.ops))
    with cache.step(dict.fromkeys(requests, MOST)) as step:
        cache.pools, _, _ = loop(cache.pools, step.index, last, jnp.asarray(COUNTS))
        step.abort()
    assert [cache.digest([request]) for request in requests] == before
    assert cache.free_blocks == free
    with cache.step(dict.fromkeys(requests, 1)) as step:
        cache.pools, _ = run(cache.pools, step.index, last)


def test_fewer_tokens_are_committed_only_as_they_can_be() -> None:
    cache, requests, run, last = started()
    with cache.step(dict.fromkeys(requests, 2)) as step:
        with pytest.raises(StepError, match=r"commit: tokens: got fewer tokens.*cache\.pools were assigned"):
            step.commit(dict.fromkeys(requests, 1))
        cache.pools = dict(cache.pools)
        for wrong in (1, list(requests), {requests[0]: 1}, dict.fromkeys(requests, 3), dict.fromkeys(requests, -1)):
            with pytest.raises(ShapeError, match="commit: tokens"):
                step.commit(wrong)
        step.commit(dict.fromkeys(requests, 0))
        with pytest.raises(StepError):
            step.commit(dict.fromkeys(requests, 0))
    assert [request.length for request in requests] == [3, 4, 5]
    with cache.step(dict.fromkeys(requests, 1)) as step:
        cache.pools, _ = run(cache.pools, step.index, last)
    assert [request.length for request in requests] == [4, 5, 6]


def test_a_rounds_index_is_the_one_that_the_host_makes() -> None:
    cache, requests, _, _ = started()
    with cache.step(dict.fromkeys(requests, 4)) as step:
        index = step.index
        found = next_tokens(index, jnp.asarray([1, 4, 0]))
        step.abort()
    assert found.positions.tolist() == [4, 5, -1]
    assert found.request_index.tolist() == [0, 2, -1]
    assert found.starts.tolist() == [4, 8, 5]
    assert found.lengths.tolist() == [5, 8, 6]
    rows = by_request(found, jnp.asarray([7, 8, 9]), jnp.asarray([1, 2, 3]))
    assert rows.tolist() == [7, 2, 8]
