"""Block tables on the device: what steps see is what requests have, and what is sent is what changed."""

import jax
import numpy as np
import pytest

import kvcore
from kvcore.backends.jax_pallas import block_tables
from kvcore.spec import presets

SPEC = presets.classic(layers=1, key_heads=1, key_dim=8, block_tokens=4)


def cache_of(tokens: int = 4 * 1200, requests: int = 6) -> kvcore.Cache:
    return kvcore.create_cache(SPEC, backend="jax_pallas", max_requests=requests, max_tokens=tokens)


def take(cache: kvcore.Cache, counts: dict[kvcore.Request, int], **padding: int) -> jax.Array:
    """A step of so many tokens each; the table that it had."""
    with cache.step(counts, **padding) as step:
        table = step.index.block_table
        rows = np.ones((len(step.index.positions), 1, 8), np.float32)
        step.layer(0).append_kv(rows, rows)
    found = np.asarray(table)
    for number, request in enumerate(counts):
        blocks = list(request.blocks)
        assert blocks == found[number, : len(blocks)].tolist()
        assert (found[number, len(blocks) :] == -1).all()
    assert (found[len(counts) :] == -1).all()
    return table


def test_random_lives_see_their_own_blocks_and_few_programs_change_every_table() -> None:
    rng, cache, live = np.random.default_rng(0), cache_of(), []
    block_tables._changed.clear_cache()
    kept = []
    for _ in range(60):
        if live and rng.random() < 0.2:
            cache.release(live.pop(rng.integers(len(live))))
        while len(live) < 2 or (len(live) < 6 and rng.random() < 0.4):
            live.append(cache.admit())
        some = list(rng.permutation(len(live))[: rng.integers(1, len(live) + 1)])
        table = take(cache, {live[number]: int(rng.integers(1, 9)) for number in some}, pad_tokens=64, pad_requests=6)
        kept.append((table, np.array(table)))
    # Of the table that the step has, and of the longer one that verbs are compiled for.
    assert block_tables._changed._cache_size() == 2
    # An index that somebody kept is what it was.
    assert all(np.array_equal(np.asarray(table), was) for table, was in kept)


def test_a_step_without_new_blocks_sends_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of()
    requests = [cache.admit() for _ in range(6)]
    first = take(cache, dict.fromkeys(requests, 1))
    sizes: list[int] = []
    put = jax.device_put

    def counted(arrays, *given, **options):
        sizes.append(sum(np.size(leaf) for leaf in jax.tree.leaves(arrays)))
        return put(arrays, *given, **options)

    monkeypatch.setattr(block_tables.jax, "device_put", counted)
    assert take(cache, dict.fromkeys(requests, 1)) is first
    assert take(cache, dict.fromkeys(requests, 2)) is first
    # The fifth token of each needs another block: six numbers in a place for some, of a table of thousands.
    assert take(cache, dict.fromkeys(requests, 1)) is not first
    assert first.size >= block_tables.SMALLEST
    assert 3 * block_tables.MOST_SENT in sizes
    assert max(sizes) < first.size


def test_what_was_interrupted_is_sent_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of()
    requests = [cache.admit() for _ in range(3)]
    take(cache, dict.fromkeys(requests, 4))

    def stopped(*_arrays):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(block_tables, "_changed", stopped)
        with pytest.raises(KeyboardInterrupt):
            cache.step(dict.fromkeys(requests, 1))
    take(cache, dict.fromkeys(requests, 1))
    take(cache, dict.fromkeys(requests, 4))
